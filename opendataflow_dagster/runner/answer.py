"""What a script may answer while it runs: rows, metadata, checks; and whether its claim holds.

Two files are made for each execution. `DATAFLOW_RESULT` is written by the script: objects of JSON,
one per line, its own or messages of Dagster Pipes. `DATAFLOW_FENCE` is there as long as the claim
holds. This module is loaded by every `odf run`, so it imports nothing heavy until a script answers.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from ..model import RESULT, Claim

if TYPE_CHECKING:
    from ..chunk import Checked, Result

FENCE = "DATAFLOW_FENCE"
PIPES_CONTEXT, PIPES_MESSAGES = "DAGSTER_PIPES_CONTEXT", "DAGSTER_PIPES_MESSAGES"

FOLDER_PREFIX = "odf-answer-"
"""What the name of the folder of the two files begins with."""


class ScriptAnswer(NamedTuple):
    """What a script said of the chunk that it made, by dataset."""

    results: "Mapping[str, Result]" = {}  # noqa: RUF012 - nobody changes it
    checks: "tuple[Checked, ...]" = ()
    log: tuple[str, ...] = ()

    def by_dataset(self) -> "dict[str, Result]":
        """The results with the checks of each dataset, as a function would return them."""
        from ..chunk import Result

        names = {*self.results, *(check.datasetid for check in self.checks)}
        return {
            name: self.results.get(name, Result())._replace(
                checks=[check for check in self.checks if check.datasetid == name]
            )
            for name in names
        }


class AnswerFiles:
    """The two files of one execution, in a folder of its own while the `with` lasts.

    A folder that can't be made costs the script its answer, and never its run.

    Args:
        claim: The claim of the chunk.
        outputs: The datasets that the job writes: an answer is about one of them.
        environ: The environment of the script: its TMPDIR has the folder, and the two variables are
            added to it.
    """

    def __init__(self, claim: Claim, outputs: Sequence[str], environ: dict[str, str]) -> None:
        self.claim, self._outputs = claim, outputs
        self.trouble = ""
        base = environ.get("TMPDIR") or "/tmp"
        self._folder = os.path.join(base, FOLDER_PREFIX + os.urandom(8).hex())
        self.result = os.path.join(self._folder, "result")
        self.fence = os.path.join(self._folder, "fence")
        self._environ = environ

    def __enter__(self) -> "AnswerFiles":
        for name in (RESULT, FENCE, PIPES_CONTEXT, PIPES_MESSAGES):
            self._environ.pop(name, None)  # of an outer job
        try:
            os.mkdir(self._folder, 0o700)
            self._raise_fence()
        except OSError as error:
            self.trouble = f"The script has no {RESULT}: {self._folder}: {error.strerror}"
            return self
        self._environ |= {RESULT: self.result, FENCE: self.fence}
        self._environ |= _pipes_variables(self.claim, self._outputs, self.result)
        return self

    def __exit__(self, *_: object) -> None:
        self._drop_fence()
        with suppress(OSError):
            os.unlink(self.result)
        try:
            os.rmdir(self._folder)
        except FileNotFoundError:
            pass
        except OSError:  # the script has put something else there
            from shutil import rmtree

            rmtree(self._folder, ignore_errors=True)

    def heed(self, holds: bool) -> None:
        """Show the script whether its claim holds, and will until this is called again."""
        if holds:
            with suppress(OSError):
                self._raise_fence()
        else:
            self._drop_fence()

    def _raise_fence(self) -> None:
        # On Linux a link to this process: when it is killed, the fence is gone with it, though
        # nobody is left to remove the file. The script may live on then, and its claim does not.
        try:
            if os.path.exists(f"/proc/{os.getpid()}"):
                os.symlink(f"/proc/{os.getpid()}", self.fence)
            else:
                os.close(os.open(self.fence, os.O_CREAT | os.O_WRONLY, 0o600))
        except FileExistsError:
            pass

    def _drop_fence(self) -> None:
        with suppress(OSError):
            os.unlink(self.fence)

    def read(self) -> ScriptAnswer:
        """What the script wrote; raises `ChunkFailed` for what can't be understood."""
        try:
            if os.path.getsize(self.result) == 0:
                return ScriptAnswer()
        except OSError:  # nothing was written, as by every script that knows nothing of it
            return ScriptAnswer()
        from ..chunk import read_answer

        return ScriptAnswer(*read_answer(self.result, self._outputs))


def _pipes_variables(claim: Claim, outputs: Sequence[str], path: str) -> dict[str, str]:
    """What lets `dagster_pipes.open_dagster_pipes()` find its context and write to `path`."""
    keys = [_quoted(datasetid) for datasetid in outputs]
    unknown = "{" + ", ".join(f"{key}: null" for key in keys) + "}"
    run = _quoted(f"{claim.owner} {claim.generation}")
    context = (
        f'{{"data": {{"asset_keys": [{", ".join(keys)}], "code_version_by_asset_key": {unknown}, '
        f'"provenance_by_asset_key": {unknown}, "partition_key": {_quoted(claim.dataid)}, '
        f'"partition_key_range": null, "partition_time_window": null, "run_id": {run}, '
        f'"job_name": {_quoted(claim.jobid)}, "retry_number": {max(claim.attempts - 1, 0)}, '
        '"extras": {}}}'
    )
    return {
        PIPES_CONTEXT: _packed(context),
        PIPES_MESSAGES: _packed(f'{{"path": {_quoted(path)}}}'),
    }


def _packed(text: str) -> str:
    """A parameter as Dagster Pipes reads it from a variable."""
    import zlib
    from binascii import b2a_base64

    return b2a_base64(zlib.compress(text.encode(), 1), newline=False).decode()


def _quoted(text: str) -> str:
    """A text as a string of JSON; importing `json` alone would take as long as all else here."""
    try:
        from _json import encode_basestring_ascii  # type: ignore[import-not-found]
    except ImportError:
        from json.encoder import encode_basestring_ascii
    return encode_basestring_ascii(text)
