"""Which errors of a database tell that it can't be used now, and which are about the rows."""

_AWAY = ("08", "25006", "40", "42501", "53", "55", "57P", "58")
"""How PostgreSQL's codes begin: connection, standby, races, rights, space, locks, stop, disk."""

_ROWS = (1, 18, 19, 20, 25)
"""SQLite's codes for what is said or given: a statement, a size, a constraint, a type, a range."""


def is_outage(error: BaseException) -> bool:
    """Whether a driver's error would meet any rows, so that trying again later may help."""
    import sqlite3

    import psycopg

    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", None)  # the module's own errors have none
        return code is not None and code & 0xFF not in _ROWS
    if not isinstance(error, psycopg.Error):
        return False
    state = error.sqlstate
    if state is None:
        return isinstance(error, psycopg.OperationalError)
    return state.startswith(_AWAY)
