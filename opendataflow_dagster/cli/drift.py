"""`odf drift`: where the tables, Dagster and the data disagree."""

import os
from collections.abc import Iterable, Iterator
from datetime import datetime
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from ..errors import WrongUse
from ..storage.audit import Drift, drift_of_data, shown_word
from ..store.catalog import Catalog, read_catalog
from ..store.overview import status
from ..util.times import parse_time
from .output import SCREEN, as_json, count_of, most_of, read_word, show_first, some_of, store_of
from .status import MORE

if TYPE_CHECKING:
    from ..dagster.translator import DataflowTranslator
    from ..store.store import Store


@click.command(epilog="Example: odf drift bobout --json")
@click.argument("dataset", required=False)
@click.option("--repair", is_flag=True, help="Put Dagster's side right: the tables are the truth.")
@click.option(
    "--no-dagster", is_flag=True, help="Compare the tables with the data on this machine only."
)
@click.option(
    "--translator",
    metavar="MODULE:CLASS",
    envvar="DATAFLOW_TRANSLATOR",
    help="Your DataflowTranslator, if your location has one of its own.",
)
@click.option(
    "--status",
    "words",
    multiple=True,
    metavar="STATUS",
    help="Only chunks of this status in the tables.",
)
@click.option("--since", metavar="TIME", help="Only chunks that changed since, like 2026-03-01.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"Show so many differences: {SCREEN} unless told, and with --json all.",
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Compare all chunks, also of datasets with more than 100,000, and show all differences.",
)
@as_json
@click.pass_context
def drift(
    ctx: click.Context,
    dataset: str | None,
    repair: bool,
    no_dagster: bool,
    translator: str | None,
    words: tuple[str, ...],
    since: str | None,
    limit: int | None,
    everything: bool,
    as_json: bool,
) -> None:
    """Compare the tables with Dagster's grid, and with the data where it can be listed.

    The instance is the one that DAGSTER_HOME names. Exits with 1 if anything differs.

    Of a dataset with more than 100,000 chunks, the 10,000 that changed last are compared, each
    with the place that was recorded for it. --all compares all, and lists their folder.

    --repair changes Dagster's grid, never the tables or the data. For data that is gone, the
    command that makes it again is shown, not run.
    """
    store = store_of(ctx)
    most = most_of(limit, everything, as_json)
    statuses = [shown_word(read_word(word)) for word in words]
    start = parse_time(store, since) if since else None

    def report(catalog: Catalog, found: Iterable[Drift]) -> None:
        if statuses:
            found = (each for each in found if each.tables in statuses)
        if start:
            found = _changed(store, catalog, found, start)
        _report(ctx, found, most, as_json)

    if no_dagster:
        if repair:
            raise WrongUse("--repair is for Dagster's grid. Leave --no-dagster out.")
        catalog = read_catalog(store)
        some = some_of(store, [dataset] if dataset else catalog.domains, everything)
        report(catalog, drift_of_data(store, catalog, dataset, some))
        return
    names = _translator(translator)
    if not os.environ.get("DAGSTER_HOME"):
        raise WrongUse(
            "DAGSTER_HOME isn't set, so there is no Dagster to compare with. Set it to the folder "
            "of your dagster.yaml, or use --no-dagster."
        )
    dg = import_module("dagster")
    from ..dagster.drift import drift as compare
    from ..dagster.drift import repair as put_right
    from ..dagster.grid import Mirror

    with dg.DagsterInstance.get() as instance:
        if repair:
            done = put_right(store, instance, names)
            click.echo(
                f"{count_of(done.writes, 'correction')}: {done.made} shown as READY, "
                f"{done.planned} as running or failed, {done.cleared} as missing, "
                f"{done.keys} partition keys.",
                err=True,
            )
        catalog = read_catalog(store)
        some = some_of(store, [dataset] if dataset else catalog.domains, everything)
        found = compare(
            store, Mirror(instance), names, datasetid=dataset, some=some, catalog=catalog
        )
        report(catalog, found)


def _changed(
    store: "Store", catalog: Catalog, found: Iterable[Drift], since: datetime
) -> Iterator[Drift]:
    """The differences of chunks that changed since then."""
    changed: dict[str, set[str]] = {}
    for each in found:
        if each.datasetid not in catalog.datasets:  # a key of a whole domain
            continue
        if each.datasetid not in changed:
            rows = status(store, each.datasetid, since=since)
            changed[each.datasetid] = {
                row["dataid"] for row in rows if row["datasetid"] == each.datasetid
            }
        if each.dataid in changed[each.datasetid]:
            yield each


def _report(ctx: click.Context, found: Iterable[Drift], most: int | None, as_json: bool) -> None:
    """Show the first differences, and count the rest as they come."""
    differences = 0

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal differences
        for each in found:
            differences += 1
            yield each._asdict()

    told = rows()
    show_first(told, most, as_json=as_json, empty="No drift.", more=MORE)
    for _ in told:
        pass
    if differences:
        if not as_json:
            click.echo(f"{count_of(differences, 'difference')}.", err=True)
        ctx.exit(1)


def _translator(name: str | None) -> "DataflowTranslator | None":
    if name is None:
        return None
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise WrongUse(f"--translator {name}: {error}. Give it as MODULE:CLASS.") from None
