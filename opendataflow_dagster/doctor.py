"""What works, what is missing, what to run: the checks of `odf doctor`."""

import os
import sys
from collections.abc import Iterator, Mapping

from .config.settings import Settings, load_settings, private_folder, redact
from .errors import CredentialError, DataflowError
from .explain.self_check import Check, examine_database
from .store.opening import open_from
from .util.text import printable, typed
from .util.times import zone_called


def examine(
    config: str | None, environ: Mapping[str, str] = os.environ, *, deep: bool = False
) -> Iterator[Check]:
    """Each check in turn; what can't be looked at since an earlier one failed is left out."""
    yield _python()
    settings = None
    try:
        settings = load_settings(config, environ)
    except DataflowError as error:
        yield Check("configuration", "fail", str(error))
    if settings is None:
        return
    yield _configuration(settings)
    if settings.timezone:
        yield _timezone(settings.timezone)
    if settings.url.startswith("sqlite:///"):
        yield _folder(settings)
    yield from _passkey(settings, environ)
    store = None
    try:
        store = open_from(settings, dict(environ))
    except DataflowError as error:
        yield Check("database", "fail", str(error))
    if store is None:
        return
    try:
        yield from examine_database(store, environ, deep)
    finally:
        store.close()


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < (3, 11):  # noqa: UP036 - not everybody installs by pip
        return Check(
            "python", "fail", f"Python {version} is too old", "Install Python 3.11 or newer"
        )
    return Check("python", "ok", f"Python {version}")


def _configuration(settings: Settings) -> Check:
    keys = printable(", ".join(sorted(settings.values))) or "no keys"
    where = settings.path or "no properties file"
    return Check(
        "configuration", "ok", f"{where}: {keys}; url {redact(settings.url)} from {settings.origin}"
    )


def _timezone(name: str) -> Check:
    try:
        zone_called(name)
    except DataflowError as error:
        return Check("timezone", "fail", str(error))
    return Check("timezone", "ok", name)


def _folder(settings: Settings) -> Check:
    path = settings.url.removeprefix("sqlite:///")
    folder = os.path.dirname(path) or "."
    there = folder
    while not os.path.exists(there):
        there = os.path.dirname(there) or "."
    if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):
        return Check(
            "folder",
            "fail",
            f"{there} isn't writable, so SQLite can't keep {path}",
            f"Make {there} writable",
        )
    if os.path.exists(path) and not os.access(path, os.W_OK):
        return Check("folder", "fail", f"{path} isn't writable", f"Make {path} writable")
    ours = private_folder(os.path.abspath(path))
    shown = [each for each in (ours, os.path.abspath(path)) if ours and each and _is_shown(each)]
    if shown:
        return Check(
            "folder",
            "warn",
            f"other users can read {' and '.join(shown)}",
            f"chmod go= {typed(*shown)}",
        )
    return Check(
        "folder", "ok", f"{folder} is writable" if there == folder else f"{folder} can be made"
    )


def _is_shown(path: str) -> bool:
    return os.path.exists(path) and os.stat(path).st_mode & 0o077 != 0


def _passkey(settings: Settings, environ: Mapping[str, str]) -> Iterator[Check]:
    from .config.credentials import PROPERTIES, decrypt, is_weak
    from .config.passkey import find_passkey, passkey_source

    try:
        key = find_passkey(environ)
        if key is None:
            needed = (
                "which `encrypted` needs" if settings.encrypted else "and the properties need none"
            )
            result = "fail" if settings.encrypted else "ok"
            action = "Set PASSKEY or PASSKEY_FILE" if settings.encrypted else ""
            yield Check("passkey", result, f"none is set, {needed}", action)
            return
        if settings.encrypted:
            decrypt(settings.encrypted, key, purpose=PROPERTIES)
    except CredentialError as error:
        yield Check("passkey", "fail", str(error), "odf encrypt")
        return
    if settings.encrypted and is_weak(settings.encrypted):
        detail = "it decrypts `encrypted`, which is in an older, weaker form"
        yield Check("passkey", "warn", detail, "odf rotate")
        return
    also = ", and decrypts `encrypted`" if settings.encrypted else ""
    yield Check("passkey", "ok", f"it comes from {passkey_source(environ)}{also}")
