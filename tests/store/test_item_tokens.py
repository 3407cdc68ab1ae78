"""Tokens: who may send items to a pipeline, and that the tables tell nobody."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from opendataflow_dagster.cli.app import app
from opendataflow_dagster.errors import WrongUse
from opendataflow_dagster.store.items import check_token, drop_token, has_token, new_token
from opendataflow_dagster.store.store import Store
from tests.server.test_app import make_project
from tests.support.store_fixtures import everything, register


def test_a_pipeline_without_a_token_accepts_no_requests(store: Store) -> None:
    assert not has_token(store, "orders")
    for given in ("", "x", "\ud800", "\0"):
        assert not check_token(store, "orders", given)


def test_only_its_own_newest_token_opens_a_pipeline(store: Store) -> None:
    first, other = new_token(store, "orders"), new_token(store, "daily")
    assert check_token(store, "orders", first)
    assert not check_token(store, "orders", other)
    assert not check_token(store, "orders", first + " ")
    assert not check_token(store, "orders", "")

    second = new_token(store, "orders")
    assert second != first
    assert not check_token(store, "orders", first)
    assert check_token(store, "orders", second)
    assert check_token(store, "daily", other)


def test_a_dropped_token_opens_nothing(store: Store) -> None:
    token = new_token(store, "orders")
    assert drop_token(store, "orders")
    assert not drop_token(store, "orders")
    assert not has_token(store, "orders")
    assert not check_token(store, "orders", token)


def test_the_tables_dont_contain_the_token(store: Store) -> None:
    token = new_token(store, "orders")
    assert len(token) >= 43
    assert token not in repr(everything(store))


def test_a_pipeline_has_a_name(store: Store) -> None:
    with pytest.raises(WrongUse):
        new_token(store, "")


def test_the_command_prints_it_once(
    store: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATAFLOW_URL", url)
    register(store, "orders", [], ["sold"])

    def odf(*words: str) -> tuple[int, str, str]:
        done = CliRunner().invoke(app, ["token", *words], prog_name="odf")
        return done.exit_code, done.stdout, done.stderr

    code, printed, told = odf("orders")
    assert code == 0
    assert check_token(store, "orders", printed.removesuffix("\n"))
    assert printed.strip() not in told
    assert "in place of" not in told
    assert "in place of the one before" in odf("orders")[2]

    assert odf("orders", "--drop") == (0, "", "Pipeline 'orders' accepts no items any more.\n")
    code, printed, told = odf("orders", "--drop")
    assert (code, printed, "odf token orders" in told) == (4, "", True)
    code, printed, told = odf("nosuch")
    assert (code, printed, "There is no pipeline 'nosuch'" in told) == (4, "", True)


def test_a_project_knows_who_takes_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def odf(*words: str) -> tuple[int, str, str]:
        done = CliRunner().invoke(app, ["token", *words], prog_name="odf")
        return done.exit_code, done.stdout, done.stderr

    root = make_project(tmp_path / "shop")
    monkeypatch.chdir(root / "pipelines")
    code, printed, told = odf("nosuch")
    assert (code, printed) == (4, "")
    assert told.endswith("It has: live, daily, broken, quiet\n")
    code, printed, told = odf("daily")
    assert (code, printed, len(told.splitlines())) == (2, "", 1)
    assert "Pipeline 'daily' accepts no items" in told
    assert not (root / ".dataflow").exists()

    code, printed, told = odf("live")
    assert (code, len(printed)) == (0, 44), told
    assert (root / ".dataflow").exists()
    # One that has left the project may still have a token.
    text = (root / "project.yml").read_text()
    (root / "project.yml").write_text(text.replace("live", "fresh"))
    assert odf("live", "--drop")[0] == 0
    assert odf("live")[0] == 4
