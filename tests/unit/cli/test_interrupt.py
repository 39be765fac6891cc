"""Ctrl-C: the work is cancelled and tidies up, also when the signal comes twice, as it does to the binary."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.conftest import FORKD

WAITER = """
import click, trio
from forkd.specs.hookspecs import hookimpl

@click.command()
def wait():
    from forkd.cli.common import with_controller

    async def work(controller):
        print("ready", flush=True)
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(0.2)
                print("tidied up", flush=True)

    with_controller(work)

@hookimpl
def forkd_register_commands(commands):
    commands("wait", "waiter:wait", "Wait.")
"""


def start_waiter(tmp_path: Path, sigint: signal.Handlers) -> subprocess.Popen[str]:
    """`forkd wait`, ready, in a session of its own that begins with SIGINT handled like this, however ours is."""
    (tmp_path / "plugins").mkdir(mode=0o755)
    (tmp_path / "plugins" / "waiter.py").write_text(WAITER)
    (tmp_path / "plugins" / "waiter.py").chmod(0o644)
    env = {**os.environ, "FORKD_DATA_DIR": str(tmp_path)}
    child = subprocess.Popen(
        [*FORKD, "wait"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, sigint),
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def test_two_interrupts_at_once_are_one(tmp_path: Path) -> None:
    child = start_waiter(tmp_path, signal.SIG_DFL)
    os.killpg(child.pid, signal.SIGINT)
    os.killpg(child.pid, signal.SIGINT)
    try:
        said, complained = child.communicate(timeout=60)
    finally:
        child.kill()
    assert (child.returncode, said, complained) == (130, "tidied up\n", "")


def test_whoever_is_started_without_ctrl_c_stays_without(tmp_path: Path) -> None:
    child = start_waiter(tmp_path, signal.SIG_IGN)
    os.killpg(child.pid, signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(1)
    child.kill()
    said, complained = child.communicate(timeout=60)
    assert (child.returncode, said, complained) == (-signal.SIGKILL, "", "")
