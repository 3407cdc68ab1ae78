def tidy(text):
    """One blank between words, and none around them."""
    return " ".join(text.split())
