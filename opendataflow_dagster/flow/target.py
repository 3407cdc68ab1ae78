"""Which tables a flow is applied to: a target that it names, or the ones that commands use here."""

import os
from collections.abc import Mapping

from ..config.settings import Settings, load_settings
from ..errors import FlowError, WrongUse
from ..store.opening import open_from
from ..store.store import Store
from ..util.text import did_you_mean
from .flow import Flow, expand

VARIABLE = "DATAFLOW_TARGET"
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
    if config is not None:
        raise WrongUse(f"--config and the target {target!r} both name tables. Leave one out.")
    if target not in flow.targets:
        known = ", ".join(flow.targets) or "none"
        like = did_you_mean(target, flow.targets) or "."
        raise FlowError(f"{flow.file or flow.name} has no target {target!r}{like} It has: {known}.")
    outside = {name: value for name, value in environ.items() if not name.startswith(_OWN)}
    given = {key: expand(value, environ) for key, value in flow.targets[target].items()}
    if "properties" in given:
        path = os.path.join(flow.folder, given.pop("properties"))
    else:
        path = os.devnull
        given["url"] = _absolute(given["url"], flow.folder)
    named = {f"{_OWN}{key.upper()}": value for key, value in given.items()}
    settings = load_settings(path, {**outside, **named})
    return settings._replace(origin=f"target {target}")


def open_target(settings: Settings) -> tuple[Store, bool]:
    """The store of some settings; and whether it has a database, as only SQLite may lack it yet."""
    path = settings.url.removeprefix("sqlite:///")
    return open_from(settings), path == settings.url or os.path.exists(path)


def _absolute(url: str, folder: str) -> str:
    path = url.removeprefix("sqlite:///")
    if path == url:
        return url
    return "sqlite:///" + os.path.join(folder, os.path.expanduser(path))
