"""Requests made up from /openapi.json by schemathesis: no 500, no status or body that is not documented, no crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import Daemon, copy_parent

pytestmark = pytest.mark.vm
ROOT = Path(__file__).parents[2]
VERSION = "4.32.5"
EXAMPLES = os.environ.get("FORKD_FUZZ_EXAMPLES", "4")
PARENT = "python-numpy"
ENDLESS = {("get", "/v1/events"), ("get", "/v1/sandboxes/{id}/files/watch")}
# What stops, changes and removes what the others work on is asked of a daemon whose data is thrown away.
ONE, TAG = "/v1/sandboxes/{id}", "/v1/snapshots/{tag}"
CHANGING = {("post", f"{ONE}/pause"), ("patch", ONE), ("patch", TAG)}
REMOVING = {("post", "/v1/snapshots/prune"), ("post", "/v1/cleanup"), ("delete", ONE), ("delete", TAG)}
# Never left out: methods that are not described are tried too, on what is there.
NAMING = {(method, path) for path in (ONE, TAG) for method in ("patch", "delete")}
# So is what would fetch, build and write for minutes; with names of nothing, as it is how it refuses that counts.
MAKING = {("post", "/v1/setup"), ("post", "/v1/rootfs"), ("post", "/v1/snapshots"), ("post", "/v1/hub/pack")}
OF_NO_USE = {
    "Setup": {"refresh": [False]},
    "BuildRootfs": {"image": ["127.0.0.1:1/no/image:x", "/nowhere", "debian:none"], "output": ["/nowhere/x"]},
    "CreateSnapshot": {"image": ["127.0.0.1:1/no/image:x", "/nowhere", "debian:none"], "rootfs": ["/nowhere"]},
    "PackRequest": {"tag": ["none", "", "../up"], "since": ["none"]},
}
# What follows a log for ever, or walks a whole disk, is asked of a sandbox that is not there.
OF_NOTHING = {("get", "/v1/sandboxes/{id}/logs"), ("get", "/v1/sandboxes/{id}/diff")}
# A guest that fails, a daemon that is busy and a full disk have documented statuses; 500 is nobody's.
CONFIG = """[checks.not_a_server_error]
expected-statuses = ["2xx", "4xx", "502", "503", "504", "507"]
"""
DESCRIBED_ONLY = """[phases.coverage]
unexpected-methods = ["trace"]
"""


@pytest.fixture(scope="session")
def schemathesis() -> Path:
    """The tool, in an environment of its own."""
    venv = ROOT / ".work" / f"schemathesis-{VERSION}"
    done = venv / "done"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
        pip = [str(venv / "bin" / "pip"), "install", "-q", "--disable-pip-version-check", f"schemathesis=={VERSION}"]
        subprocess.run(pip, check=True)
        done.touch()
    return venv / "bin" / "schemathesis"


def aimed(spec: dict[str, Any], sandbox_id: str) -> dict[str, Any]:
    """The description with real names in its paths, so that requests reach a real sandbox and a real snapshot.

    What reads for ever, and what changes or removes them, gets names of nothing.
    """
    known = {"id": [sandbox_id, "sb-none"], "tag": [PARENT, "none"]}
    for path, methods in spec["paths"].items():
        for method in list(methods):
            if (method, path) in (ENDLESS | CHANGING | MAKING | REMOVING) - NAMING:
                del methods[method]
                continue
            for parameter in methods[method]["parameters"]:
                if parameter["in"] == "path" and parameter["name"] in known:
                    names = known[parameter["name"]]
                    spared = (method, path) in OF_NOTHING | NAMING
                    parameter["schema"] = {"enum": names[1:] if spared else names}
    return spec


def fuzz(
    schemathesis: Path, spec: dict[str, Any], url: str, where: Path, config: str = CONFIG
) -> subprocess.CompletedProcess[str]:
    """Make up requests and judge the answers."""
    (where / "openapi.json").write_text(json.dumps(spec))
    (where / "schemathesis.toml").write_text(config)
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    command = [str(schemathesis), "run", str(where / "openapi.json"), "--url", url, "--checks", checks]
    bounds = ["--phases", "coverage,fuzzing", "--max-examples", EXAMPLES, "--seed", "1", "--request-timeout", "90"]
    return subprocess.run([*command, *bounds], capture_output=True, text=True, timeout=7200, cwd=where)


def test_made_up_requests_meet_only_what_is_documented(daemon: Daemon, schemathesis: Path, tmp_path: Path) -> None:
    with httpx.Client(base_url=daemon.url, timeout=120) as client:
        before = {row["tag"] for row in client.get("/v1/snapshots").json()}
        child = client.post("/v1/sandboxes", json={"snapshot_tag": PARENT}).json()[0]
        spec = aimed(client.get("/openapi.json").json(), child["id"])
        assert all("get" in spec["paths"][path] for _, path in OF_NOTHING) and "post" in spec["paths"]["/v1/fanout"]
        done = fuzz(schemathesis, spec, daemon.url, tmp_path)
        try:
            assert done.returncode == 0, done.stdout[-12000:] + done.stderr
            assert daemon.process.poll() is None
            answer = client.post(f"/v1/sandboxes/{child['id']}/eval", json={"code": "1+1"})
            assert answer.status_code == 200 and answer.json()["result"] == "2", answer.text
            assert "Traceback" not in daemon.said()
        finally:
            for row in client.get("/v1/snapshots").json():
                if row["tag"] not in before:
                    client.delete(f"/v1/snapshots/{row['tag']}?force=true")


def narrowed(spec: dict[str, Any], operations: set[tuple[str, str]], sandbox_id: str) -> dict[str, Any]:
    """The description with nothing but some operations, on real names and names of nothing."""
    known = {"id": [sandbox_id, "sb-none"], "tag": [PARENT, "none"]}
    for path, methods in spec["paths"].items():
        spec["paths"][path] = {method: row for method, row in methods.items() if (method, path) in operations}
        for row in spec["paths"][path].values():
            for parameter in row["parameters"]:
                if parameter["in"] == "path":
                    parameter["schema"] = {"enum": known[parameter["name"]]}
    spec["paths"] = {path: methods for path, methods in spec["paths"].items() if methods}
    assert sum(map(len, spec["paths"].values())) == len(operations)
    for name, fields in OF_NO_USE.items():
        schema = spec["components"]["schemas"][name]
        schema["properties"] |= {field: {"enum": values} for field, values in fields.items()}
        schema["required"] = sorted({*schema.get("required", []), *fields})
    return spec


def test_made_up_requests_to_make_stop_and_remove_meet_only_what_is_documented(
    data_dir: Path, start_daemon: Callable[..., Daemon], schemathesis: Path, tmp_path: Path
) -> None:
    daemon = start_daemon(copy_parent(data_dir, tmp_path / "thrown-away"))
    with httpx.Client(base_url=daemon.url, timeout=120) as client:
        child = client.post("/v1/sandboxes", json={"snapshot_tag": PARENT}).json()[0]
        for operations in (CHANGING | MAKING, REMOVING):  # in this order, so that something is there to be changed
            spec = narrowed(client.get("/openapi.json").json(), operations, child["id"])
            done = fuzz(schemathesis, spec, daemon.url, tmp_path, CONFIG + DESCRIBED_ONLY)
            assert done.returncode == 0, done.stdout[-12000:] + done.stderr
        assert client.get("/healthz").json() == {"ok": True}
    assert "Traceback" not in daemon.said()
