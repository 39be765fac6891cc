"""dist/forkd: small, whole, quiet about its packing, and gone without a trace when it is killed."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forkd.pluginmanager import DEFAULT_PLUGINS
from forkd.verbs import VERBS
from tests.conftest import ROOT

DIST = ROOT / "dist"
BINARY = DIST / "forkd"
MAX_BYTES = 30_000_000
pytestmark = pytest.mark.skipif(not BINARY.exists(), reason="no dist/forkd here: make binary")


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """Where the binary unpacks itself during a test."""
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


def run(scratch: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The binary with next to no environment: no Python, no PATH but the system's."""
    base = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(scratch), "TMPDIR": str(scratch)}
    return subprocess.run(
        [BINARY, *args], env={**base, **env}, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
    )


def test_it_is_one_small_file_with_checksums_and_a_bill_of_materials() -> None:
    assert BINARY.stat().st_size <= MAX_BYTES
    sums = dict(reversed(line.split()) for line in (DIST / "SHA256SUMS").read_text().splitlines())
    assert sums.keys() == {"forkd", "forkd.cdx.json"}
    for name, digest in sums.items():
        assert hashlib.sha256((DIST / name).read_bytes()).hexdigest() == digest
    sbom = json.loads((DIST / "forkd.cdx.json").read_text())
    assert (sbom["bomFormat"], sbom["specVersion"]) == ("CycloneDX", "1.5")
    names = {component["name"] for component in sbom["components"]}
    assert {"python", "trio", "httpx", "pluggy", "msgspec", "cryptography", "libcrypto.so.3"} <= names
    assert any(name.startswith("libpython3") for name in names)
    assert not names & {"hypothesis", "mypy", "pyinstaller"}


def test_version_says_what_is_inside(scratch: Path) -> None:
    done = run(scratch, "--version")
    assert done.returncode == 0, done.stderr
    assert "commit" in done.stdout and "trio" in done.stdout
    for plugin in DEFAULT_PLUGINS:
        assert plugin.rpartition(".")[2] in done.stdout


def test_every_verb_is_inside(scratch: Path) -> None:
    missing = []
    for verb in VERBS:
        done = run(scratch, verb, "--help")
        if done.returncode != 0 or "Usage:" not in done.stdout:
            missing.append((verb, done.stderr[-300:]))
    assert missing == []


def test_every_bundled_plugin_loads_in_it(scratch: Path) -> None:
    rows = json.loads(run(scratch, "plugin", "ls", "--json").stdout)
    assert {row["origin"] for row in rows} == set(DEFAULT_PLUGINS)
    assert [row for row in rows if row["status"] != "loaded"] == []


def test_a_plugin_from_a_directory_may_use_the_whole_standard_library(scratch: Path) -> None:
    folder = scratch / "plugins"
    folder.mkdir(mode=0o755)
    (folder / "shower.py").write_text(
        "import os, subprocess, sys, hmac, wave, xml.etree.ElementTree, plistlib, concurrent.futures, tomllib\n"
        "import click, httpx, trio, sqlite3\n"
        "from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey\n"
        "from forkd.specs.hookspecs import hookimpl\n"
        "@click.command()\ndef show():\n    Ed25519PrivateKey.generate().sign(b'x')\n"
        "    bad = [n for n in os.environ if n.startswith(('_PYI', 'LD_LIB'))]\n"
        "    print(bad, subprocess.run(['env'], capture_output=True, text=True).stdout.count('_MEI'))\n"
        "@hookimpl\ndef forkd_register_commands(commands):\n    commands('show', 'shower:show', 'Show.')\n"
    )
    done = run(scratch, "show", FORKD_PLUGIN_DIR=str(folder))
    assert done.stdout == "[] 0\n", done.stderr


def test_programs_it_starts_get_their_own_library_path_back(scratch: Path) -> None:
    folder = scratch / "plugins"
    folder.mkdir(mode=0o755)
    (folder / "asker.py").write_text(
        "import os, click\nfrom forkd.specs.hookspecs import hookimpl\n"
        "@click.command()\ndef ask():\n    print(os.environ['LD_LIBRARY_PATH'])\n"
        "@hookimpl\ndef forkd_register_commands(commands):\n    commands('ask', 'asker:ask', 'Ask.')\n"
    )
    assert run(scratch, "ask", FORKD_PLUGIN_DIR=str(folder), LD_LIBRARY_PATH="/opt/lib").stdout == "/opt/lib\n"


def test_it_leaves_nothing_in_the_scratch_directory(scratch: Path) -> None:
    run(scratch, "--version")
    assert list(scratch.glob("_MEI*")) == []


def test_the_mcp_server_speaks_from_it(scratch: Path) -> None:
    hello = {"protocolVersion": "2025-03-26", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    request = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello})
    env = {"PATH": "/usr/bin:/bin", "HOME": str(scratch), "TMPDIR": str(scratch)}
    with subprocess.Popen(
        [BINARY, "mcp"], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None and server.stdout is not None and server.stderr is not None
        server.stdin.write(request + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        server.terminate()
        assert answer, server.stderr.read()
    assert "serverInfo" in json.loads(answer)["result"]


def inner_of(launcher: int) -> int | None:
    """The process that does the work, once it holds its directory."""
    for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        return int(pid)
    return None


@pytest.fixture
def waiting(scratch: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The binary at work: a verb of a plugin that says it is there and then waits for ever."""
    folder = scratch / "plugins"
    folder.mkdir(mode=0o755)
    (folder / "waiter.py").write_text(
        "import click, signal\nfrom forkd.specs.hookspecs import hookimpl\n"
        "@click.command()\ndef wait():\n    print('ready', flush=True)\n    signal.pause()\n"
        "@hookimpl\ndef forkd_register_commands(commands):\n    commands('wait', 'waiter:wait', 'Wait.')\n"
    )
    env = {"PATH": "/usr/bin:/bin", "HOME": str(scratch), "TMPDIR": str(scratch), "FORKD_PLUGIN_DIR": str(folder)}
    child = subprocess.Popen([BINARY, "wait"], env=env, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    yield child
    child.kill()
    child.wait()
    child.stdout.close()


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z":
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.01)


def test_a_killed_launcher_leaves_no_orphan_and_the_next_start_no_directory(
    scratch: Path, waiting: subprocess.Popen[bytes]
) -> None:
    inner = inner_of(waiting.pid)
    assert inner is not None
    left = list(scratch.glob("_MEI*"))
    assert len(left) == 1
    assert run(scratch, "--version").returncode == 0
    assert left[0].exists(), "another binary's directory stays while it runs"
    waiting.send_signal(signal.SIGKILL)
    waiting.wait()
    wait_gone(inner)
    assert left[0].exists(), "nobody was there to remove it"
    assert run(scratch, "--version").returncode == 0
    assert list(scratch.glob("_MEI*")) == []


def test_a_terminated_launcher_passes_it_on_and_tidies_up(scratch: Path, waiting: subprocess.Popen[bytes]) -> None:
    inner = inner_of(waiting.pid)
    assert inner is not None
    waiting.send_signal(signal.SIGTERM)
    assert waiting.wait(timeout=30) == -signal.SIGTERM
    wait_gone(inner)
    assert list(scratch.glob("_MEI*")) == []


def test_a_module_of_ours_runs_as_a_program_and_no_other(scratch: Path) -> None:
    done = run(scratch, "_module", "forkd.cli.main", "--version")
    assert done.stdout.startswith("forkd "), done.stderr
    assert run(scratch, "_module", "http.server").returncode == 1
    assert os.path.exists(BINARY)
