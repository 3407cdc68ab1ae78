"""The store: our tables in PostgreSQL or SQLite, who may produce which chunk, and how it went."""

import os

from ..config.settings import Settings, load_settings
from .store import Store


def open_configured(config: str | None = None) -> Store:
    """The store that the properties file and the environment name; it connects on first use."""
    return open_from(load_settings(config))


def open_from(settings: Settings, environ: os._Environ[str] | dict[str, str] = os.environ) -> Store:
    """The store of some settings, with the password decrypted at the last moment."""
    password = None
    if settings.encrypted:
        from ..config.credentials import PROPERTIES, decrypt, find_passkey

        password = decrypt(settings.encrypted, find_passkey(environ), purpose=PROPERTIES)
    return open_store(
        settings.url,
        schema=settings.schema,
        user=settings.user,
        password=password,
        timezone=settings.timezone,
    )


def open_store(
    url: str,
    *,
    schema: str = "dataflow",
    user: str | None = None,
    password: str | None = None,
    timezone: str | None = None,
) -> Store:
    """The store at a `postgresql://` or `sqlite:///` address; it connects on first use."""
    if url.startswith("sqlite:///"):
        from .sqlite import SqliteDatabase, SqliteStore

        return SqliteStore(SqliteDatabase(url.removeprefix("sqlite:///")), timezone=timezone)
    from .postgres import PostgresDatabase, PostgresStore

    return PostgresStore(
        PostgresDatabase(url, schema, user=user, password=password), timezone=timezone
    )
