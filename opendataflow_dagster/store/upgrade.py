"""`odf init`: the tables are created, or brought to this program's version, in one transaction."""

import re
import time
from collections.abc import Iterator

from ..errors import NoDatabase
from ..util.text import printable
from .database import (
    BASELINE_VERSION,
    Database,
    Versions,
    migration_files,
    named_statements,
    program_version,
    read_sql,
    schema_script,
    trigger_script,
)

RETRY_SECONDS = 1.0
"""Seconds until an upgrade that met locked tables is tried again."""

_ADDS_COLUMN = re.compile(r"(?im)^alter table (\w+) add column (\w+) .*;\n")
_CREATES_INDEX = re.compile(r"(?im)^create (?:unique )?index if not exists (\w+)[^;]*;\n")
_CREATES_TABLE = re.compile(r"(?im)^create table if not exists (\w+)")
_CREATES_TRIGGER = re.compile(r"(?im)^create (?:or replace |constraint )?trigger (\w+)")

HEADER = """\
-- What `odf init` runs on {where}, to bring the tables from version {before} to {version}.
-- Run it as the owner of the tables: {command}
"""


def upgrade(db: Database) -> Versions:
    """Create or upgrade the tables; what they were before. Newer ones are left as they are.

    The tables change in one transaction: one that is killed has changed nothing, and of two at once
    the second finds the work of the first. Rather than let workers wait behind it for somebody
    else's transaction, it soon gives up its locks and tries again.
    """

    def work() -> Versions:
        try:
            with db.upgrading():
                found = _look(db)
                if _may_write(db, found):
                    db.script("\n".join(_steps(db, found)))
            return found
        except Exception as error:
            if db.trouble(error) == "locked":
                time.sleep(RETRY_SECONDS)  # meanwhile the workers' transactions get through
            raise

    def remember() -> None:
        if db.run("upgrade.forgotten"):
            with db.upgrading():
                # The history of rows that were written while the triggers were off.
                db.script("\n".join(_named(db, "sign", "remember", "clear")))

    with db.of_any_version():
        try:
            found, _ = db.insist(work)
        except Exception as error:
            if db.trouble(error) != "locked":
                raise
            raise NoDatabase(
                f"The tables in {db.where} are locked by another transaction: nothing was changed. "
                "`odf doctor` tells whose; end it, then run `odf init` again."
            ) from error
        db.insist(db.read_versions)
        if found.version <= program_version(db.dialect):
            db.insist(remember)
    return found


def plan(db: Database) -> tuple[Versions, str]:
    """What the tables are, and the script that `upgrade` would run; none if there is no need."""
    with db.of_any_version():
        found, _ = db.insist(lambda: _look(db))
        version = program_version(db.dialect)
        if not _may_write(db, found):
            return found, ""
        if found.version == found.triggers == version and not (
            missing_tables(db) or missing_triggers(db)
        ):
            return found, ""
        begin, end, command = db.frame()
        header = HEADER.format(
            where=printable(db.where),
            before=found.version,
            version=version,
            command=printable(command),
        )
        return found, "\n".join([header + begin, *_steps(db, found), end, ""])


def missing_tables(db: Database) -> list[str]:
    """The tables that this program needs and that aren't there."""
    return sorted(_tables(db) - db.tables())


def missing_triggers(db: Database) -> list[str]:
    """The triggers that this program needs and that aren't there."""
    return sorted(triggers(db) - {name for name, _ in db.run("doctor.triggers")})


def triggers(db: Database) -> set[str]:
    """The triggers that this program creates."""
    return set(_CREATES_TRIGGER.findall(trigger_script(db.dialect)))


def _tables(db: Database) -> set[str]:
    return set(_CREATES_TABLE.findall(schema_script(db.dialect)))


def _look(db: Database) -> Versions:
    return db.read_versions() if "dataflow_meta" in db.tables() else Versions()


def _may_write(db: Database, found: Versions) -> bool:
    """Whether the tables are no newer than this program; raises what forbids it their use."""
    version = program_version(db.dialect)
    if found.version <= version:
        return True
    if error := found.unclaimable(version, db.where):
        raise error
    return False


def _steps(db: Database, found: Versions) -> Iterator[str]:
    """Scripts: what brings older tables here, what every init runs, and the stamp."""
    if there := db.tables() & _tables(db):
        yield from missing_migrations(db, found, there)
    indexes = db.indexes()
    # `if not exists` would lock the table also for an index that is there.
    yield _CREATES_INDEX.sub(
        lambda found: "" if found[1] in indexes else found[0], schema_script(db.dialect)
    )
    yield trigger_script(db.dialect)
    # Older tables have no history yet, and nobody works with them: it begins before workers come.
    begins = ("remember",) if found.version < BASELINE_VERSION else ()
    yield from _named(db, "sign", "rebase", *begins, "record", "rebuild", "stamp", "clear")


def _named(db: Database, *names: str) -> Iterator[str]:
    """Statements of upgrade.sql, those that this dialect has."""
    named = named_statements(db.dialect, "upgrade")
    for name in names:
        if name in named:
            text = named[name].replace(":version", str(program_version(db.dialect)))
            yield f"{text};"


def missing_migrations(db: Database, found: Versions, there: set[str]) -> Iterator[str]:
    """What brings tables of an older version here; `there` are those of our tables that exist."""
    for version, path in migration_files(db.dialect).items():
        if version > found.version:
            text = read_sql(path)
            is_baseline = version <= BASELINE_VERSION and db.dialect == "sqlite"
            yield _without_known_columns(db, text, there) if is_baseline else text


def _without_known_columns(db: Database, script: str, there: set[str]) -> str:
    """The baseline without the columns that are there, or that come with their table."""
    columns = {
        table: {name for (name,) in db.run("upgrade.columns", name=table)} for table in there
    }
    return _ADDS_COLUMN.sub(
        lambda found: found[0] if found[2] not in columns.get(found[1], {found[2]}) else "", script
    )
