"""Values seen on disk or on the wire."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

SNAPSHOT_FORMAT = 1


class Platform(msgspec.Struct, frozen=True, kw_only=True):
    """What a snapshot's device state was made by, and so what it needs to run."""

    engine: str
    engine_version: str
    accelerator: str
    machine: str
    cpu: str
    arch: str
    tsc_khz: int = 0


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """The virtual machine's size."""

    vcpus: int
    mem_mib: int
    network: bool = False


class FileRef(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the store by content: ``digest`` is ``sha256:…`` (plain) or ``sparse256:…`` (formats/delta.md)."""

    digest: str
    size: int


class MemoryRef(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot's memory: ``kind`` is ``image`` (memory.bin, all of RAM) or ``delta`` (memory.delta, changes)."""

    kind: str
    digest: str
    size: int
    changed_pages: int = 0


class ParentRef(msgspec.Struct, frozen=True, kw_only=True):
    """The snapshot a delta is against: its tag and its content id."""

    tag: str
    content: str


class Volume(msgspec.Struct, frozen=True, kw_only=True):
    """A disk besides the rootfs, and where the guest has it. It is never written to: what a guest writes to one that is
    not ``read_only`` stays in its own RAM."""

    disk: FileRef
    guest_path: str
    read_only: bool = False


AgentToken = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$", max_length=32)]
"""What opens a session with an agent (formats/agent.md): 16 bytes, in hexadecimal."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """``snapshot.json``: written last, so a directory that has it is whole."""

    format: int = SNAPSHOT_FORMAT
    tag: str
    content: str
    created_at_unix: int
    forkd_version: str
    platform: Platform
    hardware: Hardware
    vmstate: FileRef
    memory: MemoryRef
    rootfs: FileRef | None = None
    kernel: FileRef | None = None
    agent_sync: AgentToken
    parent: ParentRef | None = None
    branched_from: str | None = None
    image: str | None = None
    pause_ms: float | None = None
    capture_ms: float | None = None
    labels: dict[str, str] = {}
    source: dict[str, Any] | None = None
    volumes: list[Volume] = []

    def disks(self) -> list[FileRef]:
        """The disks it needs, each once."""
        found = [self.rootfs] if self.rootfs is not None else []
        return list(dict.fromkeys([*found, *(volume.disk for volume in self.volumes)]))


class SnapshotInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A snapshot as the REST API shows it."""

    tag: str
    dir: str
    created_at_unix: int
    status: str
    bootable: bool
    branched_from: str | None = None
    parent_tag: str | None = None
    pause_ms: int | None = None
    pause_exact_ms: float | None = None
    capture_ms: float | None = None
    changed_pages: int | None = None
    diff_ms: int | None = None
    diff_physical_bytes: int | None = None
    diff_logical_bytes: int | None = None
    mem_mib: int | None = None
    vcpus: int | None = None
    physical_bytes: int | None = None
    logical_bytes: int | None = None
    shared_bytes: int | None = None
    engine: str | None = None
    accelerator: str | None = None
    image: str | None = None
    warning: str | None = None
    labels: dict[str, str] = {}
    pinned: bool = False
    source: dict[str, Any] | None = None
    volumes: list[Volume] = []


class PruneRow(msgspec.Struct, kw_only=True):
    """What becomes of a snapshot: ``action`` is ``remove`` or ``keep``; ``bytes`` is what it takes on the disk."""

    tag: str
    action: str
    reason: str
    bytes: int
    created_at_unix: int
    labels: dict[str, str] = {}


class Pruned(msgspec.Struct, kw_only=True):
    """What a prune did, or with ``dry_run`` would do; ``freed_bytes`` is what those to remove take on the disk."""

    dry_run: bool
    freed_bytes: int
    rows: list[PruneRow]


class PoolInfo(msgspec.Struct, kw_only=True):
    """The machines that wait for a snapshot's next children: how many shall, how many do, and what hinders it."""

    tag: str
    size: int
    waiting: int
    problem: str | None = None


class SandboxInfo(msgspec.Struct, kw_only=True):
    """A running child as the REST API shows it."""

    id: str
    snapshot_tag: str
    created_at_unix: int
    netns: str | None = None
    guest_addr: str = ""
    network: str = "none"
    allow: list[str] = []
    per_child_netns: bool = False
    pid: int | None = None
    memory_limit_mib: int | None = None
    cpu_limit: float | None = None
    pids_limit: int | None = None
    io_limit_mibps: int | None = None
    best_effort: bool = False
    limits_hit: list[str] = []
    has_branched: bool = False
    last_branch_memory_path: str | None = None
    branch_count: int = 0
    status: str = "running"
    hostname: str = ""
    spawn_ms: float = 0.0
    spawned_by: str = "restore"
    memory_backend: str = "file"
    warnings: list[str] = []
    name: str | None = None
    labels: dict[str, str] = {}
    metadata: dict[str, str] = {}
    env: dict[str, str] = {}
    timeout_secs: float | None = None
    expires_at_unix: float | None = None
    idle_pause_secs: float | None = None
    auto_paused: bool = False
    forked_from: str | None = None


class ProcessInfo(msgspec.Struct, kw_only=True):
    """A command in a guest. ``output_begin`` and ``output_end`` are the positions of what can still be read.

    ``reason`` is as in ExecResult, or ``lost`` if the sandbox ended first; ``truncated``: the oldest output is gone.
    """

    pid: int
    args: list[str]
    started_at_unix: float
    running: bool
    tag: str | None = None
    pty: bool = False
    reason: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    error: str | None = None
    output_begin: int = 0
    output_end: int = 0
    truncated: bool = False


class ProcessOutput(msgspec.Struct, kw_only=True):
    """What is buffered of a process's output, in base64."""

    process: ProcessInfo
    stdout: str
    stderr: str


class GuestProcess(msgspec.Struct, kw_only=True, frozen=True):
    """A process in a guest, whoever started it."""

    pid: int
    args: list[str]


class SandboxDiff(msgspec.Struct, kw_only=True):
    """How a sandbox or a snapshot differs from ``against``, another one.

    ``unread`` are directories that could not be compared; ``truncated``: there is more. Memory is what each has written
    since it was forked; of a snapshot, what is in layers the other does not build on.
    """

    id: str
    against: str
    added: list[str] = []
    changed: list[str] = []
    removed: list[str] = []
    unread: list[str] = []
    truncated: bool = False
    processes_started: list[GuestProcess] = []
    processes_ended: list[GuestProcess] = []
    ports_opened: list[int] = []
    ports_closed: list[int] = []
    changed_memory_bytes: int
    against_changed_memory_bytes: int | None = None


class LogText(msgspec.Struct, kw_only=True):
    """What is kept of a log: from position ``begin`` (bytes before it are gone) to ``end``."""

    source: str
    text: str
    begin: int
    end: int


class FileEntry(msgspec.Struct, kw_only=True):
    """A file in a guest. A name that is not UTF-8 has its bytes in ``name_b64`` besides."""

    path: str
    name: str
    type: str
    size: int
    mode: int
    mtime: float
    uid: int
    gid: int
    target: str | None = None
    name_b64: str | None = None


class WatchEvent(msgspec.Struct, kw_only=True):
    """A change below a directory: ``type`` is create, write, remove, rename, chmod, or overflow (events were lost)."""

    type: str
    path: str
    dir: bool = False


class WorkspaceInfo(msgspec.Struct, kw_only=True):
    """A named sandbox whose state outlives it.

    ``status`` is ``running``, ``suspended``, or ``stale`` if its sandbox ended by itself; ``reason`` then says how.
    """

    id: str
    name: str
    source_snapshot_tag: str
    current_state_tag: str | None = None
    status: str = "running"
    live_sandbox_id: str | None = None
    created_at_unix: int
    last_active_unix: int
    last_branch_memory_path: str | None = None
    reason: str | None = None


class ExecResult(msgspec.Struct, kw_only=True):
    """How a command in the guest ended.

    ``reason`` is ``exited``, ``signaled``, ``timed_out`` or ``not_found``; ``exit_code`` is the command's own code, or
    128 + signal, 124 and 127 (126 if it may not be executed) in the other cases, as shells do.
    """

    stdout: str
    stderr: str
    exit_code: int
    reason: str = "exited"
    signal: int | None = None
    timed_out: bool = False
    truncated: bool = False
    error: str | None = None


class FanoutRow(msgspec.Struct, kw_only=True):
    """One child of a fan-out: how its command ended, or why it could not be run; its score, None for no number."""

    index: int
    id: str
    result: ExecResult | None = None
    seconds: float = 0.0
    score: float | None = None
    kept: bool = False
    error: str | None = None


class EvalResult(msgspec.Struct, kw_only=True):
    """What the warm interpreter answered: ``result`` is the last expression's repr, ``stdout`` what was printed."""

    result: str | None
    error: str | None
    exit_code: int
    stdout: str = ""
    traceback: str | None = None
    result_json: Any = None


class PluginInfo(msgspec.Struct, kw_only=True):
    """What became of a plugin.

    ``source`` is ``bundled``, ``entry point`` or ``directory``; ``status`` is ``loaded``, ``disabled`` or ``failed``,
    and then ``error`` says why.
    """

    name: str
    source: str
    origin: str
    version: str | None = None
    about: str = ""
    status: str = "failed"
    error: str | None = None
    hooks: list[str] = []
    provides: list[str] = []
