"""What `odf serve` answers: items, statuses, and every kind of refusal."""

import json
import re
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from opendataflow_dagster.model import Fact, Stop
from opendataflow_dagster.pipelines.project import read_project
from opendataflow_dagster.server import Limits, make_app
from opendataflow_dagster.server.http_server import make_server
from opendataflow_dagster.server.pages import CostlyQuery
from opendataflow_dagster.server.request import Rates
from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.claims import interrupt
from opendataflow_dagster.store.history import Step, record
from opendataflow_dagster.store.item_folding import fold_items
from opendataflow_dagster.store.items import accept, drop_token, new_token, payloads
from opendataflow_dagster.store.store import Store
from tests.support.postgres import Server
from tests.support.store_fixtures import check, close, sql, statuses

YML = """
name: shop
pipelines:
  - slug: live
    sources: [orders]
    destination: live_orders
    transformations: [add]
  - slug: daily
    sources: [orders]
    transformations: [whole]
  - slug: broken
    transformations: []
  - slug: quiet
    transformations: [add]
"""

WHOLE = "def run(df):\n    return df\n"

ADD = '''
import pandas as pd

def run(df, stream=None):
    """Append the item."""
    return pd.concat([df, pd.DataFrame([stream])], ignore_index=True)
'''


def make_project(folder: Path) -> Path:
    """A project with two pipelines that take items, one that doesn't, and one that can't run."""
    for slug, name, text in (
        ("live", "add", ADD),
        ("quiet", "add", ADD),
        ("daily", "whole", WHOLE),
    ):
        file = folder / "pipelines" / slug / f"{name}.py"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    (folder / "project.yml").write_text(YML)
    (folder / "sources").mkdir()
    (folder / "sources" / "orders.csv").write_text("id,text\n1,first\n")
    return folder


class Client:
    """A client of an application that listens on a port, with the token of pipeline `live`."""

    def __init__(self, store: Store, root: Path, **limits: Any) -> None:
        self.store, self.said = store, []
        self.app = make_app(
            store, read_project(root), limits=Limits(**limits), say=self.said.append
        )
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._server = make_server(self.app, Limits(**limits), log_level="critical")
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))
        base = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.http = httpx.Client(base_url=base, timeout=30, trust_env=False)

    def __enter__(self) -> "Client":
        self._thread.start()
        wait_until(lambda: self._server.started or not self._thread.is_alive())
        self.token = new_token(self.store, "live")
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self._server.should_exit = True
        self._thread.join(20)
        self._socket.close()
        assert not self._thread.is_alive()

    def post(self, body: Any, *, slug: str = "live", **headers: str) -> Any:
        """Post items; bytes and text are JSON already."""
        content = body if isinstance(body, bytes | str) else json.dumps(body)
        given = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        return self.http.post(f"/stream/{slug}", content=content, headers=given)

    def get(self, path: str) -> Any:
        return self.http.get(path, headers={"Authorization": f"Bearer {self.token}"})

    def refused(self, body: Any, code: int, **how: Any) -> str:
        """Return the line by which a post is refused."""
        answer = self.post(body, **how)
        assert answer.status_code == code, answer.text
        told = answer.json()
        assert list(told) == ["error"]
        assert "\n" not in told["error"]
        assert "Traceback" not in answer.text
        return told["error"]

    def kept(self) -> dict[str, str]:
        ids = [row[0] for row in sql(self.store, "select dataid from streamitem")]
        return payloads(self.store, "live", ids)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_project(tmp_path / "shop")


@pytest.fixture
def client(store: Store, root: Path) -> Iterator[Client]:
    with Client(store, root) as made:
        yield made


@pytest.fixture
def lite(sqlite_url: str, root: Path) -> Iterator[Callable[..., Client]]:
    """Creates clients on SQLite alone, with their own limits."""
    store = open_store(sqlite_url)
    store.init()
    opened: list[Client] = []

    def make(**limits: Any) -> Client:
        opened.append(Client(store, root, **limits).__enter__())
        return opened[-1]

    yield make
    for each in opened:
        each.__exit__(None, None, None)
    close(store)


# --- items ---


def test_an_item_is_acknowledged_once_it_is_durable(client: Client) -> None:
    answer = client.post({"id": 2, "text": "two"})
    assert answer.status_code == 202
    told = answer.json()
    assert told["status"] == f"/status/live/{told['dataid']}"
    assert str(told["generation"]) == told["dataid"]
    assert client.kept() == {told["dataid"]: '{"id": 2, "text": "two"}'}
    assert statuses(client.store)["live_orders", "live", told["dataid"]] == ("OUT", "PENDING")
    check(client.store)


def test_each_element_of_an_array_is_an_item_in_order(client: Client) -> None:
    answer = client.post([{"id": each} for each in range(20)])
    assert answer.status_code == 202
    told = answer.json()["items"]
    ids = [each["dataid"] for each in told]
    assert sorted(ids, key=int) == ids
    kept = client.kept()
    assert [json.loads(kept[each]) for each in ids] == [{"id": each} for each in range(20)]


def test_a_status_needs_the_token(client: Client) -> None:
    address = client.post({"id": 2}).json()["status"]
    told = client.get(address).json()
    assert (told["status"], told["jobid"], told["reason"]) == ("PENDING", "live", None)
    for moment in (told["received"], told["modified"]):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d", moment)
    assert client.http.get(address).status_code == 401
    for unknown in ("1000000000", "nothing", "%00", "9" * 400, "-1", "１"):
        answer = client.get(f"/status/live/{unknown}")
        assert (answer.status_code, list(answer.json())) == (404, ["error"]), unknown


def test_a_sender_sees_no_path_and_no_error_text(lite: Callable[..., Client], root: Path) -> None:
    (root / "pipelines/quiet/add.py").write_text("run = eval('lambda df: df')\n")
    (root / "project.yml").write_text(YML.replace("transformations: []", f"sources: {root}"))
    client = lite()
    store, secret = client.store, f"KeyError: 'x' ({root}/pipelines/live/add.py:7)"
    ids = [
        each["dataid"] for each in client.post([{"id": each} for each in range(5)]).json()["items"]
    ]
    good, bad, full, held = store.claim("live", owner="w", k=4)
    store.finish(good, [Fact("live_orders", good.dataid, f"{root}/output/live.csv", rows=1)])
    record(store, [Step("live", bad.dataid, bad.generation, 1, "add", "FAILED", reason=secret)])
    for claim in (bad, full):
        store.fail(claim, f"add: {secret}")
    interrupt(store, held, Stop(f"{root} is full", hold=True))
    answers = [client.get(f"/status/live/{each}") for each in ids]
    shown = [
        (each["dataid"], each["status"], each["reason"], each["transformation"], each["rows"])
        for each in (answer.json() for answer in answers)
    ]
    assert shown == [
        (ids[0], "READY", None, None, 1),
        (ids[1], "FAILED", "transformation failed", "add", None),
        (ids[2], "FAILED", "result can't be kept", None, None),
        (ids[3], "HOLD", "held by the operator", None, None),
        (ids[4], "PENDING", None, None, None),
    ]
    described = client.http.get("/openapi.json").json()["paths"]["/status/{slug}/{dataid}"]["get"]
    schema = described["responses"]["200"]["content"]["application/json"]["schema"]
    assert all(answer.json().keys() == schema["properties"].keys() for answer in answers)
    answers += [client.post({}, slug=slug) for slug in ("quiet", "broken", "daily", "nothing")]
    assert {answer.status_code for answer in answers[5:]} == {404}
    answers += [client.http.get(path) for path in ("/health", "/docs", "/openapi.json", "/metrics")]
    for answer in answers:
        for told in (str(root), "KeyError", "add.py", "project.yml"):
            assert told not in answer.text, answer.text


def test_a_folded_item_is_gone(client: Client) -> None:
    told = client.post({"id": 2}).json()
    store = client.store
    store.finish(store.claim("live", owner="w"))
    for table, column in (("streamitem", "received"), ("chunkfact", "at")):
        sql(store, f"update {table} set {column} = '2026-01-01 00:00:00'")
    assert client.get(told["status"]).json()["status"] == "READY"
    assert fold_items(store) == 1
    answer = client.get(told["status"])
    assert answer.status_code == 410
    assert answer.json()["error"].startswith(
        f"Item {told['dataid']} was folded with others: 1 item of 'live' from "
    )
    assert client.get(f"/status/live/{int(told['dataid']) + 9}").status_code == 404


@pytest.mark.parametrize(
    "text",
    [
        '{"a": "\\"; drop table streamitem; --", "b": "it\'s\\n\\r\\ttwo \\u2028 lines"}',
        '{"code": "__import__(\\"os\\").system(\\"false\\") #\\n%s {0} ${HOME}"}',
        '{"ünï": "日本語 🙂", "nul": "\\u0000", "half": "\\ud800", "pair": "\\ud83d\\ude42"}',
        '{"n": 1.10, "big": 123456789012345678901234567890, "e": 1E-400, "z": -0.0, "f": 1e2}',
        '{ "spaces" :\t[ 1,\n 2 ] ,"": {"": null}}',
    ],
)
def test_an_item_is_kept_as_it_came(lite: Callable[..., Client], text: str) -> None:
    client = lite()
    one = client.post(f" {text}\n").json()["dataid"]
    [_, other] = client.post(f'[{{"a": 1}}, {text} ]').json()["items"]
    kept = client.kept()
    assert kept[one] == kept[other["dataid"]]
    assert kept[one].isascii()
    assert json.loads(kept[one]) == json.loads(text)
    if text.isascii():
        assert kept[one] == text


def test_a_repeated_post_is_answered_as_before(client: Client) -> None:
    first = client.post([{"id": 1}, {"id": 2}], Idempotency_Key="order 7")
    again = client.post([{"id": 1}, {"id": 2}], Idempotency_Key="order 7")
    assert first.status_code == again.status_code == 202
    assert first.json() == again.json()
    assert len(client.kept()) == 2
    assert "Idempotency-Key" in client.refused([{"id": 3}], 422, Idempotency_Key="order 7")
    assert client.post({"id": 3}, Idempotency_Key="order 8").status_code == 202
    assert len(client.kept()) == 3


def test_a_repeated_post_must_be_equal_byte_for_byte(client: Client) -> None:
    first = client.post('[{"id": 1},{"id": 2}]', Idempotency_Key="k")
    assert first.status_code == 202
    between = client.post(' [ {"id": 1} , {"id": 2} ]', Idempotency_Key="k")
    assert between.json() == first.json()
    assert "for other items" in client.refused('[{"id":1},{"id":2}]', 422, Idempotency_Key="k")
    told = client.http.get("/openapi.json").json()["paths"]["/stream/{slug}"]["post"]["parameters"]
    assert "byte for byte" in told[1]["description"]
    assert "byte for byte" in client.http.get("/docs").text


def test_invalid_http_gets_a_plain_answer(lite: Callable[..., Client]) -> None:
    client = lite()
    with socket.create_connection(("127.0.0.1", client.http.base_url.port or 0)) as raw:
        raw.sendall(b"P(ST /stream/live HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b"".join(iter(lambda: raw.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.endswith(b"Invalid HTTP request received.")


def test_posts_at_once_share_a_transaction_and_lose_nothing(client: Client) -> None:
    calls = count_calls(client.store)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda each: client.post({"id": each}), range(200)))
    made = {each.json()["dataid"] for each in answers}
    assert len(made) == 200
    kept = {json.loads(text)["id"] for text in client.kept().values()}
    assert kept == set(range(200))
    assert len(calls) < 200
    check(client.store)


def test_of_posts_at_once_with_one_key_one_counts(client: Client) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: client.post({"id": 1}, Idempotency_Key="k"), range(24)))
    assert {each.json()["dataid"] for each in answers} == set(client.kept())
    assert len(client.kept()) == 1


def count_calls(store: Store) -> list[int]:
    """The transactions that store items, from now on."""
    calls: list[int] = []
    real = store.db.transaction

    def counted(**signed: Any) -> Any:
        if signed.get("act") == "accept":
            calls.append(1)
        return real(**signed)

    store.db.transaction = counted  # type: ignore[method-assign]
    return calls


# --- refusals ---


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (b"", "The body isn't valid JSON: Expecting value at line 1, column 1."),
        (b"{", "The body isn't valid JSON: "),
        (b'{"a": 1} x', "The body isn't valid JSON: Extra data at line 1, column 10."),
        (b'{"a": 1}{"a": 2}', "The body isn't valid JSON: Extra data"),
        (b'[{"a": 1} {"a": 2}]', "The body isn't valid JSON: Expecting ','"),
        (b'[{"a": 1},]', "The body isn't valid JSON: "),
        (b'[{"a": 1}', "The body isn't valid JSON: "),
        (b'{"a": NaN}', "The body isn't valid JSON: NaN isn't a JSON number."),
        (b'{"a": [-Infinity]}', "The body isn't valid JSON: -Infinity isn't a JSON number."),
        (b'{"a": 1e999}', "The number 1e999 is too large."),
        (b'{"a": ' + b"9" * 5000 + b"}", "A number in the body has too many digits."),
        (b'{"a": 1, "a": 2}', "The name 'a' is repeated in an object."),
        (b'{"a": {"b\\u0000": 1, "b\\u0000": 2}}', "The name 'b\\x00' is repeated"),
        (b'{"a": "\xff"}', "The body isn't UTF-8: byte 8 is wrong."),
        (b'{"a": "\xed\xa0\x80"}', "The body isn't UTF-8"),
        (b'{"a": "line\nbreak"}', "The body isn't valid JSON: Invalid control character"),
        (b"[]", "The array has no items."),
        (b"7", "An item must be a JSON object, not a number."),
        (b"null", "An item must be a JSON object, not null."),
        (b'"text"', "An item must be a JSON object, not a string."),
        (b'[{"a": 1}, [2]]', "An item must be a JSON object, not an array."),
        (b'[{"a": 1}, true]', "An item must be a JSON object, not a boolean."),
        (b"[" * 100_000, "The item is nested more than 64 levels deep."),
        (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "The item is nested more than 64 levels deep."),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "The item is nested more than 64 levels deep."),
        (b"[" + b'{"a": 1},' * 1000 + b'{"a": 1}]', "The array has more than 1000 items."),
    ],
)
def test_invalid_items_are_refused_in_one_line(
    lite: Callable[..., Client], body: bytes, line: str
) -> None:
    client = lite()
    assert client.refused(body, 422).startswith(line)
    assert client.kept() == {}


def test_items_at_the_limits_are_accepted(lite: Callable[..., Client]) -> None:
    client = lite()
    assert client.post(b'{"a":' * 64 + b"1" + b"}" * 64).status_code == 202
    assert client.post([{"a": each} for each in range(1000)]).status_code == 202
    whole = b'{"a": "' + b"x" * (1024 * 1024 - 9) + b'"}'
    assert client.post(whole).status_code == 202
    assert "1048576 bytes" in client.refused(whole + b" ", 413)
    assert client.post(b"\xef\xbb\xbf{}").status_code == 202


def test_a_chunked_body_is_measured_as_it_comes(lite: Callable[..., Client]) -> None:
    client = lite(body=1000)
    sent: list[int] = []

    def parts(count: int) -> Iterator[bytes]:
        yield b'{"a": "'
        for each in range(count):
            sent.append(each)
            yield b"x" * 100
        yield b'"}'

    assert client.post(b"".join(parts(9))).status_code == 202
    headers = {"Authorization": f"Bearer {client.token}", "Content-Type": "application/json"}
    answer = client.http.post("/stream/live", content=parts(20), headers=headers)
    assert answer.status_code == 413


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Type": "application/json; charset=latin-1"}, 415),
        ({"Content_Type": "application/jsonx"}, 415),
        ({"Content_Type": "Application/JSON; charset=UTF-8"}, 202),
        ({"Content_Type": "application/cloudevents+json"}, 202),
        ({"Content_Encoding": "gzip"}, 415),
        ({"Idempotency_Key": "k" * 200}, 202),
        ({"Idempotency_Key": "k" * 201}, 422),
        ({"Idempotency_Key": ""}, 422),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Basic eDp5"}, 401),
        ({"Authorization": ""}, 401),
    ],
)
def test_headers_are_checked(
    lite: Callable[..., Client], headers: dict[str, str], code: int
) -> None:
    client = lite()
    answer = client.post({"a": 1}, **headers)
    assert answer.status_code == code, answer.text
    if code == 401:
        assert answer.headers["www-authenticate"].startswith("Bearer")
    assert (len(client.kept()) == 1) == (code == 202)


def test_a_pipeline_takes_nothing_until_it_has_a_token(client: Client) -> None:
    assert client.refused({"a": 1}, 403, slug="quiet").endswith("Run: odf token quiet")
    token = client.token
    assert "no such pipeline" in client.refused({"a": 1}, 404, slug="nothing")
    assert "see `odf token daily`" in client.refused({"a": 1}, 404, slug="daily")
    assert "see `odf validate`" in client.refused({"a": 1}, 404, slug="broken")
    new_token(client.store, "quiet")
    client.refused({"a": 1}, 401, slug="quiet")
    assert client.post({"a": 1}).status_code == 202
    renewed = new_token(client.store, "live")
    wait_until(lambda: client.post({"a": 1}).status_code == 401)
    client.token = renewed
    assert client.post({"a": 1}).status_code == 202
    drop_token(client.store, "live")
    wait_until(lambda: client.post({"a": 1}).status_code == 403)
    assert token != renewed


def wait_until(happened: Callable[[], bool], seconds: float = 60.0) -> None:
    over = threading.Event()
    for _ in range(int(seconds * 20)):
        if happened():
            return
        over.wait(0.05)
    raise AssertionError("it didn't happen")


def test_posts_over_the_rate_get_a_retry_after(lite: Callable[..., Client]) -> None:
    client = lite(rate=5)
    assert client.post([{"a": each} for each in range(8)]).status_code == 202
    answer = client.post({"a": 9})
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert client.post({"a": 9}, slug="daily").status_code == 404


def test_a_bucket_refills_and_holds_a_second() -> None:
    now = [0.0]
    rates = Rates(10, lambda: now[0])
    assert [rates.take("a", 1) for _ in range(10)] == [0.0] * 10
    assert 0 < rates.take("a", 1) <= 0.1
    assert rates.take("b", 1000) == 0.0
    now[0] = 98.0
    assert 1 < rates.take("b", 1) < 2
    assert [rates.take("a", 1) for _ in range(11)][-1] > 0
    slow = Rates(0.1, lambda: now[0])
    assert slow.take("a", 1) == 0.0
    assert 9 < slow.take("a", 1) <= 11
    now[0] += 10.1
    assert slow.take("a", 1) == 0.0


def test_unknown_addresses_and_methods_are_refused(client: Client) -> None:
    for path, method, code in (
        ("/", "GET", 404),
        ("/stream/live/", "POST", 404),
        ("/stream/live", "GET", 405),
        ("/stream/live", "DELETE", 405),
        ("/health", "POST", 405),
        ("/stream/%00", "POST", 404),
        ("/stream/a%2Fb", "POST", 404),
        ("/stream/%ff%fe", "POST", 404),
    ):
        answer = client.http.request(method, path)
        assert (answer.status_code, list(answer.json())) == (code, ["error"]), path
        if code == 405:
            assert "allow" in answer.headers


# --- about the server ---


def test_health_and_metrics_report_the_state(client: Client) -> None:
    assert client.http.get("/health").json() == {"status": "ok", "database": True, "worker": "off"}
    client.post([{"a": 1}, {"a": 2}])
    client.post({"a": 1}, Idempotency_Key="k")
    client.post({"a": 1}, Idempotency_Key="k")
    client.post(b"no")
    answer = client.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.text.replace(".0\n", "\n").splitlines()  # Prometheus' numbers are floats
    for line in (
        'odf_http_responses_total{code="202"} 3',
        'odf_http_responses_total{code="422"} 1',
        'odf_items_accepted_total{pipeline="live"} 3',
        'odf_items_repeated_total{pipeline="live"} 1',
        'odf_items_waiting{pipeline="live"} 3',
        'odf_items_failed{pipeline="live"} 0',
        "odf_acknowledge_seconds_count 3",
        "odf_database_up 1",
        "odf_worker_up 0",
        "# TYPE odf_acknowledge_seconds histogram",
    ):
        assert line in lines, answer.text


def test_an_error_of_our_own_is_counted(
    lite: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = lite()

    def broken(*_: Any) -> Any:
        raise RuntimeError("no good")

    monkeypatch.setattr("opendataflow_dagster.server.app.openapi", broken)
    answer = client.http.get("/openapi.json")
    assert answer.status_code == 500
    assert answer.json() == {
        "error": "The server failed with an internal error; its log has the details."
    }
    assert answer.headers["connection"] == "close"
    assert 'odf_http_responses_total{code="500"} 1' in client.http.get("/metrics").text


def test_a_lost_commit_answer_is_reported_as_unknown(
    lite: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = lite()

    def lost(store: Store, posts: Any) -> Any:
        accept(store, posts)
        raise sqlite3.OperationalError("the connection is lost")

    monkeypatch.setattr("opendataflow_dagster.server.commit_queue.accept", lost)
    told = client.refused({"a": 1}, 503, Idempotency_Key="k")
    assert "isn't known" in told
    assert "Idempotency-Key" in told
    assert "nothing was accepted" not in told
    monkeypatch.undo()
    answer = client.post({"a": 1}, Idempotency_Key="k")
    assert answer.status_code == 202
    assert client.kept() == {answer.json()["dataid"]: '{"a": 1}'}


def test_slow_queries_run_less_often() -> None:
    now, asked = [0.0], []

    def ask() -> int:
        now[0] += 0.06
        asked.append(now[0])
        return len(asked)

    sparing = CostlyQuery(ask, lambda: now[0])
    assert [sparing() for _ in range(5)] == [1] * 5
    now[0] += 1.19
    assert sparing() == 1
    now[0] += 0.02
    assert sparing() == 2


def test_the_page_needs_nothing_from_outside(client: Client) -> None:
    answer = client.http.get("/docs")
    assert answer.status_code == 200
    assert "/stream/live" in answer.text
    assert "src=" not in answer.text
    assert "http" not in answer.text.replace(str(client.http.base_url), "")


def test_every_endpoint_is_documented(lite: Callable[..., Client]) -> None:
    client = lite()
    document = client.http.get("/openapi.json").json()
    page = client.http.get("/docs").text
    for route in client.app._app.routes:
        [operation] = document["paths"][route.path].values()
        assert operation["summary"] in page


def test_a_project_may_be_edited_while_it_is_served(client: Client, root: Path) -> None:
    yml = (root / "project.yml").read_text()
    (root / "project.yml").write_text("pipelines: 7\n")
    wait_until(lambda: bool(client.said))
    assert "The project stays unchanged" in client.said[0]
    assert client.post({"a": 1}).status_code == 202
    (root / "project.yml").write_text(yml + "  - {slug: more, transformations: [add]}\n")
    (root / "pipelines" / "more").mkdir()
    (root / "pipelines" / "more" / "add.py").write_text(ADD)
    wait_until(lambda: client.post({"a": 1}, slug="more").status_code == 403)


def test_without_its_database_it_says_so_and_comes_back(
    postgres_url: str, postgres_server: Server, root: Path
) -> None:
    store = open_store(postgres_url)
    store.init()
    with Client(store, root, patience=0.5) as client:
        assert client.post({"a": 1}).status_code == 202
        postgres_server.stop("immediate")
        answers = [client.post({"a": 2}), client.get("/status/live/1"), client.http.get("/health")]
        assert [each.status_code for each in answers] == [503, 503, 503]
        assert all("retry-after" in each.headers for each in answers)
        assert "error" in answers[0].json()
        assert "odf_database_up 0" in client.http.get("/metrics").text
        postgres_server.start()
        wait_until(lambda: client.http.get("/health").status_code == 200)
        wait_until(lambda: client.post({"a": 3}, Idempotency_Key="3").status_code == 202)
        kept = [json.loads(each)["a"] for each in client.kept().values()]
        assert sorted(set(kept)) in ([1, 3], [1, 2, 3])
    close(store)
