"""What tracing must know of the processor: registers, system call numbers, signal frames, how a call is restarted."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Kernel-internal results of an interrupted call: seen by a tracer, never by the program.
ERESTARTSYS, ERESTARTNOINTR, ERESTARTNOHAND, ERESTART_RESTARTBLOCK = 512, 513, 514, 516

# System call numbers of x86_64. A second processor brings its own table.
NR = {
    "close": 3, "lseek": 8, "mmap": 9, "mprotect": 10, "madvise": 28, "getpid": 39, "recvmsg": 47, "socketpair": 53,
    "clone": 56, "chdir": 80, "fchdir": 81, "sigaltstack": 131, "prctl": 157, "futex": 202, "restart_syscall": 219,
    "exit_group": 231, "epoll_ctl": 233, "openat": 257, "set_robust_list": 273, "signalfd4": 289, "eventfd2": 290,
    "epoll_create1": 291, "dup3": 292, "pipe2": 293, "rseq": 334,
}  # fmt: skip

# Calls the kernel ends with EINTR at a tracer's stop although no signal came: rt_sigtimedwait and the epoll waits.
_SPURIOUS_EINTR = {128, 232, 281, 441}

# Runs a table of system calls without a stop in between. %rbx points to an entry: number, six arguments, result.
# The table's thread has no stack (%rsp is 0): a call that comes back with one was a clone, seen from the new thread,
# whose stack pointer is its own table. %r12 is 0 in the first thread, 1 in those.
_RUNNER = bytes.fromhex(
    "0f05"  # fork:    syscall                       the tracer sets the call up; its parent never gets past it
    "488b03 4885c0 7856"  # next:    mov (%rbx),%rax; test %rax,%rax; js special
    "488b7b08 488b7310 488b5318"  #          mov 8(%rbx),%rdi; mov 16(%rbx),%rsi; mov 24(%rbx),%rdx
    "4c8b5320 4c8b4328 4c8b4b30"  #          mov 32(%rbx),%r10; mov 40(%rbx),%r8; mov 48(%rbx),%r9
    "89c0 0f05"  #          mov %eax,%eax; syscall
    "4885e4 7518"  #          test %rsp,%rsp; jnz thread
    "48894338 f6430401 7508"  #          mov %rax,56(%rbx); testb $1,4(%rbx); jnz step   (it may fail)
    "483d01f0ffff 7313"  #          cmp $-4095,%rax; jae failed
    "4883c340 ebbf"  # step:    add $64,%rbx; jmp next
    "4889e3 31e4 41bc01000000 ebb2"  # thread:  mov %rsp,%rbx; xor %esp,%esp; mov $1,%r12d; jmp next
    "4585e4 7411"  # failed:  test %r12d,%r12d; jz stop
    "89c7 f7df b8e7000000 0f05"  #          mov %eax,%edi; neg %edi; mov $231,%eax; syscall   (exit_group)
    "4883f8fe 7417"  # special: cmp $-2,%rax; je leave
    "b8ba000000 0f05 89c7"  # stop:    mov $186,%eax; syscall; mov %eax,%edi   (gettid)
    "be13000000 b8c8000000 0f05"  #          mov $19,%esi; mov $200,%eax; syscall   (tkill with SIGSTOP)
    "ebc0"  #          jmp step
    "488b6308 b80f000000 0f05"  # leave:   mov 8(%rbx),%rsp; mov $15,%eax; syscall   (rt_sigreturn)
)
_ENTRY = struct.Struct("<q6Qq")
_MAY_FAIL = 1 << 32

_UC_FP_XSTATE, _UC_SIGCONTEXT_SS, _UC_STRICT_RESTORE_SS = 1, 2, 4
_FP_XSTATE_MAGIC1, _FP_XSTATE_MAGIC2 = 0x46505853, 0x46505845
_XSTATE_HEADER_END = 576  # 512 bytes of FXSAVE and the 64 byte XSAVE header
_XTILE_DATA, _XTILE_DATA_OFFSET = 1 << 18, 2816  # AMX tiles: only in frames of programs that asked for them
_KEEP_ALTSTACK = (0, 0x7FFF, 0)  # invalid flags: the kernel then leaves the alternate stack as it is
_FRAME = struct.Struct("<Q QQ QiiQ 18Q HHHH 4Q Q 8Q Q 128s")


class UnsupportedArch(Exception):
    """This processor's registers and signal frames are not known here."""


class Registers(ctypes.Structure):
    """`struct user_regs_struct` of x86_64."""

    r15: int
    r14: int
    r13: int
    r12: int
    rbp: int
    rbx: int
    r11: int
    r10: int
    r9: int
    r8: int
    rax: int
    rcx: int
    rdx: int
    rsi: int
    rdi: int
    orig_rax: int
    rip: int
    cs: int
    eflags: int
    rsp: int
    ss: int
    fs_base: int
    gs_base: int
    ds: int
    es: int
    fs: int
    gs: int

    _fields_ = [(name, ctypes.c_uint64) for name in __annotations__]

    def copy(self) -> Registers:
        return Registers.from_buffer_copy(self)


@dataclass(frozen=True, slots=True)
class AltStack:
    """A thread's alternate signal stack (`stack_t`)."""

    address: int
    flags: int
    size: int


class X86_64:
    """Everything processor-specific, in one value that the tracing code is handed."""

    syscall_return = b"\x0f\x05\xc3"  # syscall; ret
    sigreturn = b"\x48\xc7\xc0\x0f\x00\x00\x00\x0f\x05"  # mov $15, %rax; syscall: what every libc calls __restore_rt

    def is_native(self, registers: Registers) -> bool:
        """Whether the thread runs 64-bit code (a 32-bit one has another call convention)."""
        return registers.cs == 0x33

    def call(self, base: Registers, at: int, stack: int, number: int, arguments: Sequence[int]) -> Registers:
        """Registers that make a thread run one system call with the instruction found at `at`."""
        made = base.copy()
        made.rip, made.rsp, made.rax = at, stack, number
        made.orig_rax = (1 << 64) - 1  # not in a call: nothing for the kernel to restart
        values = [value & (1 << 64) - 1 for value in arguments] + [0] * (6 - len(arguments))
        made.rdi, made.rsi, made.rdx, made.r10, made.r8, made.r9 = values
        return made

    def skip_call(self, entered: Registers) -> Registers:
        """Registers that make a thread stopped at the entry of a call not do it."""
        made = entered.copy()
        made.orig_rax = (1 << 64) - 1
        return made

    def result(self, registers: Registers) -> int:
        """What the last call returned, negative errno included."""
        return ctypes.c_int64(registers.rax).value

    def interrupted_call(self, registers: Registers) -> int | None:
        """The number of the call the stop interrupted, or None when the thread was in its own code."""
        if ctypes.c_int64(registers.orig_rax).value < 0:
            return None
        restarts = (ERESTARTSYS, ERESTARTNOINTR, ERESTARTNOHAND, ERESTART_RESTARTBLOCK)
        spurious = registers.orig_rax in _SPURIOUS_EINTR and self.result(registers) == -errno.EINTR
        return registers.orig_rax if spurious or -self.result(registers) in restarts else None

    def resumed_by_kernel(self, registers: Registers, signal_waits: Callable[[], bool]) -> Registers:
        """Registers to hand back to a thread of a source: the kernel restarts its call, we add the calls it would not.

        With a signal waiting, EINTR is the right answer and stays.
        """
        if self.interrupted_call(registers) in _SPURIOUS_EINTR and not signal_waits():
            return self.reissued(registers, registers.orig_rax)
        return registers.copy()

    def reissued(self, registers: Registers, number: int | None) -> Registers:
        """Registers that make a thread do its interrupted call again from the start, without the kernel's help."""
        made = registers.copy()
        if number is not None:
            made.rax = number
            made.rip -= 2  # back onto the syscall instruction
        made.orig_rax = (1 << 64) - 1
        return made

    runner = _RUNNER
    entry_size = _ENTRY.size
    result_offset = 56

    def entry(self, number: int, arguments: Sequence[int], may_fail: bool = False) -> bytes:
        """A system call in the runner's table. One that fails stops the first thread and ends the process of others."""
        values = [value & (1 << 64) - 1 for value in arguments] + [0] * (6 - len(arguments))
        return _ENTRY.pack(number | (_MAY_FAIL if may_fail else 0), *values, 0)

    def stop_entry(self) -> bytes:
        """The runner stops itself with SIGSTOP here and goes on when it is resumed without that signal."""
        return _ENTRY.pack(-1, *[0] * 6, 0)

    def leave_entry(self, frame: int) -> bytes:
        """The runner leaves here through the signal frame at this address."""
        return _ENTRY.pack(-2, frame + 8, *[0] * 5, 0)

    def entry_result(self, entry: bytes) -> int:
        return int(_ENTRY.unpack(entry)[7])

    def run_fork(self, base: Registers, runner: int, table: int, flags: int, child_tid: int) -> Registers:
        """Registers for a clone whose child runs the table."""
        made = self.call(base, runner, 0, NR["clone"], [flags, 0, 0, child_tid])
        made.rbx, made.r12 = table, 0
        return made

    def thread_clone(self, flags: int, table: int, tid_address: int, registers: Registers) -> tuple[int, ...]:
        """Arguments of a clone in the table that makes a thread with the same thread-local storage."""
        return flags, table, tid_address, tid_address, registers.fs_base

    def thread_area(self, registers: Registers) -> int:
        """Where the C library's thread structure begins."""
        return registers.fs_base

    def number_before(self, code: bytes) -> int | None:
        """The call number loaded by `mov $imm32, %eax; syscall`, the seven bytes that end `code`."""
        if len(code) < 7 or code[-7] != 0xB8 or code[-2:] != b"\x0f\x05":
            return None
        return int.from_bytes(code[-6:-2], "little")

    def frame_size(self, xstate: bytes) -> int:
        """Room a signal frame takes, alignment and vector state included."""
        return _FRAME.size + 64 + (len(xstate) + 4 if xstate else 0)

    def signal_frame(
        self,
        at: int,
        pretcode: int,
        registers: Registers,
        mask: int,
        xstate: bytes = b"",
        stack: AltStack | None = None,
    ) -> bytes:
        """An `rt_sigframe` for address `at`: sigreturn on it restores all of a thread, vector registers and mask too.

        A `ret` with the stack pointer at `at` enters sigreturn through `pretcode`. Without `xstate` the vector
        registers come up empty; without `stack` the alternate stack stays as it is.
        """
        r = registers
        vectors_at = (at + _FRAME.size + 63) & ~63
        flags = _UC_SIGCONTEXT_SS | _UC_STRICT_RESTORE_SS | (_UC_FP_XSTATE if xstate else 0)
        altstack = (stack.address, stack.flags, stack.size) if stack else _KEEP_ALTSTACK
        head = _FRAME.pack(
            pretcode, flags, 0, altstack[0], altstack[1], 0, altstack[2],
            r.r8, r.r9, r.r10, r.r11, r.r12, r.r13, r.r14, r.r15, r.rdi, r.rsi, r.rbp, r.rbx, r.rdx, r.rax, r.rcx,
            r.rsp, r.rip, r.eflags, r.cs, 0, 0, r.ss, 0, 0, 0, 0,
            vectors_at if xstate else 0, *[0] * 8, mask, bytes(128),
        )  # fmt: skip
        return head + bytes(vectors_at - at - len(head)) + self._vectors(xstate) if xstate else head

    def _vectors(self, xstate: bytes) -> bytes:
        """The ptrace form of the vector state, marked as the kernel marks it in its own signal frames."""
        supported, used = struct.unpack_from("<Q", xstate, 464)[0], struct.unpack_from("<Q", xstate, 512)[0]
        if used & _XTILE_DATA:
            raise UnsupportedArch("the thread holds AMX tile data")
        size = min(len(xstate), _XTILE_DATA_OFFSET) if supported & _XTILE_DATA else len(xstate)
        marked = bytearray(xstate[:size])
        struct.pack_into("<IIQI28x", marked, 464, _FP_XSTATE_MAGIC1, size + 4, supported, size)
        return bytes(marked) + struct.pack("<I", _FP_XSTATE_MAGIC2)


def host_arch() -> X86_64:
    """The processor this runs on; raises UnsupportedArch where tracing is not written yet."""
    machine = platform.machine()
    if machine != "x86_64":
        raise UnsupportedArch(f"tracing a process is written for x86_64 only, this is {machine}")
    return X86_64()
