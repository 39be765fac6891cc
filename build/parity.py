"""Writes sdk/typescript/PARITY.md: every operation of the REST API, and which method of each SDK asks for it.

Each has to be able to send everything the operation takes, and both have the same methods of a sandbox.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import trio

sys.path.insert(0, str(Path(__file__).parent))
from typescript import document

ROOT = Path(__file__).parents[1]
OUT = ROOT / "sdk/typescript/PARITY.md"
# For people and machines that watch, not for clients of the API.
NOT_FOR_CLIENTS = {"/openapi.json", "/docs", "/metrics", "/healthz", "/v1/sandboxes/{id}/terminal"}
# For any HTTP client: what a guest serves, and the registry other daemons pull from.
FOR_ANYBODY = ("/v1/sandboxes/{id}/ports/", "/hub/")
# Older spellings, of `mode`.
OLDER = {"/v1/sandboxes/{id}/branch": {"live"}}
# Of Sandbox: in TypeScript `create` is static, and Python's `commands.run` is two methods.
SANDBOX_PYTHON = {"create"}
SANDBOX_TYPESCRIPT = {"exec", "stream"}
Asked = dict[str, tuple[str, str, set[str]]]
"""By method of an SDK: the HTTP method, the path, and the names of what it sends in the query and the body."""


def operations(api: dict[str, Any]) -> list[tuple[str, str]]:
    """Method and path template of everything a client may ask for."""
    paths = api["paths"].items()
    ours = ((path, row) for path, row in paths if path not in NOT_FOR_CLIENTS and not path.startswith(FOR_ANYBODY))
    return [(method.upper(), path) for path, row in ours for method in row]


def taken(api: dict[str, Any], method: str, path: str) -> set[str]:
    """The names of everything an operation takes in its query and its JSON body."""
    operation = api["paths"][path][method.lower()]
    names = {each["name"] for each in operation["parameters"] if each["in"] == "query"}
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    if "$ref" in body:
        body = api["components"]["schemas"][body["$ref"].rpartition("/")[2]]
    return (names | set(body.get("properties", ()))) - OLDER.get(path, set())


def python_methods(api: dict[str, Any]) -> Asked:
    """What each method of the Python Controller asks for, by calling it: first at all, then with everything."""
    from forkd import AsyncController

    asked: Asked = {}
    current = ""

    async def answer(request: httpx.Request) -> httpx.Response:
        sent = set(request.url.params)
        if request.headers.get("content-type") == "application/json":
            sent |= set(json.loads(await request.aread()))
        asked[current] = request.method, request.url.path, sent | asked.get(current, ("", "", set()))[2]
        if "ndjson" in request.headers.get("accept", ""):
            return httpx.Response(200, text='{"event": "result", "result": null}\n')
        return httpx.Response(200, json={})

    async def main() -> None:
        nonlocal current
        async with AsyncController("http://parity", transport=httpx.MockTransport(answer)) as controller:
            for current, method in inspect.getmembers(AsyncController, inspect.isfunction):
                if not current.startswith("_") and current not in ("aclose", "close"):
                    bound = getattr(controller, current)
                    await _try(bound, *_arguments(method))
                    verb, path, _ = asked[current]
                    fields = set().union(*(taken(api, *each) for each in operations(api) if _fits(verb, path, *each)))
                    await _try(bound, *_arguments(method, all_of_them=True), **_fields(method, fields))

    async def _try(bound: Any, *arguments: Any, **fields: Any) -> None:
        try:
            made = bound(*arguments, **fields)
            if hasattr(made, "__aenter__"):
                async with made:
                    pass
            else:
                await made
        except Exception:  # the answers make no sense; what was asked for is what counts
            if current not in asked:
                raise

    trio.run(main)
    return asked


def typescript_methods() -> tuple[Asked, set[str]]:
    """What each method of the TypeScript Controller asks for, and Sandbox's methods; needs ``npm run build`` first."""
    command = ["node", str(ROOT / "build/parity.mjs"), str(ROOT / "sdk/typescript/dist/index.js")]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    asked = {name: (method, path, set(sent)) for name, (method, path, sent) in told["asked"].items()}
    return asked, set(told["sandbox"])


def sandbox_gaps(typescript: set[str]) -> list[str]:
    """Methods one Sandbox has and the other has not."""
    from forkd import AsyncSandbox

    found = inspect.getmembers(AsyncSandbox, inspect.isroutine)
    python = {_camel(name) for name, _ in found if not name.startswith("_") and name not in SANDBOX_PYTHON}
    ours = typescript - SANDBOX_TYPESCRIPT
    return [f"TypeScript's Sandbox has no {name}" for name in sorted(python - ours)] + [
        f"Python's Sandbox has no {name}" for name in sorted(ours - python)
    ]


def table(api: dict[str, Any], python: Asked, typescript: Asked) -> tuple[str, list[str]]:
    """The table, and what is missing from it."""
    rows, gaps = [], []
    for method, path in operations(api):
        cells = [_names(each, method, path) for each in (python, typescript)]
        gaps += [
            f"{method} {path}: {name}" for name, cell in zip(("Python", "TypeScript"), cells, strict=True) if not cell
        ]
        for name, each in (("Python", python), ("TypeScript", typescript)):
            sent = set().union(*(each[one][2] for one in _found(each, method, path)))
            gaps += [
                f"{method} {path}: {name} cannot send {field}" for field in sorted(taken(api, method, path) - sent)
            ]
        rows.append(f"| `{method} {path}` | {cells[0] or '**missing**'} | {cells[1] or '**missing**'} |")
    for name in python:
        if _camel(name) not in typescript:
            gaps.append(f"TypeScript has no {_camel(name)}")
    for name in typescript:
        if name not in {_camel(each) for each in python}:
            gaps.append(f"Python has no counterpart of {name}")
    head = [
        "# The REST API and both SDKs",
        "",
        "Written by `build/parity.py`, which asks the daemon for its description, calls every method of both SDKs, and",
        "fails if one of them cannot send all that an operation takes, or lacks a method of the other's `Sandbox`.",
        "",
        "| operation | Python | TypeScript |",
        "|---|---|---|",
    ]
    return "\n".join([*head, *rows, ""]), gaps


def _names(asked: Asked, method: str, template: str) -> str:
    return ", ".join(f"`{name}`" for name in _found(asked, method, template))


def _found(asked: Asked, method: str, template: str) -> list[str]:
    return sorted(name for name, (verb, path, _) in asked.items() if _fits(verb, path, method, template))


def _fits(verb: str, path: str, method: str, template: str) -> bool:
    pattern = re.sub(r"\\{[^}]*?:path\\}|\\{[^}]+\\}", "[^/]+", re.escape(template))
    return verb == method and re.fullmatch(pattern, path) is not None


def _fields(method: Any, names: set[str]) -> dict[str, Any]:
    parameters = inspect.signature(method).parameters
    takes = any(each.kind == each.VAR_KEYWORD for each in parameters.values())
    return {name: 1 for name in names if name not in parameters} if takes else {}


def _arguments(method: Any, all_of_them: bool = False) -> list[Any]:
    made: list[Any] = []
    for name, parameter in list(inspect.signature(method).parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.KEYWORD_ONLY):
            continue
        if parameter.default is not parameter.empty and not all_of_them:
            continue
        text = str(parameter.annotation).removesuffix(" | None")
        if name.startswith("on_"):
            made.append(lambda *_: None)
        elif text.startswith("list"):
            made.append(["X"])
        elif "bytes" in text:
            made.append(b"X")
        elif text in ("int", "float"):
            made.append(1)
        elif text == "bool":
            made.append(not parameter.default)
        else:
            made.append("X")
    return made


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)


if __name__ == "__main__":
    described = document()
    typescript, sandbox = typescript_methods()
    text, gaps = table(described, python_methods(described), typescript)
    gaps += sandbox_gaps(sandbox)
    OUT.write_text(text)
    if gaps:
        sys.exit("\n".join(gaps))
