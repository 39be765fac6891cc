"""A ghost freezes a process's memory; the process notices nothing, whatever happens to the tracer."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forkd.linux.ghost import Ghost, unforked_ranges
from forkd.linux.ptrace import TraceError

STEPS = (
    "seized", "stopped", "framed", "armed", "entered", "forked", "held", "rested", "unmasked", "restored", "detached",
)  # fmt: skip

ECHO = """
    import sys
    print("ready", flush=True)
    for line in sys.stdin:
        print("echo " + line.strip(), flush=True)
"""

# A page at a printed address whose value is what was last written on standard input.
MEMORY = """
    import ctypes, mmap, sys
    page = mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if {dontfork}:
        page.madvise(mmap.MADV_DONTFORK)
    print("ready", flush=True)
    print(ctypes.addressof(ctypes.c_char.from_buffer(page)), flush=True)
    for line in sys.stdin:
        page[:1] = line[:1].encode()
        print("wrote", flush=True)
"""

# Counts sums of sines for ever in the main thread and proves on request that none was ever wrong.
BUSY = """
    import math, sys, threading
    state = {"rounds": 0, "wrong": 0}
    def answer():
        for line in sys.stdin:
            print(state["rounds"] > 0 and state["wrong"] == 0, flush=True)
    threading.Thread(target=answer, daemon=True).start()
    expected = sum(math.sin(x) for x in range(500))
    print("ready", flush=True)
    while True:
        if sum(math.sin(x) for x in range(500)) != expected:
            state["wrong"] += 1
        state["rounds"] += 1
"""

# Keeps a pattern in a vector register while it spins in machine code, and prints what is left of it.
VECTORS = """
    import ctypes, mmap, sys, threading
    code = mmap.mmap(-1, 4096, prot=7)
    # vmovdqu (%rdi),%ymm7; pause; cmpl $0,(%rsi); je .-7; vmovdqu %ymm7,(%rdx); vzeroupper; ret
    code.write(bytes.fromhex("c5fe6f3f f390 833e00 74f9 c5fe7f3a c5f877 c3"))
    pattern, flag, out = ctypes.create_string_buffer(bytes(range(1, 33)), 32), ctypes.c_int(0), (ctypes.c_char * 32)()
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    spin = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(address)
    def stop():
        print("ready", flush=True)
        sys.stdin.readline()
        flag.value = 1
    threading.Thread(target=stop).start()
    spin(ctypes.addressof(pattern), ctypes.addressof(flag), ctypes.addressof(out))
    print(out.raw == pattern.raw, flush=True)
"""

BLOCKED = {
    "sleep": "import time; time.sleep(0.3)",
    "poll": "import select; assert select.poll().poll(300) == []",
    "select": "import select; assert select.select([], [], [], 0.3) == ([], [], [])",
    "nanosleep": "import ctypes; assert libc.usleep(300000) == 0, ctypes.get_errno()",
    "futex": "import threading; assert not threading.Event().wait(0.3)",
    "raw poll": "assert libc.poll(None, 0, 300) == 0",
    "sigtimedwait": "import signal; assert signal.sigtimedwait([signal.SIGUSR1], 0.3) is None",
    "epoll": "import select; assert select.epoll().poll(0.3) == []",
    "raw epoll": "assert libc.epoll_wait(libc.epoll_create1(0), ctypes.create_string_buffer(12), 1, 300) == 0",
}
STARTED_ANEW = ("sigtimedwait", "epoll", "raw epoll")


def first_byte(pid: int, address: int) -> bytes:
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    try:
        return os.pread(memory, 1, address)
    finally:
        os.close(memory)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def asleep(source: Any) -> Any:
    """Wait until the main thread of a process that said it is ready sleeps in its call."""
    while state(source.pid) != "S":
        os.sched_yield()
    return source


@pytest.mark.parametrize("dontfork", [False, True])
def test_memory_stays_as_it_was_while_the_source_goes_on_writing(target: Callable[[str], Any], dontfork: bool) -> None:
    source = target(MEMORY.format(dontfork=dontfork))
    address = int(source.line())
    source.ask("a")
    assert bool(unforked_ranges(source.pid)) == dontfork
    with Ghost.of(source.pid) as ghost:
        source.ask("b")
        assert first_byte(ghost.pid, address) == b"a"
        assert first_byte(source.pid, address) == b"b"
        assert state(ghost.pid) == "t"
    assert unforked_ranges(source.pid) == []


def test_dontfork_ranges_not_asked_for_are_missing_in_the_ghost(target: Callable[[str], Any]) -> None:
    source = target(MEMORY.format(dontfork=True))
    address = int(source.line())
    with Ghost.of(source.pid, dofork=()) as ghost, pytest.raises(OSError):
        first_byte(ghost.pid, address)


def test_a_range_that_cannot_be_forked_is_an_error_and_the_source_runs_on(target: Callable[[str], Any]) -> None:
    source = target(ECHO)
    with pytest.raises(TraceError, match="cannot be forked"):
        Ghost.of(source.pid, dofork=[(0x1000, 0x2000)])
    assert source.ask("x") == "echo x"


@pytest.mark.parametrize("call", BLOCKED)
def test_an_interrupted_call_goes_on_for_the_rest_of_its_time(target: Callable[[str], Any], call: str) -> None:
    source = target(f"""
        import ctypes, sys, time
        libc = ctypes.CDLL(None, use_errno=True)
        print("ready", flush=True)
        begun = time.monotonic()
        {BLOCKED[call]}
        print(time.monotonic() - begun, flush=True)
        sys.stdin.read()
    """)
    asleep(source)
    made = 0
    # Ghost upon ghost until the call returns: one that started anew each time would never do so. The last three calls
    # are those the kernel cannot restart: they do start anew, so they are left alone after a while.
    while (made < 5 or call not in STARTED_ANEW) and not source.spoke(0):
        Ghost.of(source.pid, dofork=()).close()
        made += 1
    assert made >= 3
    assert 0.29 < float(source.line()) < 1


def test_a_signal_that_comes_meanwhile_still_interrupts_the_call(target: Callable[[str], Any]) -> None:
    source = target("""
        import ctypes, signal
        signal.signal(signal.SIGUSR1, lambda *_: None)
        libc = ctypes.CDLL(None, use_errno=True)
        epoll, room = libc.epoll_create1(0), ctypes.create_string_buffer(12)
        print("ready", flush=True)
        print(libc.epoll_wait(epoll, room, 1, -1), ctypes.get_errno(), flush=True)
    """)
    asleep(source)
    Ghost.of(source.pid, step=lambda name: os.kill(source.pid, signal.SIGUSR1) if name == "armed" else None).close()
    assert source.line() == "-1 4"


def test_a_reader_waits_on_after_many_ghosts(target: Callable[[str], Any]) -> None:
    source = target(ECHO)
    for number in range(20):
        Ghost.of(source.pid).close()
        assert source.ask(str(number)) == f"echo {number}"


@pytest.mark.parametrize("code", [BUSY, VECTORS], ids=["floats", "vectors"])
@pytest.mark.parametrize("failing", [None, "framed", "armed", "entered", "forked", "held", "rested", "restored"])
def test_a_running_source_keeps_its_registers(target: Callable[[str], Any], code: str, failing: str | None) -> None:
    def step(name: str) -> None:
        if name == failing:
            raise RuntimeError("from the test")

    source = target(code)
    for _ in range(10):
        if failing is None:
            Ghost.of(source.pid).close()
        else:
            with pytest.raises(RuntimeError, match="from the test"):
                Ghost.of(source.pid, step=step)
    assert source.ask("?") == "True"


def test_the_threads_of_the_source_run_on_and_the_ghost_has_one(target: Callable[[str], Any]) -> None:
    source = target("""
        import queue, sys, threading
        asked, answered = queue.Queue(), queue.Queue()
        def work():
            while True:
                answered.put(asked.get() * 2)
        for _ in range(8):
            threading.Thread(target=work, daemon=True).start()
        print("ready", flush=True)
        for line in sys.stdin:
            asked.put(int(line))
            print(answered.get(), flush=True)
    """)
    with Ghost.of(source.pid) as ghost:
        assert len(os.listdir(f"/proc/{ghost.pid}/task")) == 1
        assert len(os.listdir(f"/proc/{source.pid}/task")) == 9
        assert [source.ask(str(n)) for n in range(20)] == [str(2 * n) for n in range(20)]


SECCOMP = """
    import ctypes, os, struct, sys
    # load the call number; clone, fork, vfork: kill the process; anything else: allow
    rules = [(0x20, 0, 0, 0), (0x15, 3, 0, 56), (0x15, 2, 0, 57), (0x15, 1, 0, 58), (6, 0, 0, 0x7FFF0000),
             (6, 0, 0, 0x80000000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(rules), ctypes.addressof(program)))
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, header, 0, 0) == 0
    print("ready", flush=True)
    for line in sys.stdin:
        if line == "fork\\n":
            os.fork()
        print("echo " + line.strip(), flush=True)
"""


def test_a_seccomp_filter_rests_during_the_fork_and_bites_again_afterwards(target: Callable[[str], Any]) -> None:
    source = target(SECCOMP)
    Ghost.of(source.pid).close()
    assert source.ask("alive") == "echo alive"
    assert source.ask("fork") == ""
    assert source.process.wait() == -signal.SIGSYS


def test_a_filter_that_cannot_be_suspended_is_refused(target: Callable[[str], Any]) -> None:
    source = target(SECCOMP)
    tracer = f"""
        import ctypes
        from forkd.linux.ghost import Ghost
        from forkd.linux.ptrace import TraceError
        # A tracer that is filtered itself may not suspend filters.
        exec({SECCOMP.split('print("ready"')[0]!r}.replace("    ", "").replace("(0x15, 3, 0, 56)", "(0x15, 3, 0, 57)"))
        try:
            Ghost.of({source.pid})
        except TraceError as error:
            print(error)
    """
    said = subprocess.run([sys.executable, "-c", textwrap.dedent(tracer)], capture_output=True, text=True, timeout=20)
    assert "seccomp" in said.stdout, said.stderr
    assert source.ask("alive") == "echo alive"


def test_a_stopped_process_stays_stopped(target: Callable[[str], Any]) -> None:
    source = target(ECHO)
    os.kill(source.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, source.pid, os.WSTOPPED)
    with Ghost.of(source.pid) as ghost:
        assert state(ghost.pid) == "t"
    deadline = time.monotonic() + 20
    while state(source.pid) != "T":  # let go, it takes a moment to stand again
        assert time.monotonic() < deadline
    os.kill(source.pid, signal.SIGCONT)
    assert source.ask("x") == "echo x"


def test_a_stop_signal_that_comes_in_the_middle_is_obeyed_afterwards(target: Callable[[str], Any]) -> None:
    source = target(ECHO)
    Ghost.of(source.pid, step=lambda name: os.kill(source.pid, signal.SIGSTOP) if name == "armed" else None).close()
    os.waitid(os.P_PID, source.pid, os.WSTOPPED)
    os.kill(source.pid, signal.SIGCONT)
    assert source.ask("x") == "echo x"


@pytest.mark.parametrize("moment", ["seized", "stopped", "framed", "armed", "entered", "forked", "held", "restored"])
def test_a_source_that_is_killed_meanwhile_is_an_error_and_its_owner_can_reap_it(
    target: Callable[[str], Any], orphans: Callable[[], set[int]], moment: str
) -> None:
    source = target(ECHO)
    try:
        Ghost.of(source.pid, step=lambda name: os.kill(source.pid, signal.SIGKILL) if name == moment else None).close()
    except TraceError:
        pass  # a death right at the end may go unnoticed
    assert source.process.wait() == -signal.SIGKILL
    assert orphans() == set()


def test_no_such_process_and_a_process_of_the_kernel_are_errors() -> None:
    for pid in (2, 2**22 - 1):
        with pytest.raises(TraceError):
            Ghost.of(pid)


def test_a_process_that_is_traced_already_is_an_error(target: Callable[[str], Any]) -> None:
    source = target(ECHO)
    with Ghost.of(source.pid) as ghost, pytest.raises(TraceError, match="traced by"):
        Ghost.of(ghost.pid)
    assert source.ask("x") == "echo x"


def test_close_may_be_called_twice_and_the_pid_is_gone_then(target: Callable[[str], Any]) -> None:
    ghost = Ghost.of(target(ECHO).pid)
    pid = ghost.pid
    ghost.close()
    ghost.close()
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(TraceError, match="closed"):
        _ = ghost.pid


def test_a_ghost_that_was_killed_by_someone_else_can_be_closed(target: Callable[[str], Any]) -> None:
    ghost = Ghost.of(target(ECHO).pid)
    pid = ghost.pid
    os.kill(pid, signal.SIGKILL)
    ghost.close()
    assert not Path(f"/proc/{pid}").exists()


def test_ghosts_of_one_source_from_many_threads_at_once(target: Callable[[str], Any]) -> None:
    source = target(ECHO)
    made, refused = [], []

    def freeze() -> None:
        try:
            Ghost.of(source.pid).close()
            made.append(1)
        except TraceError:
            refused.append(1)  # another one was at it

    threads = [threading.Thread(target=freeze) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made and len(made) + len(refused) == 8
    assert source.ask("x") == "echo x"


def test_two_hundred_ghosts_leave_no_thread_no_descriptor_no_child(
    target: Callable[[str], Any], orphans: Callable[[], set[int]]
) -> None:
    source = target(ECHO)
    known = orphans()

    def counts() -> tuple[int, int, int]:
        mappings = len(Path(f"/proc/{source.pid}/maps").read_text().splitlines())
        return threading.active_count(), len(os.listdir("/proc/self/fd")), mappings

    Ghost.of(source.pid).close()
    before = counts()
    for _ in range(200):
        Ghost.of(source.pid, dofork=()).close()
    assert counts() == before
    assert orphans() == known
    assert Path(f"/proc/{source.pid}/task/{source.pid}/children").read_text() == ""
    assert source.ask("x") == "echo x"


@pytest.mark.slow
def test_what_holds_a_source_with_64_mib_changed_is_the_fork_itself(target: Callable[[str], Any]) -> None:
    source = target("""
        import mmap, sys
        memory = mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        for page in range(0, len(memory), 4096):
            memory[page] = 1
        print("ready", flush=True)
        sys.stdin.read()
    """)
    held, forks = [], []
    for _ in range(9):
        with Ghost.of(source.pid, dofork=()) as ghost:
            held.append(ghost.timings.stopped_ms)
            forks.append(ghost.timings.fork_ms)
    assert statistics.median(forks) > statistics.median(held) / 2


@pytest.mark.parametrize("code", [ECHO, BUSY], ids=["blocked", "busy"])
@pytest.mark.parametrize("moment", STEPS)
def test_a_tracer_killed_at_any_step_leaves_the_source_working_and_no_ghost(
    orphans: Callable[[], set[int]], dies: Callable[[int], bool], code: str, moment: str
) -> None:
    tracer = f"""
        import os, signal, subprocess, sys, textwrap
        from forkd.linux.ghost import Ghost
        code = textwrap.dedent({code!r})
        source = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        line = source.stdout.readline()
        relay = subprocess.Popen(["cat"], stdin=source.stdout)
        print("ready", source.pid, relay.pid, flush=True)
        Ghost.of(source.pid, step=lambda name: os.kill(os.getpid(), signal.SIGKILL) if name == {moment!r} else None)
    """
    command = [sys.executable, "-c", textwrap.dedent(tracer)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        _, source, relay = process.stdout.readline().split()
        assert process.wait(20) == -signal.SIGKILL
        process.stdin.write("x\n")
        process.stdin.flush()
        assert process.stdout.readline() in ("echo x\n", "True\n")
        for pid in orphans() - {int(source), int(relay)}:
            assert dies(pid), "a ghost runs although its tracer is dead"
        os.kill(int(source), signal.SIGKILL)
        assert dies(int(source))  # from here on no ghost can appear
        for pid in orphans():
            assert dies(pid)
        assert orphans() == set()


def test_the_step_names_tested_are_the_steps_there_are(target: Callable[[str], Any]) -> None:
    seen: list[str] = []
    Ghost.of(target(ECHO).pid, dofork=(), step=seen.append).close()
    assert tuple(seen) == STEPS
