def with_tax(amount):
    return None if amount is None or amount != amount else round(amount * 1.25, 4)
