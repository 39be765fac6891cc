"""A real registry on loopback, and images made and pushed by hand, whatever is wrong with them."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import socket
import subprocess
import tarfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import zstandard

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
SECRET = "$2b$04$1o8I88EhNpfVeT9y0hkaX.tI7odIBsGWbmCZ9grzBkrnbp7kEkGOS"  # bcrypt of "secret"
LAYER = "application/vnd.oci.image.layer.v1.tar"


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


@dataclass(slots=True)
class Entry:
    """One member of a layer."""

    name: str
    data: bytes = b""
    type: bytes = tarfile.REGTYPE
    mode: int = 0o644
    link: str = ""
    uid: int = 0
    gid: int = 0
    pax: dict[str, str] = field(default_factory=dict)


def folder(name: str, mode: int = 0o755) -> Entry:
    return Entry(name, type=tarfile.DIRTYPE, mode=mode)


def symlink(name: str, target: str) -> Entry:
    return Entry(name, type=tarfile.SYMTYPE, link=target)


def hardlink(name: str, target: str) -> Entry:
    return Entry(name, type=tarfile.LNKTYPE, link=target)


def tar_of(entries: Sequence[Entry]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries:
            info = tarfile.TarInfo(entry.name)
            info.type, info.mode, info.linkname = entry.type, entry.mode, entry.link
            info.uid, info.gid, info.size = entry.uid, entry.gid, len(entry.data)
            info.pax_headers = dict(entry.pax)
            archive.addfile(info, io.BytesIO(entry.data))
    return out.getvalue()


@dataclass(slots=True)
class Registry:
    """A running docker-registry."""

    address: str
    storage: Path
    auth: tuple[str, str] | None = None

    def reference(self, name: str, version: str = "latest") -> str:
        return f"oci://{self.address}/{name}:{version}"

    def blob_file(self, digest: str) -> Path:
        hexa = digest.removeprefix("sha256:")
        return self.storage / f"docker/registry/v2/blobs/sha256/{hexa[:2]}/{hexa}/data"

    def push_blob(self, name: str, data: bytes) -> dict[str, Any]:
        with self._client() as client:
            started = client.post(f"/v2/{name}/blobs/uploads/")
            assert started.status_code == 202, started.text
            where = httpx.URL(started.headers["Location"]).copy_add_param("digest", digest_of(data))
            put = client.put(where, content=data)
            assert put.status_code == 201, put.text
        return {"digest": digest_of(data), "size": len(data)}

    def push_manifest(self, name: str, version: str, document: dict[str, Any]) -> dict[str, Any]:
        data = json.dumps(document).encode()
        with self._client() as client:
            headers = {"Content-Type": document["mediaType"]}
            put = client.put(f"/v2/{name}/manifests/{version}", content=data, headers=headers)
            assert put.status_code == 201, put.text
        return {"digest": digest_of(data), "size": len(data), "mediaType": document["mediaType"]}

    def push_image(
        self,
        name: str,
        layers: Sequence[bytes],
        *,
        version: str = "latest",
        packing: Sequence[str] = (),
        architecture: str = "amd64",
        config: dict[str, Any] | None = None,
        diff_ids: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """Push an image of tar archives; returns its manifest's descriptor."""
        ways = list(packing) or ["+gzip"] * len(layers)
        pack = {"+gzip": lambda raw: gzip.compress(raw, 1, mtime=0), "+zstd": zstandard.compress, "": bytes}
        rows = [
            {**self.push_blob(name, pack[way](raw)), "mediaType": LAYER + way}
            for raw, way in zip(layers, ways, strict=True)
        ]
        settings = {
            "architecture": architecture,
            "os": "linux",
            "config": config or {},
            "rootfs": {"type": "layers", "diff_ids": list(diff_ids or [digest_of(raw) for raw in layers])},
        }
        head = self.push_blob(name, json.dumps(settings).encode())
        head["mediaType"] = "application/vnd.oci.image.config.v1+json"
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": head, "layers": rows}
        return self.push_manifest(name, version, manifest)

    def push_index(self, name: str, version: str, images: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Push an index: descriptors by architecture."""
        rows = [
            {**row, "platform": {"os": "linux", "architecture": architecture}} for architecture, row in images.items()
        ]
        return self.push_manifest(name, version, {"schemaVersion": 2, "mediaType": INDEX, "manifests": rows})

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=f"http://{self.address}", auth=self.auth, timeout=30)


@contextmanager
def running_registry(work: Path, *, private: bool = False, auth: dict[str, Any] | None = None) -> Iterator[Registry]:
    """Debian's docker-registry on a free port of 127.0.0.1; a private one wants ``me`` with the password ``secret``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    config: dict[str, Any] = {
        "version": 0.1,
        "log": {"level": "info", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(work / "storage")}},
        "http": {"addr": address, "secret": "test"},
    }
    if private:
        (work / "htpasswd").write_text(f"me:{SECRET}\n")
        config["auth"] = {"htpasswd": {"realm": "test", "path": str(work / "htpasswd")}}
    if auth is not None:
        config["auth"] = auth
    (work / "config.json").write_text(json.dumps(config))  # JSON is YAML too
    command = ["docker-registry", "serve", str(work / "config.json")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if "listening on" in line:
                break
        else:
            raise AssertionError("".join(said))
        threading.Thread(target=process.stderr.read, daemon=True).start()
        try:
            yield Registry(address, work / "storage", ("me", "secret") if private else None)
        finally:
            process.terminate()
            process.wait()
