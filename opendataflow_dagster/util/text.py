"""Texts for people: on one line, printable, quoted for a shell; and suggestions for typos."""

from collections.abc import Iterable, Sequence

MAX_REASON_CHARACTERS = 500
"""Characters of a reason in the tables: the log has all of it."""


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def one_line(text: str) -> str:
    """Join lines into one."""
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


def count_of(number: int, noun: str) -> str:
    """`1 chunk`, `2 chunks`."""
    return f"{number} {noun if number == 1 else noun + 's'}"


def first_of(items: Sequence[str], most: int) -> list[str]:
    """Return the first items, and say how many more there are."""
    more = len(items) - most
    return [*items[:most], f"and {more} more"] if more > 0 else list(items)


def tidy(reason: str) -> str:
    """Put a reason on one line, in characters that every database keeps, and limit its length."""
    text = printable(reason.encode("utf-8", "replace").decode())
    return text if len(text) <= MAX_REASON_CHARACTERS else text[: MAX_REASON_CHARACTERS - 1] + "…"


def printable(text: str) -> str:
    """Escape what could move the cursor or begin a new line."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def typed(*words: str) -> str:
    """Quote words as a person types them in a shell, on one line."""
    return " ".join(map(_typed, words))


def _typed(word: str) -> str:
    if word.isprintable():
        from shlex import quote

        return quote(word)
    escaped = (
        letter
        if letter.isprintable() and letter not in "\\'"
        else "".join(f"\\{byte:03o}" for byte in letter.encode("utf-8", "surrogateescape"))
        for letter in word
    )
    return f"$'{''.join(escaped)}'"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `. Did you mean …?` if a known name is similar."""
    from difflib import get_close_matches

    by_case = {word.casefold(): word for word in known if word != name}
    found = get_close_matches(name.casefold(), by_case, n=1, cutoff=0.6)
    return f". Did you mean {by_case[found[0]]!r}?" if found else ""
