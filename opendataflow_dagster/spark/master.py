"""The servers that a master or a remote names, and whether they are there."""

import os
import re
import socket
import time
from collections.abc import Mapping

USUAL = {"sc": 15002, "spark": 7077}
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")


def public(address: str) -> str:
    """An address without its parameters, among which a token may be."""
    return re.split(r"(?<![/:])/|;", address)[0]


def listens(
    address: str, environ: Mapping[str, str] = os.environ, *, patience: float = 0.0
) -> bool:
    """Whether one of the servers of an address takes connections; True of an address without.

    A server that is just starting is waited for.
    """
    found = re.match(r"(sc|spark)://(.+)", public(address))
    if found is None or (found[1] == "sc" and any(environ.get(each) for each in PROXIES)):
        return True  # what a proxy reaches can't be known from here
    ends = time.monotonic() + patience
    while True:
        for each in found[2].split(","):
            host, _, port = each.rpartition(":") if re.search(r":\d+$", each) else (each, "", "")
            if _answers(host.strip("[]"), int(port or USUAL[found[1]])):
                return True
        if time.monotonic() >= ends:
            return False
        time.sleep(0.5)


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=3).close()
    except OSError:
        return False
    return True
