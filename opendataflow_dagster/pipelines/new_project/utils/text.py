def tidy(text):
    """Single blanks between words, and none at the ends."""
    return " ".join(text.split())
