"""`odf clean` and `odf compact`: what lies where chunks are published."""

import re
from collections.abc import Iterator
from typing import Any

import click

from ..errors import DataflowError, Refused, WrongUse
from ..location import SQLITE, Folder, ObjectStore, Table, chunk_place
from ..storage import cleanup
from ..storage.cleanup import BACK, POINTER, Leftover, Remove
from ..store.operations import unknown_dataset
from ..store.store import Store
from ..util.times import parse_duration
from .fast_run import complain
from .output import as_json, count_of, most_of, show, show_first, some_of, store_of

_plan = click.option("--plan", is_flag=True, help="Say what would be done, and change nothing.")

_SIZE = re.compile(r"([0-9]+)\s*([KMGT]?)I?B?", re.IGNORECASE)


@click.command()
@click.argument("datasets", nargs=-1, metavar="[DATASET]...")
@click.option(
    "--older-than",
    "age",
    metavar="AGE",
    default="1h",
    show_default=True,
    help="Leave alone what changed since.",
)
@_plan
@as_json
@click.pass_context
def clean(
    ctx: click.Context, datasets: tuple[str, ...], age: str, plan: bool, as_json: bool
) -> None:
    """Remove what crashed publishes left, in all datasets or some.

    That is directories, versions and staging tables of claims that are over. A claim that somebody
    has is never touched: if that process is gone, run `odf recover` first. A chunk that a crash has
    moved aside is put back.

    \b
    Example: odf clean --plan
    Example: odf clean bobout --older-than 10m
    """
    grace = parse_duration(age)
    store = store_of(ctx)
    rows, failed = [], False
    for datasetid, found in _leftovers(ctx, store, datasets, grace):
        try:
            for row, remove in found:
                if plan or remove():
                    rows.append(row)
        except (DataflowError, OSError) as error:
            failed = True
            complain(DataflowError(f"{datasetid!r} isn't cleaned: {error}"))
    if plan or as_json:
        show([_leftover_row(row) for row in rows], as_json=as_json, empty="Nothing to clean.")
    kept = [row for row in rows if row.what not in (BACK, POINTER)]
    size = sum(row.bytes or 0 for row in kept)
    verb = "would go" if plan else "removed"
    click.echo(f"{count_of(len(kept), 'leftover')} {verb}, {size} bytes.", err=True)
    if len(kept) < len(rows):
        verb = "would be" if plan else "were"
        click.echo(f"{len(rows) - len(kept)} {verb} put right.", err=True)
    if failed:
        ctx.exit(1)


@click.command()
@click.argument("dataset")
@click.argument("dataids", nargs=-1, metavar="[DATAID]...")
@click.option("--unpack", is_flag=True, help="Give packed chunks their own directories again.")
@click.option(
    "--target-size",
    "size",
    metavar="SIZE",
    default="128MB",
    show_default=True,
    help="How large a file should be.",
)
@_plan
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Plan for all chunks, also of a dataset with more than 100,000.",
)
@as_json
@click.pass_context
def compact(
    ctx: click.Context,
    dataset: str,
    dataids: tuple[str, ...],
    unpack: bool,
    size: str,
    plan: bool,
    everything: bool,
    as_json: bool,
) -> None:
    """Rewrite chunks of many small files as few; each stays the chunk that it was.

    A chunk must be READY and unclaimed. A reader that has just listed its old files fails: run it
    again.

    Earlier versions packed many small chunks into files in `_packs` of the dataset's folder. This
    version still reads them, the next one doesn't: --unpack gives each chunk its own directory, and
    `odf clean` removes the packs afterwards.

    Of a dataset with more than 100,000 chunks, --plan looks at the 10,000 that changed last.

    \b
    Example: odf compact bobout --plan
    Example: odf compact bobout 2026-03-01 --target-size 256MB
    Example: odf compact bobout --unpack
    """
    from ..storage import compact as rewrites

    store, target = store_of(ctx), _bytes(size)
    whole = everything or not plan or bool(dataids)
    some = some_of(store, [dataset], whole).get(dataset)
    done = left = 0
    if unpack:
        found = rewrites.unpack(store, dataset, dataids, plan=plan, some=some)
    else:
        found = rewrites.compact(store, dataset, dataids, target=target, plan=plan, some=some)

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal done, left
        for row in found:
            done, left = (done, left + 1) if row.left else (done + 1, left)
            if plan or as_json or row.left:
                yield row._asdict()

    rewritten, most = rows(), most_of(None, everything=False, as_json=as_json)
    show_first(rewritten, most, as_json=as_json, empty="", more="--json lists all")
    for _ in rewritten:  # each step of the loop rewrites a chunk, also one that isn't listed
        pass
    verb = "would be" if plan else "are"
    what = "unpacked" if unpack else "compacted"
    click.echo(f"{count_of(done, 'chunk')} {verb} {what}, {left} left.", err=True)


def _leftovers(
    ctx: click.Context, store: Store, names: tuple[str, ...], grace: float
) -> Iterator[tuple[str, Iterator[tuple[Leftover, Remove]]]]:
    """What to clean, by dataset; a folder that two datasets share is looked at once."""
    registered = cleanup.registered(store)
    unknown = sorted(set(names) - {datasetid for datasetid, _, _ in registered})
    if unknown:
        raise unknown_dataset(store, unknown[0])
    seen: set[Any] = set()
    for datasetid, columns, encrypted in registered:
        if names and datasetid not in names:
            continue
        try:
            target = chunk_place(datasetid, columns)
        except Refused:
            if names:
                raise
            continue  # such as `today`, which is no place
        place = (
            target._replace(datasetid="", column="")
            if isinstance(target, Table)
            else target._replace(datasetid="", format="")
        )
        if place not in seen:
            seen.add(place)
            yield datasetid, _of(ctx, store, target, encrypted, grace)


def _of(
    ctx: click.Context, store: Store, target: Any, encrypted: str | None, grace: float
) -> Iterator[tuple[Leftover, Remove]]:
    if isinstance(target, Folder):
        yield from cleanup.in_folder(store, target.datasetid, target.root, grace)
    elif isinstance(target, ObjectStore):
        from ..spark.object_store import in_remote

        yield from in_remote(store, target, lambda: _session(ctx), grace)
    elif isinstance(target, Table) and target.dialect != SQLITE:  # which has none
        from ..config.credentials import password_of
        from ..spark.object_store import in_table

        yield from in_table(
            store, target, lambda: password_of(target.datasetid, encrypted), lambda: _session(ctx)
        )


def _session(ctx: click.Context) -> Any:
    from ..config.settings import load_settings
    from ..spark.session import spark_session

    settings = load_settings(ctx.find_root().obj)
    return spark_session(app="odf clean", settings=settings, short=True)


def _leftover_row(row: Leftover) -> dict[str, Any]:
    return row._asdict() | {"age": None if row.age is None else round(row.age)}


def _bytes(text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    if not found or not int(found[1]):
        raise WrongUse(f"{text!r} isn't a size. Write it like 64MB, 128MB or 1GB.")
    return int(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " ")
