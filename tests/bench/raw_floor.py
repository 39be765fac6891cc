"""The floor: fork N children of a snapshot with as little code as possible, none of it forkd's, and time the answers.

Usage: raw_floor.py SNAPSHOT_DIR ROOTFS N EXPRESSION   (prints one JSON line)
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

AT_A_TIME = 8


def command(manifest: dict, memory: str, rootfs: str, qmp: int, agent: int, vmstate: int) -> list[str]:
    hardware = manifest["hardware"]
    features = "csum gso guest_csum guest_tso4 guest_tso6 guest_ecn guest_ufo guest_announce mrg_rxbuf"
    features += " host_tso4 host_tso6 host_ecn host_ufo"
    network = "virtio-net-device,mac=02:f0:4b:d0:00:02," + ",".join(f"{name}=off" for name in features.split())
    return [
        "qemu-system-x86_64",
        *("-M", "microvm,memory-backend=ram,accel=tcg,suppress-vmdesc=on,rtc=on,pic=on,pit=off"),
        *("-cpu", manifest["platform"]["cpu"], "-smp", str(hardware["vcpus"]), "-m", f"{hardware['mem_mib']}M"),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-global", "migration.send-configuration=off"),
        *("-chardev", f"socket,id=qmp,fd={qmp}", "-mon", "chardev=qmp,mode=control"),
        *("-chardev", f"socket,id=agent,fd={agent}"),
        *("-chardev", "ringbuf,id=console,size=65536", "-serial", "chardev:console"),
        *("-device", "virtio-serial-device,max_ports=2"),
        *("-device", "virtserialport,chardev=agent,name=forkd.agent,nr=1"),
        *(
            "-blockdev",
            f"driver=raw,node-name=root,read-only=on,file.driver=file,file.locking=off,file.filename={rootfs}",
        ),
        *("-device", "virtio-blk-device,drive=root"),
        *(("-device", network) if hardware.get("network") else ()),
        *("-object", f"memory-backend-file,id=ram,size={hardware['mem_mib']}M,share=off,mem-path={memory}"),
        *("-incoming", f"fd:{vmstate}"),
    ]


def frame(stream: int, message: dict) -> bytes:
    body = json.dumps(message).encode()
    return struct.pack(">IBI", len(body), 1, stream) + body


def received(source: socket.socket) -> bytes:
    source.settimeout(60)
    chunk = source.recv(65536)
    if not chunk:
        raise RuntimeError("the machine went away")
    return chunk


def child(snapshot: str, manifest: dict, rootfs: str, expression: str, limit: threading.Semaphore) -> tuple[int, str]:
    with limit:
        qmp_ours, qmp_theirs = socket.socketpair()
        agent_ours, agent_theirs = socket.socketpair()
        vmstate = os.open(f"{snapshot}/vmstate", os.O_RDONLY)
        fds = (qmp_theirs.fileno(), agent_theirs.fileno(), vmstate)
        line = command(manifest, f"{snapshot}/memory.bin", rootfs, *fds)
        process = subprocess.Popen(line, pass_fds=fds, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for theirs in (qmp_theirs, agent_theirs):
            theirs.close()
        os.close(vmstate)
        # A guest that does not run yet may lose the wake-up for bytes sent to it: wait for QEMU's RESUME event.
        qmp_ours.sendall(b'{"execute": "qmp_capabilities"}\n')
        heard = b""
        while b'"RESUME"' not in heard:
            heard += received(qmp_ours)
        resume = {"op": "resume", "time_ns": time.time_ns(), "entropy": secrets.token_hex(64)}
        sync = bytes.fromhex(manifest["agent_sync"]) + secrets.token_bytes(16)
        agent_ours.sendall(sync + frame(1, resume) + frame(2, {"op": "eval", "code": expression}))
        got = b""
        while b'"result"' not in got:
            got += received(agent_ours)
        return process.pid, got.decode(errors="replace")


def main() -> None:
    snapshot, rootfs, count, expression = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    with open(f"{snapshot}/snapshot.json") as source:
        manifest = json.load(source)
    os.chdir(tempfile.gettempdir())
    limit = threading.Semaphore(AT_A_TIME)
    began = time.monotonic()
    with ThreadPoolExecutor(count) as pool:
        results = list(pool.map(lambda _: child(snapshot, manifest, rootfs, expression, limit), range(count)))
    seconds = time.monotonic() - began
    for pid, _ in results:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    print(json.dumps({"n": count, "seconds": seconds, "answers": len(results)}))


main()
