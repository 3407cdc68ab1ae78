"""What a client can do on a connection: send anything, but not keep the server waiting."""

import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from opendataflow_dagster.server.request import DRAIN_FACTOR
from tests.server.test_app import Client, lite, root, wait_until

__all__ = ["lite", "root"]

Clients = Callable[..., Client]

SOON = 15
"""Seconds: more than a busy machine takes, less than the server's own limit of 30 s."""


@contextmanager
def connected(client: Client) -> Iterator[socket.socket]:
    address = ("127.0.0.1", client.http.base_url.port or 0)
    with socket.create_connection(address, timeout=20) as raw:
        yield raw


def head(client: Client, *lines: str, path: str = "/stream/live") -> bytes:
    """Return the head of a post with the pipeline's token."""
    told = [
        f"POST {path} HTTP/1.1",
        "Host: here",
        f"Authorization: Bearer {client.token}",
        "Content-Type: application/json",
        *lines,
        "",
        "",
    ]
    return "\r\n".join(told).encode()


def answer(raw: socket.socket) -> tuple[int, str]:
    """The status and the body of the next answer."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += raw.recv(65536) or pytest.fail(f"closed after {data!r}")
    lines, _, body = data.partition(b"\r\n\r\n")
    for line in lines.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            while len(body) < int(line.split(b":")[1]):
                body += raw.recv(65536)
    return int(lines.split()[1]), body.decode()


def closed_while_sending(raw: socket.socket, parts: Iterable[bytes], pause: float) -> bool:
    """Whether the server ends the connection before everything is sent."""
    try:
        for part in parts:
            raw.sendall(part)
            time.sleep(pause)
    except OSError:
        return True
    return False


def seconds_until_closed(raw: socket.socket, began: float) -> float:
    try:
        while raw.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return time.monotonic() - began


def test_an_offer_of_another_protocol_loses_no_body(lite: Clients) -> None:
    client = lite()
    body = b'{"id": 1}'
    offer = [
        "Connection: Upgrade, HTTP2-Settings",
        "Upgrade: h2c",
        "HTTP2-Settings: AAMAAABk",
        f"Content-Length: {len(body)}",
    ]
    with connected(client) as raw:
        raw.sendall(head(client, *offer) + body)
        assert answer(raw)[0] == 202
        raw.sendall(head(client, *offer))
        time.sleep(0.1)
        raw.sendall(body)
        assert answer(raw)[0] == 202
    assert list(client.kept().values()) == ['{"id": 1}'] * 2


@pytest.mark.parametrize("sent", [b"", b"POST /stream/live HTTP/1.1\r\nHost: h"])
def test_a_request_that_does_not_begin_is_not_waited_for(lite: Clients, sent: bytes) -> None:
    client = lite(head=0.5)
    began = time.monotonic()
    with connected(client) as raw:
        raw.sendall(sent)
        assert 0.2 < seconds_until_closed(raw, began) < SOON
    began = time.monotonic()
    with connected(client) as raw:  # nor is the second one of a connection
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n")
        assert answer(raw)[0] == 200
        raw.sendall(sent or b"G")
        assert 0.2 < seconds_until_closed(raw, began) < SOON


def test_a_request_that_trickles_in_is_closed(lite: Clients) -> None:
    client = lite(head=0.5)
    letters = [bytes([each]) for each in head(client, *["X: y"] * 100)]
    with connected(client) as raw:
        assert closed_while_sending(raw, letters, 0.05)


def test_a_body_may_take_longer_than_its_head(lite: Clients) -> None:
    client = lite(head=2)
    with connected(client) as raw:
        raw.sendall(head(client, "Content-Length: 9"))
        time.sleep(2.5)
        raw.sendall(b'{"id": 1}')
        assert answer(raw)[0] == 202


@pytest.mark.parametrize(
    ("path", "lines", "code"),
    [
        ("/stream/live", ["Authorization: Bearer wrong"], 401),
        ("/stream/quiet", [], 403),
        ("/stream/nothing", [], 404),
        ("/health", [], 405),
        ("/stream/live", ["Content-Encoding: gzip"], 415),
        ("/stream/live", ["Idempotency-Key: a", "Idempotency-Key: b"], 422),
    ],
)
def test_a_refused_client_cannot_keep_sending(
    lite: Clients, path: str, lines: list[str], code: int
) -> None:
    client = lite(body=10_000, upload=30)
    begun = head(client, "Transfer-Encoding: chunked", *lines, path=path)
    if code == 401:
        begun = begun.replace(client.token.encode(), b"wrong", 1).replace(
            b"Authorization: Bearer wrong\r\n", b"", 1
        )
    chunk = b"3e8\r\n" + b"x" * 1000 + b"\r\n"
    with connected(client) as raw:
        raw.sendall(begun + chunk)
        assert answer(raw)[0] == code
        assert closed_while_sending(raw, [chunk] * 50_000, 0)
    # What comes to its end is read, and the connection serves on.
    with connected(client) as raw:
        raw.sendall(begun + chunk)
        assert answer(raw)[0] == code
        raw.sendall(chunk * (DRAIN_FACTOR - 1) + b"0\r\n\r\n")
        raw.sendall(head(client, "Content-Length: 2") + b"{}")
        assert answer(raw)[0] == 202


@pytest.mark.parametrize("path", ["/stream/nothing", "/stream/live"])
def test_an_invalid_body_closes_the_connection_without_an_error(
    lite: Clients, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = lite()
    with connected(client) as raw:
        raw.sendall(head(client, "Transfer-Encoding: chunked", path=path))
        if path == "/stream/nothing":
            assert answer(raw)[0] == 404
        raw.sendall(b"no number\r\n")
        assert seconds_until_closed(raw, time.monotonic()) < SOON
    assert client.http.get("/health").status_code == 200
    assert [each.getMessage() for each in caplog.records if each.name == "asyncio"] == []


def test_a_refused_client_cannot_hold_a_connection_by_sending_slowly(lite: Clients) -> None:
    client = lite(upload=0.5)
    with connected(client) as raw:
        raw.sendall(head(client, "Transfer-Encoding: chunked", path="/stream/nothing"))
        assert answer(raw)[0] == 404
        assert closed_while_sending(raw, [b"1\r\nx\r\n"] * 100, 0.05)


def test_a_connection_over_the_limit_gets_503(lite: Clients) -> None:
    client = lite(connections=3, head=20.0)
    client.http.close()
    with connected(client) as first, connected(client) as second, connected(client) as third:
        for raw in (first, second, third):  # none of these is waited for: a body comes
            raw.sendall(head(client, "Content-Length: 2"))
        wait_until(lambda: busy(client) == 3)
        with connected(client) as raw:
            code, text = answer(raw)
            assert (code, list(json.loads(text))) == (503, ["error"])
            assert seconds_until_closed(raw, time.monotonic()) < SOON
        first.sendall(b"{}")
        assert answer(first)[0] == 202
    with connected(client) as raw:
        raw.sendall(head(client, "Content-Length: 2") + b"{}")
        assert answer(raw)[0] == 202


def posted(client: Client) -> int:
    with connected(client) as raw:
        raw.sendall(head(client, "Content-Length: 2") + b"{}")
        return answer(raw)[0]


def busy(client: Client) -> int:
    """How many connections the server needs at least."""
    return len(client._server.server_state.tasks)


SLOW = {
    "nothing": b"",
    "half a head": b"POST /stream/live HTTP/1.1\r\nHost: h",
    "no body": b"POST /stream/live HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n",
    "no other request": b"GET /docs HTTP/1.1\r\nHost: h\r\n\r\n",
    "unread answers": b"GET /openapi.json HTTP/1.1\r\nHost: h\r\n\r\n" * 500,
}


@pytest.mark.parametrize("sent", SLOW.values(), ids=SLOW)
def test_slow_clients_do_not_block_others(lite: Clients, sent: bytes) -> None:
    client = lite(connections=3, head=60.0, upload=60.0)
    client.http.close()
    with ExitStack() as stack:
        uploading = stack.enter_context(connected(client))
        uploading.sendall(head(client, "Content-Length: 2"))
        wait_until(lambda: busy(client) == 1)
        for _ in range(8):
            slow = stack.enter_context(socket.socket())
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(("127.0.0.1", client.http.base_url.port or 0))
            with suppress(OSError):
                slow.sendall(sent)
        wait_until(lambda: posted(client) == 202, SOON)  # they are at work for a moment
        assert [posted(client) for _ in range(3)] == [202] * 3
        uploading.sendall(b"{}")
        assert answer(uploading)[0] == 202


@pytest.mark.parametrize("body", [b'{"a": 1}', b'8\r\n{"a": 1}\r\n0\r\n\r\n'])
def test_a_body_of_two_lengths_is_answered_with_400(lite: Clients, body: bytes) -> None:
    client = lite()
    lengths = [f"Content-Length: {len(body)}", "Transfer-Encoding: chunked"]
    for lines in (lengths, lengths[::-1]):
        with connected(client) as raw:
            raw.sendall(head(client, *lines) + body)
            told = b"".join(iter(lambda: raw.recv(65536), b""))
        assert told.startswith(b"HTTP/1.1 400 "), told
        assert told.count(b"HTTP/1.1") == 1
    assert client.kept() == {}
