"""The API described: /openapi.json and /docs, both made from the declared routes."""

from __future__ import annotations

import html
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec

from forkd import __version__
from forkd.daemon.api import ApiRoute, ErrorBody, Errors
from forkd.specs.errors import ForeignOrigin, ForkdError, TokenTooNarrow, Unauthorized

REFS = "#/components/schemas/{name}"


def document(routes: Iterable[ApiRoute]) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    routes = list(routes)
    types = {repr(kind): kind for kind in _types(routes)}
    schemas, components = msgspec.json.schema_components(list(types.values()), ref_template=REFS)
    by_type = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = defaultdict(dict)
    for route in routes:
        paths[_plain(route.path)][route.method.lower()] = _operation(route, by_type)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "forkd",
            "version": __version__,
            "description": "Boot a microVM once, warm it, fork children that share its memory copy-on-write.",
        },
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"token": []}],
    }


def page(spec: dict[str, Any]) -> str:
    """The document as one page for people: no script, nothing fetched from elsewhere."""
    rows = "".join(
        _section(path, method, operation)
        for path, methods in spec["paths"].items()
        for method, operation in methods.items()
    )
    return f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>forkd API</title><style>{STYLE}</style>
<h1>forkd {html.escape(spec["info"]["version"])}</h1><p>{html.escape(spec["info"]["description"])}
The same for programs: <a href="openapi.json">openapi.json</a>.</p>{rows}</html>"""


STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
code{font-size:.9em}h2{font-size:1rem;margin:1.6rem 0 .2rem;border-top:1px solid #ccc;padding-top:.8rem}
table{border-collapse:collapse}td{padding:.1rem .8rem .1rem 0;vertical-align:top}
@media(prefers-color-scheme:dark){body{background:#16181c;color:#ddd}a{color:#8bf}}"""


def _types(routes: list[ApiRoute]) -> Iterable[Any]:
    yield ErrorBody
    for route in routes:
        yield from (kind for kind in (route.body, *route.answers.values()) if kind not in (None, bytes, str))


def _operation(route: ApiRoute, schemas: dict[str, Any]) -> dict[str, Any]:
    doc = " ".join((route.endpoint.__doc__ or "").split())
    operation: dict[str, Any] = {
        "operationId": f"{route.method.lower()}_{re.sub(r'[^a-z0-9]+', '_', route.path.lower()).strip('_')}",
        "summary": doc.partition(". ")[0].rstrip("."),
        "description": doc,
        "parameters": [*_path_parameters(route), *_query_parameters(route)],
        "responses": _responses(route, schemas),
    }
    if route.upload:
        operation["requestBody"] = {"required": True, "content": {"application/octet-stream": {}}}
    elif route.body is not None:
        content = {"application/json": {"schema": schemas[repr(route.body)]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _path_parameters(route: ApiRoute) -> list[dict[str, Any]]:
    schema = {"type": "string", "minLength": 1}
    return [{"name": name, "in": "path", "required": True, "schema": schema} for name in route.param_convertors]


def _query_parameters(route: ApiRoute) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "query", "required": False, "schema": msgspec.json.schema(kind)}
        for name, kind in route.query.items()
    ]


def _responses(route: ApiRoute, schemas: dict[str, Any]) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for status, kind in route.answers.items():
        content: dict[str, Any] = {}
        if kind is bytes:
            content = {"application/octet-stream": {}}
        elif kind is str:
            content = {"text/plain": {}, "text/html": {}}
        elif kind is not None and route.events != "only":
            content = {"application/json": {"schema": schemas[repr(kind)]}}
        answers[str(status)] = {"description": "Success"} | ({"content": content} if content else {})
    if route.events:
        about = "Events, one JSON object a line; the last is `result` or `error`"
        success = answers.setdefault("200", {"description": about})
        success.setdefault("content", {})["application/x-ndjson"] = {}
    reasons: dict[int, list[type[ForkdError]]] = defaultdict(list)
    listed: Errors = (*route.errors, Unauthorized, ForeignOrigin, TokenTooNarrow)
    for error in listed:
        if error not in reasons[error.http_status]:
            reasons[error.http_status].append(error)
    for status, errors in sorted(reasons.items()):
        about = " ".join(f"`{error.code}`: {(error.__doc__ or '').split(chr(10))[0]}" for error in errors)
        answers[str(status)] = {
            "description": about,
            "content": {"application/json": {"schema": schemas[repr(ErrorBody)]}},
        }
    return answers


def _plain(path: str) -> str:
    """Starlette's ``{path:path}`` as OpenAPI's ``{path}``."""
    return re.sub(r"\{(\w+):\w+\}", r"{\1}", path)


def _section(path: str, method: str, operation: dict[str, Any]) -> str:
    cells = "".join(
        f"<tr><td><code>{status}</code><td>{html.escape(answer['description'])}"
        for status, answer in operation["responses"].items()
    )
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    takes = f"<p>Body: <code>{html.escape(str(body.get('$ref', '')).rpartition('/')[2])}</code></p>" if body else ""
    title = html.escape(f"{method.upper()} {path}")
    return f"<h2><code>{title}</code></h2><p>{html.escape(operation['description'])}</p>{takes}<table>{cells}</table>"
