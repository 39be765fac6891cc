"""Clones of a whole process run on with all its threads, share nothing with it, and die with a tracer that fails."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forkd.linux.arch import AltStack, Registers, host_arch
from forkd.linux.batch import Area
from forkd.linux.clone import ProcessTemplate
from forkd.linux.descriptors import Refused, Unsettled
from forkd.linux.held import Step, frames_size, no_step
from forkd.linux.ptrace import TraceError
from forkd.linux.threads import ThreadState, clone_call

CLONE_STEPS = ("handed", "entered", "forked", "held", "built", "checked", "detached")

ECHO = """
    import sys
    print("ready", flush=True)
    for line in sys.stdin:
        print("echo " + line.strip(), flush=True)
"""

# Four workers that wait in a futex, one in epoll for an eventfd; an answer has passed through two of them.
THREADS = """
    import os, queue, select, sys, threading
    asked, answered = queue.SimpleQueue(), queue.SimpleQueue()
    def work():
        while True:
            answered.put(asked.get() * 2)
    for _ in range(4):
        threading.Thread(target=work, daemon=True).start()
    event, epoll = os.eventfd(0), select.epoll()
    epoll.register(event, select.EPOLLIN)
    def watch():
        while True:
            for number, _ in epoll.poll():
                asked.put(os.eventfd_read(number))
    threading.Thread(target=watch, daemon=True).start()
    print("ready", flush=True)
    for line in sys.stdin:
        os.eventfd_write(event, int(line))
        print(answered.get(), flush=True)
"""

# Evaluates each line; `result` of a worker thread that waits in the call under test.
EVALUATE = """
    import ctypes, os, queue, select, signal, sys, threading, time
    libc = ctypes.CDLL(None, use_errno=True)
    result = queue.SimpleQueue()
    {before}
    def work():
        result.put({waiting})
    threading.Thread(target=work, daemon=True).start()
    print("ready", flush=True)
    for line in sys.stdin:
        print(eval(line), flush=True)
"""

# Name: what goes before, the expression that waits, what wakes it, its value.
WAITS = {
    "futex": ("event = threading.Event()", "event.wait()", "event.set()", "True"),
    "timed futex": ("event = threading.Event()", "event.wait(1000)", "event.set()", "True"),
    "sleep": ("", "time.sleep(0.2)", "None", "None"),
    "poll": (
        "e = os.eventfd(0); p = select.poll(); p.register(e, 1)",
        "p.poll() == [(e, 1)]",
        "os.eventfd_write(e, 1)",
        "True",
    ),
    "select": ("e = os.eventfd(0)", "select.select([e], [], [])[0] == [e]", "os.eventfd_write(e, 1)", "True"),
    "epoll": (
        "e = os.eventfd(0); p = select.epoll(); p.register(e, 1)",
        "p.poll() == [(e, 1)]",
        "os.eventfd_write(e, 1)",
        "True",
    ),
    "edge triggered epoll": (
        "e = os.eventfd(0); p = select.epoll(); p.register(e, select.EPOLLET | 1)",
        "p.poll() == [(e, 1)]",
        "os.eventfd_write(e, 1)",
        "True",
    ),
    "eventfd": ("e = os.eventfd(0)", "os.eventfd_read(e)", "os.eventfd_write(e, 7)", "7"),
    "pipe": ("r, w = os.pipe()", "os.read(r, 10)", "os.write(w, b'abc')", "b'abc'"),
    "duplicated pipe": ("r, w = os.pipe(); w = os.dup(w); os.dup(r)", "os.read(r, 9)", "os.write(w, b'x')", "b'x'"),
    "sigwait": (
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])",
        "signal.sigwait([signal.SIGUSR1]).name",
        "os.kill(os.getpid(), signal.SIGUSR1)",
        "SIGUSR1",
    ),
    "signalfd": (
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]); "
        "s = libc.signalfd(-1, (ctypes.c_long * 16)(512), 0)",
        "os.read(s, 128)[0]",
        "os.kill(os.getpid(), signal.SIGUSR1)",
        "10",
    ),
}

# Keeps a pattern in a vector register of one thread while it spins in machine code; prints what is left of it.
VECTORS = """
    import ctypes, mmap, sys, threading
    code = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 7)
    # vmovdqu (%rdi),%ymm7; pause; cmpl $0,(%rsi); je .-7; vmovdqu %ymm7,(%rdx); vzeroupper; ret
    code.write(bytes.fromhex("c5fe6f3f f390 833e00 74f9 c5fe7f3a c5f877 c3"))
    pattern, flag, out = ctypes.create_string_buffer(bytes(range(1, 33)), 32), ctypes.c_int(0), (ctypes.c_char * 32)()
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    spin = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(address)
    def hold():
        spin(ctypes.addressof(pattern), ctypes.addressof(flag), ctypes.addressof(out))
    thread = threading.Thread(target=hold)
    thread.start()
    print("ready", flush=True)
    sys.stdin.readline()
    flag.value = 1
    thread.join()
    print(out.raw == pattern.raw, flush=True)
"""

SECCOMP = """
    import ctypes, os, struct, sys, threading
    go, done = threading.Event(), threading.Event()
    threading.Thread(target=lambda: (go.wait(), done.set()), daemon=True).start()
    # load the call number; clone, fork, vfork: kill the process; anything else: allow
    rules = [(0x20, 0, 0, 0), (0x15, 3, 0, 56), (0x15, 2, 0, 57), (0x15, 1, 0, 58), (6, 0, 0, 0x7FFF0000),
             (6, 0, 0, 0x80000000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(rules), ctypes.addressof(program)))
    libc = ctypes.CDLL(None)
    # SECCOMP_SET_MODE_FILTER for all threads
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.syscall(317, 1, 1, header) == 0
    print("ready", flush=True)
    for line in sys.stdin:
        if line == "fork\\n":
            os.fork()
        go.set()
        print(done.wait(10), flush=True)
"""


class Clone:
    """A running clone with pipes of its own as standard input and output."""

    def __init__(self, template: ProcessTemplate) -> None:
        child_in, self._to = os.pipe()
        self._from, child_out = os.pipe()
        try:
            self.pid = template.clone({0: child_in, 1: child_out})
        except BaseException:
            os.close(self._to)
            os.close(self._from)
            raise
        finally:
            os.close(child_in)
            os.close(child_out)

    def ask(self, question: str) -> str:
        os.write(self._to, question.encode() + b"\n")
        said = b""
        while not said.endswith(b"\n"):
            assert select.select([self._from], [], [], 20)[0], "the clone says nothing"
            if not (more := os.read(self._from, 4096)):
                break
            said += more
        return said.decode().strip()

    def end(self) -> int:
        os.close(self._to)
        os.close(self._from)
        os.kill(self.pid, signal.SIGKILL)
        return os.waitpid(self.pid, 0)[1]


class Templates:
    """Makes templates and clones, and ends them after the test."""

    def __init__(self) -> None:
        self.templates: list[ProcessTemplate] = []
        self.clones: list[Clone] = []

    def of(self, pid: int, step: Step = no_step) -> ProcessTemplate:
        self.templates.append(ProcessTemplate.of(pid, replaced=[0, 1], shared=[2], step=step))
        return self.templates[-1]

    def clone(self, template: ProcessTemplate) -> Clone:
        self.clones.append(Clone(template))
        return self.clones[-1]

    def end(self) -> None:
        for clone in self.clones:
            clone.end()
        for template in self.templates:
            template.close()


@pytest.fixture
def make(orphans: Callable[[], set[int]]) -> Iterator[Templates]:
    templates = Templates()  # ended before what `orphans` finds is
    yield templates
    templates.end()


def tasks(pid: int) -> list[Path]:
    return sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda task: int(task.name))


def asleep(source: Any) -> Any:
    """Wait until every thread of a process that said it is ready sleeps in its call."""
    while any((task / "stat").read_text().rpartition(")")[2].split()[0] != "S" for task in tasks(source.pid)):
        os.sched_yield()
    return source


def test_clones_and_their_source_answer_each_for_itself(target: Callable[[str], Any], make: Templates) -> None:
    source = asleep(target(THREADS))
    template = make.of(source.pid)
    clones = [make.clone(template) for _ in range(5)]
    for number in range(3):
        for index, clone in enumerate(clones):
            assert clone.ask(str(10 * index + number + 1)) == str(2 * (10 * index + number + 1))
        assert source.ask("1000") == "2000"
    assert [len(tasks(clone.pid)) for clone in clones] == [6] * 5
    assert len(tasks(source.pid)) == 6


@pytest.mark.parametrize("wait", WAITS)
def test_a_thread_that_waits_is_woken_in_the_clone_and_not_in_the_source(
    target: Callable[[str], Any], make: Templates, wait: str
) -> None:
    before, waiting, wake, value = WAITS[wait]
    source = asleep(target(EVALUATE.format(before=before, waiting=waiting)))
    template = make.of(source.pid)
    for clone in (make.clone(template), make.clone(template)):
        assert wait == "sleep" or clone.ask("result.empty()") == "True"
        clone.ask(wake)
        assert clone.ask("result.get(timeout=10)") == value
    assert wait == "sleep" or source.ask("result.empty()") == "True"
    source.ask(wake)
    assert source.ask("result.get(timeout=10)") == value


def test_every_thread_knows_its_own_id_and_can_be_joined(target: Callable[[str], Any], make: Templates) -> None:
    source = asleep(
        target("""
        import ctypes, sys, threading
        libc = ctypes.CDLL(None)
        libc.pthread_self.restype = ctypes.c_void_p
        go, seen = threading.Event(), []
        def work():
            go.wait()
            # pthread_kill reads the id the C library keeps, and the kernel knows the true one
            ok = libc.pthread_kill(ctypes.c_void_p(libc.pthread_self()), 0) == 0
            clock = ctypes.c_int()
            libc.pthread_getcpuclockid(ctypes.c_void_p(libc.pthread_self()), ctypes.byref(clock))
            seen.append(ok and (~clock.value >> 3) == libc.gettid())
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        print("ready", flush=True)
        sys.stdin.readline()
        go.set()
        for thread in threads:
            thread.join()
        print(seen, threading.active_count(), flush=True)
        sys.stdin.readline()
    """)
    )
    clone = make.clone(make.of(source.pid))
    assert clone.ask("go") == "[True, True, True] 1"
    deadline = time.monotonic() + 30
    while len(tasks(clone.pid)) > 1:  # Python's join returns a little before the kernel has ended the thread
        assert time.monotonic() < deadline
    assert source.ask("go") == "[True, True, True] 1"


def test_the_alternate_stack_of_each_thread_is_kept(target: Callable[[str], Any], make: Templates) -> None:
    source = asleep(
        target("""
        import ctypes, os, signal, sys, threading
        libc = ctypes.CDLL(None)
        room = ctypes.create_string_buffer(65536)
        def stack():
            now = (ctypes.c_long * 3)()
            libc.sigaltstack(None, now)
            return list(now)
        def work(number):
            libc.prctl(15, b"worker-%d" % number, 0, 0, 0)
            signal.pthread_sigmask(signal.SIG_SETMASK, [number + 10])
            os.sched_setaffinity(0, [number % os.cpu_count()])
            libc.sigaltstack((ctypes.c_long * 3)(ctypes.addressof(room) + 16384 * number, 0, 16384), None)
            before = stack()
            started.release()
            go.acquire()
            same.append(stack() == before)
            done.release()
        started, go, done, same = threading.Semaphore(0), threading.Semaphore(0), threading.Semaphore(0), []
        for number in range(3):
            threading.Thread(target=work, args=[number], daemon=True).start()
            started.acquire()
        print("ready", flush=True)
        for line in sys.stdin:
            for _ in range(3):
                go.release()
                done.acquire()
            print(same, flush=True)
    """)
    )

    clone = make.clone(make.of(source.pid))
    assert clone.ask("go") == "[True, True, True]"
    assert source.ask("go") == "[True, True, True]"


def test_the_threads_of_a_clone_look_like_those_of_its_source(target: Callable[[str], Any], make: Templates) -> None:
    source = asleep(
        target("""
        import ctypes, os, signal, sys, threading
        libc = ctypes.CDLL(None)
        started = threading.Semaphore(0)
        def work(number):
            libc.prctl(15, b"worker-%d" % number, 0, 0, 0)
            signal.pthread_sigmask(signal.SIG_SETMASK, [number + 10])
            os.sched_setaffinity(0, [number % os.cpu_count()])
            started.release()
            threading.Event().wait()
        for number in range(3):
            threading.Thread(target=work, args=[number], daemon=True).start()
            started.acquire()
        print("ready", flush=True)
        for line in sys.stdin:
            print("here", flush=True)
    """)
    )
    clone = make.clone(make.of(source.pid))
    assert clone.ask("?") == "here"
    asleep(clone)

    def look(pid: int) -> list[tuple[str, ...]]:
        fields = ("Name", "SigBlk", "Cpus_allowed", "SigPnd", "ShdPnd", "NoNewPrivs")
        statuses = [
            dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines()) for task in tasks(pid)
        ]
        return [tuple(status[field] for field in fields) for status in statuses]

    assert look(clone.pid) == look(source.pid)
    assert len({each[:3] for each in look(source.pid)}) == 4


def test_a_thread_keeps_its_vector_registers_in_the_clone(target: Callable[[str], Any], make: Templates) -> None:
    source = target(VECTORS)
    template = make.of(source.pid)
    assert [make.clone(template).ask("?") for _ in range(5)] == ["True"] * 5
    assert source.ask("?") == "True"


def test_a_seccomp_filter_rests_during_the_clone_and_bites_in_it(target: Callable[[str], Any], make: Templates) -> None:
    template = make.of(asleep(target(SECCOMP)).pid)
    clone = make.clone(template)
    assert clone.ask("alive") == "True"
    assert clone.ask("fork") == ""
    assert os.WTERMSIG(clone.end()) == signal.SIGSYS
    make.clones.remove(clone)


def test_a_file_position_moves_in_one_clone_only(target: Callable[[str], Any], make: Templates, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(100)))
    source = target(f"""
        import os, sys
        file = os.open({str(tmp_path / "file")!r}, os.O_RDONLY)
        os.read(file, 10)
        twin = os.dup(file)
        print("ready", flush=True)
        for line in sys.stdin:
            print(os.read(file, 1)[0], os.read(twin, 1)[0], flush=True)
    """)
    template = make.of(source.pid)
    for _ in range(2):
        assert make.clone(template).ask("?") == "10 11"
    assert source.ask("?") == "10 11"


def test_the_count_of_an_eventfd_and_unseen_readiness_are_kept(target: Callable[[str], Any], make: Templates) -> None:
    source = target("""
        import os, select, sys
        event, epoll = os.eventfd(5, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC), select.epoll()
        epoll.register(event, select.EPOLLIN)
        print("ready", flush=True)
        for line in sys.stdin:
            count = 0
            while epoll.poll(0) == [(event, select.EPOLLIN)]:
                count += os.eventfd_read(event)
            print(count, os.get_blocking(event), os.get_inheritable(event), flush=True)
    """)
    template = make.of(source.pid)
    for _ in range(2):
        assert make.clone(template).ask("?") == "5 False False"
    assert source.ask("?") == "5 False False"


def test_a_clone_of_a_clone_of_a_clone_answers(target: Callable[[str], Any], make: Templates) -> None:
    process = target(THREADS)
    for depth in range(5):
        process = make.clone(make.of(asleep(process).pid))
        assert process.ask(str(depth + 1)) == str(2 * (depth + 1))
    assert len(tasks(process.pid)) == 6


@pytest.mark.parametrize(
    "code, reason",
    {
        "timerfd": ("libc.timerfd_create(1, 0)", "timerfd"),
        "inotify": ("libc.inotify_init()", "inotify"),
        "pidfd": ("os.pidfd_open(os.getpid())", "pidfd"),
        "socket": ("socket.socketpair()", "socket that nobody replaces"),
        "file written to": ("open('/tmp/written', 'w') if False else tempfile.TemporaryFile()", "can write to a file"),
        "pipe with bytes": ("os.write((p := os.pipe())[1], b'x')", "unread bytes in a pipe"),
        "half a pipe": ("os.close((p := os.pipe())[0])", "pipe to somebody else"),
        "terminal": ("os.openpty()", "device"),
        "memfd": ("os.memfd_create('x')", "can write to a file"),
        "epoll set in an epoll set": ("(e := select.epoll()).register(f := select.epoll())", "another epoll set"),
        "closed file in an epoll set": (
            "(e := select.epoll()).register(p[0]), (d := os.dup(p[0])), os.close(p[0])",
            "which is closed",
        ),
        "other file in an epoll set": (
            "(e := select.epoll()).register(p[0]), os.dup(p[0]), os.dup2(os.eventfd(0), p[0])",
            "watches a file that is not descriptor",
        ),
        "shared memory": ("mmap.mmap(-1, 4096)", "shared and writable"),
        "POSIX timer": ("libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p()))", "POSIX timers"),
        "signals on input": ("fcntl.fcntl(p[0], fcntl.F_SETFL, os.O_ASYNC)", "raises signals"),
    }.items(),
)
def test_what_is_not_known_to_be_safe_is_refused_with_the_reason_and_the_source_runs_on(
    target: Callable[[str], Any], code: str, reason: tuple[str, str]
) -> None:
    source = target(f"""
        import ctypes, fcntl, mmap, os, select, socket, sys, tempfile
        libc = ctypes.CDLL(None)
        p = os.pipe()
        kept = {reason[0]}
        print("ready", flush=True)
        for line in sys.stdin:
            print("echo " + line.strip(), flush=True)
    """)
    with pytest.raises(Refused, match=reason[1]) as refusal:
        ProcessTemplate.of(source.pid, replaced=[0, 1], shared=[2])
    assert refusal.value.reason
    assert source.ask("x") == "echo x"


def test_unread_input_on_a_replaced_descriptor_is_refused(target: Callable[[str], Any]) -> None:
    source = target("""
        import sys, threading
        print("ready", flush=True)
        threading.Event().wait()
    """)
    source.process.stdin.write(b"unread")
    with pytest.raises(Unsettled, match="unread bytes on descriptor 0"):
        ProcessTemplate.of(source.pid, replaced=[0, 1], shared=[2])


def test_descriptors_that_do_not_fit_the_template_are_an_error(target: Callable[[str], Any], make: Templates) -> None:
    template = make.of(target(ECHO).pid)
    with pytest.raises(TraceError, match="needs the descriptors"):
        template.clone({0: 0})
    assert make.clone(template).ask("x") == "echo x"


@pytest.mark.parametrize("moment", CLONE_STEPS[:-1])
def test_a_clone_that_fails_at_any_step_leaves_nothing_and_the_next_one_works(
    target: Callable[[str], Any], make: Templates, orphans: Callable[[], set[int]], moment: str
) -> None:
    failing = [""]

    def step(name: str) -> None:
        if name == failing[0]:
            raise RuntimeError("from the test")

    source = asleep(target(THREADS))
    template = make.of(source.pid, step)
    known, descriptors = orphans(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        failing[0] = moment
        with pytest.raises(RuntimeError, match="from the test"):
            Clone(template)
        assert orphans() == known
        assert len(os.listdir("/proc/self/fd")) == descriptors
    failing[0] = ""
    assert make.clone(template).ask("21") == "42"
    assert source.ask("4") == "8"


@pytest.mark.parametrize("moment", CLONE_STEPS[:-1])
def test_a_clone_that_is_killed_at_any_step_is_an_error_and_the_next_one_works(
    target: Callable[[str], Any], make: Templates, orphans: Callable[[], set[int]], moment: str
) -> None:
    asked = threading.Event()
    template: ProcessTemplate | None = None

    def step(name: str) -> None:
        if name == moment and asked.is_set() and template is not None:
            for pid in orphans() - {template.pid, source.pid}:
                os.kill(pid, signal.SIGKILL)

    source = asleep(target(THREADS))
    template = make.of(source.pid, step)
    asked.set()
    if moment in ("handed", "entered"):
        assert make.clone(template).ask("1") == "2"  # there was no clone yet
    else:
        with pytest.raises(TraceError):
            Clone(template)
    asked.clear()
    assert make.clone(template).ask("21") == "42"


def test_close_ends_the_template_and_not_its_clones(target: Callable[[str], Any], make: Templates) -> None:
    template = make.of(target(ECHO).pid)
    pid, clone = template.pid, make.clone(template)
    template.close()
    template.close()
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(TraceError, match="closed"):
        _ = template.pid
    with pytest.raises(TraceError, match="closed"):
        Clone(template)
    assert clone.ask("x") == "echo x"


def test_the_source_may_end_before_its_template(target: Callable[[str], Any], make: Templates) -> None:
    source = asleep(target(THREADS))
    template = make.of(source.pid)
    source.process.kill()
    source.process.wait()
    assert make.clone(template).ask("21") == "42"


def test_clones_asked_for_by_many_threads_at_once_all_answer(target: Callable[[str], Any], make: Templates) -> None:
    template = make.of(asleep(target(THREADS)).pid)
    answers: list[str] = []
    threads = [threading.Thread(target=lambda: answers.append(make.clone(template).ask("21"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == ["42"] * 8


def test_a_hundred_clones_leave_no_thread_no_descriptor_no_child(
    target: Callable[[str], Any], make: Templates, orphans: Callable[[], set[int]]
) -> None:
    template = make.of(asleep(target(THREADS)).pid)
    known = orphans()

    def counts() -> tuple[int, int, str, int]:
        mappings = Path(f"/proc/{template.pid}/maps").read_text()
        theirs = len(os.listdir(f"/proc/{template.pid}/fd"))
        return threading.active_count(), len(os.listdir("/proc/self/fd")), mappings, theirs

    before = counts()
    for number in range(100):
        clone = Clone(template)
        if number % 10 == 0:
            assert clone.ask("21") == "42"
        clone.end()
    after = counts()
    assert after[0] <= before[0]  # idle threads of other tests may have left meanwhile
    assert after[1:] == before[1:]
    assert orphans() == known


def test_an_idle_clone_uses_no_processor_time(target: Callable[[str], Any], make: Templates) -> None:
    clone = make.clone(make.of(asleep(target(THREADS)).pid))
    assert clone.ask("21") == "42"
    asleep(clone)

    def switches() -> int:
        lines = [line for task in tasks(clone.pid) for line in (task / "status").read_text().splitlines()]
        return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)

    before = switches()
    assert not select.select([clone._from], [], [], 0.3)[0]
    assert switches() == before


def test_a_clone_gets_the_signal_asked_for_when_its_parent_ends(
    orphans: Callable[[], set[int]], dies: Callable[[int], bool]
) -> None:
    parent = f"""
        import os, subprocess, sys, textwrap
        from forkd.linux.clone import ProcessTemplate
        code = textwrap.dedent({ECHO!r})
        source = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        source.stdout.readline()
        with ProcessTemplate.of(source.pid, [0, 1], [2], death_signal=9) as template:
            (a, b), (c, d) = os.pipe(), os.pipe()
            print(source.pid, template.clone({{0: a, 1: d}}), flush=True)
        source.kill()
        source.wait()
        sys.stdin.readline()
        os._exit(0)
    """
    command = [sys.executable, "-c", textwrap.dedent(parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        clone = int(process.stdout.readline().split()[1])
        assert Path(f"/proc/{clone}").exists()
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(20) == 0
        assert dies(clone)
    assert orphans() == set()


@pytest.mark.parametrize("moment", ["seized", "framed", "armed", "forked", "restored", "prepared", *CLONE_STEPS])
def test_a_tracer_killed_at_any_step_leaves_the_source_working_and_no_half_clone(
    orphans: Callable[[], set[int]], dies: Callable[[int], bool], moment: str
) -> None:
    tracer = f"""
        import os, signal, subprocess, sys, textwrap
        from forkd.linux.clone import ProcessTemplate
        code = textwrap.dedent({THREADS!r})
        source = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        line = source.stdout.readline()
        relay = subprocess.Popen(["cat"], stdin=source.stdout)
        print("ready", source.pid, relay.pid, flush=True)
        ready = {moment not in CLONE_STEPS}
        def step(name):
            if ready and name == {moment!r}:
                os.kill(os.getpid(), signal.SIGKILL)
        template = ProcessTemplate.of(source.pid, [0, 1], [2], step=step)
        ready = True
        (a, b), (c, d) = os.pipe(), os.pipe()
        template.clone({{0: a, 1: d}})
    """
    command = [sys.executable, "-c", textwrap.dedent(tracer)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        _, source, relay = process.stdout.readline().split()
        assert process.wait(20) == -signal.SIGKILL
        process.stdin.write("21\n")
        process.stdin.flush()
        assert process.stdout.readline() == "42\n"
        # A finished clone reads the end of its input, as its only writer was the tracer, and leaves by itself.
        for pid in orphans() - {int(source), int(relay)}:
            assert dies(pid), "a ghost or half a clone is left although its tracer is dead"
        os.kill(int(source), signal.SIGKILL)
        assert dies(int(source))
        for pid in orphans():
            assert dies(pid)


def test_the_step_names_tested_are_the_steps_there_are(target: Callable[[str], Any], make: Templates) -> None:
    seen: list[str] = []
    template = make.of(target(ECHO).pid, seen.append)
    assert seen[-1] == "prepared"
    seen.clear()
    make.clone(template)
    assert tuple(seen) == CLONE_STEPS


def test_how_long_the_source_was_held_is_told(target: Callable[[str], Any], make: Templates) -> None:
    source = asleep(target(THREADS))
    begun = time.perf_counter()
    held = make.of(source.pid).stopped_ms
    assert 0 < held < (time.perf_counter() - begun) * 1e3


def test_a_thread_that_never_ran_has_room_for_the_frames_of_its_next_holder() -> None:
    arch, registers = host_arch(), Registers()
    thread = ThreadState(7, b"worker", registers, 0, bytes(2696), AltStack(0, 2, 0), (0, 0), None, frozenset({0}))
    area = Area(0x10000, 0x10000)
    taken = area.place(b"taken")
    call = clone_call(thread, 0x2D0, taken, area, arch)
    table = call.arguments[1]
    assert isinstance(table, int)
    room = frames_size(thread.vectors, arch)
    assert area.image()[table - area.address - room : table - area.address] == bytes(room)


@pytest.mark.parametrize("turn", range(1, 7))
def test_a_source_killed_while_it_is_frozen_is_reported_and_can_be_waited_for(
    target: Callable[[str], Any], turn: int
) -> None:
    source = target(THREADS)
    seen: list[str] = []

    def kill(step: str) -> None:
        seen.append(step)
        if step == "entered" and seen.count("entered") == turn:
            os.kill(source.pid, signal.SIGKILL)
            while any(state != "Z" for state in thread_states(source.pid)):
                pass  # the kernel is taking the threads down

    made: list[ProcessTemplate] = []
    failures: list[BaseException] = []

    def freeze() -> None:
        try:
            made.append(ProcessTemplate.of(source.pid, [0, 1], [2], step=kill))
        except TraceError as error:
            failures.append(error)

    freezer = threading.Thread(target=freeze, daemon=True)
    freezer.start()
    freezer.join(20)
    assert not freezer.is_alive()
    assert made == [] and len(failures) == 1
    assert source.process.wait(20) == -signal.SIGKILL


def thread_states(pid: int) -> list[str]:
    states = []
    for tid in os.listdir(f"/proc/{pid}/task"):
        try:
            states.append(Path(f"/proc/{pid}/task/{tid}/stat").read_text().rpartition(")")[2].split()[0])
        except OSError:
            continue
    return states


def test_threads_that_come_and_go_all_the_time_are_no_hindrance(target: Callable[[str], Any]) -> None:
    source = target("""
        import sys, threading
        threading.stack_size(65536)
        def churn():
            while True:
                thread = threading.Thread(target=int)
                thread.start()
                thread.join()
        threading.Thread(target=churn, daemon=True).start()
        print("ready", flush=True)
        sys.stdin.read()
    """)
    reasons = set()
    for _ in range(150):
        try:
            ProcessTemplate.of(source.pid, [0, 1], [2]).close()
        except Unsettled:
            continue  # stopped in the middle of something: tried again by who wants one
        except TraceError as error:
            reasons.add(str(error))
    assert reasons == set()
