"""Make a parent snapshot: boot a machine, wait until its guest is warm, capture it, end it."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field

import msgspec
import trio

from forkd import __version__, config
from forkd.ops.capture import capture_into_stage
from forkd.ops.volumes import volume_disks
from forkd.provision import KernelFiles
from forkd.runtime import Progress, Runtime
from forkd.sandbox import Plan, Sandbox, end_sandbox, run_sandbox
from forkd.slots import new_sandbox_id
from forkd.specs.engine import IDLE_NIC, BootSpec, Machine, Slot
from forkd.specs.errors import BadInput, EngineError, GuestError
from forkd.specs.models import FileRef, Hardware, SandboxInfo, Snapshot, Volume
from forkd.store.snapshots import Stored

BOOT_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class ParentSpec:
    """What to boot and how to warm it: ``warmup`` is Python run in the warm interpreter before the capture."""

    tag: str
    kernel: KernelFiles
    rootfs: FileRef
    hardware: Hardware
    image: str | None = None
    warmup: tuple[str, ...] = ()
    settle: float = 0.0
    labels: dict[str, str] = field(default_factory=dict)
    volumes: tuple[Volume, ...] = ()
    tap: str | None = None


def check_hardware(vcpus: int, mem_mib: int) -> Hardware:
    """The machine's size, or BadInput."""
    if not 1 <= vcpus <= config.MAX_VCPUS:
        raise BadInput(f"{vcpus} virtual CPUs are not possible", hint=f"give 1 to {config.MAX_VCPUS}")
    if not config.MIN_MEM_MIB <= mem_mib <= config.MAX_MEM_MIB:
        raise BadInput(
            f"{mem_mib} MiB of RAM are not possible", hint=f"give {config.MIN_MEM_MIB} to {config.MAX_MEM_MIB}"
        )
    return Hardware(vcpus=vcpus, mem_mib=mem_mib)


async def snapshot_parent(runtime: Runtime, spec: ParentSpec, progress: Progress) -> Stored:
    """Boot, warm and capture ``spec``. Raises TagTaken at once, LaunchFailed with the console's tail, NoSpace."""
    rootfs = runtime.disks.find(spec.rootfs)
    stage = runtime.snapshots.stage(spec.tag)
    try:
        engine = runtime.engine()
        here = await engine.describe()
        sync = secrets.token_hex(16)
        # Every parent can be networked later; a device that needs a tap needs root.
        network = IDLE_NIC in here.capabilities or runtime.slots.networks.root
        hardware = msgspec.structs.replace(spec.hardware, network=network)
        volumes = await volume_disks(runtime, engine, spec.volumes)
        boot = BootSpec(spec.kernel.kernel, spec.kernel.initrd, rootfs, hardware, sync, volumes)
        progress(f"booting ({here.platform.engine}, {here.platform.accelerator})", None)
        parent = await boot_machine(runtime, boot, spec.tap)
        try:
            for code in spec.warmup:
                progress(f"warming: {code}", None)
                result = await parent.link.eval(code, timeout=runtime.settings.boot_timeout)
                if result.error is not None:
                    raise BadInput(f"warm-up {code!r} failed in the guest: {result.error}")
            await trio.sleep(spec.settle)
            progress("capturing", None)
            captured = await capture_into_stage(parent, runtime.plugins.branch_mode("full"), stage, hardware)
        finally:
            await end_sandbox(parent)
        manifest = Snapshot(
            tag=spec.tag,
            content="",
            created_at_unix=int(time.time()),
            forkd_version=__version__,
            platform=here.platform,
            hardware=hardware,
            vmstate=captured.vmstate,
            memory=captured.memory,
            rootfs=spec.rootfs,
            kernel=FileRef(digest=spec.kernel.digest, size=spec.kernel.vmlinuz.stat().st_size),
            agent_sync=sync,
            image=spec.image,
            labels=spec.labels,
            volumes=list(spec.volumes),
        )
        progress("writing to disk", None)
        stored = await trio.to_thread.run_sync(stage.commit, captured.seal(manifest))
    except BaseException:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(stage.abandon)
        raise
    runtime.observe("snapshot", tag=spec.tag)
    return stored


async def boot_machine(runtime: Runtime, spec: BootSpec, host_tap: str | None = None) -> Sandbox:
    """Boot with a deadline and one more try: a guest on a busy host may lose its first race with the clock."""
    for attempt in range(1, BOOT_ATTEMPTS + 1):
        sandbox_id = new_sandbox_id()

        async def start(slot: Slot) -> Machine:
            return await runtime.engine().boot(spec, slot)

        info = SandboxInfo(id=sandbox_id, snapshot_tag="", created_at_unix=int(time.time()), spawned_by="boot")
        tap = (
            host_tap is None
            and spec.hardware.network
            and IDLE_NIC not in (await runtime.engine().describe()).capabilities
        )
        plan = Plan(sandbox_id, start, spec.agent_sync, info, None, runtime.settings.boot_timeout, tap, host_tap)
        try:
            sandbox: Sandbox = await runtime.nursery.start(run_sandbox, runtime, plan)
            return sandbox
        except (EngineError, GuestError):
            if attempt == BOOT_ATTEMPTS:
                raise
    raise AssertionError("unreachable")
