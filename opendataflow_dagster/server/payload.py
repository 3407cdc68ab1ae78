"""Items as they came: a body of JSON, taken apart without writing any of it anew."""

import json
import math
import re
from typing import Any

from .limits import Limits

_SPACE = re.compile(r"[ \t\r\n]*")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")


class Unfit(Exception):
    """A body that can't be taken: the message says in a line what is wrong with it."""


def items_of(body: bytes, limits: Limits) -> tuple[list[str], bool]:
    """The items of a body as ASCII JSON texts, and whether they came as an array.

    An item is the text that the client sent, with `\\u` escapes for what isn't ASCII: no number is
    rounded, and no database has to keep a NUL or half of a surrogate pair.
    """
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unfit(f"The body isn't UTF-8: byte {error.start + 1} is wrong.") from None
    try:
        return _taken_apart(text, limits)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise Unfit(f"The body isn't JSON: {error.msg.rstrip(' :')} at {where}.") from None
    except RecursionError:
        raise _deep(limits) from None
    except ValueError:  # of int(): the digits of a number
        raise Unfit("A number of the body has too many digits.") from None


def _taken_apart(text: str, limits: Limits) -> tuple[list[str], bool]:
    at = _after_space(text, 0)
    many = text.startswith("[", at)
    found: list[str] = []
    end = at
    if many:
        end = _after_space(text, at + 1)
        if text.startswith("]", end):
            raise Unfit("The array has no items.")
        while True:
            start = end
            end = _item(text, start, found, limits)
            if len(found) > limits.items:
                raise Unfit(f"The array has more than {limits.items} items. Send several.")
            end = _after_space(text, end)
            if not text.startswith(",", end):
                break
            end = _after_space(text, end + 1)
        if not text.startswith("]", end):
            raise json.JSONDecodeError("Expecting ',' delimiter", text, end)
        end += 1
    else:
        end = _item(text, at, found, limits)
    if (end := _after_space(text, end)) != len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return found, many


def _item(text: str, start: int, found: list[str], limits: Limits) -> int:
    """Add the item that begins at `start`, and return where it ends."""
    value, end = _DECODER.raw_decode(text, start)
    if not isinstance(value, dict):
        raise Unfit(f"An item must be a JSON object, not {_KINDS[type(value)]}.")
    if _deeper(value, limits.depth):
        raise _deep(limits)
    found.append(_NOT_ASCII.sub(_escaped, text[start:end]))
    return end


def _after_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


def _escaped(letters: re.Match[str]) -> str:
    return json.dumps(letters[0])[1:-1]


def _deeper(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _deep(limits: Limits) -> Unfit:
    return Unfit(f"The item is nested more than {limits.depth} levels deep.")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise Unfit(f"The name {twice[:40]!a} stands twice in an object.")
    return made


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise Unfit(f"The number {digits[:40]} is too large.")
    return number


def _constant(word: str) -> Any:
    raise Unfit(f"The body isn't JSON: {word} is no number of it.")


_DECODER = json.JSONDecoder(object_pairs_hook=_once, parse_float=_finite, parse_constant=_constant)
_KINDS = {
    list: "an array",
    str: "a text",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}
