"""Scripts as assets: the program that `odf run` would start, once for each chunk."""

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import dagster as dg

from ..runner.maker import Maker
from ..runner.produce import Chunk, ChunkFailed
from ..runner.script import CannotStart, check
from ..runner.script_runner import Scripts
from ..store.catalog import Catalog
from .assets import assets_of_job
from .checks import ChunkCheck
from .resources import DataflowResource
from .step import Stopped
from .translator import DataflowTranslator

HEARING = 1.0
"""Seconds at most until a script whose chunk was taken over is ended, once that is known."""


def script_assets(
    job: str,
    script: str | Sequence[str],
    *,
    dataflow: DataflowResource | Catalog,
    translator: DataflowTranslator | None = None,
    checks: Iterable[ChunkCheck] = (),
    stop_grace: float = 10.0,
    **options: Any,
) -> dg.AssetsDefinition:
    """Make assets of a script: a program, or a program and its arguments; no shell is involved.

    It gets the environment of `odf run`, and what it prints is in the step's log. Its exit code
    says how the chunk ended. When the run is terminated it has `stop_grace` seconds to end. The
    options are those of `assets_of_job`.
    """
    argv = [script] if isinstance(script, str) else list(script)

    def prepare(context: dg.AssetExecutionContext) -> Maker:
        try:
            check(argv[0], os.environ.get("PATH", os.defpath))
        except CannotStart as refusal:
            raise dg.Failure(f"{refusal}. Nothing was claimed.", allow_retries=False) from None
        return Maker(script_compute(argv, stop_grace=stop_grace))

    described: dict[str, Any] = {
        "description": f"Runs `{' '.join(argv)}` for each chunk."
    } | options
    return assets_of_job(
        job, dataflow, prepare, translator=translator, checks=checks, secrets=True, **described
    )


def script_compute(argv: list[str], *, stop_grace: float = 10.0) -> Callable[[Chunk], None]:
    """What runs a script for a chunk."""

    def compute(chunk: Chunk) -> None:
        # Its own handlers stand in for Dagster's while a script runs: they end the whole script.
        with Scripts(stop_grace=stop_grace) as scripts:
            ended = scripts.run(
                argv,
                dict(chunk.environment),
                time_limit=chunk.claim.time_limit,
                beat=chunk.alive,
                beat_every=min(HEARING, chunk.claim.lease / 3),
                stdin_null=True,
            )
        if scripts.stopping is not None:
            raise Stopped(scripts.stopping)
        if ended.code:
            raise ChunkFailed(ended.reason)

    return compute
