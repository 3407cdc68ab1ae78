"""Names that somebody may have meant."""

from collections.abc import Iterable
from difflib import get_close_matches


def meant(name: str, known: Iterable[str]) -> str:
    """` Did you mean …?`, if one of the known names is like it."""
    by_case = {each.casefold(): each for each in known}
    found = get_close_matches(name.casefold(), by_case, n=1, cutoff=0.6)
    return f". Did you mean {by_case[found[0]]!r}?" if found else ""
