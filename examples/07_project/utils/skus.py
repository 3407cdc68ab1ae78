def normal(sku):
    """A product's number as the catalogue writes it."""
    return sku.strip().upper()
