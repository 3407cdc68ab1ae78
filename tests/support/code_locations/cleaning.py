"""A user's own location: Python jobs, one with a check, and a script that reads what it makes.

Files in FLOW_FOLDER steer it: `bad`, `slow` and `invalid` name chunks of jobs, a line each;
`produced` gets a line for each chunk that was really made.
"""

import os
import time
from pathlib import Path

import dagster as dg

from opendataflow_dagster import (
    Chunk,
    DataflowResource,
    Result,
    build_definitions,
    dataflow_assets,
    dataflow_check,
)
from tests.support.dagster_project import Names

folder = Path(os.environ["FLOW_FOLDER"])
dataflow = DataflowResource(url=os.environ["DATAFLOW_URL"])


def told(name: str, chunk: Chunk) -> bool:
    """Whether a file names the chunk."""
    path = folder / name
    return path.exists() and f"{chunk.jobid} {chunk.dataid}" in path.read_text().splitlines()


@dataflow_check()
def adds_up(chunk: Chunk) -> bool | str:
    """No amount is negative."""
    return not told("invalid", chunk) or "an amount is negative"


@dataflow_assets(job="clean", dataflow=dataflow, checks=[adds_up])
def clean(chunk: Chunk) -> Result:
    """Copy the chunk's lines that aren't empty."""
    while told("slow", chunk):
        chunk.check()
        time.sleep(0.1)
    if told("bad", chunk):
        raise ValueError(f"{chunk.dataid} is bad")
    source = Path(chunk.inputs["orders"].location or "")
    target = Path(chunk.outputs["cleaned"].location or "")
    lines = [line for line in (source / f"{chunk.dataid}.csv").read_text().splitlines() if line]
    (target / f"{chunk.dataid}.csv").write_text("\n".join(lines) + "\n")
    with (folder / "produced").open("a") as file:
        file.write(f"{chunk.jobid} {chunk.dataid}\n")
    return Result(rows=len(lines))


@dataflow_assets(job="count", dataflow=dataflow, translator=Names())
def count(chunk: Chunk) -> Result:
    """Copy the day."""
    source = Path(chunk.inputs["visits"].location or "", f"{chunk.dataid}.csv")
    target = Path(chunk.outputs["counted"].location or "", f"{chunk.dataid}.csv")
    target.write_text(source.read_text())
    with (folder / "produced").open("a") as file:
        file.write(f"{chunk.jobid} {chunk.dataid}\n")
    return Result(rows=1)


defs = build_definitions(
    dataflow,
    assets=[clean, count],
    translator=Names(),
    scripts={"report": Path(__file__).with_name("cleaning.sh")},
    executor=dg.in_process_executor if os.environ.get("FLOW_IN_PROCESS") else None,
)
