"""A small BigQuery on loopback: the REST calls that its client uses, and no others.

It checks what it is sent; what BigQuery would refuse, it refuses, and `problems` tells of it.
"""

import json
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, date, datetime, timedelta
from email.parser import BytesParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet

ROOT = "/bigquery/v2/projects/"
UPLOAD = "/upload/bigquery/v2/projects/"
PAGE = 2
"""Rows per page: few, so that the client has to turn pages."""


class BigQuery:
    """The tables and jobs of one project."""

    def __init__(self, project: str, token: str = "") -> None:
        self.project, self.token = project, token
        self.tables: dict[str, pa.Table] = {}
        """`dataset.table` → its rows."""
        self.views: dict[str, str] = {}
        self.jobs: dict[str, dict[str, Any]] = {}
        self.results: dict[str, pa.Table] = {}
        self.uploads: dict[str, dict[str, Any]] = {}
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.forget_answers = 0
        """How many answers to loads get lost on the way."""
        self.lock = threading.RLock()
        self.url = ""

    def load(self, job: dict[str, Any], data: bytes) -> dict[str, Any]:
        told, config = job["jobReference"], job["configuration"]["load"]
        name = told["jobId"]
        if name in self.jobs:
            raise Refusal(409, "duplicate", f"Already Exists: Job {self.project}:{name}")
        if config["sourceFormat"] != "PARQUET":
            raise Refusal(400, "invalid", f"unexpected format {config['sourceFormat']}")
        unknown = set(config) - {
            "sourceFormat",
            "writeDisposition",
            "createDisposition",
            "destinationTable",
            "parquetOptions",
        }
        if unknown:
            raise Refusal(400, "invalid", f"unexpected {sorted(unknown)}")
        where = config["destinationTable"]
        if where["projectId"] != self.project or told["projectId"] != self.project:
            raise Refusal(404, "notFound", f"Not found: Project {where['projectId']}")
        table = f"{where['datasetId']}.{where['tableId']}"
        rows = pyarrow.parquet.read_table(BytesIO(data))
        old, status = self.tables.get(table), {"state": "DONE"}
        if config["writeDisposition"] == "WRITE_APPEND" and old is not None:
            trouble = self._trouble(old, rows)
            if trouble:
                wrong = {"reason": "invalid", "message": trouble}
                status |= {"errorResult": wrong, "errors": [wrong]}
                rows = old
            else:
                rows = rows.cast(self._of(old, rows))
                rows = pa.concat_tables([old, rows], promote_options="default")
        self.tables[table] = rows
        self.jobs[name] = job | {"status": status, "kind": "bigquery#job"}
        return self.jobs[name]

    def _trouble(self, old: pa.Table, rows: pa.Table) -> str:
        for each in rows.schema:
            if each.name not in old.column_names:
                return f"Provided Schema does not match: Cannot add fields (field: {each.name})"
            there = kind(old.schema.field(each.name).type)
            if kind(each.type) != there:
                return (
                    f"Provided Schema does not match: Field {each.name} has changed type from "
                    f"{there} to {kind(each.type)}"
                )
        return ""

    def _of(self, old: pa.Table, rows: pa.Table) -> pa.Schema:
        return pa.schema([old.schema.field(each) for each in rows.column_names])

    def query(self, text: str) -> pa.Table:
        """Return what a SELECT finds: SQLite's dialect is near enough, and accepts backticks."""
        with closing(sqlite3.connect(":memory:")) as connection:
            for name, rows in self.tables.items():
                columns = ", ".join(f'"{each}"' for each in rows.column_names)
                marks = ", ".join("?" * rows.num_columns)
                plain = [tuple(map(_plain, each.values())) for each in rows.to_pylist()]
                connection.execute(f'create table "{self.project}.{name}" ({columns})')
                connection.executemany(
                    f'insert into "{self.project}.{name}" values ({marks})', plain
                )
            for name, query in self.views.items():
                connection.execute(f'create view "{self.project}.{name}" as {query}')
            try:
                cursor = connection.execute(text)
            except sqlite3.Error as error:
                raise Refusal(400, "invalidQuery", str(error)) from None
            names = [each[0] for each in cursor.description]
            columns = list(zip(*cursor.fetchall(), strict=True)) or [[] for _ in names]
        return pa.table([pa.array(list(each)) for each in columns], names=names)


class Refusal(Exception):
    """Return an error in BigQuery's form."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        inner = {"reason": reason, "message": message, "domain": "global"}
        self.told = {"error": {"code": code, "message": message, "errors": [inner]}}


def kind(arrow: pa.DataType) -> str:
    """Return BigQuery's name of a type."""
    if pa.types.is_list(arrow):
        return kind(arrow.value_type)
    if pa.types.is_timestamp(arrow):
        return "TIMESTAMP" if arrow.tz else "DATETIME"
    for name, found in (
        ("INTEGER", pa.types.is_integer),
        ("FLOAT", pa.types.is_floating),
        ("BOOLEAN", pa.types.is_boolean),
        ("DATE", pa.types.is_date),
        ("NUMERIC", pa.types.is_decimal),
        ("STRING", pa.types.is_string),
        ("STRING", pa.types.is_large_string),
        ("INTEGER", pa.types.is_null),
    ):
        if found(arrow):
            return name
    raise Refusal(400, "invalid", f"no type for {arrow}")


def schema(rows: pa.Table) -> dict[str, Any]:
    return {
        "fields": [
            {
                "name": each.name,
                "type": kind(each.type),
                "mode": "REPEATED" if pa.types.is_list(each.type) else "NULLABLE",
            }
            for each in rows.schema
        ]
    }


def page(rows: pa.Table, start: int, most: int) -> dict[str, Any]:
    """Some rows, and how to get the next."""
    some = rows.slice(start, min(most, PAGE))
    told: dict[str, Any] = {
        "totalRows": str(rows.num_rows),
        "rows": [{"f": [{"v": _value(v)} for v in each.values()]} for each in some.to_pylist()],
    }
    if start + some.num_rows < rows.num_rows and most > some.num_rows:
        told["pageToken"] = str(start + some.num_rows)
    return told


def _value(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return [{"v": _value(each)} for each in value]
    if isinstance(value, datetime):
        if value.tzinfo is None:
            return value.isoformat()
        return str((value - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1))
    return value.isoformat() if isinstance(value, date) else str(value)


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float) else str(value)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    big: BigQuery

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def _answer(self, method: str) -> None:
        big = self.big
        parts = urlsplit(self.path)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.asked = {key: each[-1] for key, each in parse_qs(parts.query).items()}
        headers: dict[str, str] = {}
        with big.lock:
            big.requests.append(f"{method} {parts.path}")
            try:
                if parts.path == "/token":
                    code, told = 200, self._token()
                else:
                    given = self.headers.get("Authorization", "")
                    if big.token and given != f"Bearer {big.token}":
                        raise Refusal(401, "authError", "Invalid Credentials")
                    told = self._told(method, parts.path, headers)
                    code = 200
            except Refusal as error:
                code, told = error.code, error.told
            except Exception as error:
                big.problems.append(f"{method} {self.path}: {type(error).__name__}: {error}")
                code, told = 400, Refusal(400, "invalid", big.problems[-1]).told
            lost = code == 200 and big.forget_answers and "jobReference" in told
            lost = lost and method in ("POST", "PUT") and parts.path.startswith(UPLOAD)
            big.forget_answers -= bool(lost)
        if lost:
            self.close_connection = True
            return
        data = json.dumps(told).encode()
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _token(self) -> dict[str, Any]:
        given = parse_qs(self.body.decode())
        if given["grant_type"] != ["urn:ietf:params:oauth:grant-type:jwt-bearer"]:
            raise Refusal(400, "invalid_grant", "no grant")
        return {"access_token": self.big.token, "expires_in": 3600, "token_type": "Bearer"}

    def _told(self, method: str, path: str, headers: dict[str, str]) -> dict[str, Any]:
        big = self.big
        if path.startswith(UPLOAD):
            return self._upload(method, headers)
        if not path.startswith(f"{ROOT}{big.project}/"):
            raise Refusal(404, "notFound", f"Not found: {path}")
        words = [unquote(each) for each in path.removeprefix(f"{ROOT}{big.project}/").split("/")]
        match method, words:
            case "GET", ["jobs", name]:
                if name not in big.jobs:
                    raise Refusal(404, "notFound", f"Not found: Job {name}")
                return big.jobs[name]
            case "GET", ["datasets", dataset, "tables", table]:
                return self._table(f"{dataset}.{table}")
            case "GET", ["datasets", dataset, "tables", table, "data"]:
                return self._page(big.tables[f"{dataset}.{table}"])
            case "POST", ["jobs"]:
                return self._planned(json.loads(self.body))
            case "POST", ["queries"]:
                asked = json.loads(self.body)
                if asked.get("useLegacySql") is not False:
                    raise Refusal(400, "invalid", "legacy SQL")
                name = f"query-{len(big.results)}"
                rows = big.results[name] = big.query(asked["query"])
                big.jobs[name] = {
                    "jobReference": {"projectId": big.project, "jobId": name},
                    "configuration": {"query": {"query": asked["query"]}},
                    "status": {"state": "DONE"},
                }
                return self._result(name, rows)
            case "GET", ["queries", name]:
                return self._result(name, big.results[name])
        raise ValueError("BigQuery isn't asked this by anything we know of")

    def _table(self, name: str) -> dict[str, Any]:
        big = self.big
        if name not in big.tables and name not in big.views:
            raise Refusal(404, "notFound", f"Not found: Table {big.project}:{name}")
        dataset, table = name.split(".")
        told = {
            "tableReference": {"projectId": big.project, "datasetId": dataset, "tableId": table},
            "type": "VIEW" if name in big.views else "TABLE",
        }
        if name in big.tables:
            rows = big.tables[name]
            told |= {"schema": schema(rows), "numRows": str(rows.num_rows)}
        return told

    def _planned(self, job: dict[str, Any]) -> dict[str, Any]:
        config = job["configuration"]
        if not config.get("dryRun"):
            raise ValueError("only plans are made this way")
        word = config["query"]["query"].split()[0].upper()
        kind = "SELECT" if word in ("SELECT", "WITH") else "SCRIPT"
        if ";" in config["query"]["query"].rstrip("; \n"):
            kind = "SCRIPT"
        told = {"query": {"statementType": kind}}
        return job | {"status": {"state": "DONE"}, "statistics": told}

    def _page(self, rows: pa.Table) -> dict[str, Any]:
        if self.asked.get("formatOptions.useInt64Timestamp", "true").lower() != "true":
            raise ValueError("times would be floats")
        start = int(self.asked.get("pageToken") or self.asked.get("startIndex") or 0)
        return page(rows, start, int(self.asked.get("maxResults") or 10_000))

    def _result(self, name: str, rows: pa.Table) -> dict[str, Any]:
        return self._page(rows) | {
            "jobComplete": True,
            "schema": schema(rows),
            "jobReference": {"projectId": self.big.project, "jobId": name},
        }

    def _upload(self, method: str, headers: dict[str, str]) -> dict[str, Any]:
        big = self.big
        if method == "POST" and self.asked["uploadType"] == "multipart":
            text = b"Content-Type: " + self.headers["Content-Type"].encode() + b"\r\n\r\n"
            message: Any = BytesParser().parsebytes(text + self.body)
            first, second = message.get_payload()
            assert first.get_content_type() == "application/json"
            # Not by email's parser, which would mend the ends of lines in the bytes.
            boundary = self.headers["Content-Type"].split('boundary="')[1].rstrip('"').encode()
            data = self.body.split(b"--" + boundary)[2].split(b"\r\n\r\n", 1)[1]
            assert second is not None
            return big.load(json.loads(first.get_payload()), data.removesuffix(b"\r\n"))
        if method == "POST":
            name = str(len(big.uploads))
            big.uploads[name] = {"job": json.loads(self.body), "data": b""}
            headers["Location"] = f"{big.url}{UPLOAD}{big.project}/jobs?upload_id={name}"
            return {}
        upload = big.uploads[self.asked["upload_id"]]
        upload["data"] += self.body
        assert self.headers["Content-Range"].endswith(f"/{len(upload['data'])}")
        return big.load(upload["job"], upload["data"])


@contextmanager
def big_query(project: str = "shop", token: str = "") -> Iterator[BigQuery]:
    """A BigQuery that listens on a free port."""
    big = BigQuery(project, token)
    handler = type("Handler", (_Handler,), {"big": big})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        big.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield big
        finally:
            server.shutdown()
            thread.join()
    assert big.problems == []
