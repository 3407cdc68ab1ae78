"""flow.yml as a file: its keys, its JSON schema, and the parser, which names file and line."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from ..errors import DataflowError, FlowError
from ..formats.csv_options import KEYS as CSV_KEYS
from ..model import DATASET_COLUMNS, DIALS
from ..store.registry import LARGEST_INTEGER, WRITE_MODES
from ..util.text import did_you_mean, printable

# The keys of a flow.yml, described once: its parser and its JSON schema are made from this.


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
    Key("description", TEXT, "A description for people. It isn't stored in the tables."),
    Key("owners", TEXTS, "The owners: e-mail addresses, or team:NAME."),
    Key("tags", TEXTS_BY_NAME, "Tags, for people and for Dagster."),
)

PASSWORD = Key("password", TEXT, "The variable of the environment that has it: ${NAME}.")


def _column_key(name: str) -> Key:
    if name == "options":
        return Key(name, OPTIONS, DATASET_COLUMNS[name], CSV_KEYS)
    choices = WRITE_MODES if name == "writemode" else ()
    return Key(name, TEXT, DATASET_COLUMNS[name], choices)


EXPECT_KEYS = (
    Key("exists", FLAG, "Whether the job's output must exist: a file, a folder, rows."),
    Key(
        "rows",
        OBJECT,
        "The number of rows of the chunk.",
        (),
        (Key("min", COUNT, "The least number of rows."), Key("max", COUNT, "At most so many.")),
    ),
)

DATASET_KEYS = (
    *map(_column_key, DATASET_COLUMNS),
    PASSWORD,
    Key("expect", OBJECT, "Checks of each chunk before it becomes READY.", (), EXPECT_KEYS),
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
    Key("in", TEXTS, "The datasets that the job reads; `today` stands for the current date."),
    Key("out", TEXTS, "The datasets that the job writes."),
    Key("run", TEXT, "The script that produces a chunk, and its arguments. Relative to this file."),
    Key("python", TEXT, "The Python function that produces a chunk: FILE.py:FUNCTION."),
    Key("spark", TEXT, "The Spark function that produces chunks: FILE.py:FUNCTION."),
    Key("pipeline", TEXT, "The folder of the project whose pipeline has the job's name."),
    Key("engine", TEXT, "What runs its pipeline. Default: what project.yml says.", ENGINES),
    Key(
        "policy",
        OBJECT,
        "The dials that this file sets; other dials are set by hand.",
        (),
        POLICY_KEYS,
    ),
    Key("environment", TEXTS_BY_NAME, "Environment variables for the script."),
    Key("runs_in", TEXT, "Who starts the job.", RUNS_IN),
    *ABOUT,
)

TARGET_KEYS = (
    Key("properties", TEXT, "The properties file that names the tables. Relative to this file."),
    Key("url", TEXT, "The address of the tables: postgresql://HOST/DB or sqlite:///FILE."),
    Key("user", TEXT, "The database user."),
    Key("schema", TEXT, "The PostgreSQL schema of the tables."),
    Key("encrypted", TEXT, "The user's password as `odf encrypt` printed it."),
    Key("timezone", TEXT, "The time zone of the date `today`."),
)

FLOW_KEYS = (
    Key("flow", TEXT, "The flow's name: its registrations carry it.", is_required=True),
    Key(
        "targets",
        OBJECTS_BY_NAME,
        "The databases that this flow can be applied to.",
        (),
        TARGET_KEYS,
    ),
    Key(
        "defaults",
        OBJECT,
        "Defaults for every job.",
        (),
        (Key("policy", OBJECT, "Dials of every job.", (), POLICY_KEYS),),
    ),
    Key("datasets", OBJECTS_BY_NAME, "The datasets by id: data with a location.", (), DATASET_KEYS),
    Key("jobs", OBJECTS_BY_NAME, "The jobs by id: what reads and writes datasets.", (), JOB_KEYS),
)

SECONDS_PATTERN = r"^([0-9]+(\.[0-9]+)?[smhdw]?)+$"


FILE = "flow.yml"

_TAG = "tag:yaml.org,2002:"
_SCALAR_TAGS = {_TAG + name for name in ("str", "int", "float", "bool", "timestamp", "null")}
_SHOWN_LETTERS = 40
_DEEPEST = 50
"""Levels of objects and lists in each other; a flow has 6."""


class Item(NamedTuple):
    """A dataset or a job as written, or the top level of the file."""

    name: str
    where: str
    """The file and the line."""
    lines: Mapping[str, str]
    """The same of each of its keys."""
    values: Mapping[str, Any]


class FlowFile(NamedTuple):
    """What a file has, by the types of its keys; what it means isn't checked yet."""

    path: str
    top: Item
    policy: Item
    """The dials of every job."""
    targets: Mapping[str, Mapping[str, str]]
    datasets: Sequence[Item]
    jobs: Sequence[Item]


def read_file(path: str | os.PathLike[str] = FILE) -> FlowFile:
    """Read a flow.yml."""
    path = os.fspath(path)
    try:
        with open(path, "rb") as file:
            content = file.read()
    except FileNotFoundError:
        raise FlowError(
            f"There is no {path}. Write one, name another file with --file, or create one "
            f"from what is registered: odf export > {FILE}"
        ) from None
    except OSError as error:
        raise FlowError(
            f"{path} can't be read: {error.strerror}. Correct its permissions."
        ) from None
    return parse_file(content, path)


def parse_file(content: bytes | str, path: str = FILE) -> FlowFile:
    """Read the content of a flow.yml; `path` is for messages."""
    loader, name = None, printable(path)
    try:
        kind = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        _refuse_deep(yaml.parse(content, Loader=kind), name)
        loader = kind(content)
        node = loader.get_single_node()
        refuse_many_values(node, name, FlowError)
        return _FlowReader(name, loader).file(node, path)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise FlowError(not_yaml(error, name)) from None
    finally:
        if loader is not None:
            loader.dispose()


def _refuse_deep(events: Iterator[Any], name: str) -> None:
    """Refuse what is nested so deep that composing it would end the process."""
    depth = 0
    for event in events:
        kind = type(event).__name__
        depth += kind in ("MappingStartEvent", "SequenceStartEvent")
        depth -= kind in ("MappingEndEvent", "SequenceEndEvent")
        if depth > _DEEPEST:
            raise FlowError(
                f"{name}:{event.start_mark.line + 1} is nested more than {_DEEPEST} levels "
                "deep. Correct it."
            )


class _FlowReader:
    """Reads YAML nodes, and checks their keys and values."""

    def __init__(self, name: str, loader: Any) -> None:
        self._name = name
        self._loader = loader
        self._found: dict[int, list[tuple[str, Any, Any]]] = {}
        """The keys of each object that was read: merging changes its node."""

    def file(self, node: Any, path: str) -> FlowFile:
        if node is None or node.id != "mapping":
            raise self._wrong(node, "must be an object with the keys flow, datasets and jobs")
        nodes = self._known(node, FLOW_KEYS, "the flow")
        if "flow" not in nodes:
            raise self._wrong(node, "needs a name for its registrations: flow: NAME")
        keys = {key.name: key.keys for key in FLOW_KEYS}
        defaults = self._object(nodes.get("defaults"), keys["defaults"], "defaults")
        name = self._text(nodes["flow"], "flow")
        targets = self._items(nodes, "targets", TARGET_KEYS)
        return FlowFile(
            path,
            Item(name, self._at(node), self._lines(node), {}),
            Item("", self._at(nodes.get("defaults")), {}, defaults.get("policy", {})),
            {target.name: target.values for target in targets},
            self._items(nodes, "datasets", DATASET_KEYS),
            self._items(nodes, "jobs", JOB_KEYS),
        )

    def _items(self, nodes: Mapping[str, Any], section: str, keys: tuple[Key, ...]) -> list[Item]:
        """The content of a section, by name."""
        kind = section.removesuffix("s")
        return [
            Item(
                name,
                self._at(key),
                self._lines(value),
                self._object(value, keys, f"{kind} {name!r}"),
            )
            for name, key, value in self._named(nodes.get(section), section)
        ]

    def _object(self, node: Any, keys: tuple[Key, ...], what: str) -> dict[str, Any]:
        """The values of an object by the names of its keys; of nothing, none."""
        if self._is_nothing(node):
            return {}
        if node.id != "mapping":
            known = ", ".join(key.name for key in keys)
            raise self._wrong(node, f"{what} must be an object with keys of {known}")
        kinds = {key.name: key for key in keys}
        return {
            name: self._value(value, kinds[name], what)
            for name, value in self._known(node, keys, what).items()
        }

    def _value(self, node: Any, key: Key, what: str) -> Any:
        shown = f"{key.name} of {what}"
        if key.kind == FLAG:
            if self._text(node, shown) != "true":
                raise self._wrong(node, f"{shown} must be true, or be left out")
            return True
        if key.kind == COUNT:
            if not (text := self._text(node, shown)).isdecimal() or not text.isascii():
                raise self._wrong(node, f"{shown} must be a number from 0, not {self._cut(text)}")
            return int(text)
        if key.kind in (TEXT, DIAL):
            text = self._text(node, shown)
            if key.kind == TEXT and key.choices and text not in key.choices:
                like = did_you_mean(text, key.choices)
                must = f"{shown} must be {' or '.join(key.choices)}, not {self._cut(text)}"
                raise FlowError(f"{self._at(node)}: {must}{like or '.'}")
            return text
        if key.kind == TEXTS:
            inner = node.value if node.id == "sequence" else [node]
            return [self._text(each, shown) for each in inner]
        if key.kind == OPTIONS:
            return self._options(node, key, shown)
        if key.kind == OBJECT:
            return self._object(node, key.keys, shown)
        assert key.kind != OBJECTS_BY_NAME
        return {
            name: self._text(value, f"{name!r} of {shown}")
            for name, _, value in self._named(node, shown)
        }

    def _options(self, node: Any, key: Key, shown: str) -> dict[str, Any]:
        if node.id != "mapping":
            raise self._wrong(node, f"{shown} must have keys, of {', '.join(key.choices)}")
        keys = tuple(Key(name, TEXT, "") for name in key.choices)
        self._known(node, keys, shown)
        return {name: self._plain(value) for name, _, value in self._named(node)}

    def _plain(self, node: Any) -> Any:
        """A value of JSON, as it is."""
        if node.id == "mapping":
            return {name: self._plain(value) for name, _, value in self._named(node)}
        if node.id == "sequence":
            return [self._plain(each) for each in node.value]
        self._refuse_tag(node)
        if node.tag == _TAG + "timestamp":
            return node.value
        return self._loader.construct_object(node)

    def _text(self, node: Any, what: str) -> str:
        """Return a single value exactly as written: 0123 and yes stay text."""
        if node.id != "scalar":
            kind = "a list" if node.id == "sequence" else "an object"
            raise self._wrong(node, f"{what} must be one value, not {kind}")
        self._refuse_tag(node)
        if node.tag == _TAG + "null":
            raise self._wrong(node, f"{what} has no value. Write one, or leave the key out")
        return node.value

    def _known(self, node: Any, keys: tuple[Key, ...], what: str) -> dict[str, Any]:
        """The nodes of an object by key; a key that isn't known is refused."""
        known = [key.name for key in keys]
        found = {}
        for name, key, value in self._named(node):
            if name not in known:
                like = did_you_mean(name, known) or f". It may have {', '.join(known)}."
                raise FlowError(
                    f"{self._at(key)}: {what} has an unknown key {self._cut(name)}{like}"
                )
            found[name] = value
        return found

    def _named(self, node: Any, what: str = "what has keys") -> list[tuple[str, Any, Any]]:
        """The keys of an object, with the nodes of each key and its value; none twice."""
        if self._is_nothing(node):
            return []
        if node.id != "mapping":
            raise self._wrong(node, f"{what} must have names, with a colon after each")
        if id(node) not in self._found:
            self._found[id(node)] = self._named_in(node)
        return self._found[id(node)]

    def _named_in(self, node: Any) -> list[tuple[str, Any, Any]]:
        if node.tag != _TAG + "map":
            raise self._tagged(node)
        lines: dict[str, int] = {}
        for key, _ in self._pairs(node):
            if key.value in lines:
                raise self._wrong(
                    key, f"{self._cut(key.value)} is given here and in line {lines[key.value]}"
                )
            lines[key.value] = key.start_mark.line + 1
        merged: dict[str, tuple[str, Any, Any]] = {}
        self._loader.flatten_mapping(node)  # what `<<: *name` brings comes first
        for key, value in node.value:
            merged[key.value] = key.value, key, value
        return list(merged.values())

    def _pairs(self, node: Any) -> Iterator[tuple[Any, Any]]:
        for key, value in node.value:
            if key.tag == _TAG + "merge":
                continue
            if key.id != "scalar":
                raise self._wrong(key, "a name must be one value, not a list or an object")
            self._refuse_tag(key)
            yield key, value

    def _lines(self, node: Any) -> dict[str, str]:
        if node is None or node.id != "mapping":
            return {}
        return {name: self._at(value) for name, _, value in self._named(node)}

    def _is_nothing(self, node: Any) -> bool:
        return node is None or (node.id == "scalar" and node.tag == _TAG + "null")

    def _refuse_tag(self, node: Any) -> None:
        if node.tag not in _SCALAR_TAGS:
            raise self._tagged(node)

    def _tagged(self, node: Any) -> FlowError:
        return self._wrong(node, f"the tag {printable(node.tag)} isn't used here. Leave it out")

    def _wrong(self, node: Any, what: str) -> FlowError:
        return FlowError(f"{self._at(node)}: {what}.")

    def _at(self, node: Any) -> str:
        return f"{self._name}:{node.start_mark.line + 1 if node is not None else 1}"

    @staticmethod
    def _cut(text: str) -> str:
        return repr(text if len(text) <= _SHOWN_LETTERS else text[: _SHOWN_LETTERS - 1] + "…")


# The JSON schema of flow.yml, for editors: `odf schema`.


_SCALAR = {"type": ["string", "number", "boolean"]}
_ENVIRONMENT_REFERENCE = r"^\$\{[A-Za-z_][A-Za-z0-9_]*\}$"


def json_schema() -> dict[str, Any]:
    """The schema of a whole flow.yml."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "flow.yml of OpenDataFlow",
        **_object(FLOW_KEYS),
    }


def schema_text() -> str:
    """The same as the text of a file."""
    return json.dumps(json_schema(), indent=2) + "\n"


def _object(keys: tuple[Key, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "type": "object",
        "properties": {key.name: {"description": key.meaning, **_value(key)} for key in keys},
        "additionalProperties": False,
    }
    if required := [key.name for key in keys if key.is_required]:
        found["required"] = required
    if keys is JOB_KEYS:
        found["required"] = ["out"]
        found["allOf"] = _at_most_one(RUNNERS)
    if {"properties", "url"} <= {key.name for key in keys}:
        found["allOf"] = _at_most_one(("properties", "url"))
        found["anyOf"] = [{"required": [name]} for name in ("properties", "url")]
    if {"password", "encryptedpass"} <= {key.name for key in keys}:
        found["allOf"] = _at_most_one(("password", "encryptedpass"))
    return found


def _value(key: Key) -> dict[str, Any]:
    if key.choices and key.kind == TEXT:
        return {"enum": list(key.choices)}
    if key.name == "password":
        return {"type": "string", "pattern": _ENVIRONMENT_REFERENCE}
    if key.kind == TEXT:
        return _SCALAR
    if key.kind == TEXTS:
        return {"anyOf": [_SCALAR, {"type": "array", "items": _SCALAR}]}
    if key.kind == FLAG:
        return {"const": True}
    if key.kind == COUNT:
        return {"type": "integer", "minimum": 0}
    if key.kind == DIAL:
        return _dial(key.name)
    if key.kind == OPTIONS:
        known = dict.fromkeys(key.choices, True)
        return {"type": "object", "properties": known, "additionalProperties": False}
    if key.kind == OBJECT:
        return _or_nothing(_object(key.keys))
    if key.kind == OBJECTS_BY_NAME:
        return {
            "type": ["object", "null"],
            "additionalProperties": _or_nothing(_object(key.keys)),
        }
    return {"type": ["object", "null"], "additionalProperties": _SCALAR}


def _or_nothing(schema: dict[str, Any]) -> dict[str, Any]:
    """An object of which nothing may be written after its name; not if it needs a key."""
    return (
        schema
        if "required" in schema or "anyOf" in schema
        else schema | {"type": ["object", "null"]}
    )


def _dial(name: str) -> dict[str, Any]:
    dial = DIALS[name]
    if dial.unit == "time":
        return {"type": "string"}
    if dial.words:
        return {"enum": [*dial.words, "none"]}
    pattern = SECONDS_PATTERN if dial.unit == "seconds" else r"^[0-9]+$"
    return {
        "anyOf": [
            {"type": "integer", "minimum": dial.least, "maximum": LARGEST_INTEGER},
            {"type": "string", "pattern": f"{pattern}|^[Nn][Oo][Nn][Ee]$"},
        ]
    }


def _at_most_one(names: tuple[str, ...]) -> list[dict[str, Any]]:
    return [
        {"not": {"type": "object", "required": [one, other]}}
        for at, one in enumerate(names)
        for other in names[at + 1 :]
    ]


# Files of YAML: read safely, and with the line of each value.


MOST_VALUES = 100_000
"""Values of a file, its aliases written out: a few lines of them can be billions."""


def refuse_many_values(node: Any, name: str, error: type[DataflowError]) -> None:
    """Refuse a document that has more values than anybody writes, before they are created."""
    if size_of(node, {}) > MOST_VALUES:
        raise error(
            f"{name} has more than {MOST_VALUES:,} values once its aliases (`*name`) are "
            "written out. Leave most of them out."
        )


def size_of(node: Any, sizes: dict[int, float]) -> float:
    """How many values a node of YAML has, each alias written out; one within itself has no end."""
    if node is None:
        return 0
    if id(node) not in sizes:
        sizes[id(node)] = math.inf  # until it is known: what an alias within itself finds
        values = node.value if isinstance(node.value, list) else ()
        # A mapping has pairs, a sequence has nodes.
        inner = [each for value in values for each in (value if type(value) is tuple else (value,))]
        sizes[id(node)] = 1 + sum(size_of(each, sizes) for each in inner)
    return sizes[id(node)]


def not_yaml(error: Exception, name: str) -> str:
    """What says why a file can't be read as YAML, and where."""
    mark = getattr(error, "problem_mark", None)
    where = f"{name}:{mark.line + 1}" if mark else name
    why = getattr(error, "problem", None) or str(error).split("\n")[0] or type(error).__name__
    return f"{where} isn't YAML: {printable(why)}. Correct it."
