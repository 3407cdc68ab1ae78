"""A job whose chunks take long enough to be killed halfway; a file records each of them."""

import os
import time
from pathlib import Path

from opendataflow_dagster.chunk import Chunk
from opendataflow_dagster.dagster import launch, sensors
from opendataflow_dagster.dagster.build import build_definitions


def slow(chunk: Chunk) -> None:
    """Take a while, and record it in a line."""
    time.sleep(0.15)
    chunk.check()
    with (Path(os.environ["SLOW_FOLDER"]) / "made").open("a") as file:
        file.write(f"{chunk.dataid} {chunk.generation} {os.getpid()}\n")


# What a test can't wait for: a run that was killed before its first worker began.
launch.WORKER_START_SECONDS, sensors.SILENCE_SECONDS = 10.0, 20.0

defs = build_definitions(functions={"slow": slow})
