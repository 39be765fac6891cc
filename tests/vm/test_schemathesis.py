"""Requests made up from /openapi.json by schemathesis: no 500, no status or body that is not documented, no crash."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.vm
ROOT = Path(__file__).parents[2]
VERSION = "4.32.5"
PARENT = "python-numpy"
# What would fetch and build for minutes, or end the sandbox the others work on.
LEFT_OUT = {("post", "/v1/setup"), ("post", "/v1/rootfs"), ("post", "/v1/snapshots"), ("post", "/v1/cleanup")}
# What stops it, what goes on for ever, and what walks a whole disk or forks many times for each request.
LEFT_OUT |= {("post", "/v1/sandboxes/{id}/pause"), ("get", "/v1/events"), ("get", "/v1/sandboxes/{id}/files/watch")}
LEFT_OUT |= {("post", "/v1/hub/pack")}  # writes where the daemon stands
LEFT_OUT |= {("get", "/v1/sandboxes/{id}/logs"), ("get", "/v1/sandboxes/{id}/diff"), ("post", "/v1/fanout")}
# A guest that fails, a daemon that is busy and a full disk have documented statuses; 500 is nobody's.
CONFIG = """[checks.not_a_server_error]
expected-statuses = ["2xx", "4xx", "502", "503", "504", "507"]
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

    What would end or starve the sandbox, or remove the snapshot, gets names of nothing.
    """
    known = {"id": [sandbox_id, "sb-none"], "tag": [PARENT, "none"]}
    for path, methods in spec["paths"].items():
        for method in list(methods):
            if (method, path) in LEFT_OUT:
                del methods[method]
                continue
            for parameter in methods[method]["parameters"]:
                if parameter["in"] == "path" and parameter["name"] in known:
                    names = known[parameter["name"]]
                    parameter["schema"] = {"enum": names[1:] if method in ("delete", "patch") else names}
    return spec


def test_made_up_requests_meet_only_what_is_documented(daemon: Any, schemathesis: Path, tmp_path: Path) -> None:
    with httpx.Client(base_url=daemon.url, timeout=120) as client:
        before = {row["tag"] for row in client.get("/v1/snapshots").json()}
        child = client.post("/v1/sandboxes", json={"snapshot_tag": PARENT}).json()[0]
        spec = tmp_path / "openapi.json"
        spec.write_text(json.dumps(aimed(client.get("/openapi.json").json(), child["id"])))
        (tmp_path / "schemathesis.toml").write_text(CONFIG)
        checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
        command = [str(schemathesis), "run", str(spec), "--url", daemon.url, "--checks", checks]
        bounds = ["--phases", "coverage,fuzzing", "--max-examples", "8", "--seed", "1", "--request-timeout", "90"]
        done = subprocess.run([*command, *bounds], capture_output=True, text=True, timeout=900, cwd=tmp_path)
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
