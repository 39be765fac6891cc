"""The wheel, the unit, the manifest and the installer: what people install is what we mean."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT, Daemon, run_forkd

PACKAGING = ROOT / "packaging"


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    """A stand-in for dist/: a program called forkd that answers, and its checksum."""
    folder = tmp_path / "dist"
    folder.mkdir()
    (folder / "forkd").write_text('#!/bin/sh\n[ "$1" != --version ] || echo "forkd 9.9"\n')
    (folder / "forkd").chmod(0o755)
    digest = hashlib.sha256((folder / "forkd").read_bytes()).hexdigest()
    (folder / "SHA256SUMS").write_text(f"{digest}  forkd\n")
    return folder


def install(tmp_path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(PACKAGING / "install.sh"), "--prefix", str(tmp_path / "prefix"), *args]
    env = {**os.environ, "UNIT_DIR": str(tmp_path / "units")}
    return subprocess.run(command, capture_output=True, text=True, env=env)


def test_the_installer_checks_and_installs(dist: Path, tmp_path: Path) -> None:
    done = install(tmp_path, "--unit", str(dist))
    assert done.returncode == 0, done.stderr
    assert "forkd 9.9" in done.stdout
    prefix = tmp_path / "prefix"
    assert (prefix / "bin/forkd").read_bytes() == (dist / "forkd").read_bytes()
    assert os.access(prefix / "bin/forkd", os.X_OK)
    assert (prefix / "share/man/man1/forkd.1").exists()
    assert f"ExecStart={prefix}/bin/forkd daemon" in (tmp_path / "units/forkd.service").read_text()


def test_the_installer_fetches_from_a_url(dist: Path, tmp_path: Path) -> None:
    if not (shutil.which("curl") or shutil.which("wget")):
        pytest.skip("neither curl nor wget")
    command = [sys.executable, "-u", "-m", "http.server", "--bind", "127.0.0.1", "0", "--directory", str(dist)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        found = re.search(r"port (\d+)", server.stdout.readline())
        assert found is not None
        done = install(tmp_path, f"http://127.0.0.1:{found[1]}/")
        server.kill()
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("harm", ["altered", "unnamed", "missing", "not running"])
def test_the_installer_installs_nothing_it_cannot_vouch_for(dist: Path, tmp_path: Path, harm: str) -> None:
    if harm == "altered":
        with open(dist / "forkd", "a") as out:
            out.write("# one line more\n")
    elif harm == "unnamed":
        (dist / "SHA256SUMS").write_text("0" * 64 + "  other-forkd\n")
    elif harm == "missing":
        (dist / "SHA256SUMS").unlink()
    else:
        (dist / "forkd").write_text("#!/bin/sh\nexit 3\n")
        digest = hashlib.sha256((dist / "forkd").read_bytes()).hexdigest()
        (dist / "SHA256SUMS").write_text(f"{digest}  forkd\n")
    done = install(tmp_path, str(dist))
    assert done.returncode != 0
    assert not (tmp_path / "prefix/bin/forkd").exists()


def test_the_unit_lets_machines_survive_and_keeps_the_daemon_in_bounds() -> None:
    unit = (PACKAGING / "forkd.service").read_text()
    for line in ("KillMode=process", "NoNewPrivileges=yes", "StateDirectoryMode=0700", "DevicePolicy=closed"):
        assert line in unit.splitlines()
    # Each of these gives a mount namespace, and the next daemon another one: it would not find adopted VMs' networks.
    for setting in ("ProtectSystem", "PrivateTmp", "ProtectHome", "PrivateDevices", "ReadOnlyPaths", "ProtectKernel"):
        assert not re.search(rf"^{setting}", unit, re.MULTILINE)
    if shutil.which("systemd-analyze"):
        fake = unit.replace("/usr/local/bin/forkd", "/bin/true").replace("Documentation=man:forkd(1)\n", "")
        path = ROOT / ".work" / "forkd-check.service"
        path.parent.mkdir(exist_ok=True)
        path.write_text(fake)
        done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True)
        path.unlink()
        assert "forkd-check" not in done.stderr, done.stderr


def test_nothing_we_ship_has_a_token_in_it() -> None:
    text = (PACKAGING / "kubernetes.yaml").read_text()
    assert "secretName: forkd-token" in text
    assert "kind: Secret" not in text
    for name in ("kubernetes.yaml", "Dockerfile", "forkd.service", "install.sh"):
        assert not re.search(
            r"(changeme|change-me|s3cret|token:\s*['\"]?[\w+/]{8,})", (PACKAGING / name).read_text(), re.I
        )


def test_the_wheel_has_one_top_level_name_and_everything_in_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path)]
    tree = tmp_path / "tree"
    keep = ("forkd", "specs", "plugins", "hub", "guest", "pyproject.toml", "README.md", "LICENSE")
    tree.mkdir()
    for name in keep:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)
    done = subprocess.run([*command, str(tree)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("forkd-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"forkd"}
    wanted = {
        *(
            "forkd/guest/agent.py",
            "forkd/guest/init",
            "forkd/guest/initramfs-init",
            "forkd/specs/schemas/snapshot.json",
        ),
        *("forkd/py.typed", "forkd/plugins/engine_qemu/engine.py", "forkd/testing/skeletons/branch_mode.py"),
        *("forkd/hub/__init__.py", "forkd/cli/main.py"),
    }
    assert wanted <= set(names), wanted - set(names)


def test_the_binary_is_built_again_when_anything_in_it_has_changed() -> None:
    told = subprocess.run(["make", "-pnq", "dist/forkd"], cwd=ROOT, capture_output=True, text=True).stdout
    needs = next(line for line in told.splitlines() if line.startswith("dist/forkd:")).split()[1:]
    known = {(ROOT / name).resolve() for name in needs}
    for folder in ("guest", "specs/schemas", "specs/formats", "docs", "forkd/testing/skeletons"):
        inside = {path.resolve() for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts}
        assert {path for path in inside if path.is_file()} <= known


def test_a_containers_health_is_the_daemons(tmp_path: Path, start_daemon: Callable[..., Daemon]) -> None:
    text = (PACKAGING / "Dockerfile").read_text()
    probe = re.search(r'^HEALTHCHECK .* CMD \["forkd", (.*)\]$', text, re.MULTILINE)
    assert probe is not None
    args = [word.strip('"').replace("/var/lib/forkd", str(tmp_path)) for word in probe[1].split(", ")]
    daemon = start_daemon(tmp_path)
    assert run_forkd(tmp_path, *args).returncode == 0
    daemon.stop()
    done = run_forkd(tmp_path, *args)
    assert (done.returncode, "cannot be reached" in done.stderr) == (1, True), done.stderr


def test_the_manifest_gives_forkd_the_devices_and_places_it_needs() -> None:
    text = (PACKAGING / "kubernetes.yaml").read_text()
    assert "privileged: true" in text
    assert "mountPath: /run}" in text
