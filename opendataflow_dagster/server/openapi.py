"""What tells how to send items: an OpenAPI document for programs, and a page for people."""

from collections.abc import Collection
from html import escape
from shlex import quote as shell
from typing import Any
from urllib.parse import quote

from .. import __version__
from .limits import Limits
from .responses import REASONS

ERRORS = {
    "401": "The token is missing or wrong.",
    "403": "The pipeline has no token, so it takes no items.",
    "404": "There is no such pipeline here, or it takes no items.",
    "405": "The address has another method.",
    "408": "The body didn't arrive in time.",
    "410": "The item was folded: it was READY, and has no row of its own any more.",
    "413": "The body is too large.",
    "415": "The body isn't JSON by its Content-Type, or it is compressed.",
    "422": "The body isn't valid JSON, or not an item, or its Idempotency-Key can't be taken.",
    "429": "The pipeline takes no more items in this second.",
    "503": "The database doesn't answer. If the line says that it isn't known whether a post was "
    "accepted, send it again with its Idempotency-Key.",
}
LATER = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}
CHALLENGE = {"WWW-Authenticate": {"schema": {"type": "string"}}}


def openapi(name: str, slugs: Collection[str], limits: Limits) -> dict[str, Any]:
    """The OpenAPI document of a project whose pipelines `slugs` take items."""
    pipeline = {
        "name": "slug",
        "in": "path",
        "required": True,
        "description": "The pipeline.",
        "schema": {"type": "string", "enum": sorted(slugs)} if slugs else {"type": "string"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": f"Items of {name}", "version": __version__},
        "paths": {
            "/stream/{slug}": {"post": _post(pipeline, limits)},
            "/status/{slug}/{dataid}": {"get": _status(pipeline)},
            "/health": {"get": _health()},
            "/metrics": {
                "get": {
                    "summary": "Numbers for Prometheus",
                    "responses": {
                        "200": {
                            "description": "Prometheus' text format.",
                            "content": {"text/plain": {"schema": {"type": "string"}}},
                        }
                    },
                }
            },
        },
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {
                "Item": {"type": "object"},
                "Accepted": _object(
                    {
                        "dataid": {"type": "string"},
                        "generation": {"type": "integer"},
                        "status": {"type": "string", "description": "Where its status is."},
                    }
                ),
                "Error": _object({"error": {"type": "string"}}),
            },
        },
    }


def _post(pipeline: dict[str, Any], limits: Limits) -> dict[str, Any]:
    item = {"$ref": "#/components/schemas/Item"}
    accepted = {"$ref": "#/components/schemas/Accepted"}
    key = {
        "name": "Idempotency-Key",
        "in": "header",
        "required": False,
        "description": "A post that is repeated byte for byte with its key is answered as before.",
        "schema": {
            "type": "string",
            "minLength": 1,
            "maxLength": limits.key,
            "pattern": "^[!-~]+$",
        },
    }
    array = {"type": "array", "items": item, "minItems": 1, "maxItems": limits.items}
    answer = {"anyOf": [accepted, _object({"items": {"type": "array", "items": accepted}})]}
    return {
        "summary": "Send one item, or several",
        "description": "An item is durable when it is acknowledged.",
        "security": [{"token": []}],
        "parameters": [pipeline, key],
        "requestBody": {"required": True, "content": _json({"anyOf": [item, array]})},
        "responses": {"202": {"description": "Durable.", "content": _json(answer)}} | _errors(),
    }


def _status(pipeline: dict[str, Any]) -> dict[str, Any]:
    text = {"type": ["string", "null"]}
    known = {
        "jobid": {"type": "string"},
        "dataid": {"type": "string"},
        "status": {"type": "string"},
        "generation": {"type": ["integer", "null"]},
        "received": text,
        "modified": text,
        "rows": {"type": ["integer", "null"]},
        "reason": {"enum": [*REASONS, None]},
        "transformation": text,
    }
    dataid = {"name": "dataid", "in": "path", "required": True, "schema": {"type": "string"}}
    told = {"200": {"description": "Its status.", "content": _json(_object(known))}}
    return {
        "summary": "How an item stands",
        "security": [{"token": []}],
        "parameters": [pipeline, dataid],
        "responses": told | _errors("401", "403", "404", "405", "410", "503"),
    }


def _health() -> dict[str, Any]:
    schema = _object(
        {
            "status": {"type": "string"},
            "database": {"type": "boolean"},
            "worker": {"type": "string"},
        }
    )
    schema["properties"]["refused"] = {
        "type": "string",
        "description": "The project's files, as they are now, aren't served: the last good ones "
        "are. The log tells why. Absent if they are.",
    }
    schema["properties"]["full"] = {
        "type": "array",
        "items": {"type": "string"},
        "description": "Which disks are full. Absent if none is.",
    }
    return {
        "summary": "Whether items can be taken",
        "responses": {
            "200": {"description": "They can.", "content": _json(schema)},
            "503": {
                "description": "The database doesn't answer, or its disk is full.",
                "content": _json(schema),
                "headers": LATER,
            },
        },
    }


def _errors(*codes: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for code in codes or tuple(ERRORS):
        found[code] = {
            "description": ERRORS[code],
            "content": _json({"$ref": "#/components/schemas/Error"}),
        }
        if code in ("429", "503"):
            found[code]["headers"] = LATER
        if code == "401":
            found[code]["headers"] = CHALLENGE
    return found


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def page(name: str, slugs: Collection[str], base: str) -> str:
    """The page for people; it needs nothing from outside."""
    parts = [_PIPELINE.format(slug=escape(slug), line=escape(_line(base, slug))) for slug in slugs]
    none = "<p>No pipeline of this project has a parameter <code>stream</code>.</p>"
    return _PAGE.format(name=escape(name), pipelines="".join(parts) or none)


def _line(base: str, slug: str) -> str:
    address = shell(f"{base}stream/{quote(slug, safe='')}")
    return (
        f'curl {address} -H "Authorization: Bearer $TOKEN" '
        "-H 'Content-Type: application/json' -d '{\"name\": \"value\"}'"
    )


_PIPELINE = "<h2>{slug}</h2><pre>{line}</pre>"

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Items of {name}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>body{{font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem}}
pre{{background:#8882;padding:.8rem;overflow:auto}}
td,th{{padding:.2rem .8rem .2rem 0;text-align:left}}
:root{{color-scheme:light dark}}</style></head><body>
<h1>Items of {name}</h1>
<p>Send a JSON object, or an array of objects, to a pipeline. The answer 202 has each item's
<code>dataid</code> and the address of its status: the item is durable then.
A pipeline takes items once it has a token: <code>odf token PIPELINE</code> prints a new one.
A post that is repeated byte for byte with the same header <code>Idempotency-Key</code> is
answered as before: give each post a key, so that after a timeout or 503 you can send it again.</p>
{pipelines}
<h2>Addresses</h2>
<table>
<tr><th>POST /stream/PIPELINE</th><td>an item, or several</td></tr>
<tr><th>GET /status/PIPELINE/DATAID</th><td>how an item stands</td></tr>
<tr><th><a href="health">GET /health</a></th><td>whether items can be taken</td></tr>
<tr><th><a href="metrics">GET /metrics</a></th><td>numbers for Prometheus</td></tr>
<tr><th><a href="openapi.json">GET /openapi.json</a></th><td>all this for programs</td></tr>
</table></body></html>
"""
