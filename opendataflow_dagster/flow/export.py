"""What is registered, as the text of a flow.yml whose plan is empty."""

import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

from ..config.credentials import is_encrypted
from ..errors import WrongUse
from ..model import DATASET_COLUMNS
from ..store.store import Store
from ..util.text import printable
from .catalog import DATASET, JOB, Columns, Registrations, read_registered
from .flow import EXPANDED, Dataset, Flow, Job, escape, origin_of
from .plan import SECRET

SCHEMA_LINE = "# yaml-language-server: $schema=flow.schema.json"
_LINE_LETTERS = 120


class LeftOut(NamedTuple):
    """What isn't in an export, and why."""

    kind: str
    name: str
    why: str


class Export(NamedTuple):
    """The text of a flow.yml, and what isn't in it."""

    text: str
    left_out: tuple[LeftOut, ...]


def export_flow(store: Store, name: str | None = None) -> Export:
    """Write what is registered as a flow.yml.

    Left out is what pipelines of projects and other flows register, and what no flow.yml may say.
    Passwords stay encrypted. What runs a job isn't known to the tables.

    Args:
        store: The tables.
        name: The flow's name; else that of the only flow that the tables know, or the folder's.
    """

    def look() -> Registrations:
        with store.db.reading():
            return read_registered(store)

    registered = store.db.insist(look)[0]
    return _Exporter(registered, name or _name(registered)).export()


def _name(registered: Registrations) -> str:
    prefix = origin_of("")
    origins = {origin for found in registered.declared.values() for origin in found}
    flows = sorted(origin.removeprefix(prefix) for origin in origins if origin.startswith(prefix))
    if len(flows) > 1:
        named = ", ".join(map(repr, flows[:5]))
        raise WrongUse(f"The tables have several flows: {named}. Choose one with --flow NAME.")
    return flows[0] if flows else os.path.basename(os.getcwd()) or "flow"


class _Exporter:
    def __init__(self, registered: Registrations, name: str) -> None:
        self._registered, self._name = registered, name
        self._left_out: list[LeftOut] = []

    def export(self) -> Export:
        written: dict[str, Any] = {"flow": Flow(self._name).name}
        datasets = dict(self._datasets())
        jobs = dict(self._jobs())
        written |= {"datasets": datasets} if datasets else {}
        written |= {"jobs": jobs} if jobs else {}
        text = yaml.dump(
            written,
            Dumper=_Dumper,
            allow_unicode=True,
            sort_keys=False,
            width=_LINE_LETTERS,
        )
        comments = [
            f"# Left out: {each.kind} {printable(each.name)}: {printable(each.why)}"
            for each in self._left_out
        ]
        return Export("\n".join([SCHEMA_LINE, *comments, text]), tuple(self._left_out))

    def _datasets(self) -> Iterator[tuple[str, dict[str, Any] | None]]:
        for name, rows in sorted(self._registered.datasets.items()):
            if why := self._foreign(DATASET, name) or _unlike(rows):
                self._left_out.append(LeftOut(DATASET, name, why))
                continue
            try:
                values = _values(rows[0])
                Dataset(name, **values)
            except WrongUse as error:
                self._left_out.append(LeftOut(DATASET, name, str(error)))
                continue
            yield name, values or None

    def _jobs(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for name, links in sorted(self._registered.links.items()):
            if why := self._foreign(JOB, name):
                self._left_out.append(LeftOut(JOB, name, why))
                continue
            inputs, outputs = (
                sorted(item for each, item in links if each == kind) for kind in ("IN", "OUT")
            )
            variables = self._registered.variables.get(name, frozenset())
            environment = dict(sorted(variables))
            dials = self._registered.dials.get(name, {})
            policy = {key: value for key, value in dials.items() if value is not None}
            try:
                if len(environment) < len(variables):
                    raise WrongUse("A variable stands there twice, with different values.")
                Job(name, inputs=inputs, outputs=outputs, environment=environment, policy=policy)
            except WrongUse as error:
                self._left_out.append(LeftOut(JOB, name, str(error)))
                continue
            values = {"in": inputs, "out": outputs, "policy": policy, "environment": environment}
            yield name, {key: value for key, value in values.items() if value}

    def _foreign(self, kind: str, name: str) -> str:
        """Who else declares this, if the flow doesn't."""
        origins = self._registered.origins(kind, name)
        if not origins or origin_of(self._name) in origins:
            return ""
        return f"declared by {' and '.join(sorted(origins))}"


def _values(row: Columns) -> dict[str, Any]:
    """A dataset's columns as its keys are written."""
    found: dict[str, Any] = {}
    for name in DATASET_COLUMNS:
        value = row.get(name)
        if value is None:
            continue
        if name == SECRET and not is_encrypted(value):
            raise WrongUse("Its encryptedpass isn't encrypted: `odf dataset add --password`.")
        if name == "options":
            found[name] = _options(value)
        else:
            found[name] = escape(value) if name in EXPANDED else value
    return found


def _options(text: str) -> Any:
    try:
        read = json.loads(text)
    except ValueError:
        read = None
    if not isinstance(read, dict) or not read:
        raise WrongUse("Its options aren't an object of JSON.")
    return read


def _unlike(rows: list[Columns]) -> str:
    same = all(row == rows[0] for row in rows)
    return "" if same else f"it has {len(rows)} rows with different values"


class _Dumper(yaml.SafeDumper):
    """Writes no aliases, and lists on one line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> Any:
        # Other styles fold lines, and take more characters for the end of one than they write.
        style = None if data.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> Any:
        return super().represent_sequence(tag, sequence, flow_style=True)


_Dumper.add_representer(str, _Dumper.represent_str)
