"""A stand-in for Firecracker, written to its API description: answers what that says, and misbehaves on demand.

Run as a program in place of `firecracker`: it knows `--version` and `--api-sock PATH`, keeps every request in
`requests.json` of its working directory, and connects to the agent's socket as a guest would. The environment variable
FAKE_FIRECRACKER chooses: ok, die, refuse, garbage, slow, memory-first, huge, no-number, bound-only.

It imports little, and late: a bench starts a hundred of these beside what it measures.
"""

from __future__ import annotations

import os
import sys
from _socket import AF_UNIX, SOCK_STREAM, socket

MAGIC = 0x0710_1984_8664_0000.to_bytes(8, "little")


def answer(connection: socket, status: int, fault: str = "") -> None:
    payload = f'{{"fault_message": "{fault}"}}'.encode() if fault else b""
    reason = {200: "OK", 204: "No Content", 400: "Bad Request"}[status]
    head = f"HTTP/1.1 {status} {reason}\r\nServer: Firecracker API\r\nConnection: keep-alive\r\n"
    if payload:
        head += f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n"
    connection.sendall(head.encode() + b"\r\n" + payload)


def requests(connection: socket):
    buffer = b""
    while True:
        while b"\r\n\r\n" not in buffer:
            chunk = connection.recv(65536)
            if not chunk:
                return
            buffer += chunk
        head, _, buffer = buffer.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        size = int(fields.get("content-length", "0"))
        while len(buffer) < size:
            buffer += connection.recv(65536)
        body, buffer = buffer[:size], buffer[size:]
        method, path, _ = lines[0].split(" ")
        yield method, path, body.decode()


def knock() -> socket | None:
    guest = socket(AF_UNIX, SOCK_STREAM)
    try:
        guest.connect("vsock.sock_52")
    except OSError:
        return None
    guest.sendall(b"hello from the guest")
    return guest


def main() -> None:
    if "--version" in sys.argv:
        print(f"Firecracker v{os.environ.get('FAKE_FIRECRACKER_VERSION', '1.12.0')}")
        return
    how = os.environ.get("FAKE_FIRECRACKER", "ok")
    if how == "die":
        print("Error: cannot create KVM context", file=sys.stderr)
        sys.exit(148)
    listener = socket(AF_UNIX, SOCK_STREAM)
    listener.bind(sys.argv[sys.argv.index("--api-sock") + 1])
    if how == "bound-only":
        sys.exit(1)
    listener.listen(1)
    seen: list[str] = []
    guest = None
    while True:
        connection = socket(fileno=listener._accept()[0])
        for method, path, body in requests(connection):
            seen.append(f'["{method}", "{path}", {body}]')
            with open("requests.json", "w") as record:
                record.write(f"[{', '.join(seen)}]")
            if how == "garbage":
                connection.sendall(b"\x00\xff this is not HTTP\r\n\r\n")
            elif how == "huge":
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 99999999999\r\n\r\n")
            elif how == "no-number":
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: \xb2\r\n\r\n")
            elif how == "slow":
                continue
            elif how == "die-later" and path in ("/actions", "/snapshot/load"):
                sys.exit(1)
            elif how == "refuse" and path in ("/actions", "/snapshot/load", "/vm"):
                answer(connection, 400, f"The requested operation is not supported: {path}")
            elif path == "/snapshot/create":
                create(connection, how, body)
            else:
                answer(connection, 204)
                if path in ("/actions", "/snapshot/load"):
                    guest = knock()
    del guest


def create(connection: socket, how: str, text: str) -> None:
    import json
    from pathlib import Path

    body = json.loads(text)
    memory = Path(body["mem_file_path"])
    if how != "memory-first":
        Path(body["snapshot_path"]).write_bytes(MAGIC + b"state")
    if not memory.parent.is_dir():
        words = "Create snapshot error: Cannot perform open on the memory backing file: No such file or directory"
        answer(connection, 400, words)
        return
    memory.write_bytes(b"ram")
    Path(body["snapshot_path"]).write_bytes(MAGIC + b"state")
    answer(connection, 204)


if __name__ == "__main__":
    main()
