"""A chunk as an asset's input: in the shape that its annotation asks for, with the evidence."""

import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..chunk import Place
from ..errors import Refused
from ..location import DEFAULT_FORMAT, Folder, Remote, Table
from ..storage.publish import read
from ..storage.read import Reading
from ..util.text import printable

SHOWN = 200
"""How many chunks of one input the log lists."""


def wanted(annotation: Any) -> tuple[str, str]:
    """How an annotation wants a chunk: alone, in a `dict`, or `any`; and as what."""
    origin = typing.get_origin(annotation)
    if annotation in (dict, Mapping) or origin in (dict, Mapping):
        values = typing.get_args(annotation)
        return "dict", wanted(values[1] if len(values) == 2 else Any)[1]
    if annotation in (None, Any, object):
        return "any", "pandas"
    package = getattr(annotation, "__module__", "").partition(".")[0]
    kinds = {
        ("pandas", "DataFrame"): "pandas",
        ("pyspark", "DataFrame"): "spark",
        ("pyarrow", "Table"): "arrow",
    }
    kind = kinds.get((package, getattr(annotation, "__name__", "")))
    kind = kind or {bytes: "bytes", str: "str"}.get(annotation)
    if kind is None and isinstance(annotation, type) and issubclass(annotation, Path):
        kind = "path"
    if kind is None:
        raise Refused(
            f"A chunk can't be read as {getattr(annotation, '__name__', annotation)}. Annotate the "
            "input as DataFrame of pandas or Spark, pyarrow.Table, bytes, Path, str, or dict."
        )
    return "one", kind


def data(
    reading: Reading, target: Folder | Remote | Table, kind: str, session: Callable[[], Any]
) -> Any:
    """A chunk as what is wanted; a session of Spark is asked for only where that is its frame."""
    if kind == "spark":
        return _spark(reading, target, session)
    if kind in ("path", "str"):
        place = read(reading, target, "path")
        return Path(place) if kind == "path" else place
    return read(reading, target, kind)


def _spark(reading: Reading, target: Folder | Remote | Table, session: Callable[[], Any]) -> Any:
    from ..spark.read import read_chunk_frame

    fact = reading.fact
    place = Place(
        reading.datasetid,
        reading.columns,
        fact.get("location"),
        reading.generation,
        fact.get("rows"),
        fact.get("fingerprint"),
        store=reading.store,
    )
    return read_chunk_frame(
        session(),
        place,
        reading.dataid,
        reading.password,
        lambda: reading.bounds,
        getattr(target, "format", DEFAULT_FORMAT),
    )


def joined(found: Mapping[str, Any], kind: str, name: str) -> Any:
    """Several chunks, by their partition keys, as one."""
    parts = list(found.values())
    if kind == "pandas":
        import pandas

        return pandas.concat(parts, ignore_index=True)
    if kind == "arrow":
        import pyarrow

        return pyarrow.concat_tables(parts, promote_options="default")
    if kind == "spark":
        return _united(found, name)
    raise Refused(
        f"Input {name!r} is {len(parts)} chunks, which don't become one. Annotate it as "
        "dict[str, …]: a chunk by each partition key."
    )


def _united(found: Mapping[str, Any], name: str) -> Any:
    """Chunks of Spark as one frame, which has the columns of all: a schema may have been merged."""
    from ..spark.schema import compare, fitted, merged, schema_text

    texts = {key: schema_text(part.schema) for key, part in found.items()}
    whole = next(iter(texts.values()))
    for key, text in texts.items():
        if differences := compare(whole, text):
            both = merged(whole, text)
            if both is None:
                raise Refused(
                    f"Input {name!r} is {len(found)} chunks, which don't become one: in chunk "
                    f"{printable(key)!r}, {'; '.join(differences)}. Annotate it as "
                    "dict[str, DataFrame]: a chunk by each partition key."
                )
            whole = both
    united = None
    for key, part in found.items():
        frame = fitted(part, whole) if compare(whole, texts[key]) else part
        united = frame if united is None else united.unionByName(frame)
    return united


def evidence(reading: Reading) -> dict[str, Any]:
    """What was consumed, and the answers to the five questions for it."""
    told: dict[str, Any] = {
        "dataset": reading.datasetid,
        "dataid": reading.dataid,
        "generation": reading.generation or 0,
    }
    for name in ("rows", "fingerprint"):
        if reading.fact.get(name) is not None:
            told[name] = reading.fact[name]
    told |= {each.question.partition(" ")[0]: each.text for each in reading.answers}
    return {f"opendataflow/{name}": value for name, value in told.items()}


def consumption(datasetid: str, readings: list[Reading]) -> str:
    """Which generations were consumed, in a line."""
    named = [f"{printable(each.dataid)} ({each.generation or 0})" for each in readings[:SHOWN]]
    more = [f"and {len(readings) - SHOWN} more"] if len(readings) > SHOWN else []
    return f"Read {len(readings)} chunks of {datasetid} (generation): {', '.join(named + more)}"
