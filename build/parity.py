"""Writes sdk/typescript/PARITY.md: every operation of the REST API, and which method of each SDK asks for it."""

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
Asked = dict[str, tuple[str, str]]


def operations(api: dict[str, Any]) -> list[tuple[str, str]]:
    """Method and path template of everything a client may ask for."""
    paths = api["paths"].items()
    ours = ((path, row) for path, row in paths if path not in NOT_FOR_CLIENTS and not path.startswith(FOR_ANYBODY))
    return [(method.upper(), path) for path, row in ours for method in row]


def python_methods() -> Asked:
    """What each method of the Python Controller asks for, by calling it."""
    from forkd import AsyncController

    asked: Asked = {}
    current = ""

    async def answer(request: httpx.Request) -> httpx.Response:
        asked.setdefault(current, (request.method, request.url.path))
        if "ndjson" in request.headers.get("accept", ""):
            return httpx.Response(200, text='{"event": "result", "result": null}\n')
        return httpx.Response(200, json={})

    async def main() -> None:
        nonlocal current
        async with AsyncController("http://parity", transport=httpx.MockTransport(answer)) as controller:
            for current, method in inspect.getmembers(AsyncController, inspect.isfunction):
                if not current.startswith("_") and current not in ("aclose", "close"):
                    await _try(getattr(controller, current), method)

    async def _try(bound: Any, method: Any) -> None:
        try:
            made = bound(*_arguments(method))
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


def typescript_methods() -> Asked:
    """What each method of the TypeScript Controller asks for; needs ``npm run build`` first."""
    command = ["node", str(ROOT / "build/parity.mjs"), str(ROOT / "sdk/typescript/dist/index.js")]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {name: (method, path) for name, (method, path) in told.items()}


def table(api: dict[str, Any], python: Asked, typescript: Asked) -> tuple[str, list[str]]:
    """The table, and what is missing from it."""
    rows, gaps = [], []
    for method, path in operations(api):
        cells = [_names(each, method, path) for each in (python, typescript)]
        gaps += [
            f"{method} {path}: {name}" for name, cell in zip(("Python", "TypeScript"), cells, strict=True) if not cell
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
        "Written by `build/parity.py`, which asks the daemon for its description and calls every method of both SDKs.",
        "",
        "| operation | Python | TypeScript |",
        "|---|---|---|",
    ]
    return "\n".join([*head, *rows, ""]), gaps


def _names(asked: Asked, method: str, template: str) -> str:
    pattern = re.compile(re.sub(r"\\{[^}]*?:path\\}|\\{[^}]+\\}", "[^/]+", re.escape(template)))
    found = [name for name, (verb, path) in asked.items() if verb == method and pattern.fullmatch(path)]
    return ", ".join(f"`{name}`" for name in sorted(found))


def _arguments(method: Any) -> list[Any]:
    made: list[Any] = []
    for name, parameter in list(inspect.signature(method).parameters.items())[1:]:
        if parameter.default is not parameter.empty or parameter.kind in (
            parameter.VAR_KEYWORD,
            parameter.KEYWORD_ONLY,
        ):
            continue
        text = str(parameter.annotation)
        if name.startswith("on_"):
            made.append(lambda *_: None)
        elif text.startswith("list"):
            made.append(["X"])
        elif "bytes" in text:
            made.append(b"X")
        elif text in ("int", "float"):
            made.append(1)
        else:
            made.append("X")
    return made


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)


if __name__ == "__main__":
    text, gaps = table(document(), python_methods(), typescript_methods())
    OUT.write_text(text)
    if gaps:
        sys.exit("\n".join(gaps))
