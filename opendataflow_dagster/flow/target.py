"""Which tables a flow is applied to: a target that it names, or the ones that commands use here."""

import os
from collections.abc import Mapping, MutableMapping

from ..config.settings import KEYS, Settings, load_settings
from ..errors import FlowError, WrongUse
from ..store import open_from
from ..store.store import Store
from ..util.text import did_you_mean
from .flow import Flow, expand
from .parse import FILE

VARIABLE = "DATAFLOW_TARGET"
PROPERTIES = "DATAFLOW_PROPERTIES"
_OWN = "DATAFLOW_"


def settings_of(
    flow: Flow,
    target: str | None = None,
    config: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Settings:
    """The settings for a target; without one, as every command finds them.

    A target counts as it is written: no DATAFLOW_URL and no other properties file change it.
    """
    target = target or environ.get(VARIABLE) or None
    if target is None:
        return load_settings(config, environ)
    _refuse_both(target, config)
    named = _variables(flow, target, environ)
    outside = {name: value for name, value in environ.items() if not name.startswith(_OWN)}
    settings = load_settings(None, {**outside, **named})
    return settings._replace(origin=f"target {target}")


def enter_target(
    target: str | None = None,
    config: str | None = None,
    environ: MutableMapping[str, str] = os.environ,
) -> None:
    """Let this process, and what it starts, use the tables of a target of ./flow.yml.

    What tells of other tables is removed from the environment.

    Args:
        target: Its name; without one, that of DATAFLOW_TARGET.
        config: The properties file that is named beside it, which is refused.
        environ: Where the tables are named from now on.
    """
    target = target or environ[VARIABLE]
    _refuse_both(target, config)
    if not os.path.isfile(FILE):
        raise FlowError(
            f"There is no {FILE} in this folder, so nothing says which tables the target "
            f"{target!r} has. Go to the folder of the flow, or unset {VARIABLE}."
        )
    named = _variables(Flow.load(FILE), target, environ)
    for name in (VARIABLE, PROPERTIES, *(f"{_OWN}{key.upper()}" for key in KEYS)):
        environ.pop(name, None)
    environ.update(named)


def _variables(flow: Flow, target: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What names the tables of a target, as variables of the environment."""
    if target not in flow.targets:
        known = ", ".join(flow.targets) or "none"
        like = did_you_mean(target, flow.targets) or "."
        raise FlowError(f"{flow.file or flow.name} has no target {target!r}{like} It has: {known}.")
    given = {key: expand(value, environ) for key, value in flow.targets[target].items()}
    path = os.devnull
    if "properties" in given:
        path = os.path.abspath(os.path.join(flow.folder, given.pop("properties")))
    else:
        given["url"] = _absolute(given["url"], flow.folder)
    return {PROPERTIES: path, **{f"{_OWN}{key.upper()}": value for key, value in given.items()}}


def _refuse_both(target: str, config: str | None) -> None:
    if config is not None:
        raise WrongUse(f"--config and the target {target!r} both name tables. Leave one out.")


def open_target(settings: Settings) -> tuple[Store, bool]:
    """The store of some settings; and whether it has a database, as only SQLite may lack it yet."""
    path = settings.url.removeprefix("sqlite:///")
    return open_from(settings), path == settings.url or os.path.exists(path)


def _absolute(url: str, folder: str) -> str:
    path = url.removeprefix("sqlite:///")
    if path == url:
        return url
    return "sqlite:///" + os.path.join(folder, os.path.expanduser(path))
