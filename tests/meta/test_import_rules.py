"""The import table of ARCHITECTURE.md, enforced."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

# package → prefixes of ours it must not import
FORBIDDEN = {
    "forkd.specs": ["forkd"],
    "forkd.linux": ["forkd"],
    "forkd.hub": ["forkd"],
    "forkd.plugins": ["forkd"],
    "forkd.store": [
        "forkd.ops",
        "forkd.hub",
        "forkd.plugins",
        "forkd.daemon",
        "forkd.sdk",
        "forkd.cli",
        "forkd.runtime",
    ],
    "forkd.slots": ["forkd.ops", "forkd.hub", "forkd.plugins", "forkd.daemon", "forkd.sdk", "forkd.cli"],
    "forkd.guestlink": ["forkd.ops", "forkd.hub", "forkd.plugins", "forkd.daemon", "forkd.sdk", "forkd.cli"],
    "forkd.ops": ["forkd.daemon", "forkd.cli", "forkd.sdk", "forkd.plugins"],
    "forkd.runtime": ["forkd.daemon", "forkd.cli", "forkd.sdk", "forkd.plugins"],
    "forkd.daemon": ["forkd.cli", "forkd.sdk", "forkd.plugins"],
    "forkd.sdk": ["forkd.ops", "forkd.store", "forkd.plugins", "forkd.cli"],
    "forkd.mcp": ["forkd.ops", "forkd.store", "forkd.plugins", "forkd.daemon", "forkd.cli", "forkd.runtime"],
    "forkd.extras": ["forkd.ops", "forkd.store", "forkd.plugins", "forkd.daemon", "forkd.cli", "forkd.runtime"],
    "forkd.cli": ["forkd.ops", "forkd.store", "forkd.plugins"],
    "forkd.testing.skeletons": ["forkd"],
    "forkd.testing": ["forkd.ops", "forkd.hub", "forkd.plugins", "forkd.daemon", "forkd.sdk", "forkd.cli"],
    "forkd.guest": ["forkd"],
    "forkd.httpclient": ["forkd"],
}
# exceptions to a whole-"forkd" ban
ALLOWED = {
    "forkd.specs": ["forkd.specs"],
    "forkd.linux": ["forkd.linux"],
    "forkd.hub": ["forkd.hub", "forkd.specs"],
    # what foreign plugins may import (docs/PLUGINS.md): the skeletons are their models
    "forkd.testing.skeletons": ["forkd.specs", "forkd.linux", "forkd.cli.common", "forkd.plugins.engine_qemu.engine"],
    "forkd.httpclient": ["forkd.specs"],
    "forkd.plugins": ["forkd.specs", "forkd.linux", "forkd.frozen", "forkd.httpclient"],
}
SPECS_THIRD_PARTY = {"msgspec", "pluggy"}


def modules() -> Iterator[tuple[str, Path]]:
    for folder, prefix in (
        ("forkd", ""),
        ("specs", "forkd."),
        ("plugins", "forkd."),
        ("hub", "forkd."),
        ("guest", "forkd."),
    ):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            yield prefix + name, path


def imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def package_of(module: str) -> str | None:
    return next((package for package in FORBIDDEN if under(module, package)), None)


def breaches() -> Iterator[str]:
    for module, path in modules():
        package = package_of(module)
        if package is None:
            continue
        allowed = list(ALLOWED.get(package, []))
        if package == "forkd.plugins" and module.count(".") >= 2:
            allowed.append(".".join(module.split(".")[:3]))  # a plugin may import itself, never another
        for name, line in imports(path):
            if any(under(name, prefix) for prefix in allowed):
                continue
            if any(under(name, prefix) for prefix in FORBIDDEN[package]):
                yield f"{path.relative_to(ROOT)}:{line}: {module} must not import {name}"


def test_every_package_imports_only_what_the_table_allows() -> None:
    assert list(breaches()) == []


def test_the_walker_sees_the_real_tree() -> None:
    names = {name for name, _ in modules()}
    assert {"forkd.specs.errors", "forkd.plugins.engine_qemu.engine", "forkd.ops.fork"} <= names


def test_specs_need_nothing_but_the_standard_library_msgspec_and_pluggy_at_run_time() -> None:
    import subprocess
    import sys

    code = "import forkd.specs.hookspecs, forkd.specs.requests, sys; print(*{m.split('.')[0] for m in sys.modules})"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert not loaded & {"trio", "httpx", "click", "rich", "starlette"}


def test_help_imports_neither_trio_nor_httpx() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from click.testing import CliRunner; from forkd.cli.main import cli; "
        "r = CliRunner().invoke(cli, ['--help']); assert r.exit_code == 0, r.output; "
        "print([m for m in ('trio', 'httpx', 'rich', 'starlette') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
