"""The function that produces a chunk of the job `count`."""

import os

from opendataflow_dagster import Chunk, Result


def count(chunk: Chunk) -> Result:
    """Count a day's lines."""
    [source], [target] = chunk.inputs.values(), chunk.outputs.values()
    with open(f"{source.location}/{chunk.dataid}.csv", encoding="utf-8") as file:
        lines = len(file.readlines())
    with open(f"{target.location}/{chunk.dataid}.new", "w", encoding="utf-8") as file:
        file.write(f"{lines}\n")
    os.replace(f"{target.location}/{chunk.dataid}.new", f"{target.location}/{chunk.dataid}")
    return Result(rows=1, metadata={"lines": lines})
