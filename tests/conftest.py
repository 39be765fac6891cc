"""What every test may use: a data directory with a warmed parent, the CLI, a controller over the in-process app."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from forkd.sdk.async_controller import AsyncController

ROOT = Path(__file__).parents[1]
PARENT = "python-numpy"
PARENT_FILE = f"snapshots/{PARENT}/snapshot.json"
Forkd = Callable[..., "subprocess.CompletedProcess[str]"]
BINARY = os.environ.get("FORKD_TEST_BINARY")
FORKD = [str(Path(BINARY).absolute())] if BINARY else [sys.executable, "-m", "forkd"]
"""The CLI under test: from source, or the binary FORKD_TEST_BINARY names."""


def run_forkd(
    data_dir: Path, *args: str, env: dict[str, str] | None = None, stdin: str | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run the CLI under test on ``data_dir``."""
    return subprocess.run(
        [*FORKD, *args],
        env={**os.environ, "FORKD_DATA_DIR": str(data_dir), **(env or {})},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        errors="replace",
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A case that passed only when it was tried again is named, with what went wrong before."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"tried again: {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """A data directory, kept between runs, with the parent ``python-numpy`` in it; each of several workers has its own.

    ``FORKD_TEST_DATA`` is another name for it below ``.work``, for a run beside others.
    """
    work = ROOT / ".work"
    work.mkdir(exist_ok=True)
    with open(work / "test-data.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = work / "test-data"
        remove_outdated_parent(path)
        if not (path / PARENT_FILE).exists():
            done = run_forkd(path, "quickstart", "-n", "1", "--json", timeout=900)
            assert done.returncode == 0, done.stderr + done.stdout
            assert json.loads(done.stdout)["ok"]
    worker = os.environ.get("FORKD_TEST_DATA") or os.environ.get("PYTEST_XDIST_WORKER")
    return copy_parent(path, work / f"test-data-{worker}") if worker else path


def copy_parent(source: Path, target: Path) -> Path:
    """A data directory with the same parent, made once for each parent."""
    if (
        not (target / PARENT_FILE).exists()
        or (target / PARENT_FILE).read_bytes() != (source / PARENT_FILE).read_bytes()
    ):
        if target.exists():
            run_forkd(target, "cleanup", "--yes")
            shutil.rmtree(target)
        names = ["kernels", "rootfs", "cache", f"snapshots/{PARENT}"]
        (target / "snapshots").mkdir(parents=True)
        for name in names:
            copy = ["cp", "-a", "--reflink=auto", "--sparse=always", source / name, (target / name).parent]
            subprocess.run(copy, check=True)
    return target


def remove_outdated_parent(path: Path) -> None:
    """A parent has the agent and the machine it was made with: with another it is made anew."""
    import hashlib

    from forkd.plugins.engine_qemu.command import MODEL, TCG_CPU

    agent = hashlib.sha256((ROOT / "guest" / "agent.py").read_bytes() + (TCG_CPU + MODEL).encode()).hexdigest()
    stamp = path / "parent.agent"
    if (path / "snapshots" / PARENT).exists() and (not stamp.exists() or stamp.read_text() != agent):
        run_forkd(path, "rmi", "--force", PARENT)
    path.mkdir(parents=True, exist_ok=True)
    stamp.write_text(agent)


@pytest.fixture
def forkd(data_dir: Path) -> Forkd:
    """The CLI on the shared data directory."""
    return lambda *args, **options: run_forkd(data_dir, *args, **options)


@pytest.fixture
async def controller(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsyncController]:
    """A controller over the app hosted in the test's own loop, or over a daemon of the binary under test.

    Its sandboxes end with the test.
    """
    from forkd.sdk.inprocess import hosted_app

    monkeypatch.setenv("FORKD_DATA_DIR", str(data_dir))
    if BINARY:
        daemon = Daemon(data_dir, tmp_path / "controller.log", "--end-sandboxes")
        try:
            async with AsyncController(daemon.url, timeout=None) as made:
                yield made
        finally:
            daemon.stop()
        return
    async with (
        hosted_app() as transport,
        AsyncController("http://forkd", timeout=None, transport=transport) as made,
    ):
        yield made


class Daemon:
    """A daemon process on a data directory, at a port of its own."""

    def __init__(
        self,
        data_dir: Path,
        log: Path,
        *flags: str,
        env: dict[str, str] | None = None,
        forkd: list[str] = FORKD,
    ) -> None:
        self._data_dir = data_dir
        self._env = env or {}
        self._forkd = forkd
        self._log = log
        self._flags = flags
        self.start()

    def start(self) -> None:
        """Start it and wait until it says that it listens; after a kill, start another one in its place."""
        environ = {key: value for key, value in os.environ.items() if not key.startswith("FORKD_")}
        with open(self._log, "ab") as log:
            begin = log.tell()
            self.process = subprocess.Popen(
                [*self._forkd, "daemon", "--bind", "127.0.0.1:0", *self._flags],
                env={**environ, "FORKD_DATA_DIR": str(self._data_dir), **self._env},
                stderr=log,
            )
        deadline = time.monotonic() + 120
        while "stop it with" not in (said := self._log.read_text()[begin:]):
            assert self.process.poll() is None and time.monotonic() < deadline, said
            time.sleep(0.02)
        self.url = next(word for word in said.split() if word.startswith("http"))

    def kill(self) -> None:
        """SIGKILL: it has no chance to tidy up."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM, and its exit code."""
        self.process.terminate()
        return self.process.wait(60)

    def said(self) -> str:
        """Its log."""
        return self._log.read_text()


@pytest.fixture
def start_daemon(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Starts daemons: ``start_daemon(data_dir, *flags)``. They and their sandboxes end with the test."""
    made: list[tuple[Daemon, Path]] = []

    def start(data_dir: Path, *flags: str) -> Daemon:
        made.append((Daemon(data_dir, tmp_path / f"daemon-{len(made)}.log", "--end-sandboxes", *flags), data_dir))
        return made[-1][0]

    yield start
    for daemon, data_dir in made:
        if daemon.process.poll() is None:
            daemon.stop()
        run_forkd(data_dir, "cleanup", "--yes")


@pytest.fixture
def daemon(data_dir: Path, start_daemon: Callable[..., Daemon]) -> Daemon:
    """A daemon on the shared data directory."""
    return start_daemon(data_dir)


@pytest.fixture
async def fresh_tag(controller: AsyncController) -> AsyncIterator[Callable[[str], str]]:
    """Tags of this test's own; the snapshots they name are removed after it."""
    import secrets

    given: list[str] = []

    def make(name: str) -> str:
        given.append(f"t-{name}-{secrets.token_hex(3)}")
        return given[-1]

    yield make
    for row in await controller.list_snapshots():
        if row["tag"] in given:
            await controller.delete_snapshot(row["tag"], force=True)


@pytest.fixture
def machines(data_dir: Path) -> Callable[[], list[int]]:
    """Pids of VMMs that run below the shared data directory."""

    def find() -> list[int]:
        found = []
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                try:
                    if os.readlink(f"{entry.path}/cwd").startswith(str(data_dir / "run")):
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    return find


async def none_left(machines: Callable[[], list[int]]) -> None:
    """Wait for the end of the last VMM: one that ripens to be a template goes on for some seconds."""
    with trio.fail_after(30):
        while machines():
            await trio.sleep(0.05)


def parent_disk(data_dir: Path) -> Path:
    """The disk of ``python-numpy``: cases leave others beside it, some of which no guest could boot from."""
    digest = json.loads((data_dir / PARENT_FILE).read_text())["rootfs"]["digest"]
    return data_dir / "rootfs" / f"{digest.partition(':')[2]}.ext4"


async def large_parent(controller: AsyncController, data_dir: Path) -> str:
    """A parent with the disk of ``python-numpy`` and RAM enough for a file of 1 GiB: half of it is for files."""
    tag = f"{PARENT}-3g"
    rows = {row["tag"]: row for row in await controller.list_snapshots()}
    if tag in rows and rows[tag]["created_at_unix"] < rows[PARENT]["created_at_unix"]:
        await controller.delete_snapshot(tag, force=True)  # it has an older agent in its memory
        del rows[tag]
    if tag not in rows:
        await controller.create_snapshot(tag, rootfs=str(parent_disk(data_dir)), mem_size_mib=3072)
    return tag


def resident_mib(pid: int, field: str = "VmRSS") -> float:
    """Memory of a process, or with VmHWM the most it had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))


def result_of(answer: dict[str, Any]) -> Any:
    """The Python value an eval gave."""
    import ast

    assert answer["error"] is None, answer
    return ast.literal_eval(answer["result"])
