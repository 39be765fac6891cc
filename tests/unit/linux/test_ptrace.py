"""One traced thread: it can be stopped, read, changed and let go, and its death is left to its owner."""

from __future__ import annotations

import errno
import os
import platform
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkd.linux import arch
from forkd.linux.arch import X86_64, AltStack, Registers, UnsupportedArch, host_arch
from forkd.linux.held import Gadgets, HeldThread
from forkd.linux.ptrace import Ended, Tracee, TraceError, Tracees, read_status, seize

ECHO = """
    import sys
    print("ready", flush=True)
    for line in sys.stdin:
        print("echo " + line.strip(), flush=True)
"""

NUMBERS = st.integers(0, 2**64 - 1)


@pytest.fixture
def tracer() -> Iterator[Callable[..., Any]]:
    """Run functions on one OS thread, that ends (and so lets go of its tracees) after the test."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def stop(pid: int) -> Tracee:
    tracee = seize(pid, host_arch(), Tracees())
    tracee.interrupt()
    tracee.wait_interrupted()
    return tracee


def test_registers_and_mask_written_back_change_nothing(
    target: Callable[[str], Any], tracer: Callable[..., Any]
) -> None:
    source = target(ECHO)

    def visit() -> None:
        tracee = stop(source.pid)
        registers = tracee.registers()
        assert host_arch().is_native(registers)
        tracee.set_registers(registers)
        tracee.set_signal_mask(tracee.signal_mask())
        assert len(tracee.vectors()) >= 512
        tracee.detach()

    tracer(visit)
    assert source.ask("x") == "echo x"


def test_the_mask_is_the_one_the_program_set(target: Callable[[str], Any], tracer: Callable[..., Any]) -> None:
    source = target("""
        import signal, sys
        signal.pthread_sigmask(signal.SIG_SETMASK, [signal.SIGUSR1, signal.SIGTERM])
        print("ready", flush=True)
        sys.stdin.read()
    """)
    mask = tracer(lambda: stop(source.pid).signal_mask())
    assert mask == 1 << signal.SIGUSR1 - 1 | 1 << signal.SIGTERM - 1


def test_a_thread_that_dies_is_reported_and_left_to_its_parent(
    target: Callable[[str], Any], tracer: Callable[..., Any]
) -> None:
    source = target(ECHO)

    def visit() -> None:
        tracee = stop(source.pid)
        os.kill(source.pid, signal.SIGKILL)
        with pytest.raises(Ended):
            tracee.wait_interrupted()

    tracer(visit)
    assert source.process.wait() == -signal.SIGKILL


def test_a_call_of_another_os_thread_is_refused(target: Callable[[str], Any], tracer: Callable[..., Any]) -> None:
    tracee = tracer(stop, target(ECHO).pid)
    with pytest.raises(TraceError):
        tracee.registers()


def test_a_missing_process_has_no_status() -> None:
    with pytest.raises(Ended):
        read_status(2**22 - 1)


def test_calls_in_a_held_thread_give_their_results(target: Callable[[str], Any], tracer: Callable[..., Any]) -> None:
    source = target(ECHO)

    def visit() -> tuple[int, int]:
        processor = host_arch()
        with HeldThread(source.pid, Gadgets.find(source.pid, processor), processor, Tracees()) as thread:
            return thread.call("getpid"), thread.call("close", 2**20)

    assert tracer(visit) == (source.pid, -errno.EBADF)
    assert source.ask("x") == "echo x"


def test_another_processor_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(UnsupportedArch, match="riscv64"):
        host_arch()


@pytest.mark.parametrize(
    "code", [arch.ERESTARTSYS, arch.ERESTARTNOINTR, arch.ERESTARTNOHAND, arch.ERESTART_RESTARTBLOCK]
)
def test_an_interrupted_call_is_issued_again_from_its_instruction(code: int) -> None:
    registers = Registers(rax=2**64 - code, orig_rax=7, rip=1000)
    assert X86_64().interrupted_call(registers) == 7
    again = X86_64().reissued(registers, 7)
    assert (again.rax, again.rip, again.orig_rax) == (7, 998, 2**64 - 1)


@pytest.mark.parametrize("rax, orig_rax", [(0, 7), (2**64 - errno.EINTR, 7), (2**64 - 512, 2**64 - 1)])
def test_a_finished_call_and_own_code_are_not_issued_again(rax: int, orig_rax: int) -> None:
    registers = Registers(rax=rax, orig_rax=orig_rax, rip=1000)
    assert X86_64().interrupted_call(registers) is None
    again = X86_64().reissued(registers, None)
    assert (again.rax, again.rip) == (rax, 1000)


def test_an_epoll_wait_cut_short_by_the_stop_is_issued_again_unless_a_signal_waits() -> None:
    registers = Registers(rax=2**64 - errno.EINTR, orig_rax=232, rip=1000)
    assert X86_64().resumed_by_kernel(registers, lambda: False).rip == 998
    assert X86_64().resumed_by_kernel(registers, lambda: True).rip == 1000


@given(NUMBERS, NUMBERS, st.integers(0, 2**47).map(lambda n: n & ~15), st.sampled_from([0, 832, 2696]))
def test_a_frame_fits_the_room_announced_and_holds_the_registers(rip: int, mask: int, at: int, vectors: int) -> None:
    registers = Registers(rip=rip)
    frame = X86_64().signal_frame(at, 77, registers, mask, bytes(vectors), AltStack(1, 2, 3))
    assert len(frame) <= X86_64().frame_size(bytes(vectors))
    assert int.from_bytes(frame[:8], "little") == 77
    assert rip.to_bytes(8, "little") in frame and mask.to_bytes(8, "little") in frame


def test_the_number_of_a_call_is_read_from_the_instruction_before_it() -> None:
    assert X86_64().number_before(b"\x90\xb8\xca\x00\x00\x00\x0f\x05") == 202
    assert X86_64().number_before(b"\x90\x90\x90\x90\x90\x90\x0f\x05") is None
    assert X86_64().number_before(b"\x0f\x05") is None
