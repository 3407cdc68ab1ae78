def normal(sku):
    """Return a product's number as the catalogue writes it."""
    return sku.strip().upper()
