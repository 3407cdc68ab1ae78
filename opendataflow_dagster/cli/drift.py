"""`odf drift`: where the tables, Dagster and the data disagree."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from ..dataflow.catalog import read_catalog
from ..dataflow.errors import WrongUse
from ..dataflow.holdings import NEWEST, drift_of_data, newest_of_large
from .output import as_json, count_of, most_of, show_first, store_of

if TYPE_CHECKING:
    from ..dataflow.store import Store
    from ..translator import DataflowTranslator


@click.command(epilog="Example: odf drift bobout --json")
@click.argument("dataset", required=False)
@click.option("--repair", is_flag=True, help="Put Dagster's side right: the tables are the truth.")
@click.option(
    "--no-dagster", is_flag=True, help="Compare the tables with the data on this machine only."
)
@click.option(
    "--translator", metavar="MODULE:CLASS", envvar="DATAFLOW_TRANSLATOR",
    help="Your DataflowTranslator, if your location has one of its own.",
)  # fmt: skip
@click.option(
    "--all", "everything", is_flag=True,
    help="Compare all chunks, also of datasets with more than 100,000.",
)  # fmt: skip
@as_json
@click.pass_context
def drift(
    ctx: click.Context, dataset: str | None, repair: bool, no_dagster: bool,
    translator: str | None, everything: bool, as_json: bool,
) -> None:  # fmt: skip
    """Compare the tables with Dagster's grid, and with the data where it can be listed.

    The instance is the one that DAGSTER_HOME names. Exits with 1 if anything differs.

    Of a dataset with more than 100,000 chunks, the 10,000 that changed last are compared, each
    with the place that was recorded for it. --all compares all, and lists their folder.

    --repair changes Dagster's grid, never the tables or the data. For data that is gone, the
    command that makes it again is shown, not run.
    """
    store = store_of(ctx)
    if no_dagster:
        if repair:
            raise WrongUse("--repair is for Dagster's grid. Leave --no-dagster out.")
        some = _some(store, dataset, everything)
        _report(ctx, drift_of_data(store, read_catalog(store), dataset, some), as_json)
        return
    names = _translator(translator)
    if not os.environ.get("DAGSTER_HOME"):
        raise WrongUse(
            "DAGSTER_HOME isn't set, so there is no Dagster to compare with. Set it to the folder "
            "of your dagster.yaml, or use --no-dagster."
        )
    dg = import_module("dagster")
    from ..drift import drift as compare
    from ..drift import repair as put_right
    from ..mirror import Mirror

    with dg.DagsterInstance.get() as instance:
        if repair:
            done = put_right(store, instance, names)
            click.echo(
                f"{count_of(done.writes, 'correction')}: {done.made} shown as READY, "
                f"{done.planned} as running or failed, {done.cleared} as missing, "
                f"{done.keys} partition keys.",
                err=True,
            )
        some = _some(store, dataset, everything)
        _report(ctx, compare(store, Mirror(instance), names, datasetid=dataset, some=some), as_json)


def _some(store: "Store", dataset: str | None, everything: bool) -> dict[str, list[str]]:
    """Large datasets, of which not all chunks are compared: those that are."""
    if everything:
        return {}
    some = newest_of_large(store, [dataset] if dataset else read_catalog(store).domains)
    if some:
        click.echo(
            f"Of {', '.join(map(repr, some))}, only the {NEWEST:,} chunks that changed last are "
            "compared: --all compares all.",
            err=True,
        )
    return some


def _report(ctx: click.Context, found: list[Any], as_json: bool) -> None:
    most = most_of(None, everything=False, as_json=as_json)
    rows = (each._asdict() for each in found)
    show_first(rows, most, as_json=as_json, empty="No drift.", more="--json lists all")
    if found:
        if not as_json:
            click.echo(f"{count_of(len(found), 'difference')}.", err=True)
        ctx.exit(1)


def _translator(name: str | None) -> "DataflowTranslator | None":
    if name is None:
        return None
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise WrongUse(f"--translator {name}: {error}. Give it as MODULE:CLASS.") from None
