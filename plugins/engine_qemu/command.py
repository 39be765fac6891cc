"""QEMU's command line. Boot and restore must describe the same machine, so both come from one function."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from forkd.specs.engine import BootSpec, RestoreSpec, Slot, VolumeDisk, volume_words
from forkd.specs.models import Hardware

MACHINE = "microvm"
MODEL = "microvm-nopit"
"""What the machine is called in snapshots: state of one loads only into one with the same devices."""
TCG_CPU = "qemu64,+arat,+rdrand,+3dnow,+3dnowext"
"""By its family it is an Opteron: OpenBLAS (of PyPI's numpy) then uses 3DNow without asking whether it is there."""
KVM_CPU = "host"
CONSOLE_BYTES = 65536
SANDBOX = ("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny")
"""Seccomp: a VMM that was taken over can start no program and gain no privilege."""
MAC = "02:f0:4b:d0:00:02"
"""Every guest has the same address, in a network of its own."""


def boot_command(
    qemu: Sequence[str], accel: str, tsc_khz: int, spec: BootSpec, slot: Slot, fds: Fds, console: Path
) -> list[str]:
    """Boot from the kernel; RAM is anonymous, the console goes to a file so that a failed boot can be explained."""
    cmdline = " ".join(kernel_command_line(accel, tsc_khz, spec))
    ram = f"memory-backend-memfd,id=ram,size={spec.hardware.mem_mib}M,share=off"
    return [
        *_machine(qemu, accel, spec.hardware, spec.rootfs, fds),
        *_volumes(spec.volumes),
        *_network(spec.hardware, slot),
        *("-object", ram),
        *("-chardev", f"file,id=console,path={_escape(str(console))}"),
        *("-kernel", str(spec.kernel), "-initrd", str(spec.initrd), "-append", cmdline),
    ]


def restore_command(
    qemu: Sequence[str], accel: str, spec: RestoreSpec, slot: Slot, fds: Fds, vmstate_fd: int
) -> list[str]:
    """Load device state from an inherited descriptor and run; the kernel is in RAM already."""
    backend = f"memory-backend-file,id=ram,size={spec.memory.size},share=off,mem-path={_escape(spec.memory.path)}"
    return [
        *_machine(qemu, accel, spec.hardware, spec.rootfs, fds),
        *_volumes(spec.volumes),
        *_network(spec.hardware, slot),
        *("-object", backend),
        *("-chardev", f"ringbuf,id=console,size={CONSOLE_BYTES}"),
        *("-incoming", f"fd:{vmstate_fd}"),
    ]


def kernel_command_line(accel: str, tsc_khz: int, spec: BootSpec) -> list[str]:
    """What the guest kernel is told: a quiet, quick boot; no mitigations inside a single-tenant guest."""
    words = [
        "console=ttyS0",
        "loglevel=4",
        "panic=-1",
        "reboot=t",
        "random.trust_cpu=on",
        "mitigations=off",
        "audit=0",
        "apparmor=0",
        # Fewer pages written for the same work: every one is private to the child that writes it.
        "transparent_hugepage=never",
        "init_on_alloc=0",
        "randomize_kstack_offset=off",
        "cgroup_disable=memory",
        "nowatchdog",
        # An idle guest is left alone: nothing looks every second or two for memory to compact, counts or pressure.
        "sysctl.vm.compaction_proactiveness=0",
        "sysctl.vm.stat_interval=3600",
        "psi=0",
        "8250.nr_uarts=1",
        f"forkd.sync={spec.agent_sync}",
        *volume_words(spec.volumes),
    ]
    if accel == "tcg":
        # Without these a guest under load hangs at boot, or ticks 250 times a second when idle.
        words += ["tsc=reliable", "no_timer_check", f"tsc_early_khz={tsc_khz}"]
    return words


class Fds:
    """Listening sockets handed to QEMU; each already has our connection waiting, so QEMU never waits for it."""

    def __init__(self, qmp: int, agent: int) -> None:
        self.qmp = qmp
        self.agent = agent


def _machine(qemu: Sequence[str], accel: str, hardware: Hardware, rootfs: Path | None, fds: Fds) -> list[str]:
    command = [
        *qemu,
        # No interval timer: Linux calibrates by the TSC, and an untouched one wakes QEMU 36 times a second for ever.
        *("-M", f"{MACHINE},memory-backend=ram,accel={accel},suppress-vmdesc=on,rtc=on,pic=on,pit=off"),
        *("-cpu", TCG_CPU if accel == "tcg" else KVM_CPU),
        *("-smp", str(hardware.vcpus), "-m", f"{hardware.mem_mib}M"),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-global", "migration.send-configuration=off"),
        *("-chardev", f"socket,id=qmp,fd={fds.qmp},server=on,wait=on", "-mon", "chardev=qmp,mode=control"),
        *("-chardev", f"socket,id=agent,fd={fds.agent},server=on,wait=on"),
        *("-serial", "chardev:console"),
        *("-device", "virtio-serial-device,max_ports=2"),
        *("-device", "virtserialport,chardev=agent,name=forkd.agent,nr=1"),
    ]
    if rootfs is not None:
        command += _disk("root", rootfs)
    return command


def _volumes(volumes: Sequence[VolumeDisk]) -> list[str]:
    return [word for index, volume in enumerate(volumes) for word in _disk(f"volume{index}", volume.path)]


def _disk(name: str, path: Path) -> list[str]:
    """A read-only disk that the guest knows by its serial number: what it is called there depends on the machine."""
    disk = (
        f"driver=raw,node-name={name},read-only=on,file.driver=file,file.locking=off,file.filename={_escape(str(path))}"
    )
    return ["-blockdev", disk, "-device", f"virtio-blk-device,drive={name},serial=forkd-{name}"]


def _network(hardware: Hardware, slot: Slot) -> list[str]:
    """The guest's network device is always the same, whatever it leads to; without a peer it leads nowhere.

    No offloads: what the device offers must not depend on what it is connected to, or state would not load.
    """
    if not hardware.network:
        return []
    offloads = "csum gso guest_csum guest_tso4 guest_tso6 guest_ecn guest_ufo guest_announce mrg_rxbuf"
    offloads += " host_tso4 host_tso6 host_ecn host_ufo"
    device = f"virtio-net-device,mac={MAC}," + ",".join(f"{name}=off" for name in offloads.split())
    if slot.tap is not None:
        peer = f"tap,id=net,ifname={slot.tap},script=no,downscript=no,vhost=off,vnet_hdr=off"
    elif slot.user_network:
        peer = "user,id=net,ipv6=off,net=10.42.0.0/24,host=10.42.0.1,dns=10.42.0.3,dhcpstart=10.42.0.9"
    else:
        return ["-device", device]
    return ["-netdev", peer, "-device", f"{device},netdev=net"]


def _escape(value: str) -> str:
    return value.replace(",", ",,")
