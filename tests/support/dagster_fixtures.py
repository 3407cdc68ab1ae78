"""Fixtures with a real Dagster and a real browser; the logs of its servers when a test fails."""

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from itertools import count
from typing import Any

import pytest

from tests.support.postgres import Server

_numbers = count(1)


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def storage(request: pytest.FixtureRequest) -> str:
    """Where Dagster stores its own data: a module that uses this runs once on each kind."""
    return request.param


@pytest.fixture(scope="module")
def start_dagster(storage: str, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """A function that starts a `Dagster` on this storage; each is closed after the module."""
    from tests.support.dagster_servers import Dagster

    with ExitStack() as stack:

        def start(location: Any, **more: Any) -> Dagster:
            database = None
            if storage == "postgres":
                # Only then: a module on SQLite alone needs no server.
                server: Server = request.getfixturevalue("postgres_server")
                name = f"dagster_{next(_numbers)}"
                database = server.create_database(name)
                stack.callback(server.drop_database, name)
            return stack.enter_context(Dagster(location, database=database, **more))

        yield start


# While it is open, Playwright's event loop runs in this thread, in which others can't run theirs.
@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """One browser for the module; without Chromium, the tests that need it are skipped."""
    pytest.importorskip("playwright")
    from tests.support.browser import NAMES, NO_CHROMIUM, browser
    from tests.support.browser import chromium as find

    if find() is None:
        pytest.skip(NO_CHROMIUM.format("none of " + ", ".join(NAMES)))
    with browser() as opened:
        yield opened


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    """An empty tab, without cookies."""
    with chromium.new_context(viewport={"width": 1400, "height": 900}) as context:
        yield context.new_page()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    """Add what the servers said to the report of a test that failed."""
    outcome = yield
    report = outcome.get_result()
    if report.failed and {"start_dagster", "dagster"} & set(getattr(item, "fixturenames", ())):
        from tests.support.dagster_servers import Dagster

        for dagster in Dagster.alive:
            report.sections.append((f"Dagster {dagster.name}", dagster.logs()))
