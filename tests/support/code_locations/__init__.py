"""Code locations that the tests serve."""
