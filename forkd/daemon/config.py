"""What the daemon is told: flags, environment and a TOML file into one frozen value."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from forkd.ops.prune import check_policy
from forkd.specs.errors import BadInput
from forkd.specs.requests import RetentionPolicy
from forkd.specs.tags import check_tag

NONE = "none"


@dataclass(frozen=True, slots=True)
class DaemonConfig:
    """Where to listen, who may come in, what to write down. ``bind`` or ``socket`` may be "none"."""

    bind: str = "127.0.0.1:8889"
    socket: str = ""
    token_file: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    audit_log: str = ""
    branch_concurrency: int = 4
    drain_secs: float = 30.0
    end_sandboxes: bool = False
    agent_ports: str = "auto"
    retention: RetentionPolicy | None = None
    pool: str = ""

    def address(self) -> tuple[str, int] | None:
        """Host and port of ``bind``; None if it is "none". Raises BadInput."""
        if self.bind == NONE:
            return None
        host, colon, port = self.bind.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not port.isdigit() or int(port) > 65535:
            raise BadInput(f"bind {self.bind!r} is not HOST:PORT", hint="for example 127.0.0.1:8889, or none")
        return host or "0.0.0.0", int(port)

    def loopback(self) -> bool:
        """Whether only this host can reach the TCP port."""
        address = self.address()
        if address is None or address[0] == "localhost":
            return True
        try:
            return ipaddress.ip_address(address[0]).is_loopback
        except ValueError:
            return False

    def opens_agent_ports(self) -> bool:
        """Whether each sandbox gets a port without authentication; a daemon with tokens has to be told to."""
        return self.agent_ports == "on" or (self.agent_ports == "auto" and not self.token_file)

    def pools(self) -> dict[str, int]:
        """How many machines shall wait, by snapshot. Raises BadInput."""
        sizes = {}
        for entry in filter(None, map(str.strip, self.pool.split(","))):
            tag, _, size = entry.partition("=")
            if not (size.isascii() and size.isdigit()):
                raise BadInput(f"pool has {entry[:80]!r}", hint="for example python-numpy=10,node=4")
            sizes[check_tag(tag)] = int(size)
        return sizes


RETENTION = "retention"
"""The one setting that is a table, and so in the file alone."""
PLAIN = [field for field in dataclasses.fields(DaemonConfig) if field.name != RETENTION]
KINDS: dict[str, type[Any]] = {field.name: type(field.default) for field in PLAIN}
EXPLAINED = {
    "bind": "HOST:PORT for TCP, or none. Anything but a loopback address needs token_file.",
    "socket": "Path of the unix socket (empty: forkd.sock in the data directory), or none. Its owner needs no token.",
    "token_file": "File with one token a line, or NAME TOKEN, or NAME TOKEN hub (only pulls, from /hub/); mode 600.",
    "tls_cert": "PEM certificate; with tls_key TCP speaks https.",
    "tls_key": "PEM key of the certificate.",
    "audit_log": "File for one JSON line a request (empty: audit.log in the data directory), or none.",
    "branch_concurrency": "How many branches may be captured at once.",
    "drain_secs": "How long requests may finish when the daemon is stopped.",
    "end_sandboxes": "Whether sandboxes end with the daemon; otherwise the next daemon adopts them.",
    "agent_ports": "Whether each sandbox gets a loopback port for the JSON-line protocol: on, off, auto (no tokens).",
    "pool": "Machines that wait, warm, for snapshots' next children: TAG=N, separated by commas.",
}


RETENTION_EXPLAINED = (
    "Snapshots the daemon removes by itself; none without this table. Try the rules first with: forkd prune",
    "The first rule whose labels a snapshot has decides; keep_last newest stay, of the others what is older than",
    "older_than_secs goes, and the oldest until the rest takes max_bytes. Pinned and used ones stay.",
    "[retention]",
    "every_secs = 3600",
    "[[retention.rules]]",
    'labels = ["session"]',
    "keep_last = 3",
    "older_than_secs = 604800",
    "max_bytes = 10737418240",
)


def load_config(path: str | None, flags: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> DaemonConfig:
    """Defaults, then the file, then ``FORKD_…`` variables, then flags that are not None. Raises BadInput."""
    env = os.environ if environ is None else environ
    values: dict[str, Any] = _read(path) if path is not None else {}
    for field in PLAIN:
        if text := env.get(f"FORKD_{field.name.upper()}"):
            values[field.name] = _parse(field.name, text)
    values.update({name: value for name, value in flags.items() if value is not None})
    config = DaemonConfig(**values)
    if config.branch_concurrency < 1:
        raise BadInput("branch_concurrency is below 1")
    if bool(config.tls_cert) != bool(config.tls_key):
        raise BadInput("tls_cert and tls_key belong together", hint="give both, or neither")
    if config.agent_ports not in ("on", "off", "auto"):
        raise BadInput(f"agent_ports is {config.agent_ports!r}", hint="on, off or auto")
    config.address()
    if config.retention is not None:
        check_policy(config.retention)
    config.pools()
    return config


def template() -> str:
    """A config file with every setting at its default, explained."""
    import tomli_w

    lines = ["# forkd daemon --config THIS_FILE. Environment (FORKD_BIND …) and flags win over it."]
    for field in PLAIN:
        value = tomli_w.dumps({field.name: field.default}).rstrip()
        lines += ["", f"# {EXPLAINED[field.name]}", f"# {value}"]
    lines += ["", *(f"# {line}".rstrip() for line in RETENTION_EXPLAINED)]
    return "\n".join(lines) + "\n"


def _read(path: str) -> dict[str, Any]:
    try:
        values = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise BadInput(f"config {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"config {path} is not TOML: {error}") from error
    if (table := values.pop(RETENTION, None)) is not None:
        try:
            policy = msgspec.convert(table, RetentionPolicy)
        except msgspec.ValidationError as error:
            raise BadInput(f"config {path}: [{RETENTION}]: {error}") from error
        return {**_checked(path, values), RETENTION: policy}
    return _checked(path, values)


def _checked(path: str, values: dict[str, Any]) -> dict[str, Any]:
    for name, value in values.items():
        if name not in KINDS:
            raise BadInput(
                f"config {path}: there is no setting {name!r}", hint=f"there are: {', '.join((*KINDS, RETENTION))}"
            )
        if KINDS[name] is float and type(value) is int:
            values[name] = float(value)
        elif type(value) is not KINDS[name]:
            raise BadInput(f"config {path}: {name} must be a {KINDS[name].__name__}")
    return values


def _parse(name: str, text: str) -> Any:
    kind: type[Any] = KINDS[name]
    try:
        if kind is bool:
            return {"0": False, "false": False, "1": True, "true": True}[text.lower()]
        return kind(text)
    except (ValueError, KeyError):
        raise BadInput(f"FORKD_{name.upper()}={text!r} is not a {kind.__name__}") from None
