"""House rules: hooks are documented, error codes are unique, files stay small, schemas match the code."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import msgspec

from forkd.specs import hookspecs
from forkd.specs.errors import all_errors
from forkd.specs.models import Snapshot
from forkd.specs.packs import PackManifest, Registry

ROOT = Path(__file__).parents[2]
MAX_LINES = 500
# file → why it may be longer
LONG_FILES = {
    "guest/agent.py": "the agent is one file by contract: it is carried into guests whole",
    "forkd/guestlink.py": "the host end of the agent protocol",
    "forkd/linux/clone.py": "cloning a process is one indivisible sequence",
}


def source_files() -> list[Path]:
    folders = ("specs", "forkd", "plugins", "hub", "guest", "build")
    return [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not any(part.is_symlink() for part in (path, *path.parents))
    ]


def test_every_hook_says_when_it_is_called() -> None:
    hooks = [value for name, value in vars(hookspecs).items() if name.startswith("forkd_")]
    assert len(hooks) >= 8
    for hook in hooks:
        assert "Called" in (inspect.getdoc(hook) or ""), f"{hook.__name__} does not say when it is called"
        assert not inspect.iscoroutinefunction(hook), f"{hook.__name__} is async: pluggy does not await"


def test_every_hook_is_in_the_architecture() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for name in vars(hookspecs):
        if name.startswith("forkd_"):
            assert name in text, f"{name} is not described in ARCHITECTURE.md"


def test_error_codes_are_unique_and_every_error_says_what_it_means() -> None:
    errors = all_errors()
    codes = [error.code for error in errors]
    assert len(codes) == len(set(codes)), sorted(code for code in codes if codes.count(code) > 1)
    for error in errors:
        assert error.__doc__, error
        assert error.exit_status in (1, 2), error
        assert 400 <= error.http_status < 600, error


def test_every_module_says_in_one_sentence_what_it_is() -> None:
    import ast

    for path in source_files():
        text = path.read_text()
        if text.strip():
            assert ast.get_docstring(ast.parse(text)), f"{path.relative_to(ROOT)} has no docstring"


def test_files_stay_small_or_give_a_reason() -> None:
    for path in source_files():
        name = str(path.relative_to(ROOT))
        lines = len(path.read_text().splitlines())
        assert lines <= MAX_LINES or name in LONG_FILES, f"{name} has {lines} lines"


def test_the_schemas_are_the_ones_the_code_reads() -> None:
    for name, kind in (("snapshot", Snapshot), ("pack", PackManifest), ("registry", Registry)):
        written = json.loads((ROOT / f"specs/schemas/{name}.json").read_text())
        assert written == msgspec.json.schema(kind), "run build/schemas.py"


def test_every_route_says_what_it_takes_and_gives() -> None:
    import importlib
    import pkgutil

    from starlette.routing import WebSocketRoute

    from forkd.daemon import routes as package
    from forkd.daemon.api import ApiRoute

    for found in pkgutil.iter_modules(package.__path__):
        for route in importlib.import_module(f"{package.__name__}.{found.name}").routes:
            if isinstance(route, WebSocketRoute):  # has a plain GET beside it that is declared
                continue
            assert isinstance(route, ApiRoute), f"{route.path} in {found.name} is not declared with forkd.daemon.api"
            assert (route.endpoint.__doc__ or "").strip(), f"{route.path}: the handler has no docstring"


def test_the_sync_sdk_is_the_one_the_async_sdk_gives() -> None:
    import runpy

    tool = runpy.run_path(str(ROOT / "build" / "unasync.py"))
    for source, target in tool["FILES"].items():
        made = tool["formatted"](tool["unasync"]((tool["SDK"] / source).read_text()))
        assert (tool["SDK"] / target).read_text() == made, f"{target} is old: run python build/unasync.py"
