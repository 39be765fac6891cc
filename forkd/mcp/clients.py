"""Snippets that make the usual clients start `forkd mcp`."""

from __future__ import annotations

import json
import os
import re
import sys

SERVER = "forkd"


def _json(key: str, **more: str) -> str:
    return json.dumps({key: {SERVER: {**more, "command": "%COMMAND%", "args": ["mcp"]}}}, indent=2)


CLIENTS = {
    "claude-desktop": ("claude_desktop_config.json", _json("mcpServers")),
    "claude-code": (".mcp.json of a project", _json("mcpServers", type="stdio")),
    "cursor": (".cursor/mcp.json of a project, or ~/.cursor/mcp.json", _json("mcpServers")),
    "windsurf": ("~/.codeium/windsurf/mcp_config.json", _json("mcpServers")),
    "vscode": (".vscode/mcp.json of a project", _json("servers", type="stdio")),
    "gemini": ("~/.gemini/settings.json", _json("mcpServers")),
    "zed": ("settings.json", _json("context_servers", source="custom")),
    "codex": ("~/.codex/config.toml", f'[mcp_servers.{SERVER}]\ncommand = "%COMMAND%"\nargs = ["mcp"]'),
}
"""By name: where the snippet belongs, and itself."""


def snippet(name: str, command: str) -> tuple[str, str]:
    """Where it belongs, and the text, with ``command`` as the program to start. Raises KeyError."""
    where, text = CLIENTS[name]
    if os.path.basename(command) == "__main__.py":  # of `python -m forkd`, which no client could start
        command, text = sys.executable, re.sub(r'("mcp")(?=\s*\])', r'"-m", "forkd", \1', text)
    return where, text.replace("%COMMAND%", json.dumps(command)[1:-1])
