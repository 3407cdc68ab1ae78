"""The JSON schema of flow.yml, for editors: `odf schema`."""

import json
from typing import Any

from ..model import DIALS
from ..store.registry import LARGEST_INTEGER
from .keys import (
    COUNT,
    DIAL,
    FLAG,
    FLOW_KEYS,
    JOB_KEYS,
    OBJECT,
    OBJECTS_BY_NAME,
    OPTIONS,
    RUNNERS,
    SECONDS_PATTERN,
    TEXT,
    TEXTS,
    Key,
)

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
