"""Every request the engine sends, as (method, path, body): paths of the machine's own files are relative to its slot.

Firecracker writes such paths into its device state, so each child, started in a slot of its own, finds its own disk,
sockets and tap under the same names.
"""

from __future__ import annotations

from typing import Any

from forkd.specs.engine import BootSpec, RestoreSpec, Slot

ROOTFS_LINK = "rootfs"
KERNEL_LINK = "kernel"
INITRD_LINK = "initrd"
VMSTATE_LINK = "vmstate"
MEMORY_LINK = "memory"
VSOCK = "vsock.sock"
AGENT_PORT = 52
GUEST_CID = 3
MAC = "02:f0:4b:d0:00:02"
NOWHERE = "no-such-directory/memory"
"""Where the memory of a snapshot shall go: nowhere, so that Firecracker gives up before it writes (decisions/0003)."""

Request = tuple[str, str, dict[str, Any]]


def boot_requests(spec: BootSpec, slot: Slot) -> list[Request]:
    """Configure a machine and start it."""
    requests: list[Request] = [
        ("PUT", "/machine-config", {"vcpu_count": spec.hardware.vcpus, "mem_size_mib": spec.hardware.mem_mib}),
        (
            "PUT",
            "/boot-source",
            {"kernel_image_path": KERNEL_LINK, "initrd_path": INITRD_LINK, "boot_args": boot_args(spec)},
        ),
        (
            "PUT",
            "/drives/rootfs",
            {"drive_id": "rootfs", "path_on_host": ROOTFS_LINK, "is_root_device": False, "is_read_only": True},
        ),
        ("PUT", "/vsock", {"guest_cid": GUEST_CID, "uds_path": VSOCK}),
        ("PUT", "/entropy", {}),
    ]
    if spec.hardware.network and slot.tap is not None:
        body = {"iface_id": "eth0", "host_dev_name": slot.tap, "guest_mac": MAC}
        requests.append(("PUT", "/network-interfaces/eth0", body))
    return [*requests, ("PUT", "/actions", {"action_type": "InstanceStart"})]


def restore_request(spec: RestoreSpec) -> Request:
    """Load device state over a private mapping of the image, and run."""
    body = {
        "snapshot_path": VMSTATE_LINK,
        "mem_backend": {"backend_type": "File", "backend_path": MEMORY_LINK},
        "resume_vm": True,
    }
    return ("PUT", "/snapshot/load", body)


def state_request(paused: bool) -> Request:
    """Stop the virtual CPUs, or let them run."""
    return ("PATCH", "/vm", {"state": "Paused" if paused else "Resumed"})


def save_request(target: str, memory: str = NOWHERE) -> Request:
    """Write device state to ``target``, and memory to ``memory``."""
    return ("PUT", "/snapshot/create", {"snapshot_path": target, "mem_file_path": memory, "snapshot_type": "Full"})


def boot_args(spec: BootSpec) -> str:
    """What the guest kernel is told: a quiet, quick boot; no mitigations inside a single-tenant guest."""
    return " ".join(
        (
            "console=ttyS0",
            "loglevel=4",
            "reboot=k",
            "panic=-1",
            "random.trust_cpu=on",
            "mitigations=off",
            "audit=0",
            "apparmor=0",
            "transparent_hugepage=never",
            "init_on_alloc=0",
            "randomize_kstack_offset=off",
            "cgroup_disable=memory",
            "nowatchdog",
            "sysctl.vm.compaction_proactiveness=0",
            "sysctl.vm.stat_interval=3600",
            "psi=0",
            "8250.nr_uarts=1",
            "forkd.vsock",
            f"forkd.sync={spec.agent_sync}",
        )
    )
