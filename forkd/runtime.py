"""The Runtime value: everything verbs work with, opened as an async context; leaving it ends what it started."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio

from forkd.config import Settings
from forkd.pluginmanager import Plugins, load_plugins
from forkd.sandbox import Sandbox
from forkd.slots import SlotOwner
from forkd.specs.engine import Engine, EngineContext
from forkd.specs.errors import BadInput, ForkdError, SandboxNotFound
from forkd.specs.models import SnapshotInfo
from forkd.store.disks import DiskStore
from forkd.store.images import ImageCache
from forkd.store.snapshots import SnapshotStore

Progress = Callable[[str, float | None], None]
MAX_ENDINGS = 1000


class Endings(dict[str, str]):
    """Why sandboxes ended by themselves; the oldest are forgotten."""

    def __setitem__(self, key: str, value: str) -> None:
        super().__setitem__(key, value)
        while len(self) > MAX_ENDINGS:
            del self[next(iter(self))]


@dataclass(slots=True)
class Runtime:
    """Settings, plugins, stores, this process's slots and its running sandboxes."""

    settings: Settings
    plugins: Plugins
    snapshots: SnapshotStore
    disks: DiskStore
    images: ImageCache
    slots: SlotOwner
    nursery: trio.Nursery
    start_limit: trio.Semaphore
    sandboxes: dict[str, Sandbox] = field(default_factory=dict)
    endings: Endings = field(default_factory=Endings)
    engines: dict[str, Engine] = field(default_factory=dict)
    writing: dict[str, SnapshotInfo] = field(default_factory=dict)
    failed: dict[str, ForkdError] = field(default_factory=dict)

    def engine(self, name: str | None = None) -> Engine:
        """The engine called ``name``, or the one the settings choose; made on first use."""
        wanted = name or ("qemu" if self.settings.engine == "auto" else self.settings.engine)
        if wanted not in self.engines:
            factory = self.plugins.engines.get(wanted)
            if factory is None:
                known = ", ".join(sorted(self.plugins.engines))
                raise BadInput(f"there is no engine {wanted!r}", hint=f"there are: {known}")
            context = EngineContext(self.settings.cache_dir, {"accel": self.settings.accel})
            self.engines[wanted] = factory(context)
        return self.engines[wanted]

    def sandbox(self, sandbox_id: str) -> Sandbox:
        """The running sandbox with this id. Raises SandboxNotFound, saying how it ended if it did by itself."""
        sandbox = self.sandboxes.get(sandbox_id)
        if sandbox is not None:
            return sandbox
        if reason := self.endings.get(sandbox_id):
            raise SandboxNotFound(f"sandbox {sandbox_id!r} has ended: {reason}")
        raise SandboxNotFound(f"there is no sandbox {sandbox_id[:80]!r}", hint="forkd ls lists them")

    def observe(self, kind: str, **details: Any) -> None:
        """Tell observers (audit, metrics) that something happened."""
        self.plugins.observe({"event": kind, **details})


@asynccontextmanager
async def open_runtime(
    settings: Settings, *, plugins: Plugins | None = None, owner: str | None = None, die_with_owner: bool = True
) -> AsyncIterator[Runtime]:
    """A Runtime whose sandboxes end with it."""
    loaded = plugins or load_plugins(settings)
    slots = SlotOwner(settings.run_dir, owner, die_with_owner=die_with_owner)
    try:
        async with trio.open_nursery() as nursery:
            runtime = Runtime(
                settings=settings,
                plugins=loaded,
                snapshots=SnapshotStore(settings.snapshots_dir),
                disks=DiskStore(settings.rootfs_dir),
                images=ImageCache(settings.images_dir, settings.image_cache_bytes),
                slots=slots,
                nursery=nursery,
                start_limit=trio.Semaphore(settings.start_limit),
            )
            try:
                yield runtime
            finally:
                nursery.cancel_scope.cancel()
    finally:
        for backend in loaded.memory_backends.values():
            backend.close()
        slots.close()
