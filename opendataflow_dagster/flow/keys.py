"""The keys of a flow.yml, described once: its parser and its JSON schema are made from this."""

from typing import NamedTuple

from ..formats.csv_options import KEYS as CSV_KEYS
from ..model import DATASET_COLUMNS, DIALS
from ..store.registry import WRITE_MODES

TEXT, TEXTS, TEXTS_BY_NAME = "text", "texts", "texts by name"
DIAL, OPTIONS = "dial", "options"
FLAG, COUNT = "flag", "count"
OBJECT, OBJECTS_BY_NAME = "object", "objects by name"


class Key(NamedTuple):
    """One key: what its value is, and what it means."""

    name: str
    kind: str
    meaning: str
    choices: tuple[str, ...] = ()
    keys: "tuple[Key, ...]" = ()
    """Of an object: the keys that it may have."""
    is_required: bool = False


ABOUT = (
    Key("description", TEXT, "What it is, for people. It stays in this file."),
    Key("owners", TEXTS, "Who is responsible: e-mail addresses, or team:NAME."),
    Key("tags", TEXTS_BY_NAME, "Tags, for people and for Dagster."),
)

PASSWORD = Key("password", TEXT, "The variable of the environment that has it: ${NAME}.")


def _column_key(name: str) -> Key:
    if name == "options":
        return Key(name, OPTIONS, DATASET_COLUMNS[name], CSV_KEYS)
    choices = WRITE_MODES if name == "writemode" else ()
    return Key(name, TEXT, DATASET_COLUMNS[name], choices)


EXPECT_KEYS = (
    Key("exists", FLAG, "What the job was to write is in its place: a file, a folder, rows."),
    Key(
        "rows",
        OBJECT,
        "How many rows the chunk has.",
        (),
        (Key("min", COUNT, "At least so many."), Key("max", COUNT, "At most so many.")),
    ),
)

DATASET_KEYS = (
    *map(_column_key, DATASET_COLUMNS),
    PASSWORD,
    Key("expect", OBJECT, "What is asked of each chunk before it is READY.", (), EXPECT_KEYS),
    *ABOUT,
)

POLICY_KEYS = tuple(
    Key(name, DIAL, f"{dial.meaning[:1].upper()}{dial.meaning[1:]}. Default: {dial.default}.")
    for name, dial in DIALS.items()
)

RUNNERS = ("run", "python", "spark", "pipeline")
"""The keys of a job that say what runs it; it has one of them, or none."""

ENGINES = ("spark", "local")

RUNS_IN = ("work", "dagster", "cron")

JOB_KEYS = (
    Key("in", TEXTS, "The datasets that it reads; `today` stands for the current date."),
    Key("out", TEXTS, "The datasets that it writes."),
    Key("run", TEXT, "The script that makes a chunk, and its arguments. Relative to this file."),
    Key("python", TEXT, "The Python function that makes a chunk: FILE.py:FUNCTION."),
    Key("spark", TEXT, "The function of DataFrames that makes chunks: FILE.py:FUNCTION."),
    Key("pipeline", TEXT, "The folder of the project whose pipeline has the job's name."),
    Key("engine", TEXT, "What runs its pipeline; else what project.yml says.", ENGINES),
    Key(
        "policy",
        OBJECT,
        "The dials that this file sets; others are turned by hand.",
        (),
        POLICY_KEYS,
    ),
    Key("environment", TEXTS_BY_NAME, "Variables that the script gets."),
    Key("runs_in", TEXT, "Who starts it.", RUNS_IN),
    *ABOUT,
)

TARGET_KEYS = (
    Key("properties", TEXT, "The properties file that names the tables. Relative to this file."),
    Key("url", TEXT, "The address of the tables: postgresql://HOST/DB or sqlite:///FILE."),
    Key("user", TEXT, "The database user."),
    Key("schema", TEXT, "The PostgreSQL schema of the tables."),
    Key("encrypted", TEXT, "The user's password as `odf encrypt` printed it."),
    Key("timezone", TEXT, "Whose date `today` is."),
)

FLOW_KEYS = (
    Key("flow", TEXT, "The flow's name: what it registers carries it.", is_required=True),
    Key("targets", OBJECTS_BY_NAME, "The databases that this flow is applied to.", (), TARGET_KEYS),
    Key(
        "defaults",
        OBJECT,
        "What every job has that doesn't say otherwise.",
        (),
        (Key("policy", OBJECT, "Dials of every job.", (), POLICY_KEYS),),
    ),
    Key("datasets", OBJECTS_BY_NAME, "Data with a place, by id.", (), DATASET_KEYS),
    Key("jobs", OBJECTS_BY_NAME, "What reads and writes datasets, by id.", (), JOB_KEYS),
)

SECONDS_PATTERN = r"^([0-9]+(\.[0-9]+)?[smhdw]?)+$"
