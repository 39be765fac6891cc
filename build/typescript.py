"""Writes sdk/typescript/src/schema.ts: the REST API's bodies and answers as TypeScript interfaces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

OUT = Path(__file__).parents[1] / "sdk/typescript/src/schema.ts"
HEAD = "// Written by build/typescript.py from the daemon's own description of its API; do not edit.\n"
PLAIN = {"string": "string", "integer": "number", "number": "number", "boolean": "boolean", "null": "null"}


def document() -> dict[str, Any]:
    """The OpenAPI document of the app."""
    import json

    from starlette.testclient import TestClient

    from forkd.daemon.app import make_app

    with TestClient(make_app(None)) as client:  # type: ignore[arg-type]  # describing itself needs no runtime
        described: dict[str, Any] = json.loads(client.get("/openapi.json").content)
    return described


def typescript(api: dict[str, Any]) -> str:
    """All component schemas as interfaces."""
    parts = [HEAD]
    for name, schema in sorted(api["components"]["schemas"].items()):
        parts.append(_interface(name, schema))
    return "\n".join(parts)


def _interface(name: str, schema: dict[str, Any]) -> str:
    about = " ".join(schema.get("description", "").split()).replace("``", "`")
    head = f"/** {about} */\n" if about else ""
    if schema.get("type") != "object" or "properties" not in schema:
        return f"{head}export type {name} = {_type(schema)};\n"
    required = set(schema.get("required", ()))
    # What has a default may be left out of a request; an answer has it or means the default.
    lines = [
        f"  {field}{'' if field in required else '?'}: {_type(row)};" for field, row in schema["properties"].items()
    ]
    return f"{head}export interface {name} {{\n" + "\n".join(lines) + "\n}\n"


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "enum" in schema:
        return " | ".join(f"'{value}'" for value in schema["enum"])
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(_type(row) for row in schema["anyOf"]))
    kind = schema.get("type")
    if isinstance(kind, list):
        return " | ".join(dict.fromkeys(_type({**schema, "type": each}) for each in kind))
    if kind == "array":
        inner = _type(schema.get("items", {}))
        return f"({inner})[]" if " " in inner else f"{inner}[]"
    if kind == "object":
        extra = schema.get("additionalProperties")
        return f"Record<string, {_type(extra) if isinstance(extra, dict) and extra else 'unknown'}>"
    return PLAIN.get(str(kind), "unknown")


if __name__ == "__main__":
    OUT.write_text(typescript(document()))
