"""A person at a terminal: full-screen programs, resizing, Ctrl-C, job control, much output, and coming back."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path

import httpx
import pexpect
import pytest
import trio

from forkd.cli.exec import start_in
from forkd.sdk.async_controller import AsyncController
from tests.conftest import Daemon, run_forkd

pytestmark = pytest.mark.vm
PARENT = "python-numpy"
# A full-screen editor in miniature: alternate screen, cursor addressing, raw keys, size, `q` ends it.
FULL_SCREEN = (
    "import curses\n"
    "def main(s):\n"
    "    while True:\n"
    "        s.clear(); s.addstr(0, 0, 'SIZE %dx%d' % s.getmaxyx()); s.addstr(3, 5, 'BODY'); s.refresh()\n"
    "        if s.getch() == ord('q'): return\n"
    "curses.wrapper(main)\n"
)
# sigwait, since a signal that comes in the instant before Python sleeps does not wake it.
WAITS_FOR_SIGINT = (
    "import signal\n"
    "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})\n"
    "print('up', flush=True)\n"
    "exit(6 if signal.sigwait({signal.SIGINT}) else 0)\n"
)


def spawn(data_dir: Path, *args: str) -> pexpect.spawn[bytes]:
    env = {**os.environ, "FORKD_DATA_DIR": str(data_dir), "TERM": "xterm-256color"}
    return pexpect.spawn(sys.executable, ["-m", "forkd", *args], env=env, dimensions=(30, 100), timeout=40)


def test_a_shell_is_a_real_terminal_and_can_be_come_back_to(daemon: Daemon, data_dir: Path) -> None:
    child = httpx.post(f"{daemon.url}/v1/sandboxes", json={"snapshot_tag": PARENT}, timeout=60).json()[0]["id"]
    httpx.put(f"{daemon.url}/v1/sandboxes/{child}/files?path=/root/full.py", content=FULL_SCREEN.encode(), timeout=60)
    shell = spawn(data_dir, "shell", child)
    shell.sendline("PS1='ready> '; stty size")
    shell.expect(r"30 100\s")
    shell.expect("ready> ")
    shell.setwinsize(40, 120)
    shell.sendline("while [ \"$(stty size)\" != '40 120' ]; do :; done; echo resi''zed")
    shell.expect("resized")
    shell.sendline("python3 /root/full.py")
    shell.expect("SIZE 40x120")
    shell.expect("BODY")
    shell.setwinsize(35, 90)
    # curses may miss the signal in the instant before it waits for a key, so keys are typed until it has looked.
    while shell.expect(["SIZE 35x90", pexpect.TIMEOUT], timeout=2):
        shell.send("x")
    shell.send("q")
    shell.expect("ready> ")
    shell.sendline("cat")
    shell.sendline("mark")
    shell.expect("mark\r\nmark\r\n")  # typed, and said by a cat that runs
    shell.sendintr()
    shell.expect("ready> ")
    shell.sendline("echo code=$?")
    shell.expect("code=130")
    shell.sendline("cat")
    shell.sendline("again")
    shell.expect("again\r\nagain\r\n")
    shell.send("\x1a")
    shell.expect("Stopped")
    shell.sendline("jobs; kill %1; wait; echo jobs''done")
    shell.expect("jobsdone")
    shell.sendline("head -c 10485760 /dev/zero | tr '\\0' x; echo; echo flood''ed")
    shell.expect("flooded", timeout=120)
    shell.sendline("marker=still-here; echo ma''rked")
    shell.expect("marked")
    assert shell.pid is not None
    os.kill(shell.pid, signal.SIGKILL)
    shell.close()
    pid = run_forkd(data_dir, "ps", child).stdout.splitlines()[-1].split()[0]
    again = spawn(data_dir, "shell", child, "--attach", pid)
    again.sendline("echo $marker")
    again.expect("still-here\r\n")
    again.sendline("exit 7")
    again.expect(pexpect.EOF)
    again.close()
    assert again.exitstatus == 7


def test_exec_with_a_terminal_or_a_pipe_ends_with_the_commands_code(data_dir: Path) -> None:
    shell = spawn(data_dir, "exec", "--tag", PARENT, "-it", "--", "sh", "-c", "stty size; read x; echo got $x; exit 5")
    shell.expect("30 100")
    shell.sendline("word")
    shell.expect("got word")
    shell.expect(pexpect.EOF)
    shell.close()
    assert shell.exitstatus == 5
    piped = spawn(data_dir, "exec", "--tag", PARENT, "-i", "--", "python3", "-c", WAITS_FOR_SIGINT)
    piped.expect("up")
    piped.kill(signal.SIGINT)
    piped.expect(pexpect.EOF)
    piped.close()
    assert piped.exitstatus == 6


async def test_a_command_nobody_could_be_joined_to_any_more_is_hung_up(
    controller: AsyncController, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = (await controller.spawn_sandboxes(PARENT, 1))[0]["id"]
    started = trio.Event()

    async def never(*args: object) -> None:
        started.set()
        await trio.sleep_forever()

    monkeypatch.setattr(controller, "attach_process", never)
    async with trio.open_nursery() as nursery:
        fields = {"interactive": True, "tty": False, "detach": False}
        nursery.start_soon(partial(start_in, controller, child, ["sleep", "1000"], None, {}, **fields))
        await started.wait()
        nursery.cancel_scope.cancel()  # as Ctrl-C does
    with trio.fail_after(60):
        while (await controller.list_processes(child))[0]["running"]:
            await trio.sleep(0.05)
