"""Moments, as the tables keep them and as people write them."""

import re
from datetime import UTC, datetime, tzinfo
from typing import Any, Protocol

from ..errors import WrongUse

STORED = "%Y-%m-%d %H:%M:%S.%f"
"""How SQLite's columns store a time: in UTC, so that texts sort like times."""


class StoreClock(Protocol):
    """What has to be known of a store here: its time zone, and its database's dialect."""

    timezone: str | None
    db: Any


def zone(store: StoreClock) -> tzinfo | None:
    """The configured time zone; None is the machine's."""
    return zone_called(store.timezone) if store.timezone else None


def zone_called(name: str) -> tzinfo:
    """The time zone that the configuration names."""
    from zoneinfo import ZoneInfo

    try:
        return ZoneInfo(name)
    except (LookupError, ValueError, OSError):  # unknown, not a name at all, or a folder of zones
        pass
    raise WrongUse(
        f"The timezone {name[:40]!r} isn't known on this machine. Correct `timezone` in "
        "the properties, for example to Europe/Berlin; if it is right, run: pip "
        "install tzdata"
    )


def parse_time(store: StoreClock, text: str) -> datetime:
    """An ISO date or time; one without an offset is in the configured time zone."""
    try:
        moment = datetime.fromisoformat(text.strip())
        return moment if moment.tzinfo else _placed(moment, zone(store))
    except (ValueError, OverflowError):
        raise WrongUse(
            f"{text!r} isn't a time. "
            "Write it like 2026-03-01, 2026-03-01T14:30 or 2026-03-01T14:30Z."
        ) from None


def to_table(store: StoreClock, moment: datetime | None) -> Any:
    """Return a moment as a parameter that can be compared with a column."""
    if moment is None or store.db.dialect == "postgres":
        return moment
    return moment.astimezone(UTC).strftime(STORED)[:-3]


def from_table(store: StoreClock, value: Any) -> datetime | None:
    """A column's time, in the configured time zone; what isn't a time is None."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            return None
        value = value if value.tzinfo else value.replace(tzinfo=UTC)
    return value.astimezone(zone(store)) if isinstance(value, datetime) else None


FOREVER_YEAR = 9999
"""The year of a time without an end, such as that of an endless pause."""


def shown(moment: datetime | None) -> str:
    """A time for a sentence."""
    if moment and moment.year == FOREVER_YEAR:
        return "further notice"
    return moment.strftime("%Y-%m-%d %H:%M:%S") if moment else "an unknown time"


def _placed(moment: datetime, where: tzinfo | None) -> datetime:
    return moment.replace(tzinfo=where) if where else moment.astimezone()


_PIECE = re.compile(r"(\d+(?:\.\d+)?)([smhdw]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def parse_duration(text: str) -> float:
    """Seconds from what a person writes: `90`, `90s`, `30m`, `2h`, `1h30m`, `7d`, `2w`."""
    pieces = _PIECE.findall(text.strip().lower())
    if not pieces or "".join(map("".join, pieces)) != text.strip().lower():
        raise WrongUse(f"{text!r} isn't a duration. Write it like 90s, 30m, 2h, 1h30m or 7d.")
    return sum(float(number) * _SECONDS[unit] for number, unit in pieces)
