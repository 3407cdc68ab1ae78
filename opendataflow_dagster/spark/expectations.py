"""Parses `expect={…}` of a job into rules, or reports in a line what is wrong with it."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from math import isfinite
from typing import Any

from ..chunk import ERROR, WARN
from ..errors import WrongUse
from ..util.text import did_you_mean
from .rules import (
    FunctionRule,
    RangeRule,
    RowRule,
    RowsRule,
    Rule,
    SqlRule,
    UniqueRule,
    abbreviated_sql,
    null_on_error,
)
from .schema import DECIMAL_DIGITS, literal, quoted

WARNING = "warn"
ROW_LIMITS = ("min", "max", "change")


def rules_of(expect: Mapping[str, Any] | None, outputs: Sequence[str]) -> list[Rule]:
    """Return the rules of a job; if it has several outputs, `expect` is dataset → rules."""
    rules: list[Rule] = []
    names: set[str] = set()
    for datasetid, asked in _by_dataset(expect or {}, outputs).items():
        for make in _rule_makers(asked, datasetid, ERROR, f"expect of {datasetid!r}"):
            rule = make(names)
            names.add(rule.name)
            rules.append(rule)
    return rules


def _by_dataset(expect: Any, outputs: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    kinds = [*KINDS, WARNING]
    _mapping(expect, "expect", f"{{kind: what}}, of the kinds {', '.join(kinds)}")
    if expect and all(
        name in outputs and isinstance(rules, Mapping) and all(rule in kinds for rule in rules)
        for name, rules in expect.items()
    ):
        return dict(expect)
    unknown = [word for word in expect if word not in kinds and word not in outputs]
    if unknown:
        of_several = f", or a dataset: {', '.join(map(repr, outputs))}" if len(outputs) > 1 else ""
        raise WrongUse(
            f"expect has {unknown[0]!r}, which isn't a kind of rule. Choose from {', '.join(kinds)}"
            f"{of_several}{did_you_mean(str(unknown[0]), [*kinds, *outputs])}"
        )
    mixed = [word for word in expect if word in outputs and word not in kinds]
    if mixed:
        rules = expect[mixed[0]]
        about = f"expect of {mixed[0]!r}"
        _mapping(rules, about, f"{{kind: what}}, of the kinds {', '.join(kinds)}")
        for kind in rules:
            _known_kind(kind, about)
        raise WrongUse(
            "expect names both datasets and kinds of rules. Write all of it as "
            f"{{{mixed[0]!r}: {{kind: what}}, …}}."
        )
    if expect and len(outputs) != 1:
        raise WrongUse(
            f"`expect` names no dataset, but the job writes {', '.join(map(repr, outputs))}. "
            f"Write expect={{{outputs[0]!r}: {{…}}}}."
            if outputs
            else "`expect` is given, but the job writes no dataset. Leave it out."
        )
    return {outputs[0]: expect} if expect else {}


Make = Callable[[Iterable[str]], Rule]


def _rule_makers(
    rules: Mapping[str, Any], datasetid: str, severity: str, about: str
) -> Iterator[Make]:
    """Yield functions that create each rule, given the names already in use."""
    for kind, what in rules.items():
        _known_kind(kind, about)
        if kind != WARNING:
            yield from KINDS[kind](what, f"{about}, {kind}", datasetid, severity)
        elif severity == WARN:
            raise WrongUse(f"{about} has {WARNING!r} within {WARNING!r}. Remove the inner one.")
        else:
            _mapping(what, f"{about}, {WARNING}", "{kind: what}, as expect itself")
            yield from _rule_makers(what, datasetid, WARN, f"{about}, {WARNING}")


def _known_kind(kind: Any, about: str) -> None:
    if kind not in KINDS and kind != WARNING:
        raise WrongUse(
            f"{about} has {kind!r}, which isn't a kind of rule. Choose from "
            f"{', '.join([*KINDS, WARNING])}{did_you_mean(str(kind), [*KINDS, WARNING])}"
        )


def _not_null(what: Any, about: str, *of: str) -> Iterator[Make]:
    for column in _list(what, about, "a list of columns"):
        name = _column(column, about)
        yield _rule(
            RowRule,
            f"not_null_{name}",
            of,
            columns=(name,),
            violation=f"{quoted(name)} is null",
            says=f"have no {name}",
        )


def _unique(what: Any, about: str, *of: str) -> Iterator[Make]:
    keys = _list(what, about, "a list of columns, or of lists of them")
    alone = [key for key in keys if isinstance(key, str)]
    hint = f"; one key of several columns is [{alone!r}]" if len(alone) > 1 else ""
    for key in keys:
        columns = (key,) if isinstance(key, str) else key
        if not isinstance(columns, list | tuple) or not columns:
            raise _refused(about, key, "a column, or a list of columns")
        columns = tuple(_column(column, about) for column in columns)
        if len({column.casefold() for column in columns}) < len(columns):
            raise _refused(about, key, "each column once")
        yield _rule(
            UniqueRule,
            f"unique_{'_'.join(columns)}",
            of,
            columns=columns,
            hint=hint if len(columns) == 1 else "",
        )


def _range(what: Any, about: str, *of: str) -> Iterator[Make]:
    for column, bounds in _mapping(what, about, "{column: (least, most)}").items():
        name = _column(column, about)
        where = f"{about} of {name!r}"
        if not isinstance(bounds, list | tuple) or len(bounds) != 2:
            raise _refused(where, bounds, "(least, most), with None for an open end")
        given = [bound for bound in bounds if bound is not None]
        kinds = {_kind(value) for value in given}
        if not given or len(kinds) > 1 or None in kinds:
            raise _refused(where, bounds, "two numbers, dates or texts, at most one of them None")
        low, high = bounds
        try:
            upside_down = len(given) == 2 and low > high
        except TypeError:  # a date and a datetime, or only one with a zone
            raise _refused(where, bounds, "two bounds of one type") from None
        if upside_down:
            raise WrongUse(f"{where} is {bounds!r}: the minimum is above the maximum. Swap them.")
        kind, sql = kinds.pop() or "", quoted(name)
        outside = [f"{sql} < {_literal(low)}"] if low is not None else []
        if high is not None:
            outside.append(f"{sql} > {_literal(high)}")
        elif kind == "number":
            outside.append(f"{sql} = double('NaN')")  # Spark treats it as the greatest number
        span = "≤".join(str(part) for part in (low, name, high) if part is not None)
        yield _rule(
            RangeRule,
            f"range_{name}",
            of,
            columns=(name,),
            bounds=kind,
            decimals=max(map(_decimals, given)),
            violation=" or ".join(outside),
            says=f"are outside {span}",
        )


def _rows(what: Any, about: str, *of: str) -> Iterator[Make]:
    limits = _mapping(what, about, "{'min': 1, 'max': None, 'change': 0.5}")
    for name, limit in limits.items():
        if name not in ROW_LIMITS:
            raise WrongUse(
                f"{about} has {name!r}. Choose from {', '.join(ROW_LIMITS)}"
                f"{did_you_mean(str(name), ROW_LIMITS)}"
            )
        number = isinstance(limit, int) or (name == "change" and isinstance(limit, float))
        if limit is not None and (isinstance(limit, bool) or not number or not limit >= 0):
            wanted = "a share, such as 0.5" if name == "change" else "a number of rows"
            raise _refused(f"{about}, {name}", limit, wanted)
    low, high, change = map(limits.get, ROW_LIMITS)
    if low is not None and high is not None and low > high:
        raise WrongUse(f"{about} has a min of {low} above its max of {high}. Swap them.")
    if low is high is change is None:
        raise _refused(about, what, "at least one of min, max, change")
    yield _rule(RowsRule, "rows", of, least=low, most=high, change=change)


def _sql(what: Any, about: str, *of: str) -> Iterator[Make]:
    for name, sql in _mapping(what, about, "{name: an expression that is true}").items():
        if not isinstance(name, str) or not name:
            raise _refused(about, name, "a name for each expression")
        if not isinstance(sql, str) or not sql.strip():
            raise _refused(f"{about} of {name!r}", sql, "an expression that is true for every row")
        yield _rule(
            SqlRule,
            name,
            of,
            sql=sql,
            violation=f"not coalesce({null_on_error(sql)}, false)",
            says=f"don't meet {abbreviated_sql(sql)}",
        )


def _function(what: Any, about: str, *of: str) -> Iterator[Make]:
    for fn in what if isinstance(what, list | tuple) else [what]:
        if not callable(fn):
            raise _refused(about, fn, "a list of functions")
        yield _rule(FunctionRule, getattr(fn, "__name__", type(fn).__name__), of, fn=fn)


KINDS: Mapping[str, Callable[..., Iterator[Make]]] = {
    "not_null": _not_null,
    "unique": _unique,
    "range": _range,
    "rows": _rows,
    "sql": _sql,
    "function": _function,
}


def _rule(kind: Callable[..., Rule], name: str, of: Sequence[str], **more: Any) -> Make:
    def make(taken: Iterable[str]) -> Rule:
        plain = re.sub(r"\W", "_", name, flags=re.ASCII).strip("_") or "rule"
        plain = f"rule_{plain}" if plain[0].isdigit() else plain
        unique, number = plain, 1
        while unique in taken:
            number += 1
            unique = f"{plain}_{number}"
        return kind(unique, *of, **more)

    return make


def _refused(about: str, given: Any, wanted: str) -> WrongUse:
    text = repr(given)
    return WrongUse(f"{about} is {text if len(text) <= 60 else text[:59] + '…'}. Give {wanted}.")


def _mapping(given: Any, about: str, wanted: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise _refused(about, given, wanted)
    return given


def _list(given: Any, about: str, wanted: str) -> Sequence[Any]:
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list | tuple) or not given:
        raise _refused(about, given, wanted)
    return given


def _column(name: Any, about: str) -> str:
    if not isinstance(name, str) or not name:
        raise _refused(about, name, "a column's name")
    return name


def _kind(bound: Any) -> str | None:
    if isinstance(bound, bool):
        return None
    if isinstance(bound, int | float | Decimal):
        return "number" if isfinite(bound) else None
    if isinstance(bound, date):
        return "date"
    return "text" if isinstance(bound, str) else None


def _decimals(bound: Any) -> int:
    """Return how many decimals a number has; a float is compared as a double."""
    exponent = bound.normalize().as_tuple().exponent if isinstance(bound, Decimal) else 0
    return max(0, -int(exponent))


def _literal(bound: Any) -> str:
    """A bound in SQL: exact, unless it has more digits than any column it is compared with."""
    match bound:
        case datetime():
            zoned = "TIMESTAMP_NTZ" if bound.tzinfo is None else "TIMESTAMP_LTZ"
            return f"{zoned}'{bound.isoformat(sep=' ')}'"
        case date():
            return f"DATE'{bound.isoformat()}'"
        case str():
            return literal(bound)
        case float():
            return f"double('{bound!r}')"
        case _:
            text = format(bound, "f") if isinstance(bound, Decimal) else str(bound)
            if sum(map(str.isdigit, text)) > DECIMAL_DIGITS:
                return f"double('{text}')"
            return text
