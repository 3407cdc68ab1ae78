"""Where the tables of a project are: as configured, else beside its project.yml."""

import os
from collections.abc import Mapping
from pathlib import Path

from ..config.settings import BUILT_IN, Settings, load_settings
from ..errors import NoDatabase
from ..store.opening import open_from
from ..store.store import Store


def project_settings(
    root: Path, config: str | None = None, environ: Mapping[str, str] = os.environ
) -> Settings:
    """The settings for a project, from whichever folder its commands are typed."""
    return load_settings(config, environ, home=root)


def open_project(settings: Settings) -> Store:
    """The store of a project; in the embedded default the tables are made, or upgraded, if need be.

    Elsewhere they are other people's too, so that it takes an `odf init`.
    """
    store = open_from(settings)
    if settings.origin == BUILT_IN:
        try:
            store.db.insist(lambda: store.db.run("pipelines.tables"))
        except NoDatabase:
            store.init()
    return store
