"""`odf plan`, `apply`, `export` and `schema`: registrations as code."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ..errors import DataflowError, NoDatabase
from ..explain.self_check import Check
from ..util.text import printable, typed
from .output import count_of, fill_queues, in_pager, json_text, store_of, wrapped

if TYPE_CHECKING:
    from ..flow.flow import Flow
    from ..flow.plan import Change, FlowPlan
    from ..store.store import Store

EXIT_CHANGES = 5
"""The exit code of `odf plan` if there is something to apply."""

SIGNS = {"add": "+", "change": "~", "remove": "-"}
COLOURS = {"+": "green", "~": "yellow", "-": "red", "!": "magenta"}


def _file_and_target(command: Callable) -> Callable:
    command = click.option(
        "--target",
        metavar="NAME",
        help="Use the tables of this target of the flow. Default: DATAFLOW_TARGET, or the tables "
        "that the other commands use.",
    )(command)
    return click.option(
        "--file",
        "path",
        metavar="FILE",
        default="flow.yml",
        show_default=True,
        help="The flow, or FILE.py:NAME for a Flow in Python or definitions built from one.",
    )(command)


_adopt = click.option(
    "--adopt",
    is_flag=True,
    help="Adopt what another flow, a project or a person registered: this flow then owns it, and "
    "changes its values.",
)


class Planned(NamedTuple):
    """A plan, the command that applies it, and its effects on chunks."""

    plan: "FlowPlan"
    effects: list[list[str]]
    flow: "Flow"
    where: str
    command: str
    """What applies it."""

    @property
    def next(self) -> str:
        if not self.plan.conflicts:
            return self.command.replace("HASH", self.plan.hash, 1)
        may_adopt = all(change.may_adopt for change in self.plan.conflicts)
        adopting = self.command.replace("apply HASH", "plan", 1) + " --adopt"
        return adopting if may_adopt else "correct the flow"

    def rows(self) -> Iterator[tuple["Change", list[str]]]:
        yield from zip(self.plan.changes, self.effects, strict=True)


@click.command()
@_file_and_target
@_adopt
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--markdown", is_flag=True, help="Print Markdown, for a pull request's comment.")
@click.pass_context
@in_pager
def plan(
    ctx: click.Context, path: str, target: str | None, adopt: bool, as_json: bool, markdown: bool
) -> None:
    """Show what `odf apply` would change, and change nothing.

    The exit code is 0 if there is nothing to change, and 5 if there are changes. Passwords are
    never shown.

    \b
    Example: odf plan
    Example: odf plan --target prod --markdown
    """
    flow = _load(path)
    store, has_tables = _open(ctx, flow, target)
    planned = _planned(store, flow, has_tables, adopt, _command("apply", path, target, adopt))
    for note in planned.plan.notes:
        click.echo(printable(note), err=True)
    if as_json:
        print(json_text(_as_object(planned), indent=1))
    elif markdown:
        click.echo(_as_markdown(planned))
    else:
        _show(planned)
    ctx.exit(EXIT_CHANGES if planned.plan.changes else 0)


@click.command()
@click.argument("plan_hash", metavar="[HASH]", required=False)
@_file_and_target
@_adopt
@click.option("--yes", is_flag=True, help="Don't ask for confirmation.")
@click.pass_context
def apply(
    ctx: click.Context,
    plan_hash: str | None,
    path: str,
    target: str | None,
    adopt: bool,
    yes: bool,
) -> None:
    """Make the tables match flow.yml.

    Registers the datasets, jobs and dials of the flow in one transaction, and records your name
    and the git commit. At a terminal, you see the plan and confirm it. With HASH or --yes, or
    without a terminal, you aren't asked. HASH comes from `odf plan`: if the plan has changed since,
    it is refused.

    Only what this flow registered is ever removed. Chunks are never removed.

    \b
    Example: odf apply
    Example: odf apply 3f1c9a0b7d2e --target prod
    """
    from ..flow.apply import apply_flow

    flow = _load(path)
    store, has_tables = _open(ctx, flow, target)
    words = _command("apply", path, target, adopt)
    expected = plan_hash
    if not (yes or plan_hash) and sys.stdin.isatty() and sys.stderr.isatty():
        planned = _planned(store, flow, has_tables, adopt, words)
        _show(planned)
        if planned.plan.changes and not planned.plan.conflicts:
            click.confirm("Apply this?", abort=True, err=True)
            expected = planned.plan.hash
    if not has_tables:
        _refuse_other_hash(store, flow, adopt, expected)
        expected = None
        store.init()
        click.echo(f"Created the tables in {store.db.where}.", err=True)
    done = apply_flow(store, flow, expected=expected, adopt=adopt)
    for note in done.notes:
        click.echo(printable(note), err=True)
    for change in done.changes:
        click.echo(f"{SIGNS[change.action]} {change.kind} {printable(change.name)}")
    fill_queues(store)
    click.echo(f"{_done(done)} in {store.db.where}.", err=True)


@click.command()
@click.option(
    "--flow",
    "name",
    metavar="NAME",
    help="The flow's name. Default: the name of the only registered flow, or of this folder.",
)
@click.pass_context
def export(ctx: click.Context, name: str | None) -> None:
    """Print the registered datasets and jobs as a flow.yml.

    `odf plan` finds no changes in it. Passwords stay encrypted. What pipelines and other flows
    registered appears only in comments. The tables don't record which program runs a job: add it
    to the file.

    \b
    Example: odf export > flow.yml
    """
    from ..flow.apply import export_flow

    found = export_flow(store_of(ctx), name)
    click.echo(found.text, nl=False)
    if found.left_out:
        left_out = count_of(len(found.left_out), "registration")
        click.echo(f"{left_out} left out: the comments say why.", err=True)


@click.command()
def schema() -> None:
    """Print the JSON schema of flow.yml, for editors.

    To use it, begin flow.yml with: # yaml-language-server: $schema=flow.schema.json

    \b
    Example: odf schema > flow.schema.json
    """
    from ..flow.file import schema_text

    click.echo(schema_text(), nl=False)


def _load(path: str) -> "Flow":
    """The flow of a file, or of a name in a Python file."""
    from ..errors import FlowError
    from ..flow.flow import Flow

    file, colon, name = path.rpartition(":")
    file, name = (file, name) if colon and file.endswith(".py") else (path, "flow")
    if not file.endswith(".py"):
        return Flow.load(path)
    from importlib import import_module

    from ..util.system import module_of_file

    if not os.path.isfile(file):
        raise FlowError(f"There is no {file}. Name the Python file that has the Flow.")
    named = getattr(import_module(module_of_file(file)), name, None)
    found = named if isinstance(named, Flow) else _carried(named)
    if not isinstance(found, Flow):
        raise FlowError(f"{file} has no Flow called {name!r}. Write --file {file}:NAME.")
    return found


def _carried(definitions: Any) -> Any:
    """The flow that Dagster's definitions were built from, also if others are merged with them."""
    from ..flow.flow import CARRIED

    if (found := getattr(definitions, CARRIED, None)) is not None or not hasattr(
        definitions, "metadata"
    ):
        return found
    from ..dagster.location import flows_in
    from ..errors import FlowError

    flows = flows_in(definitions)
    if len(flows) > 1:
        names = ", ".join(repr(flow.name) for flow in flows)
        raise FlowError(
            f"These definitions are merged from several flows: {names}. Put the definitions of "
            "each flow into a module of its own, and name that module."
        )
    return next(iter(flows), None)


def _open(ctx: click.Context, flow: "Flow", target: str | None) -> tuple["Store", bool]:
    """The store of a target, closed with the command, and whether its tables are there."""
    from ..flow.flow import open_target, settings_of

    settings = settings_of(flow, target, ctx.find_root().obj)
    store, has_tables = open_target(settings)
    ctx.call_on_close(store.close)
    if has_tables and settings.origin.startswith("target "):
        _refuse_no_tables(store, settings.origin)
    return store, has_tables


def _refuse_no_tables(store: "Store", origin: str) -> None:
    """Say which tables lack an `odf init`, which by itself would look elsewhere."""
    try:
        store.db.insist(store.db.connect)
    except NoDatabase as error:
        raise NoDatabase(f"The {origin}: {error}") from None


def _planned(store: "Store", flow: "Flow", has_tables: bool, adopt: bool, command: str) -> Planned:
    from ..flow.plan import effects_of, plan_flow, plan_of_nothing

    if not has_tables:
        found = plan_of_nothing(store, flow)
        return Planned(found, [[] for _ in found.changes], flow, store.db.where, command)
    found = plan_flow(store, flow, adopt=adopt)
    return Planned(found, effects_of(store, flow, found), flow, store.db.where, command)


def _refuse_other_hash(store: "Store", flow: "Flow", adopt: bool, expected: str | None) -> None:
    """Refuse a stale plan before creating tables for it."""
    from ..flow.apply import refuse_stale
    from ..flow.plan import plan_of_nothing

    refuse_stale(plan_of_nothing(store, flow), expected)


def _show(planned: Planned) -> None:
    """Print a plan for people."""
    if not planned.plan.changes:
        click.echo(f"{_summary(planned.plan)} in {planned.where}.", err=True)
        return
    width = max(len(printable(change.name)) for change in planned.plan.changes)
    for change, effects in planned.rows():
        sign = "!" if change.conflict else SIGNS[change.action]
        name = printable(change.name).ljust(min(width, 40))
        parts = [*map(_difference, change.differences), change.conflict, *effects]
        told = "; ".join(filter(None, parts))
        start = f"{sign} {change.kind:<7}  {name}  "
        line = wrapped((start + told).rstrip(), min(len(start), 24))
        click.echo(click.style(line, fg=COLOURS[sign]))
    click.echo(f"{_summary(planned.plan)} in {planned.where}. Next: {planned.next}", err=True)


def _difference(difference: Any) -> str:
    """One value that changes: `format csv`, `format csv → parquet`, `format csv → nothing`."""
    key = printable(difference.key.removeprefix("policy."))
    before, after = (
        None if value is None else printable(value) or "''"
        for value in (difference.before, difference.after)
    )
    if before is None:
        return f"{key} {after}"
    return f"{key} {before} → {after or 'nothing'}"


def _summary(plan: "FlowPlan") -> str:
    return f"Flow {printable(plan.flow)!r}: {plan.summary}"


def _done(plan: "FlowPlan") -> str:
    """What an apply has written."""
    words = {"add": "added", "change": "changed", "remove": "removed"}
    parts = [f"{count} {word}" for action, word in words.items() if (count := plan.count(action))]
    parts += [f"{len(plan.noted)} adopted unchanged"] if plan.noted else []
    return f"Flow {printable(plan.flow)!r}: {', '.join(parts) or 'nothing to do'}"


def _command(name: str, path: str, target: str | None, adopt: bool) -> str:
    words = ["odf", name, "HASH"]
    words += [] if path == "flow.yml" else ["--file", path]
    words += ["--target", target] if target else []
    words += ["--adopt"] if adopt else []
    return typed(*words)


def _as_object(planned: Planned) -> dict[str, Any]:
    return {
        "flow": planned.plan.flow,
        "where": planned.where,
        "hash": planned.plan.hash,
        "changes": [
            {
                "action": change.action,
                "kind": change.kind,
                "name": change.name,
                "differences": [
                    {"key": each.key, "before": each.before, "after": each.after}
                    for each in change.differences
                ],
                "conflict": change.conflict or None,
                "effects": effects,
            }
            for change, effects in planned.rows()
        ],
        "notes": list(planned.plan.notes),
    }


def _as_markdown(planned: Planned) -> str:
    """A plan as a table of Markdown: nothing in it can end a cell, or begin a line or a tag."""
    lines = [f"### {_cell(_summary(planned.plan))}", "", f"In {_cell(planned.where)}."]
    if planned.plan.changes:
        lines += ["", "| | | | |", "|---|---|---|---|"]
    for change, effects in planned.rows():
        action = "**conflict**" if change.conflict else change.action
        told = [*map(_difference, change.differences), *filter(None, [change.conflict]), *effects]
        cells = [action, change.kind, f"**{_cell(change.name)}**", "<br>".join(map(_cell, told))]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"- {_cell(note)}" for note in planned.plan.notes)]
    if planned.plan.changes:
        lines += ["", f"Next: {_cell(planned.next)}"]
    return "\n".join(lines).replace("\n\n\n", "\n\n").rstrip()


def _cell(text: str) -> str:
    shown = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join("\\" + letter if letter in "\\`*_[]|" else letter for letter in shown)


def examine_flow(config: str | None, environ: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """Whether the tables are as the flow.yml of this folder says; nothing if there is none."""
    from ..flow.flow import FILE, Flow

    if not os.path.isfile(FILE):
        return
    try:
        yield _compare_flow(Flow.load(FILE), config, environ)
    except DataflowError as error:
        yield Check("flow", "fail", str(error))


def _compare_flow(flow: "Flow", config: str | None, environ: Mapping[str, str]) -> Check:
    from ..flow.flow import open_target, settings_of
    from ..flow.plan import plan_flow

    store, has_tables = open_target(settings_of(flow, None, config, environ))
    named = printable(f"{flow.name!r} in {flow.file}")
    try:
        plan = plan_flow(store, flow, environ=environ) if has_tables else None
    finally:
        store.close()
    if plan is None:
        return Check("flow", "warn", f"{named}: it isn't applied yet", "odf plan")
    if plan.changes:
        return Check("flow", "warn", f"{named}: {plan.summary}", "odf plan")
    return Check("flow", "ok", f"{named}: the tables are as it says")
