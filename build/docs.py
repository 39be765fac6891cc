"""Write what is generated: docs/CLI.md, docs/API.md, the examples in docs/PLUGINS.md and the man page (`make docs`)."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WIDTH = 100
EVERYWHERE = ("401", "403")
sys.path.insert(0, str(ROOT))
# Nobody's plugins and nobody's settings show in the documents.
for variable in [name for name in os.environ if name.startswith("FORKD_")]:
    del os.environ[variable]
os.environ["FORKD_DATA_DIR"] = "/nonexistent"

import click  # noqa: E402

from forkd import __version__  # noqa: E402
from forkd.cli.main import cli  # noqa: E402


def verbs() -> Iterator[tuple[str, click.Command, click.Context]]:
    """Every verb, and every verb of a group, with a context to ask for help in."""
    root = click.Context(cli, info_name="forkd", max_content_width=WIDTH, terminal_width=WIDTH)
    for name in cli.list_commands(root):
        command = cli.get_command(root, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=root, max_content_width=WIDTH, terminal_width=WIDTH)
        yield f"forkd {name}", command, context
        if isinstance(command, click.Group):
            for inner_name, inner in command.commands.items():
                within = click.Context(
                    inner, info_name=inner_name, parent=context, max_content_width=WIDTH, terminal_width=WIDTH
                )
                yield f"forkd {name} {inner_name}", inner, within


def cli_reference() -> str:
    """docs/CLI.md."""
    parts = ["# The command line\n\nGenerated from `--help` by `make docs`.\n"]
    root = click.Context(cli, info_name="forkd", max_content_width=WIDTH, terminal_width=WIDTH)
    parts.append(f"```\n{_trimmed(cli.get_help(root))}\n```\n")
    for title, command, context in verbs():
        parts.append(f"## {title}\n\n```\n{_trimmed(command.get_help(context))}\n```\n")
    return "\n".join(parts)


def _trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines())


def openapi() -> dict[str, Any]:
    """The document the daemon serves at /openapi.json."""
    from forkd.daemon import openapi as described
    from forkd.daemon import routes as package
    from forkd.daemon.api import ApiRoute

    found = []
    for module in pkgutil.iter_modules(package.__path__):
        routes = importlib.import_module(f"{package.__name__}.{module.name}").routes
        found += [route for route in routes if isinstance(route, ApiRoute)]
    document: dict[str, Any] = described.document(found)
    return document


def api_reference() -> str:
    """docs/API.md."""
    document = openapi()
    parts = [
        "# The REST API\n\nGenerated from `/openapi.json` by `make docs`; the daemon shows the same at `/docs`.\n"
        'Errors are JSON: `{"error", "code", "hint"}`. Every route may answer 401 (no token, or a wrong one) and 403\n'
        "(a request made by a page of another site to a daemon without tokens).\n"
    ]
    for path, operations in sorted(document["paths"].items()):
        for method, operation in operations.items():
            parts.append(_operation(method, path, operation))
    parts.append("# Types\n")
    for name, schema in sorted(document.get("components", {}).get("schemas", {}).items()):
        if "properties" in schema:
            parts.append(_type(name, schema))
    return "\n".join(parts)


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    lines = [f"## {method.upper()} {path}\n", operation.get("description") or operation.get("summary", ""), ""]
    for parameter in operation.get("parameters", []):
        if parameter["in"] == "query":
            lines.append(f"* query `{parameter['name']}`: {_shape(parameter.get('schema', {}))}")
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        lines.append(f"* takes {_shape(content.get('schema', {}))} ({kind})")
    for status, answer in sorted(operation.get("responses", {}).items()):
        if status in EVERYWHERE:
            continue
        shapes = [_shape(content.get("schema", {})) for content in answer.get("content", {}).values()]
        lines.append(
            f"* {status}: {answer.get('description', '').strip()} {' or '.join(dict.fromkeys(shapes))}".rstrip()
        )
    return "\n".join(lines) + "\n"


def _type(name: str, schema: dict[str, Any]) -> str:
    lines = [f"## {name}\n"]
    if text := schema.get("description"):
        lines += [text, ""]
    lines += ["| field | type | default |", "|---|---|---|"]
    for field, value in schema["properties"].items():
        default = "required" if field in schema.get("required", []) else f"`{value.get('default')!r}`"
        lines.append(f"| `{field}` | {_shape(value)} | {default} |")
    return "\n".join(lines) + "\n"


def _shape(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    if "anyOf" in schema:
        return " or ".join(_shape(one) for one in schema["anyOf"])
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_shape(schema.get('items', {}))}"
    return str(kind)


EXAMPLE = re.compile(r"(<!-- example (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def plugin_guide() -> str:
    """docs/PLUGINS.md with its examples as the skeletons are now."""

    def example(match: re.Match[str]) -> str:
        text = (ROOT / "forkd/testing/skeletons" / f"{match[2]}.py").read_text()
        return f"{match[1]}```python\n{text}```\n{match[3]}"

    return EXAMPLE.sub(example, (ROOT / "docs/PLUGINS.md").read_text())


def man_page() -> str:
    """packaging/forkd.1."""
    lines = [
        f'.TH FORKD 1 "" "forkd {__version__}" "User Commands"',
        ".SH NAME",
        "forkd \\- boot a microVM once, warm it, fork children that share its memory",
        ".SH SYNOPSIS",
        ".B forkd",
        "[\\-\\-version] [\\-\\-help] VERB [OPTIONS]",
        ".SH VERBS",
    ]
    for title, command, context in verbs():
        lines += [".SS", _roff(f"{title} {' '.join(command.collect_usage_pieces(context))}")]
        for paragraph in (command.help or "").replace("\b", "").split("\n\n"):
            lines += [_roff(" ".join(paragraph.split())), ".PP"]
        for parameter in command.get_params(context):
            if record := parameter.get_help_record(context):
                lines += [".TP", f"\\fB{_roff(record[0])}\\fR", _roff(record[1])]
    lines += [
        *(".SH EXIT STATUS", "0 done, 1 failed, 2 bad arguments; exec and run exit as the command did."),
        *(".SH FILES", "~/.local/share/forkd or $FORKD_DATA_DIR: snapshots, disks, kernels, plugins."),
    ]
    return "\n".join(lines) + "\n"


def _roff(text: str) -> str:
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text


GENERATED: dict[str, Callable[[], str]] = {
    "docs/CLI.md": cli_reference,
    "docs/API.md": api_reference,
    "docs/PLUGINS.md": plugin_guide,
    "packaging/forkd.1": man_page,
}


def main() -> None:
    """Write every generated document."""
    for name, make in GENERATED.items():
        (ROOT / name).write_text(make())


if __name__ == "__main__":
    main()
