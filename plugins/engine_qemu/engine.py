"""The QEMU engine: boot, restore and adopt machines."""

from __future__ import annotations

import os
import platform as host_platform
from pathlib import Path

import trio

from forkd.linux.hostprobe import HostProbe
from forkd.linux.process import ProcessHandle
from forkd.plugins.engine_qemu import command, host
from forkd.plugins.engine_qemu.command import Fds
from forkd.plugins.engine_qemu.machine import AGENT_SOCKET, CONSOLE, QMP_SOCKET, Launch, QemuMachine, connect
from forkd.plugins.engine_qemu.qmp import Qmp
from forkd.plugins.engine_qemu.template import QemuTemplate
from forkd.plugins.engine_qemu.user import as_user, choose_users, give_slot, let_read, user_of
from forkd.specs.engine import (
    GHOST,
    IDLE_NIC,
    TEMPLATE,
    USER_NETWORK,
    VOLUMES,
    BootSpec,
    EngineContext,
    EngineInfo,
    Machine,
    RestoreSpec,
    Slot,
)
from forkd.specs.errors import MachineGone, SnapshotIncompatible, TemplateRefused
from forkd.specs.models import Platform

TSC_TOLERANCE = 0.01
BOOT_RAM = "memory-backend-memfd"


class QemuEngine:
    """Runs machines on the host's own QEMU."""

    name = "qemu"

    def __init__(self, context: EngineContext) -> None:
        self._cache_dir = context.cache_dir
        self._accel = context.settings.get("accel", "auto")
        self._users = choose_users(context.settings.get("vmm_users", "auto"), HostProbe())
        self._info: EngineInfo | None = None
        self._qemu: list[str] = []

    async def describe(self) -> EngineInfo:
        """Version, accelerator and TSC rate; remembered."""
        if self._info is None:
            binary = host.find_qemu()
            accel, why = host.pick_accelerator(self._accel)
            facts = await trio.to_thread.run_sync(host.gather, binary, self._cache_dir)
            # To freeze or clone a process under seccomp needs root: who has not must do without the one or the other.
            self._qemu = [binary, *(command.SANDBOX if facts.sandbox and os.geteuid() == 0 else ())]
            platform = Platform(
                engine=self.name,
                engine_version=facts.version,
                accelerator=accel,
                machine=command.MODEL,
                cpu=command.TCG_CPU if accel == "tcg" else f"host:{_cpu_model()}",
                arch=host_platform.machine(),
                tsc_khz=facts.tsc_khz,
            )
            capabilities = {GHOST, IDLE_NIC, USER_NETWORK, VOLUMES} | ({TEMPLATE} if accel == "tcg" else set())
            self._info = EngineInfo(platform, frozenset(capabilities), why)
        return self._info

    def check(self, platform: Platform, here: EngineInfo) -> None:
        """Same engine, QEMU minor version, accelerator, machine, CPU and (within 1 %) TSC rate."""
        ours = here.platform
        for what, theirs, own in (
            ("architecture", platform.arch, ours.arch),
            ("accelerator", platform.accelerator, ours.accelerator),
            ("machine type", platform.machine, ours.machine),
            ("CPU", platform.cpu, ours.cpu),
            ("QEMU version", _minor(platform.engine_version), _minor(ours.engine_version)),
        ):
            if theirs != own:
                raise SnapshotIncompatible(
                    f"the snapshot was made on {what} {theirs!r}, this host has {own!r}",
                    hint="build the snapshot again on this host: forkd from-image",
                )
        if abs(platform.tsc_khz - ours.tsc_khz) > TSC_TOLERANCE * ours.tsc_khz:
            raise SnapshotIncompatible(
                f"the snapshot's guest counts on a {platform.tsc_khz} kHz TSC, this host's runs at {ours.tsc_khz} kHz",
                hint="build the snapshot again on this host: forkd from-image",
            )

    async def boot(self, spec: BootSpec, slot: Slot) -> QemuMachine:
        """Boot from the kernel."""
        info = await self.describe()
        accel, tsc = info.platform.accelerator, info.platform.tsc_khz
        launch = Launch(slot)
        try:
            fds = Fds(*launch.prepare())
            console = slot.directory / CONSOLE
            qemu = self._for(slot, spec.rootfs, *(volume.path for volume in spec.volumes))
            launch.start(command.boot_command(qemu, accel, tsc, spec, slot, fds, console))
            return await launch.handshake(BOOT_RAM, spec.hardware.mem_mib << 20)
        except BaseException:
            await launch.undo()
            raise

    async def restore(self, spec: RestoreSpec, slot: Slot) -> QemuMachine:
        """Load device state over a private mapping of the image."""
        info = await self.describe()
        launch = Launch(slot)
        vmstate = os.open(spec.vmstate, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fds = Fds(*launch.prepare())
            qemu = self._for(slot, spec.rootfs, *(volume.path for volume in spec.volumes))
            line = command.restore_command(qemu, info.platform.accelerator, spec, slot, fds, vmstate)
            launch.start(line, (vmstate,))
            machine = await launch.handshake(spec.memory.path, spec.memory.size)
            await launch.running(machine)
            return machine
        except BaseException:
            await launch.undo()
            raise
        finally:
            os.close(vmstate)

    def _for(self, slot: Slot, *disks: Path | None) -> list[str]:
        """QEMU for this slot: as a user of its own, where it may be one.

        Not where it must end with its owner: the kernel takes a process's death signal when that changes its user.
        """
        if self._users is None or self._info is None or slot.die_with_owner:
            return self._qemu
        user = user_of(self._users, slot.id)
        give_slot(slot.directory, user)
        for disk in disks:
            if disk is not None:
                let_read(disk)  # a clone opens its disks anew, as the user it is
        return as_user(self._qemu, user, self._info.platform.engine_version)

    async def freeze(self, machine: Machine, slot: Slot, *, resume: bool) -> QemuTemplate:
        """A template of a machine."""
        if not isinstance(machine, QemuMachine) or TEMPLATE not in (await self.describe()).capabilities:
            raise TemplateRefused("only a machine of QEMU's software emulation can be cloned")
        return await QemuTemplate.of(machine, die_with_owner=slot.die_with_owner, resume=resume)

    async def adopt(self, slot: Slot, pid: int, starttime: int) -> QemuMachine:
        """Connect again to a QEMU that kept running. One that cannot be reached is ended: nobody could use it."""
        process = ProcessHandle.of_running(pid, starttime)
        if process is None:
            raise MachineGone(f"VMM {pid} of {slot.id} is gone")
        try:
            qmp = Qmp(await connect(slot.directory, QMP_SOCKET))
            agent = await connect(slot.directory, AGENT_SOCKET)
            await qmp.negotiate()
            machine = QemuMachine(process, qmp, agent, slot, *_ram(pid))
            await machine.look_for_lent()
        except OSError as error:
            process.kill()
            await process.wait()
            raise MachineGone(f"VMM {pid} of {slot.id} does not answer: {error}") from error
        except BaseException:
            process.close()
            raise
        return machine


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _cpu_model() -> str:
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as info:
        for line in info:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "unknown"


def _ram(pid: int) -> tuple[str, int | None]:
    """What guest RAM maps, and its size: the path may lead nowhere any more, if it was a descriptor of a dead owner."""
    with open(f"/proc/{pid}/cmdline", "rb") as source:
        for word in source.read().decode(errors="replace").split("\0"):
            if word.startswith("memory-backend-file,"):
                size = word.partition("size=")[2].partition(",")[0]
                return word.partition("mem-path=")[2].replace(",,", ","), int(size)
    return BOOT_RAM, None
