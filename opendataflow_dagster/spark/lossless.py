"""Which values a column of PostgreSQL would round or cut in silence, as conditions in SQL.

A condition is of `{}`, a column of the staging table; None: every value is kept, or is an error.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .types import Column

_WHOLE = ("int2", "int4", "int8")
_FLOATS = ("float4", "float8")
_TIMES = ("timestamp", "timestamptz", "time", "timetz")
_NUMERIC = "numeric"
_MICROSECONDS = 6

_MOST = {"float4": "9223371487098961920", "float8": "9223372036854774784"}
"""The largest number below 2^63 that a type has: the next is no bigint any more."""

_EXACT = {
    "float4": ("int2", "float4"),
    "float8": ("int2", "int4", "float4", "float8"),
}
"""The types of which a float has all numbers."""


def of_value(source: str, scale: int | None, target: "Column") -> str | None:
    """The same of a value that travels as `source`; `scale` is that of a decimal in the frame."""
    base = target.base
    if _is_kept(source, scale, base, target):
        return None
    if base == _NUMERIC and source in _WHOLE:
        return f"{{0}}::numeric is distinct from {{0}}::{target.full}"
    if base == _NUMERIC and source in _FLOATS:
        # Spark's decimals have no NaN: what was written couldn't be read again.
        return (
            f"({{0}} in ('NaN', 'Infinity', '-Infinity') or "
            f"{{0}} is distinct from {{0}}::text::{target.full}::{source})"
        )
    if base in _FLOATS and source == "int8":
        return f"{{0}} <> least({{0}}::{base}::float8, {_MOST[base]})::int8"
    if base in _FLOATS and source == _NUMERIC:
        # By the text: the cast back to a numeric has fewer digits than the number.
        return f"{{0}} is distinct from {{0}}::{base}::float8::text::{_as(scale)}"
    if base in _FLOATS:
        return f"{{0}}::float8 is distinct from {{0}}::{base}::float8"
    return f"{{0}} is distinct from {{0}}::{target.full}"


def of_array(source: str, scale: int | None, target: "Column") -> str | None:
    """The same of an array, whose elements are of the type `source`."""
    base = target.element
    if _is_kept(source, scale, base, target):
        return None
    if source == _NUMERIC and base in _FLOATS:
        there = f"{{0}}::{base}[]::float8[]::text[]::{_as(scale)}[]"
    else:
        there = f"{{0}}::{target.full}::{source}[]"
    changed = f"{{0}}::{source}[] is distinct from {there}"
    if source in _FLOATS and base == _NUMERIC:
        return f"({{0}}::{source}[] && '{{{{NaN,Infinity,-Infinity}}}}' or {changed})"
    return changed


def of_text(target: "Column") -> str | None:
    """The same of a text."""
    base = target.base
    if base == "name":
        return "{0} is distinct from {0}::name::text"
    if base == "varchar" and target.modifier >= 0:  # trailing spaces are cut without an error
        full = f"{{0}}::{target.full}::text"
        return f"({{0}} <> {full} and rtrim({{0}}, ' ') = rtrim({full}, ' '))"
    if (base == _NUMERIC and target.modifier >= 0) or _is_cut(base, target):
        return f"{{0}}::{target.type} is distinct from {{0}}::{target.full}"
    return None


def _is_kept(source: str, scale: int | None, base: str, target: "Column") -> bool:
    """Whether a column keeps every value of a type that it doesn't refuse."""
    if base in _FLOATS:
        return source in _EXACT[base] or source not in (*_WHOLE, *_FLOATS, _NUMERIC)
    if base == _NUMERIC and source in _FLOATS:
        return False
    if base == _NUMERIC:
        return target.modifier < 0 or (scale or 0) <= _scale(target)
    return not _is_cut(base, target)


def _is_cut(base: str, target: "Column") -> bool:
    """Whether a column has fewer digits of a second than a value may have."""
    return base in _TIMES and 0 <= target.modifier < _MICROSECONDS


def _as(scale: int | None) -> str:
    """A decimal of the frame, with room for one that was rounded up."""
    return f"numeric(100,{scale or 0})"


def _scale(target: "Column") -> int:
    """The digits after the point that a NUMERIC keeps; below zero, it rounds before the point."""
    scale = (target.modifier - 4) & 0x7FF
    return scale - 2048 if scale > 1023 else scale
