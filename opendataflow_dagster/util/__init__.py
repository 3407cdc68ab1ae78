"""Small helpers that know no word of the product."""
