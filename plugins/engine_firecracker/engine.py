"""The Firecracker engine: boot, restore and adopt machines, in a jail where one is asked for."""

from __future__ import annotations

import os
import platform as host_platform
import re
import shutil
import stat
import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import trio

from forkd.linux.hostprobe import HostProbe
from forkd.linux.inotify import FileWaiter
from forkd.linux.process import ProcessHandle
from forkd.plugins.engine_firecracker import host
from forkd.plugins.engine_firecracker.api import Api
from forkd.plugins.engine_firecracker.machine import API_SOCKET, FirecrackerMachine, Launch
from forkd.plugins.engine_firecracker.requests import (
    AGENT_PORT,
    INITRD_LINK,
    KERNEL_LINK,
    MEMORY_LINK,
    ROOTFS_LINK,
    VMSTATE_LINK,
    VSOCK,
    boot_requests,
    restore_request,
)
from forkd.plugins.engine_firecracker.sockets import AgentStream, dial_guest, listen, reach
from forkd.specs.engine import GHOST, BootSpec, EngineContext, EngineInfo, RestoreSpec, Slot
from forkd.specs.errors import BadInput, LaunchFailed, MachineGone, SnapshotIncompatible
from forkd.specs.host import Host
from forkd.specs.models import Platform

JAIL = "jail"
"""Where in a slot the jailer makes a machine's directory; slots.py looks for processes in there."""
ONE_REGION_MIB = 3072
"""Above it Firecracker maps guest RAM in two pieces, which a booted machine's RAM is not looked for in."""


class FirecrackerEngine:
    """Runs machines on the host's own Firecracker."""

    name = "firecracker"

    def __init__(self, context: EngineContext, probe: Host | None = None) -> None:
        self._probe: Host = probe or HostProbe()
        self._jail = _jail(context.settings.get("jail", ""))
        self._info: EngineInfo | None = None
        self._binary = ""
        self._setpriv = "setpriv"
        self._waiter = FileWaiter()

    @staticmethod
    def why_not(probe: Host) -> str | None:
        """Why ``auto`` would not choose this engine, if it would not."""
        return host.why_not(probe)

    async def describe(self) -> EngineInfo:
        """Version and CPU; remembered."""
        if self._info is None:
            binary, version = await trio.to_thread.run_sync(host.find, self._probe)
            self._binary = os.path.realpath(binary)  # by whose name a jailer calls its directory
            self._setpriv = shutil.which("setpriv") or "setpriv"  # looked up once, not at every start
            model = re.search(r"^model name\s*:\s*(.*)$", self._probe.read("/proc/cpuinfo") or "", re.MULTILINE)
            made = Platform(
                engine=self.name,
                engine_version=version,
                accelerator="kvm",
                machine="firecracker",
                cpu=f"host:{model[1] if model else 'unknown'}",
                arch=host_platform.machine(),
            )
            self._info = EngineInfo(made, frozenset({GHOST}), f"{self._binary} and KVM work")
        return self._info

    def check(self, platform: Platform, here: EngineInfo) -> None:
        """Same CPU, and a Firecracker of the same minor version: its state format is its own business."""
        ours = here.platform
        for what, theirs, own in (
            ("architecture", platform.arch, ours.arch),
            ("accelerator", platform.accelerator, ours.accelerator),
            ("CPU", platform.cpu, ours.cpu),
            ("Firecracker version", _minor(platform.engine_version), _minor(ours.engine_version)),
        ):
            if theirs != own:
                raise SnapshotIncompatible(
                    f"the snapshot was made on {what} {theirs!r}, this host has {own!r}",
                    hint="build the snapshot again on this host: forkd from-image",
                )

    async def boot(self, spec: BootSpec, slot: Slot) -> FirecrackerMachine:
        """Boot from the kernel."""
        if spec.hardware.mem_mib > ONE_REGION_MIB:
            raise BadInput(
                f"{spec.hardware.mem_mib} MiB of RAM are not possible on Firecracker",
                hint=f"give {ONE_REGION_MIB} at most",
            )
        files = {KERNEL_LINK: spec.kernel, INITRD_LINK: spec.initrd, ROOTFS_LINK: spec.rootfs}
        launch = await self._launch(slot, files, keep_console=True)
        try:
            await launch.connect()
            await launch.configure(boot_requests(spec, slot))
            return launch.machine(None, spec.hardware.mem_mib << 20)
        except BaseException:
            await launch.undo()
            raise

    async def restore(self, spec: RestoreSpec, slot: Slot) -> FirecrackerMachine:
        """Load device state over a private mapping of the image."""
        files = {VMSTATE_LINK: spec.vmstate, MEMORY_LINK: Path(spec.memory.path)}
        if spec.rootfs is not None:
            files[ROOTFS_LINK] = spec.rootfs
        launch = await self._launch(slot, files, keep_console=False)
        try:
            await launch.connect()
            await launch.configure([restore_request(spec)])
            return launch.machine(spec.memory.path, spec.hardware.mem_mib << 20)
        except BaseException:
            await launch.undo()
            raise

    async def adopt(self, slot: Slot, pid: int, starttime: int) -> FirecrackerMachine:
        """Connect again to a Firecracker that kept running: its guest, which lost its host, connects to the new one.

        One that cannot be reached is ended: nobody could use it, and its slot is about to go.
        """
        process = ProcessHandle.of_running(pid, starttime)
        if process is None:
            raise MachineGone(f"VMM {pid} of {slot.id} is gone")
        root, user = _where(slot)
        with ExitStack() as undo:
            undo.callback(process.close)
            try:
                stream = await reach(root, API_SOCKET)
                undo.callback(stream.close)
                listener = listen(root, f"{VSOCK}_{AGENT_PORT}", user)
                undo.callback(listener.close)
                agent = AgentStream(listener, await dial_guest(root))
            except OSError as error:
                process.kill()
                await process.wait()
                raise MachineGone(f"VMM {pid} of {slot.id} does not answer: {error}") from error
            undo.pop_all()
        return FirecrackerMachine(process, Api(stream), agent, root, os.path.realpath(root / MEMORY_LINK), None)

    async def _launch(self, slot: Slot, files: Mapping[str, Path], *, keep_console: bool) -> Launch:
        await self.describe()
        root = self._root(slot)
        launch = Launch(slot, root, self._waiter)
        try:
            _place(root, files, jailed=self._jail is not None)
            launch.prepare(self._user(slot))
            guarded = self._jail is not None and slot.die_with_owner
            launch.start(self._command(slot), keep_console=keep_console, guarded=guarded)
        except BaseException:
            await launch.undo()
            raise
        return launch

    def _root(self, slot: Slot) -> Path:
        if self._jail is None:
            return slot.directory
        root = slot.directory / JAIL / os.path.basename(self._binary) / slot.id / "root"
        root.mkdir(parents=True)
        return root

    def _user(self, slot: Slot) -> int | None:
        """The user of a slot's jail, by its id, which nobody else has."""
        return None if self._jail is None else self._jail[zlib.crc32(slot.id.encode()) % len(self._jail)]

    def _command(self, slot: Slot) -> list[str]:
        """How to start it. Its seccomp filter stays on; it gains no privileges and dies with us if the slot says so.

        In a jail a guard sees to the latter: the kernel takes a process's death signal when that changes its user.
        """
        death = ["--pdeathsig", "KILL"] if slot.die_with_owner else []
        if self._jail is None:
            space = [] if slot.netns is None else ["nsenter", f"--net={slot.netns}", "--"]
            return [*space, self._setpriv, "--no-new-privs", *death, "--", self._binary, "--api-sock", API_SOCKET]
        who, space = str(self._user(slot)), [] if slot.netns is None else ["--netns", slot.netns]
        jail = ["--id", slot.id, "--exec-file", self._binary, "--uid", who, "--gid", who, *space]
        base = ["--chroot-base-dir", str(slot.directory / JAIL), "--", "--api-sock", API_SOCKET]
        return [self._setpriv, "--no-new-privs", "--", host.JAILER, *jail, *base]


def _place(root: Path, files: Mapping[str, Path], *, jailed: bool) -> None:
    """Put a machine's files under their names: as symbolic links, or hard ones where those would lead out of a jail.

    A jailed Firecracker is another user, so its files are made readable; the directories above them stay private.
    """
    for name, path in files.items():
        if jailed:
            try:
                os.link(path, root / name)
            except OSError as error:
                raise LaunchFailed(
                    f"{path} cannot be linked into a jail: {error.strerror}",
                    hint="keep snapshots and run directory on one file system, fork from files, or unset FORKD_JAIL",
                ) from error
            os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) | 0o444)
        else:
            os.symlink(path, os.path.join(root, name))


def _where(slot: Slot) -> tuple[Path, int | None]:
    """The directory a machine works in, and the user it is there, as its slot tells: the setting may have changed.

    Not by its process: what that calls its directory is seen from inside its jail.
    """
    for root in slot.directory.glob(f"{JAIL}/*/*/root"):
        return root, os.stat(root).st_uid
    return slot.directory, None


def _jail(setting: str) -> range | None:
    """The users of ``NUMBER`` or ``FIRST-LAST``."""
    if not setting:
        return None
    match = re.fullmatch(r"([0-9]{1,10})(?:-([0-9]{1,10}))?", setting)
    if match is None or not 0 < int(match[1]) <= int(match[2] or match[1]) < 0xFFFFFFFF:
        raise BadInput(
            f"jail is {setting[:40]!r}",
            hint="give the number of an unprivileged user, or the first and last of many: 1879048192-2013265919",
        )
    return range(int(match[1]), int(match[2] or match[1]) + 1)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
