"""Bodies of REST requests. Unknown fields are ignored, as clients of the reference expect."""

from __future__ import annotations

import msgspec


class VolumeRequest(msgspec.Struct, kw_only=True):
    """An ext4 image of the host, and where the guest shall have it. The image is never written to."""

    host_path: str
    guest_path: str
    read_only: bool = False


class CreateSnapshot(msgspec.Struct, kw_only=True):
    """Boot a parent and capture it: from an ``image`` reference, or from ``rootfs`` (and ``kernel``) files.

    ``tap`` is a device of the host that leads to the network while it boots and warms up; its children have their own.
    With ``reuse`` a snapshot that has the tag already, or is just being made by another request, is the answer.
    """

    tag: str
    reuse: bool = False
    image: str | None = None
    extras: list[str] = []
    size_mib: int = 1536
    kernel: str | None = None
    initrd: str | None = None
    rootfs: str | None = None
    rw: bool = False
    tap: str | None = None
    boot_wait_secs: float = 0
    mem_size_mib: int = 512
    vcpus: int = 1
    warmup: list[str] = []
    volumes: list[VolumeRequest] = []
    labels: dict[str, str] = {}


class BuildRootfs(msgspec.Struct, kw_only=True):
    """Build a disk; ``output`` additionally copies it to a file of the host."""

    image: str
    extras: list[str] = []
    size_mib: int = 1536
    output: str | None = None


class SetPool(msgspec.Struct, kw_only=True):
    """How many machines shall wait for the snapshot's next children; 0 for none."""

    size: int


class CreateSandboxes(msgspec.Struct, kw_only=True):
    """Fork ``n`` children from a snapshot; with ``partial`` those that come up stay although others failed.

    ``spawn`` is auto, template (clone them) or restore; absent, the settings decide.
    """

    snapshot_tag: str
    n: int = 1
    per_child_netns: bool = False
    network: str = "none"
    allow: list[str] = []
    memory_limit_mib: int | None = None
    cpu_limit: float | None = None
    pids_limit: int | None = None
    io_limit_mibps: int | None = None
    best_effort: bool = False
    prewarm: bool = False
    keep_workdir: bool = False
    live_fork: bool = False
    memory_backend: str | None = None
    hugepages: bool = False
    partial: bool = False
    spawn: str | None = None
    name: str | None = None
    labels: dict[str, str] | None = None
    metadata: dict[str, str] | None = None
    env: dict[str, str] | None = None
    timeout_secs: float | None = None
    idle_pause_secs: float | None = None


class ForkSandbox(msgspec.Struct, kw_only=True):
    """Fork ``n`` children of a running sandbox, all from the same instant, with limits of their own."""

    n: int = 1
    memory_limit_mib: int | None = None
    cpu_limit: float | None = None
    pids_limit: int | None = None
    io_limit_mibps: int | None = None
    best_effort: bool = False


class CreateWorkspace(CreateSandboxes, kw_only=True):
    """A sandbox under a name; everything but ``n`` is as for a sandbox, and is kept for when it is resumed."""

    name: str


class SuspendWorkspace(msgspec.Struct, kw_only=True):
    """Capture the workspace's sandbox and end it; with ``diff`` only what changed since it was resumed is written."""

    diff: bool = False


class UpdateSandbox(msgspec.Struct, kw_only=True):
    """Change a running sandbox; what is absent stays. With ``best_effort`` a limit that cannot be had is a warning."""

    memory_limit_mib: int | None = None
    cpu_limit: float | None = None
    pids_limit: int | None = None
    io_limit_mibps: int | None = None
    best_effort: bool = False
    name: str | None = None
    labels: dict[str, str] | None = None
    metadata: dict[str, str] | None = None
    env: dict[str, str] | None = None
    timeout_secs: float | None = None
    idle_pause_secs: float | None = None


class SandboxDetails(msgspec.Struct, kw_only=True):
    """What one child of a fork is given. ``timeout_secs`` counts from then; 0 means no limit.

    ``network`` and ``allow`` are for the fork verb, in place of the request's.
    """

    name: str | None = None
    labels: dict[str, str] | None = None
    metadata: dict[str, str] | None = None
    env: dict[str, str] | None = None
    limits: UpdateSandbox | None = None
    timeout_secs: float | None = None
    idle_pause_secs: float | None = None
    network: str | None = None
    allow: list[str] | None = None


class ForkRequest(msgspec.Struct, kw_only=True):
    """Fork ``n`` children of ``source``, a running sandbox (by id or name) or a snapshot (by tag).

    ``all_children`` is for every child, ``per_child`` for the first, second … besides. ``mode`` (full, diff, live)
    branches a running source into a snapshot first; without it nothing is written. ``on_partial`` is keep or rollback.
    """

    source: str
    n: int = 1
    mode: str | None = None
    all_children: SandboxDetails = msgspec.field(default_factory=SandboxDetails)
    per_child: list[SandboxDetails] = []
    network: str = "none"
    allow: list[str] = []
    on_partial: str = "rollback"
    deadline_secs: float | None = None
    idempotency_key: str | None = None


class FanoutRequest(msgspec.Struct, kw_only=True):
    """Fork ``n`` children of ``source``, run one command in each (its number is in FORKD_INDEX), keep the best.

    ``best`` scores a child, the highest wins: numbers, + - * /, comparisons, ``A if B else C``, and the names
    exit_code, seconds and value (the last line of stdout as a number).
    """

    source: str
    n: int = 1
    args: list[str] = []
    shell: str | None = None
    env: dict[str, str] = {}
    timeout_secs: float = 30
    network: str = "none"
    keep: int = 0
    best: str = "-exit_code"


class RollbackRequest(msgspec.Struct, kw_only=True):
    """The snapshot to go back to: one the sandbox was forked from, or was branched into."""

    tag: str


class ExecRequest(msgspec.Struct, kw_only=True):
    """Run a command: ``args``, or ``shell`` for a line of shell.

    ``stdin`` is text given to it; without it the command reads from /dev/null.
    """

    args: list[str] = []
    shell: str | None = None
    timeout_secs: float = 30
    env: dict[str, str] = {}
    cwd: str | None = None
    user: str | None = None
    stdin: str | None = None


class TerminalSize(msgspec.Struct, kw_only=True):
    """Size of a terminal in characters."""

    rows: int = 24
    cols: int = 80


class StartProcess(msgspec.Struct, kw_only=True):
    """Start a command that outlives the request: ``args``, or ``shell`` for a line of shell.

    ``stdin``: input will be sent, else it reads /dev/null. ``pty`` gives it a terminal. ``tag`` is another way to name
    it. Without ``timeout_secs`` it may run for ever. ``attach``: somebody is about to listen, so no output is dropped
    before; a command that says more than the buffer holds is held up until then, for half a minute at most.
    """

    args: list[str] = []
    shell: str | None = None
    env: dict[str, str] = {}
    cwd: str | None = None
    user: str | None = None
    stdin: bool = False
    attach: bool = False
    pty: TerminalSize | None = None
    timeout_secs: float | None = None
    tag: str | None = None


class SignalProcess(msgspec.Struct, kw_only=True):
    """Signal a process's whole group, by name or number."""

    signal: str | int = "TERM"


class MakeDirectory(msgspec.Struct, kw_only=True):
    """Make a directory; ``parents`` also makes what is missing above it, and is content if it is there."""

    path: str
    mode: int = 0o755
    parents: bool = False


class MoveFile(msgspec.Struct, kw_only=True):
    """Give a file or directory another name."""

    source: str
    target: str


class ChangeMode(msgspec.Struct, kw_only=True):
    """Change permission bits."""

    path: str
    mode: int


class EvalRequest(msgspec.Struct, kw_only=True):
    """Evaluate code in the warm interpreter."""

    code: str
    timeout_secs: float = 30


class PrepareRequest(msgspec.Struct, kw_only=True):
    """Change what children of a branch begin with: defaults of commands, and a warm runtime.

    ``args`` is started and must say ready; with ``lang`` (such as ``node``) evals go to it from then on.
    """

    env: dict[str, str] = {}
    workdir: str | None = None
    user: str | None = None
    args: list[str] | None = None
    lang: str | None = None
    timeout_secs: float = 60


class Cleanup(msgspec.Struct, kw_only=True):
    """Find what dead processes left; with ``remove`` also remove it."""

    remove: bool = False


class Setup(msgspec.Struct, kw_only=True):
    """Fetch the guest kernel, or take in the ``kernel`` of that path on the daemon's host, and make the initramfs."""

    kernel: str | None = None
    refresh: bool = False


class BranchRequest(msgspec.Struct, kw_only=True):
    """Capture a running sandbox. ``mode`` is full, diff or live; ``diff`` and ``live`` are older spellings of it.

    Without ``labels`` the snapshot has those of the sandbox.
    """

    tag: str | None = None
    mode: str | None = None
    diff: bool = False
    live: bool = False
    measure_diff: bool = False
    wait: bool = True
    parent_tag: str | None = None
    labels: dict[str, str] | None = None


class Compact(msgspec.Struct, kw_only=True):
    """Flatten a chain into a new snapshot that stands alone."""

    to: str


class UpdateSnapshot(msgspec.Struct, kw_only=True):
    """Change what is noted about a snapshot; what is absent stays. One that is ``pinned`` is not removed."""

    pinned: bool | None = None
    labels: dict[str, str] | None = None


class RetentionRule(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Which snapshots may go: those with all ``labels`` (``name=value``, or ``name``: each of its values apart).

    ``keep_last`` newest ones always stay. Of the others those older than ``older_than_secs`` go, and the oldest until
    the rest takes ``max_bytes``; with neither of the two, all of them.
    """

    labels: list[str] = []
    keep_last: int | None = None
    older_than_secs: float | None = None
    max_bytes: int | None = None


class PruneRequest(msgspec.Struct, kw_only=True):
    """Remove what the rules let go; the first rule whose labels a snapshot has decides about it."""

    rules: list[RetentionRule]
    dry_run: bool = True


class RetentionPolicy(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Rules a daemon applies by itself, when it starts and then every so many seconds."""

    rules: list[RetentionRule]
    every_secs: float = 3600.0


class PackRequest(msgspec.Struct, kw_only=True):
    """Write a snapshot's pack to ``out``, a path of the host. ``sign`` is the name or the file of a key."""

    tag: str
    out: str | None = None
    description: str = ""
    base_image: str = ""
    since: str | None = None
    bundle: bool = False
    sign: str | None = None


class UnpackRequest(msgspec.Struct, kw_only=True):
    """Take in the pack file ``path`` of the host. ``trust`` is off, warn or require."""

    path: str
    tag: str | None = None
    force: bool = False
    trust: str | None = None


class PushRequest(msgspec.Struct, kw_only=True):
    """Send a snapshot to ``target``: a package reference, or the URL of a pack file."""

    tag: str
    target: str
    hub: str | None = None
    description: str = ""
    base_image: str = ""
    since: str | None = None
    sign: str | None = None


class PullRequest(msgspec.Struct, kw_only=True):
    """Fetch a snapshot from ``target``: a package reference, or the URL of a pack file."""

    target: str
    hub: str | None = None
    tag: str | None = None
    force: bool = False
    trust: str | None = None


class HubCheck(msgspec.Struct, kw_only=True):
    """Ask whether a package would run here."""

    target: str
    hub: str | None = None


class HubLogin(msgspec.Struct, kw_only=True):
    """Keep a login for a registry, or forget it."""

    url: str
    token: str | None = None
    username: str | None = None
    password: str | None = None
    forget: bool = False


class HubKeygen(msgspec.Struct, kw_only=True):
    """Make a signing key."""

    name: str = "default"


class HubSign(msgspec.Struct, kw_only=True):
    """Sign a pack file of the host."""

    path: str
    key: str = "default"


class HubTrust(msgspec.Struct, kw_only=True):
    """Trust a public key under a name; without a key, stop trusting that name."""

    name: str
    key: str | None = None
