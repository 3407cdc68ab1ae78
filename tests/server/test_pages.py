"""schemathesis tests the OpenAPI document of `odf serve`: nothing answers 5xx."""

import subprocess
import sys
from pathlib import Path

import pytest

from opendataflow_dagster.store import open_store
from tests.server.test_app import Client, make_project
from tests.support.store_fixtures import check, close, sql

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_headers_conformance,response_schema_conformance,"
    "missing_required_header,unsupported_method,allow_header_conformance,ignored_auth"
)


@pytest.mark.parametrize("known", [True, False], ids=["with a token", "without"])
def test_schemathesis_finds_no_server_error(sqlite_url: str, tmp_path: Path, known: bool) -> None:
    store = open_store(sqlite_url)
    store.init()
    with Client(store, make_project(tmp_path / "shop"), rate=1_000_000.0) as client:
        line = [
            str(Path(sys.executable).with_name("schemathesis")),
            "run",
            f"{client.http.base_url}/openapi.json",
            "--checks",
            CHECKS,
            "--max-examples",
            "50",
            "--seed",
            "7",
            "--warnings",
            "off",
            "--continue-on-failure",
            "--no-color",
        ]
        if known:
            line += ["--header", f"Authorization: Bearer {client.token}"]
        ran = subprocess.run(
            line, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=110
        )
        assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
        assert client.http.get("/health").status_code == 200
        answers = client.http.get("/metrics").text
    assert 'code="5' not in answers
    [(kept,)] = sql(store, "select count(*) from streamitem")
    assert (kept > 10) == known
    check(store)
    close(store)
