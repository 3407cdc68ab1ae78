"""`odf dataset`, `job`, `policy`, `split`, and the credentials: `encrypt`, `rotate` …"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from ..config import credentials
from ..config.credentials import find_passkey
from ..config.settings import load_settings
from ..errors import CredentialError, DataflowError, WrongUse
from ..model import DATASET_COLUMNS, DIALS
from ..store import registry
from ..store.store import refuse_flawed
from ..util.text import typed
from .app import DATASET, JOB
from .output import (
    as_json,
    count_of,
    fill_queues,
    in_pager,
    knowing_pipelines,
    pipeline_here,
    show,
    show_first,
    shown_rows,
    store_of,
)

if TYPE_CHECKING:
    from ..store.split import Series


_plan = click.option("--plan", is_flag=True, help="Show what would be removed, and change nothing.")

_SHORT_OPTIONS = {
    "hostname": "--host",
    "schemaname": "--schema",
    "tablename": "--table",
    "username": "--user",
}
_METAVARS = {"encryptedpass": "VALUE", "writemode": "append|replace", "options": "JSON"}
_PASSWORD = click.option(
    "--password",
    is_flag=True,
    help="Ask for the password, or read it from standard input, and encrypt it.",
)


def _column_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each column of `dataset`, and `--password` beside its user."""
    for name, meaning in reversed(
        DATASET_COLUMNS.items()
    ):  # the last that is added is listed first
        names = dict.fromkeys((f"--{name}", _SHORT_OPTIONS.get(name, f"--{name}")))
        command = click.option(*names, metavar=_METAVARS.get(name), help=meaning)(command)
        if name == "encryptedpass":
            command = _PASSWORD(command)
    return command


@click.group()
def dataset() -> None:
    """Register, list and remove datasets.

    \b
    Example: odf dataset add bobout --host db1 --database sales --table bob
    """


@dataset.command("add")
@click.argument("datasetid", type=DATASET)
@_column_options
@click.pass_context
def dataset_add(ctx: click.Context, datasetid: str, password: bool, **columns: str | None) -> None:
    """Register a dataset, or change its registration.

    An option that you leave out changes nothing; an empty value clears the column.

    \b
    Example: odf dataset add bobin --hostname /data/bobin --format csv
    Example: odf dataset add bobin --options '{"delimiter": ";"}'
    Example: odf dataset add bobout --hostname db1 --database sales \\
                 --tablename bob --username etl --password
    """
    secret = _password(datasetid) if password else None
    new = registry.add_dataset(store_of(ctx), datasetid, password=secret, **columns)
    click.echo(f"Dataset {datasetid!r} is {'registered' if new else 'changed'}.", err=True)


@dataset.command("remove")
@click.argument("datasetid", type=DATASET)
@_plan
@as_json
@click.pass_context
def dataset_remove(ctx: click.Context, datasetid: str, plan: bool, as_json: bool) -> None:
    """Remove a dataset's registration.

    Its location and password are removed. Its data, chunks and history stay. A dataset that a job
    reads or writes is refused.

    \b
    Example: odf dataset remove bobout --plan
    """
    found = registry.remove_dataset(store_of(ctx), datasetid, plan=plan)
    _show_removal(f"Dataset {datasetid!r}", found, plan, as_json)


@dataset.command("list")
@as_json
@click.pass_context
@in_pager
def dataset_list(ctx: click.Context, as_json: bool) -> None:
    """List the datasets.

    Only the first characters of an encrypted password are shown.

    \b
    Example: odf dataset list --json
    """
    rows = registry.datasets(store_of(ctx))
    show(rows, as_json=as_json, empty="No dataset is registered. Run `odf dataset add`.")


@click.group()
def job() -> None:
    """Register, list and remove jobs.

    \b
    Example: odf job add loadbob --in bobin --out bobout
    """


@job.command("add")
@click.argument("jobid", type=JOB)
@click.option(
    "--in",
    "inputs",
    multiple=True,
    type=DATASET,
    metavar="DATASET",
    help="A dataset that the job reads.",
)
@click.option(
    "--out",
    "outputs",
    multiple=True,
    type=DATASET,
    metavar="DATASET",
    help="A dataset that the job writes.",
)
@click.option(
    "--env", multiple=True, metavar="NAME=VALUE", help="An environment variable for its script."
)
@click.option(
    "--replace", is_flag=True, help="Replace the inputs, outputs and variables of the job."
)
@click.pass_context
def job_add(
    ctx: click.Context,
    jobid: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    env: tuple[str, ...],
    replace: bool,
) -> None:
    """Register a job: what it reads, writes and sets.

    If the job exists, this adds to its inputs, outputs and variables. JOBID is the base name of its
    script. The dataset `today` stands for the current date.

    \b
    Example: odf job add loadbob --in bobin --out bobout --env MODE=fast
    """
    environment = dict(_pair(word, "--env") for word in env)
    store = store_of(ctx)
    added = registry.add_job(store, jobid, inputs, outputs, environment, replace=replace)
    fill_queues(store, jobid)
    for note in added.notes:
        click.echo(note, err=True)
    click.echo(
        f"Job {jobid!r} is registered: {count_of(added.rows, 'new row')}. "
        f"Next: `odf run --job {typed(jobid)} SCRIPT`, `odf why {typed(jobid)}`.",
        err=True,
    )


@job.command("remove")
@click.argument("jobid", type=JOB)
@_plan
@as_json
@click.pass_context
def job_remove(ctx: click.Context, jobid: str, plan: bool, as_json: bool) -> None:
    """Remove a job's registration.

    Removes its inputs, outputs, variables and dials. Its chunks and history stay. A running job is
    refused.

    \b
    Example: odf job remove loadbob --plan
    """
    store = store_of(ctx)
    found = registry.remove_job(store, jobid, plan=plan)
    if not plan:
        fill_queues(store, jobid)  # which takes away what is pending of it
    _show_removal(f"Job {jobid!r}", found, plan, as_json)


@job.command("list")
@click.argument("jobid", required=False, type=JOB)
@as_json
@click.pass_context
@in_pager
def job_list(ctx: click.Context, jobid: str | None, as_json: bool) -> None:
    """List the jobs: what each reads, writes and sets.

    \b
    Example: odf job list
    Example: odf job list loadbob
    """
    store = store_of(ctx)
    rows = shown_rows(registry.jobs(store, jobid), as_json=as_json)
    if jobid is not None and not rows:
        with knowing_pipelines(store, jobid):
            refuse_flawed(store, store.read_plan(jobid))
    show(rows, as_json=as_json, empty="No job is registered. Run `odf job add`.")


@click.command()
@click.argument("jobid", type=JOB)
@click.argument("dials", nargs=-1, metavar="[KEY=VALUE]...")
@as_json
@click.pass_context
@in_pager
def policy(ctx: click.Context, jobid: str, dials: tuple[str, ...], as_json: bool) -> None:
    """Show a job's dials, or change them while it runs.

    `none` resets a dial. paused_until takes a time, +2h, forever or no. Give
    delays and limits in seconds, or like 30m or 2h.

    batch_size is the number of chunks that a worker of `odf run --all`, or a catch-up run in
    Dagster, claims at once. The worker runs them one after another. If it is stopped or paused, or
    if you lower the concurrency, it gives back the chunks that it hasn't started. A function with
    @spark_job(batch=…) gets that many chunks in one call, also in a Dagster run of selected
    partitions. Pipelines claim one chunk at a time.

    \b
    Example: odf policy loadbob
    Example: odf policy loadbob concurrency=4 max_attempts=3 retry_delay=5m
    Example: odf policy loadbob paused_until=+2h
    Example: odf policy loadbob batch_size=20
    """
    store = store_of(ctx)
    if project := pipeline_here(store, jobid):
        from ..pipelines.jobs import register

        register(store, project, jobid)
    if dials:
        row = registry.set_policy(store, jobid, dict(_pair(word, "Dial") for word in dials))
    else:
        row = registry.policy(store, jobid)
    if as_json:
        show([row], as_json=True)
    else:
        show([_dial(key, row[key]) for key in DIALS], as_json=False)


@click.command()
@click.argument("datasetid", type=DATASET)
@click.option("--column", metavar="C", help="The column that assigns a row to a chunk.")
@click.option("--from", "lower", metavar="X", help="The first date, or the lowest number.")
@click.option(
    "--to", "upper", metavar="X", help="The last date, inclusive; or the number to stop before."
)
@click.option(
    "--by",
    type=click.Choice(["day", "week", "month", "year"]),
    help="One chunk per day, week, month or year.",
)
@click.option("--size", type=int, help="Numbers per chunk.")
@click.option("--chunks", type=int, help="Number of chunks, of about the same size.")
@click.option(
    "--shards", type=int, metavar="N", help="N chunks, by the remainder of the column divided by N."
)
@click.option(
    "--values",
    metavar="A,B,...",
    help="One chunk per value; - reads one per line from standard input.",
)
@click.option(
    "--pending", is_flag=True, help="The data doesn't exist yet: register the chunks as PENDING."
)
@click.option(
    "--job",
    "jobid",
    type=JOB,
    metavar="JOB",
    help="With --pending: the job that will produce the chunks.",
)
@click.option("--plan", is_flag=True, help="Show what would be registered, and change nothing.")
@as_json
@click.pass_context
def split(
    ctx: click.Context,
    datasetid: str,
    column: str | None,
    pending: bool,
    jobid: str | None,
    plan: bool,
    as_json: bool,
    **way: Any,
) -> None:
    """Register the chunks of a large table as READY.

    A second run adds only the chunks that are missing. A chunk's dataid is the day, the
    Monday of the week (2026-01-05), the month (2026-01), the year (2026), the lower bound of a
    range of numbers, the remainder of a shard, or the value. Rows whose column is NULL are in no
    chunk.

    Chunks are registered 2,000 at a time, so workers can start at once. If the command is
    interrupted, run it again.

    \b
    Example: odf split orders --column day --by month \\
                 --from 2026-01-01 --to 2026-12-31
    Example: odf split orders --column id --from 0 --to 1000000 --size 100000
    Example: odf split orders --column id --shards 64 --plan
    Example: odf split orders --column country --values at,de,ch
    """
    from ..store import split as splitting

    pieces = _pieces(**way)
    done = splitting.split(
        store_of(ctx), datasetid, pieces, column=column, pending=pending, jobid=jobid, plan=plan
    )
    if as_json:
        show_first(_rows(datasetid, done.new), None, as_json=True, empty="")
    elif plan and done.new:
        few = [done.new] if len(done.new) <= 6 else [done.new[:3], done.new[-3:]]
        show([row for some in few for row in _rows(datasetid, some)], as_json=False)
    words = "would be registered" if plan else "registered"
    new, all_of_them = len(done.new), len(done.chunks)
    click.echo(
        f"{count_of(new, 'chunk')} of {datasetid!r} {words} as {done.status}; "
        f"{all_of_them - new} of {all_of_them} existed already.",
        err=True,
    )


def _pieces(
    lower: str | None,
    upper: str | None,
    by: str | None,
    size: int | None,
    chunks: int | None,
    shards: int | None,
    values: str | None,
) -> "Series":
    """The chunks of a table by the one way of splitting that the options name."""
    from ..store import split as splitting

    given = {"--by": by, "--size": size, "--chunks": chunks, "--shards": shards, "--values": values}
    ways = [option for option, value in given.items() if value is not None]
    if len(ways) != 1:
        raise WrongUse(
            "Split in one way: --by, --size, --chunks, --shards, --values. See `odf split --help`."
        )
    if by or size is not None or chunks is not None:
        if lower is None or upper is None:
            raise WrongUse(f"{ways[0]} needs --from and --to.")
        if by:
            return splitting.by_date(lower, upper, by)
        bounds = _number("--from", lower), _number("--to", upper)
        return splitting.by_number(*bounds, size=size, count=chunks)
    if lower is not None or upper is not None:
        raise WrongUse(
            f"{ways[0]} can't be used with --from and --to: use --by, --size or --chunks."
        )
    if shards is not None:
        return splitting.by_shards(shards)
    listed = sys.stdin.read().splitlines() if values == "-" else (values or "").split(",")
    return splitting.by_value(listed)


def _rows(datasetid: str, chunks: "Series") -> Iterator[dict[str, Any]]:
    return ({"datasetid": datasetid} | chunk._asdict() for chunk in chunks)


def _show_removal(what: str, found: list[registry.Removal], plan: bool, as_json: bool) -> None:
    if plan or as_json:
        show([row._asdict() for row in found], as_json=as_json)
    click.echo(f"{what} {'would be' if plan else 'is'} removed.", err=True)


def _password(datasetid: str) -> str:
    if sys.stdin.isatty():
        return click.prompt(f"Password of {datasetid!r}", hide_input=True, err=True)

    text = given_text()
    secret = line if "\n" not in (line := text.rstrip("\r\n")) else text
    if not secret:
        raise WrongUse(
            "There is no password on standard input. Pipe it in, or run this at a terminal."
        )
    return secret


def _pair(text: str, what: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise WrongUse(f"{what} {text[:40]!r} has no value. Write NAME=VALUE.")
    return name, value


def _number(option: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise WrongUse(
            f"{option} {text[:40]!r} isn't a whole number. For dates, say --by month."
        ) from None


def _dial(key: str, value: Any) -> dict[str, Any]:
    dial = DIALS[key]
    return {"key": key, "value": value, "default": dial.default, "meaning": dial.meaning}


# `odf encrypt`, `odf decrypt` and `odf rotate`: no secret is ever an argument.


NO_ARGUMENTS = {"ignore_unknown_options": True}
"""So that a password that begins with a dash isn't repeated in a message either."""

for_dataset = click.option(
    "--dataset", type=DATASET, metavar="ID", help="The value is this dataset's encryptedpass."
)
stray = click.argument("stray", nargs=-1, type=click.UNPROCESSED, metavar="")


@click.command(
    context_settings=NO_ARGUMENTS,
)
@for_dataset
@stray
@click.pass_context
def encrypt(ctx: click.Context, dataset: str | None, stray: tuple[str, ...]) -> None:
    """Encrypt a text from standard input or a prompt.

    With --dataset, the result is for that dataset's encryptedpass; without, for the key `encrypted`
    of the properties file. The prompt doesn't show what you type.

    \b
    Example: odf encrypt --dataset bobin < password.txt
    """
    purpose = _purpose("encrypt", dataset, stray)
    key = find_passkey()
    if key is None:
        key = _prompt_for_key("PASSKEY", "The passkey")
    text = _text("The text to encrypt", twice=True)
    click.echo(credentials.encrypt(text, key, purpose=purpose, beside=_in_properties(ctx)))


@click.command(
    context_settings=NO_ARGUMENTS,
)
@for_dataset
@stray
def decrypt(dataset: str | None, stray: tuple[str, ...]) -> None:
    """Decrypt a value from standard input or a prompt.

    \b
    Example: echo 'odf1.scrypt…' | odf decrypt --dataset bobin
    """
    purpose = _purpose("decrypt", dataset, stray)
    key = find_passkey()
    if key is None:
        key = _prompt_for_key("PASSKEY", "The passkey")
    click.echo(credentials.decrypt(_text("The value to decrypt"), key, purpose=purpose))


@click.command()
def key() -> None:
    """Print a new random passkey.

    Keep it in a file, and set PASSKEY_FILE to the file's name. To change from another passkey, run
    `odf rotate`. Nobody can guess a random passkey, so it needs no slow key derivation: a job that
    decrypts a password starts 0.2 seconds sooner than with a passkey of your own.

    \b
    Example: (umask 077; odf key > /etc/odf/passkey)
    """
    click.echo(credentials.new_key())


@click.command(
    context_settings=NO_ARGUMENTS,
)
@stray
@click.pass_context
def rotate(ctx: click.Context, stray: tuple[str, ...]) -> None:
    """Encrypt all secrets again with a new passkey.

    PASSKEY or PASSKEY_FILE gives the old passkey, NEW_PASSKEY or NEW_PASSKEY_FILE the new one. If
    the command is interrupted or refused, run it again with the same two passkeys. Afterwards, give
    the new passkey to everyone who runs jobs. If both are the same, the command renews the values
    that `odf doctor` reports as weak.

    \b
    Example: PASSKEY_FILE=old.key NEW_PASSKEY_FILE=new.key odf rotate
    """
    from ..store import rotate_passkey

    if stray:
        raise WrongUse(
            "`odf rotate` takes no arguments: the keys come from the environment or a prompt."
        )
    old = find_passkey() or _prompt_for_key("PASSKEY", "The passkey until now")
    new = find_passkey(os.environ, "NEW_PASSKEY") or _prompt_for_key(
        "NEW_PASSKEY", "The new passkey", twice=True
    )
    done = rotate_passkey.rotate(load_settings(ctx.find_root().obj), old, new)
    file = " and `encrypted` of the properties file" if done.file else ""
    click.echo(
        f"{done.rows} rows of dataset{file} encrypted again; {done.kept} values unchanged.",
        err=True,
    )
    if os.environ.get("DATAFLOW_ENCRYPTED"):
        click.echo(
            "Change DATAFLOW_ENCRYPTED yourself: create its new value with `odf encrypt`.",
            err=True,
        )
    click.echo(
        "Now give the new passkey to all who run jobs, and run `odf doctor` with it.", err=True
    )


def _in_properties(ctx: click.Context) -> list[str]:
    """The value in the properties file, whose salt those of datasets share."""
    with suppress(DataflowError):
        if value := load_settings(ctx.find_root().obj).encrypted:
            return [value]
    return []


def _purpose(command: str, dataset: str | None, stray: tuple[str, ...]) -> credentials.Purpose:
    if stray:
        raise WrongUse(
            f"`odf {command}` takes no argument but --dataset ID: other users can read a command "
            "line, and shells remember it. Give the text on standard input, as in "
            f"odf {command} < FILE, or type it at the prompt."
        )
    return credentials.for_dataset(dataset) if dataset else credentials.PROPERTIES


def _text(what: str, *, twice: bool = False) -> str:
    if sys.stdin.isatty():
        return click.prompt(what, hide_input=True, confirmation_prompt=twice, err=True)
    return given_text()


def given_text() -> str:
    """All of standard input, without the end of its last line."""
    raw = sys.stdin.buffer.read()
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        text = None
    if text is None:
        raise CredentialError("The text on standard input isn't UTF-8. Convert it, and try again.")
    return text.removesuffix("\n").removesuffix("\r")


def _prompt_for_key(variable: str, what: str, *, twice: bool = False) -> str:
    if not sys.stdin.isatty():
        raise CredentialError(
            f"No passkey is set. Set {variable}, or {variable}_FILE to a file that holds it."
        )
    return click.prompt(what, hide_input=True, confirmation_prompt=twice, err=True)
