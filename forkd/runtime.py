"""The Runtime value: everything verbs work with, opened as an async context; leaving it ends what it started."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from forkd.config import Settings
from forkd.events import Events
from forkd.inventory import Inventory, NoInventory, SqliteInventory
from forkd.linux.hostprobe import HostProbe
from forkd.pluginmanager import Plugins, load_plugins
from forkd.pool import Pools
from forkd.sandbox import Sandbox
from forkd.slots import SlotOwner
from forkd.specs.engine import Engine, EngineContext
from forkd.specs.errors import BadInput, HostNotReady, SandboxNotFound, TooBusy
from forkd.specs.models import SnapshotInfo
from forkd.store.blobs import BlobStore
from forkd.store.disks import DiskStore
from forkd.store.images import ImageCache
from forkd.store.snapshots import SnapshotStore
from forkd.templates import Templates

Progress = Callable[[str, float | None], None]
MAX_NOTES = 1000
DAEMON = "daemon"
"""The name of the daemon's directory of slots: one daemon a data directory."""


class Notes(dict[str, str]):
    """A sentence each about things that are no more; the oldest are forgotten."""

    def __setitem__(self, key: str, value: str) -> None:
        super().__setitem__(key, value)
        while len(self) > MAX_NOTES:
            del self[next(iter(self))]


@dataclass(slots=True)
class Runtime:
    """Settings, plugins, stores, this process's slots and its running sandboxes."""

    settings: Settings
    plugins: Plugins
    snapshots: SnapshotStore
    disks: DiskStore
    images: ImageCache
    blobs: BlobStore
    slots: SlotOwner
    nursery: trio.Nursery
    start_limit: trio.Semaphore
    sandboxes: dict[str, Sandbox] = field(default_factory=dict)
    endings: Notes = field(default_factory=Notes)
    """Why sandboxes ended by themselves."""
    engines: dict[str, Engine] = field(default_factory=dict)
    writing: dict[str, SnapshotInfo] = field(default_factory=dict)
    failed: Notes = field(default_factory=Notes)
    """Why branches that nobody waited for came to nothing, by tag."""
    events: Events = field(default_factory=Events)
    inventory: Inventory = field(default_factory=NoInventory)
    keeps: bool = False
    """Whether sandboxes go on when this runtime is left, for another one to adopt."""
    adopting: set[str] = field(default_factory=set)
    on_up: Callable[[Sandbox], Awaitable[None]] | None = None
    """Called with every sandbox that has come up, before anybody is told of it."""
    templates: Templates = field(default_factory=Templates)
    pools: Pools = field(default_factory=Pools)
    fork_answers: dict[str, Any] = field(default_factory=dict)
    """Forks with an idempotency key, under way or done."""
    busy_workspaces: set[str] = field(default_factory=set)
    readers: Counter[str] = field(default_factory=Counter)
    """How many verbs read a snapshot just now, by tag."""

    @contextmanager
    def reading(self, tag: str) -> Iterator[None]:
        """While this lasts, retention leaves the snapshot alone."""
        self.readers[tag] += 1
        try:
            yield
        finally:
            self.readers[tag] -= 1
            if not self.readers[tag]:
                del self.readers[tag]

    def engine(self, name: str | None = None) -> Engine:
        """The engine called ``name``, or the one the settings choose; made on first use."""
        wanted = name or self.chosen_engine()
        if wanted not in self.engines:
            factory = self.plugins.engines.get(wanted)
            if factory is None:
                known = ", ".join(sorted(self.plugins.engines))
                raise BadInput(f"there is no engine {wanted!r}", hint=f"there are: {known}")
            chosen = {key: getattr(self.settings, key) for key in ("accel", "jail", "vmm_users")}
            context = EngineContext(self.settings.cache_dir, chosen)
            self.engines[wanted] = factory(context)
        return self.engines[wanted]

    def chosen_engine(self) -> str:
        """The engine of new parents: the setting's, or with ``auto`` one that says it works here, else QEMU."""
        if self.settings.engine != "auto":
            return self.settings.engine
        if self.settings.accel != "tcg":
            for name, factory in self.plugins.engines.items():
                why_not = getattr(factory, "why_not", None)
                if name in self.engines and why_not is not None:
                    return name
                if why_not is not None and why_not(HostProbe()) is None:
                    return name
        return "qemu"

    def sandbox(self, sandbox_id: str) -> Sandbox:
        """The running sandbox with this id or name. Raises SandboxNotFound, saying how it ended if it did by itself."""
        sandbox = self.sandboxes.get(sandbox_id)
        if sandbox is not None:
            return sandbox
        for named in self.sandboxes.values():
            if named.info.name == sandbox_id:
                return named
        if sandbox_id in self.adopting:
            raise TooBusy(f"sandbox {sandbox_id!r} is being taken over after a restart", hint="try again")
        if reason := self.endings.get(sandbox_id):
            raise SandboxNotFound(f"sandbox {sandbox_id!r} has ended: {reason}")
        raise SandboxNotFound(f"there is no sandbox {sandbox_id[:80]!r}", hint="forkd ls lists them")

    def observe(self, kind: str, **details: Any) -> None:
        """Tell observers and subscribers that something happened."""
        self.plugins.observe(self.events.publish(kind, **details))


@asynccontextmanager
async def open_runtime(
    settings: Settings, *, plugins: Plugins | None = None, daemon: bool = False
) -> AsyncIterator[Runtime]:
    """A Runtime whose sandboxes end with it; the daemon's are written down and go on without it."""
    _make_data_dir(settings.data_dir)
    loaded = plugins or load_plugins(settings)
    slots = SlotOwner(settings.run_dir, DAEMON if daemon else None, die_with_owner=not daemon)
    inventory = SqliteInventory(settings.inventory) if daemon else NoInventory()
    templates, pools = Templates(), Pools()
    try:
        async with trio.open_nursery() as nursery:
            runtime = Runtime(
                settings=settings,
                plugins=loaded,
                snapshots=SnapshotStore(settings.snapshots_dir, settings.low_water_bytes),
                disks=DiskStore(settings.rootfs_dir),
                images=ImageCache(settings.images_dir, settings.image_cache_bytes),
                blobs=BlobStore(settings.blobs_dir, settings.blob_cache_bytes),
                slots=slots,
                nursery=nursery,
                start_limit=trio.Semaphore(settings.start_limit),
                inventory=inventory,
                keeps=daemon,
                templates=templates,
                pools=pools,
            )
            try:
                yield runtime
            finally:
                nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            await templates.close()
            await pools.close(slots)
        for backend in loaded.memory_backends.values():
            backend.close()
        inventory.close()
        slots.close()


def _make_data_dir(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "this user may not write there")
    except OSError as error:
        raise HostNotReady(
            f"{path} cannot be the data directory: {error.strerror}", hint="set FORKD_DATA_DIR to one of your own"
        ) from error
