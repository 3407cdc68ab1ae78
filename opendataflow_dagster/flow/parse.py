"""Reading flow.yml: what is wrong in it is said with its file and line."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from ..errors import FlowError
from ..util.text import did_you_mean, printable
from ..util.yaml_file import not_yaml, refuse_many_values
from .keys import (
    COUNT,
    DATASET_KEYS,
    DIAL,
    FLAG,
    FLOW_KEYS,
    JOB_KEYS,
    OBJECT,
    OBJECTS_BY_NAME,
    OPTIONS,
    TARGET_KEYS,
    TEXT,
    TEXTS,
    Key,
)

FILE = "flow.yml"

_TAG = "tag:yaml.org,2002:"
_SCALAR_TAGS = {_TAG + name for name in ("str", "int", "float", "bool", "timestamp", "null")}
_SHOWN_LETTERS = 40
_DEEPEST = 50
"""Levels of objects and lists in each other; a flow has 6."""


class Item(NamedTuple):
    """A dataset or a job as it is written, or what stands at the top of the file."""

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
            f"There is no {path}. Write it, name another file with --file, or make one of what is "
            f"registered: odf export > {FILE}"
        ) from None
    except OSError as error:
        raise FlowError(f"{path} can't be read: {error.strerror}. Correct that.") from None
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
                f"{name}:{event.start_mark.line + 1} is nested more than {_DEEPEST} levels deep. "
                "Correct it."
            )


class _FlowReader:
    """Values of nodes, by the keys that they may have."""

    def __init__(self, name: str, loader: Any) -> None:
        self._name = name
        self._loader = loader
        self._found: dict[int, list[tuple[str, Any, Any]]] = {}
        """The keys of each object that was read: merging changes its node."""

    def file(self, node: Any, path: str) -> FlowFile:
        if node is None or node.id != "mapping":
            raise self._wrong(node, "must have the keys flow, datasets and jobs")
        nodes = self._known(node, FLOW_KEYS, "the flow")
        if "flow" not in nodes:
            raise self._wrong(node, "needs a name that its registrations carry: flow: NAME")
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
        """What stands in a section, by name."""
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
            raise self._wrong(node, f"{what} must have keys, of {known}")
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
        """A single value, as it is written: 0123 and yes stay what they are."""
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
                raise FlowError(f"{self._at(key)}: {what} has a key {self._cut(name)}{like}")
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
                    key, f"{self._cut(key.value)} stands here and in line {lines[key.value]}"
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
