#!/usr/bin/env python3
"""forkd's guest agent: first process of a guest, serves the host over one byte stream (specs/formats/agent.md).

One thread, one event loop, no polling. Writes to the link block; everything else does not. Python >= 3.7, standard
library only. With --interpreter this file is instead the warm interpreter, a child of the agent that runs evals.
"""

import base64
import collections
import errno
import fcntl
import gc
import grp
import heapq
import io
import json
import os
import pwd
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import termios
import time

VERSION = "1.1"
PYTHON = "%d.%d.%d" % sys.version_info[:3]
PROTOCOL = 1
PORT_NAME = "forkd.agent"
VSOCK_PORT = 52
RECIPE = "/etc/forkd-recipe.env"
IMAGE = "/.forkd/image.json"

HEADER = struct.Struct(">IBI")
U32 = struct.Struct(">I")
MAX_FRAME = 256 * 1024
MAX_RESPONSE = 8 * 1024 * 1024
WINDOW = 256 * 1024
CREDIT_STEP = 64 * 1024
CHUNK = 64 * 1024
MAX_ENTRIES = 10000
MAX_LIST = 4 * 1024 * 1024
MAX_TEXT = 1024 * 1024
MAX_KEPT = 256 * 1024
MAX_ENDED = 32
MAX_WATCHES = 4096
KILL_GRACE = 2.0
WARMUP_SECONDS = 60.0
REHEARSALS = 40  # Python then has adapted its code, and writes to fewer pages of it (each is a child's own)
MAX_PLUGS = 50000  # some megabytes at the most
LATER = 1e9  # no time limit is longer (seconds)

EDGE = select.EPOLLIN | select.EPOLLET
SYNC_MARK = b"FORKDSYN"
HELLO, REQUEST, RESPONSE, DATA_IN, OUT, ERR, CONTROL, CREDIT, CANCEL, NOOP, STARTED, MORE = range(12)

OS_CODES = {
    errno.ENOENT: "no_such_file",
    errno.EISDIR: "is_dir",
    errno.ENOTDIR: "not_dir",
    errno.EACCES: "denied",
    errno.EPERM: "denied",
    errno.EROFS: "denied",
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
    errno.EEXIST: "exists",
    errno.ENOTEMPTY: "not_empty",
    errno.ENAMETOOLONG: "bad_name",
    errno.ELOOP: "bad_name",
}
FILE_TYPES = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "dir",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "char",
    stat.S_IFBLK: "block",
}


# json's own inner functions: its outer ones make and use twenty objects a call, and each page written to (as counting
# a reference does) is a child's own. For the same reason what every request needs is not looked up in its module.
JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
scan_json = json.JSONDecoder().scan_once
encode_json = (json.encoder.c_make_encoder or (lambda *_: JSON.iterencode))(
    None, JSON.default, json.encoder.encode_basestring, None, ":", ",", False, False, True
)
read, write, kill, getpid, monotonic, time_ns = os.read, os.write, os.kill, os.getpid, time.monotonic, time.time_ns


class Refusal(Exception):
    """A request that is answered with ok = false."""

    def __init__(self, code, error, **more):
        super().__init__(error)
        self.answer = dict(more, ok=False, code=code, error=error)


class BadFrame(Exception):
    """The host broke the framing rules: the session is over."""


def refusal_of(error):
    """The answer to a request that ended in this exception."""
    if isinstance(error, Refusal):
        return error.answer
    if isinstance(error, OSError):
        return {"ok": False, "code": OS_CODES.get(error.errno, "os_error"), "error": str(error)}
    if isinstance(error, (ValueError, RecursionError)):
        return {"ok": False, "code": "bad_request", "error": str(error)}
    import traceback

    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return {"ok": False, "code": "agent_error", "error": "%s: %s" % (type(error).__name__, error), "traceback": trace}


def log(text):
    try:
        write(2, ("forkd-agent: %s\n" % text).encode("utf-8", "replace"))
    except OSError:
        pass  # without a console there is nowhere left to say it


def take(request, name, kind, default=None, required=False):
    """A checked field of a request; kind is a type or a tuple of types, and True is no number."""
    value = request.get(name)
    if value is None:
        if required:
            raise Refusal("bad_request", "%s is missing" % name)
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise Refusal("bad_request", "%s must be %s" % (name, " or ".join(each.__name__ for each in kinds)))
    return value


def take_seconds(request, name):
    value = take(request, name, (int, float))
    if value is not None and not 0 < value < LATER:
        raise Refusal("bad_request", "%s must be a number of seconds above 0" % name)
    return value


def take_count(request, name, default=None, limit=1 << 62, required=False):
    value = take(request, name, int, default, required)
    if value is not None and not 0 <= value <= limit:
        raise Refusal("bad_request", "%s must be between 0 and %d" % (name, limit))
    return value


def take_env(request, name="env"):
    env = take(request, name, dict, {})
    for key, value in env.items():
        if not key or "=" in key or "\0" in key or not isinstance(value, str) or "\0" in value:
            raise Refusal("bad_request", "%s must map names to strings" % name)
    return env


def take_network(request):
    network = take(request, "network", dict)
    if network is None:
        return None
    try:
        for name in ("address", "gateway", "dns"):
            socket.inet_aton(take(network, name, str, required=True))
    except OSError:
        raise Refusal("bad_request", "network.%s is no address" % name)
    if not 1 <= take(network, "prefix", int, required=True) <= 32:
        raise Refusal("bad_request", "network.prefix is not 1 to 32")
    return network


def take_hex(request, name, digits):
    text = take(request, name, str)
    if text is None:
        return None
    if len(text) != digits:
        raise Refusal("bad_request", "%s must have %d hex digits" % (name, digits))
    return bytes.fromhex(text)


def encode(message):
    """JSON in UTF-8; what UTF-8 cannot say (lone surrogates) becomes a question mark."""
    return "".join(encode_json(message, 0)).encode("utf-8", "replace")


def decode(text):
    """The value a JSON text stands for; raises ValueError."""
    try:
        value, end = scan_json(text, 0)
        if end == len(text):
            return value
    except StopIteration:
        pass
    return json.loads(text)  # there is space around it, or an error to be named


def kill_group(pid, number):
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        pass  # all of it has ended


def plug():
    """Fill the holes of Python's small memory blocks: what a request needs for a moment is then taken from fresh ones.

    They lie side by side on few pages; holes are one here and one there, and each page written to is a child's own.
    Returns what fills them, to be kept.
    """
    gc.collect()  # this gives back the blocks Python keeps for lists, tuples, floats …
    kept = []
    for size in range(16, 513, 16):
        last = neighbours = 0
        while neighbours < 16 and len(kept) < MAX_PLUGS:
            block = object() if size == 16 else float(neighbours) if size == 32 else bytes(size - 33)
            neighbours = neighbours + 1 if id(block) - last == size else 0
            last = id(block)
            kept.append(block)
    return kept


# -- the event loop --------------------------------------------------------------------------------------------------


class Loop:
    """epoll, timers and things to do soon. A handler that raises loses its descriptor, never the agent."""

    def __init__(self):
        self.epoll = select.epoll()
        self.handlers = {}
        self.timers = []
        self.pending = collections.deque()
        self.made = 0

    def watch(self, fd, events, handler):
        self.handlers[fd] = handler
        self.epoll.register(fd, events)

    def unwatch(self, fd):
        if self.handlers.pop(fd, None) is not None:
            self.epoll.unregister(fd)

    def soon(self, call):
        self.pending.append(call)

    def after(self, seconds, call):
        """Call once, later; the timer returned goes to ``stop``."""
        self.made += 1
        timer = [monotonic() + seconds, self.made, call]
        heapq.heappush(self.timers, timer)
        return timer

    @staticmethod
    def stop(timer):
        if timer is not None:
            timer[2] = None

    def turn(self):
        """Wait for something to happen and handle it."""
        timers = self.timers
        while timers and timers[0][2] is None:
            heapq.heappop(timers)
        if self.pending:
            timeout = 0
        elif timers:
            timeout = max(0, timers[0][0] - monotonic())
        else:
            timeout = None
        for fd, events in self.epoll.poll(timeout):
            handler = self.handlers.get(fd)
            if handler is not None and not self.guard(handler, events):
                self.unwatch(fd)
        while timers and timers[0][0] <= monotonic():
            call = heapq.heappop(timers)[2]
            if call is not None:
                self.guard(call)
        for _ in range(len(self.pending)):
            self.guard(self.pending.popleft())

    @staticmethod
    def guard(call, *args):
        try:
            call(*args)
        except Exception as error:  # the edge of the process: PID 1 must live
            log(refusal_of(error).get("traceback", repr(error)))
            return False
        return True


class Outlet:
    """A descriptor that takes bytes without blocking; holds what does not fit yet and owns the descriptor.

    ``taken(count)`` hears what has left (or was thrown away because nobody reads); ``ended()`` is called once, after
    ``end()`` and the last byte, or when the reader is gone.
    """

    def __init__(self, loop, fd, taken=None, ended=None):
        os.set_blocking(fd, False)
        self.loop = loop
        self.fd = fd
        self.taken = taken
        self.ended = ended
        self.buffer = bytearray()
        self.ending = False
        self.waiting = False

    def write(self, data):
        if self.fd is None:
            self.gone(len(data))
            return
        self.buffer += data
        if not self.waiting:
            self.flush()

    def end(self):
        self.ending = True
        if not self.waiting:
            self.flush()

    def flush(self, _events=0):
        try:
            while self.buffer:
                count = write(self.fd, self.buffer)
                del self.buffer[:count]
                self.gone(count)
        except BlockingIOError:
            if not self.waiting:
                self.waiting = True
                self.loop.watch(self.fd, select.EPOLLOUT, self.flush)
            return
        except OSError:  # nobody reads any more: what is left can go nowhere
            count = len(self.buffer)
            self.ending = True
            self.close()
            self.gone(count)
            return
        if self.waiting:
            self.waiting = False
            self.loop.unwatch(self.fd)
        if self.ending:
            self.close()

    def gone(self, count):
        if self.taken is not None and count:
            self.taken(count)

    def close(self):
        if self.fd is None:
            return
        self.loop.unwatch(self.fd)
        os.close(self.fd)
        self.fd = None
        self.waiting = False
        self.buffer.clear()
        if self.ended is not None:
            self.ended()


class Source:
    """A descriptor whose bytes become a stream's output as far as its window goes; owns the descriptor.

    Once the stream is muted the bytes are dropped, so that whoever writes them is neither blocked nor killed.
    ``left`` is how many bytes are still wanted after the command ended; None before that.
    """

    def __init__(self, stream, fd, kind):
        os.set_blocking(fd, False)
        self.stream = stream
        self.loop = stream.agent.loop
        self.fd = fd
        self.kind = kind
        self.left = None
        self.watching = False
        self.go()

    def go(self):
        if not self.watching and self.fd is not None:
            self.watching = True
            self.loop.watch(self.fd, select.EPOLLIN, self.ready)

    def pause(self):
        if self.watching:
            self.watching = False
            self.loop.unwatch(self.fd)

    def ready(self, _events=0):
        """Pass on one piece; False if there is none or no room for it."""
        stream = self.stream
        room = CHUNK if stream.muted else min(CHUNK, stream.window)
        if self.left is not None and not stream.muted:
            room = min(room, self.left)
        if room <= 0:
            self.pause()
            return False
        try:
            data = read(self.fd, room)
        except BlockingIOError:
            self.left = self.left and 0
            return False
        except OSError:  # a terminal whose last user left, or a connection reset: nothing more will come
            data = b""
        if not data:
            self.close()
            stream.source_ended(self)
            return False
        if self.left is not None:
            self.left = max(0, self.left - len(data))
        stream.output(self.kind, data)
        return True

    def close(self):
        if self.fd is not None:
            self.pause()
            os.close(self.fd)
            self.fd = None
            self.left = 0


# -- streams ---------------------------------------------------------------------------------------------------------


class Stream:
    """A request that is still open. ``live``: the host waits for the RESPONSE; ``muted``: it wants no output."""

    def __init__(self, agent, sid, request):
        self.agent = agent
        self.sid = sid
        self.live = True
        self.muted = False
        self.window = take_count(request, "window", WINDOW, 1 << 31)
        self.granted = WINDOW
        self.unsaid = 0

    def open(self):
        self.agent.streams[self.sid] = self

    def output(self, kind, data):
        if not self.muted:
            self.window -= len(data)
            self.agent.send(kind, self.sid, data)

    def started(self, message):
        if self.live:
            self.agent.send(STARTED, self.sid, encode(message))

    def finish(self, answer):
        """Answer, once."""
        if self.live:
            self.live = False
            self.agent.streams.pop(self.sid, None)
            self.agent.respond(self.sid, answer)
        self.muted = True

    def taken(self, count):
        """Input was consumed: let the host send more, in steps."""
        self.unsaid += count
        if self.unsaid >= CREDIT_STEP and self.live:
            self.granted += self.unsaid
            self.agent.send(CREDIT, self.sid, U32.pack(self.unsaid))
            self.unsaid = 0

    def credit(self, count):
        self.window = min(self.window + count, 1 << 31)
        self.more_room()

    def detach(self):
        """The session is over: nobody listens."""
        self.live = False
        self.muted = True
        self.abandon()

    # what the kinds of streams differ in

    def data(self, payload):
        self.taken(len(payload))  # this stream has no use for input

    def end_input(self):
        pass

    def control(self, message):
        raise Refusal("bad_request", "this stream takes no control messages")

    def more_room(self):
        pass

    def cancel(self):
        self.abandon()
        self.finish({"ok": False, "code": "cancelled", "error": "cancelled"})

    def abandon(self):
        """Give back what the stream holds."""

    def source_ended(self, source):
        pass


class Kept:
    """The newest output of a command nobody listens to; what does not fit is dropped, oldest first, and counted."""

    def __init__(self):
        self.pieces = collections.deque()
        self.size = 0
        self.dropped = 0
        self.closed = False  # the command ended: what grandchildren say belongs to nobody

    def add(self, kind, data):
        if self.closed:
            return
        self.pieces.append((kind, data))
        self.size += len(data)
        while self.size > MAX_KEPT:
            lost = len(self.pieces.popleft()[1])
            self.size -= lost
            self.dropped += lost

    def take(self, room):
        """The oldest piece, or as much of it as there is room for; None if there is none."""
        if not self.pieces:
            return None
        kind, data = self.pieces.popleft()
        if len(data) > room:
            self.pieces.appendleft((kind, data[room:]))
            data = data[:room]
        self.size -= len(data)
        return kind, data


class Account:
    """A user of the guest: a name or number, and a group's name or number behind a colon where it is another."""

    def __init__(self, user):
        uid, _, gid = user.partition(":")
        try:
            entry = pwd.getpwuid(int(uid)) if uid.isdigit() else pwd.getpwnam(uid)
        except (KeyError, OverflowError):
            entry = None
        try:
            gid = gid if not gid or gid.isdigit() else str(grp.getgrnam(gid).gr_gid)
        except KeyError:
            raise Refusal("unknown_user", "there is no group %s" % gid)
        if entry is None and not uid.isdigit() or user.endswith(":"):
            raise Refusal("unknown_user", "there is no user %s" % user)
        self.name = entry.pw_name if entry else uid
        self.home = entry.pw_dir if entry else "/"
        self.uid = int(uid) if uid.isdigit() else entry.pw_uid
        self.gid = int(gid) if gid else entry.pw_gid if entry else self.uid

    def env(self):
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name}

    def become(self):
        os.initgroups(self.name, self.gid)
        os.setgid(self.gid)
        os.setuid(self.uid)


class Exec(Stream):
    """A command with its pipes or terminal."""

    def __init__(self, agent, sid, request):
        super().__init__(agent, sid, request)
        args = take(request, "args", list, required=True)
        if not args or not all(isinstance(arg, str) for arg in args):
            raise Refusal("bad_request", "args must be a list of strings, and not empty")
        self.args = args
        self.tag = take(request, "tag", str)
        self.reason = None
        self.status = None
        self.stdin = None
        self.sources = []
        self.terminal = None
        self.timer = None
        self.kept = None  # a Kept while nobody listens, and until a new listener has taken it all
        limit = take_seconds(request, "timeout")
        self.detached = take(request, "detach", bool, False)
        self.spawn(request)
        self.begun = agent.machine.now() / 1e9
        agent.procs[self.pid] = self
        if limit is not None:
            self.timer = agent.loop.after(limit, self.overdue)
        self.open()
        if self.detached:
            self.finish({"ok": True, "reason": "started", "pid": self.pid})
        else:
            self.started({"pid": self.pid})

    def spawn(self, request):
        user = take(request, "user", str, self.agent.user)
        account = Account(user) if user is not None else None
        env = {} if take(request, "clear_env", bool) else dict(os.environ, **self.agent.env)
        if account is not None:
            env.update(account.env())
        size = take(request, "pty", dict)
        if size is not None:
            env.setdefault("TERM", "xterm-256color")
        env.update(take_env(request))
        cwd = take(request, "cwd", str, self.agent.workdir)
        if not os.path.isdir(cwd):
            raise Refusal("bad_cwd", "there is no directory %s" % cwd)
        mine, theirs = [], []
        try:
            self.make_ends(request, size, account, mine, theirs)
            self.pid = self.launch(env, cwd, theirs, account, size is not None)
        except BaseException:
            for fd in mine:
                os.close(fd)
            raise
        finally:
            for fd in set(theirs):
                os.close(fd)
        self.adopt_ends(mine, size is not None)

    def make_ends(self, request, size, account, mine, theirs):
        """Fill in our descriptors (stdin, stdout, stderr; or the terminal) and the command's 0, 1 and 2."""
        if size is not None and not self.detached:
            rows, cols = take_count(size, "rows", 24, 65535), take_count(size, "cols", 80, 65535)
            master, slave = os.openpty()
            mine.append(master)
            theirs += [slave, slave, slave]
            mine.append(os.dup(master))
            set_size(master, rows, cols)
            if account is not None:
                os.fchown(slave, account.uid, account.gid)
            return
        if take(request, "stdin", bool, False) and not self.detached:
            reader, writer = os.pipe()
            mine.append(writer)
            theirs.append(reader)
        else:
            theirs.append(os.open(os.devnull, os.O_RDWR))
        for _ in range(2):
            if self.detached:
                theirs.append(os.open(os.devnull, os.O_RDWR))
            else:
                reader, writer = os.pipe()
                mine.append(reader)
                theirs.append(writer)

    def launch(self, env, cwd, theirs, account, terminal):
        def prepare():  # in the child, after setsid
            if terminal:
                # SAFETY: descriptor 0 is the terminal and this process leads a session that has none.
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            if account is not None:
                account.become()

        # Without prepare, subprocess uses vfork, which copies no page tables.
        special = (terminal and not self.detached) or account is not None
        try:
            process = subprocess.Popen(
                self.args,
                stdin=theirs[0],
                stdout=theirs[1],
                stderr=theirs[2],
                cwd=cwd,
                env=env,
                start_new_session=True,
                preexec_fn=prepare if special else None,
            )
        except FileNotFoundError:
            raise Refusal("not_found", "%s: command not found" % self.args[0])
        except (PermissionError, NotADirectoryError):
            raise Refusal("not_executable", "%s: may not be executed" % self.args[0])
        except OSError as error:
            if error.errno == errno.ENOEXEC:
                raise Refusal("not_executable", "%s: not a program" % self.args[0])
            raise Refusal("os_error", "%s: %s" % (self.args[0], os.strerror(error.errno or 0)))
        except subprocess.SubprocessError as error:
            raise Refusal("os_error", "cannot start %s as asked: %s" % (self.args[0], error))
        process.returncode = 0  # the agent reaps; subprocess must not
        return process.pid

    def adopt_ends(self, mine, terminal):
        if terminal and mine:
            self.terminal = mine[0]
            self.stdin = Outlet(self.agent.loop, mine[1], self.taken)
            self.sources.append(Source(self, mine[0], OUT))
            return
        if len(mine) == 3:
            self.stdin = Outlet(self.agent.loop, mine.pop(0), self.taken)
        for fd, kind in zip(mine, (OUT, ERR)):
            self.sources.append(Source(self, fd, kind))

    def output(self, kind, data):
        if self.kept is not None:
            self.kept.add(kind, data)
            return
        super().output(kind, data)
        if self.window <= 0 and not self.muted:
            for source in self.sources:
                source.pause()

    def detach(self):
        self.kept = Kept() if self.kept is None else self.kept
        super().detach()

    def attach(self, sid, request):
        """A new listener, in this session: it gets what was kept, then what comes, then the answer."""
        if self.live:
            raise Refusal("exists", "process %d has a listener already" % self.pid)
        if self.detached:
            raise Refusal("bad_request", "process %d was started without output" % self.pid)
        self.window = take_count(request, "window", WINDOW, 1 << 31)
        self.sid, self.granted, self.unsaid = sid, WINDOW, 0
        self.live, self.muted = True, False
        self.agent.ended.pop(self.pid, None)
        self.open()
        kept = self.kept or Kept()
        self.started({"pid": self.pid, "args": self.args, "started": self.begun, "dropped": kept.dropped})
        self.more_room()

    def pour(self):
        """Send what was kept as far as the window goes; True when all of it is sent."""
        while self.kept is not None and self.window > 0:
            piece = self.kept.take(self.window)
            if piece is None:
                self.kept = None
            else:
                super().output(*piece)
        if self.kept is None:
            return True
        for source in self.sources:
            source.pause()
        return False

    def source_ended(self, source):
        self.sources.remove(source)
        if self.terminal is not None:
            self.terminal = None

    def data(self, payload):
        if self.stdin is None:
            super().data(payload)
        else:
            self.stdin.write(payload)

    def end_input(self):
        if self.terminal is not None:
            self.stdin.write(b"\4")
        elif self.stdin is not None:
            self.stdin.end()

    def control(self, message):
        number = take_count(message, "signal", limit=signal.NSIG - 1)
        if number is not None and self.status is None:
            kill_group(self.pid, number)
        size = take(message, "resize", list)
        if size is not None and self.terminal is not None:
            named = dict(zip(("rows", "cols"), size))
            set_size(self.terminal, take_count(named, "rows", 24, 65535), take_count(named, "cols", 80, 65535))

    def overdue(self):
        self.end("timed_out")

    def cancel(self):
        self.muted = True
        self.kept = None
        if self.status is None:
            self.end("cancelled")
        else:
            self.drain()

    def end(self, reason):
        if self.status is None:
            self.reason = self.reason or reason
            kill_group(self.pid, signal.SIGKILL)

    def abandon(self):
        for source in self.sources:
            source.go()

    def more_room(self):
        if not self.pour():
            return
        if self.status is not None:
            self.drain()
        else:
            for source in self.sources:
                source.go()

    def exited(self, status):
        """The command itself was reaped; grandchildren may go on, and may hold the pipes."""
        self.status = status
        self.agent.loop.stop(self.timer)
        if self.stdin is not None:
            self.stdin.close()
        for source in self.sources:
            source.left = CHUNK if self.terminal is not None else bytes_in(source.fd)
        if not self.live and not self.detached:
            self.agent.remember(self)
        if self.live and not self.pour():
            return  # goes on with the host's credit
        self.drain()

    def drain(self):
        """Send what the pipes held when the command ended, as far as the window goes; then answer."""
        for source in list(self.sources):
            while source.left and source.ready():
                pass
        if any(source.left for source in self.sources):
            return  # goes on with the host's credit
        self.finish(self.answer())
        if self.kept is not None:
            self.kept.closed = True
        for source in self.sources:
            source.go()  # muted now: drops what grandchildren say

    def answer(self):
        status = self.status
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        answer = {"ok": True, "pid": self.pid}
        if self.reason is not None:
            answer.update(reason=self.reason, exit_code=124 if self.reason == "timed_out" else 128 + signal.SIGKILL)
        elif number is not None:
            answer.update(reason="signaled", exit_code=128 + number)
        else:
            answer.update(reason="exited", exit_code=os.WEXITSTATUS(status))
        if number is not None:
            answer["signal"] = number
        return answer


def set_size(terminal, rows, cols):
    # SAFETY: struct winsize is four unsigned shorts; the kernel copies it during the call.
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))


def bytes_in(pipe):
    # SAFETY: FIONREAD writes one int into the buffer that ioctl copies in and out.
    return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0]


class Eval(Stream):
    """Code for the warm interpreter (or the image's own one), waiting in line or running."""

    def __init__(self, agent, sid, request):
        super().__init__(agent, sid, request)
        self.code = take(request, "code", str, required=True)
        self.limit = take_seconds(request, "timeout")
        self.timer = None
        self.stopped = None
        self.open()
        if self.limit is not None:
            self.timer = agent.loop.after(self.limit, self.overdue)
        agent.evaluator.submit(self)

    def overdue(self):
        self.stop({"code": "timed_out", "error": "Timeout: took longer than %g s" % self.limit})

    def cancel(self):
        self.stop({"code": "cancelled", "error": "cancelled"})

    def stop(self, why):
        if self.stopped is None:
            self.stopped = why
            self.agent.evaluator.stop(self)

    def abandon(self):
        self.agent.evaluator.forget(self)

    def answered(self, answer):
        """The evaluator is done with it; ``answer`` has no ``ok`` yet."""
        self.agent.loop.stop(self.timer)
        if self.stopped is not None:
            answer.pop("result", None)
            answer.update(self.stopped)
        answer["ok"] = "code" not in answer
        self.finish(answer)


class Prepare(Stream):
    """New defaults of commands, and a warm runtime: what children forked from here on begin with."""

    def __init__(self, agent, sid, request):
        super().__init__(agent, sid, request)
        args = take(request, "args", list)
        limit = take_seconds(request, "timeout") or WARMUP_SECONDS
        self.lang = take(request, "lang", str)
        if args is not None and not (args and all(isinstance(arg, str) for arg in args)):
            raise Refusal("bad_request", "args must be a list of strings, and not empty")
        if self.lang is not None and (args is None or agent.lang != "python"):
            raise Refusal("bad_request", "lang needs args, and a guest whose evals still go to Python")
        agent.furnish(request)
        if args is None:
            self.finish({"ok": True})
            return
        self.worker = Worker(agent, args, False)
        self.worker.waiting = self
        agent.watched_workers.append(self.worker)
        self.timer = agent.loop.after(limit, self.overdue)
        self.open()
        self.worker.start()

    def overdue(self):
        self.worker.problem = self.worker.problem or "it was not ready in time"
        self.worker.tell()

    def settled(self, worker):
        agent = self.agent
        agent.loop.stop(self.timer)
        if worker.ready:
            if self.lang is not None:
                agent.lang, agent.evaluator = self.lang, worker
            self.finish({"ok": True})
            return
        agent.watched_workers.remove(worker)
        worker.kill()
        self.finish({"ok": False, "code": "not_ready", "error": "%s: %s" % (worker.argv[0], worker.problem)})

    def abandon(self):
        if self.worker.waiting is self:
            self.worker.problem = "nobody waits for it"
            self.worker.tell()


class Read(Stream):
    """A file on its way to the host, one piece a turn."""

    def __init__(self, agent, sid, request):
        super().__init__(agent, sid, request)
        path = take(request, "path", str, required=True)
        offset = take_count(request, "offset", 0)
        self.todo = take_count(request, "length", 1 << 62)
        self.sent = 0
        # O_NONBLOCK: opening a pipe must not wait for its other end.
        self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            self.size = regular(path, os.fstat(self.fd)).st_size
            if offset:
                os.lseek(self.fd, offset, os.SEEK_SET)
        except BaseException:
            os.close(self.fd)
            raise
        self.waiting = False
        self.open()
        self.pump()

    def pump(self):
        if self.fd is None:
            return
        if self.todo and self.window <= 0:
            self.waiting = True
            return
        try:
            data = read(self.fd, min(CHUNK, self.window, self.todo)) if self.todo else b""
        except BlockingIOError:
            data = b""
        except OSError as error:
            self.abandon()
            self.finish(refusal_of(error))
            return
        if not data:
            self.abandon()
            self.finish({"ok": True, "size": self.size, "sent": self.sent})
            return
        self.todo -= len(data)
        self.sent += len(data)
        self.output(OUT, data)
        self.agent.loop.soon(self.pump)

    def more_room(self):
        if self.waiting:
            self.waiting = False
            self.pump()

    def abandon(self):
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def regular(path, status):
    """The status, if it is that of a regular file."""
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(status.st_mode):
        raise Refusal("os_error", "%s is not a regular file" % path)
    return status


class Write(Stream):
    """A file on its way from the host, under a temporary name until it is whole."""

    def __init__(self, agent, sid, request):
        super().__init__(agent, sid, request)
        self.path = os.path.realpath(take(request, "path", str, required=True))
        self.mode = take_count(request, "mode", limit=0o7777)
        self.append = take(request, "append", bool, False)
        user = take(request, "user", str)
        self.account = Account(user) if user is not None else None
        self.size = 0
        try:
            self.former = regular(self.path, os.stat(self.path))
        except FileNotFoundError:
            self.former = None
        folder, name = os.path.split(self.path)
        if take(request, "make_parents", bool, False):
            self.make_folders(folder)
        # A name may have 255 bytes; the temporary one must not be too long where the final one is not.
        self.temporary = os.path.join(folder, ".forkd-%s" % os.urandom(12).hex())
        self.fd = os.open(self.temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self.open()

    def make_folders(self, folder):
        if os.path.isdir(folder):
            return
        self.make_folders(os.path.dirname(folder))
        os.mkdir(folder, 0o755)
        if self.account is not None:
            os.chown(folder, self.account.uid, self.account.gid)

    def data(self, payload):
        try:
            write_all(self.fd, payload)
        except OSError as error:
            self.abandon()
            self.finish(refusal_of(error))
            return
        self.size += len(payload)
        self.taken(len(payload))

    def end_input(self):
        try:
            if self.append and self.former is not None:
                self.add_to_former()
            else:
                self.publish()
        except OSError as error:
            self.finish(refusal_of(error))
        else:
            self.finish({"ok": True, "size": self.size})
        finally:
            self.abandon()

    def publish(self):
        uid, gid, mode = 0, 0, 0o644
        if self.former is not None:
            uid, gid, mode = self.former.st_uid, self.former.st_gid, stat.S_IMODE(self.former.st_mode)
        if self.account is not None:
            uid, gid = self.account.uid, self.account.gid
        if os.geteuid() == 0:
            os.fchown(self.fd, uid, gid)
        os.fchmod(self.fd, mode if self.mode is None else self.mode)
        os.rename(self.temporary, self.path)
        self.temporary = None

    def add_to_former(self):
        """Add the new bytes to the file itself: others may hold it open."""
        target = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            before = os.fstat(target).st_size
            os.lseek(self.fd, 0, os.SEEK_SET)
            try:
                for piece in iter(lambda: read(self.fd, CHUNK), b""):
                    write_all(target, piece)
            except OSError:
                os.ftruncate(target, before)
                raise
        finally:
            os.close(target)

    def abandon(self):
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        if self.temporary is not None:
            os.unlink(self.temporary)
            self.temporary = None


def write_all(fd, data):
    view = memoryview(data)
    while view:
        view = view[write(fd, view) :]


class Dial(Stream):
    """A TCP connection made inside the guest."""

    def __init__(self, agent, sid, request):
        super().__init__(agent, sid, request)
        self.port = take_count(request, "port", limit=65535, required=True)
        host = take(request, "host", str, "127.0.0.1")
        # Names are not looked up: a resolver may block for seconds.
        self.hosts = ["127.0.0.1", "::1"] if host == "localhost" else [host]
        self.socket = None
        self.source = None
        self.outlet = None
        self.early = bytearray()
        self.input_ended = False
        self.output_ended = False
        self.try_next("")
        self.open()

    def try_next(self, why):
        if not self.hosts:
            raise Refusal("refused", "cannot connect to port %d: %s" % (self.port, why))
        host = self.hosts.pop(0)
        self.socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            socket.inet_pton(self.socket.family, host)
            self.socket.setblocking(False)
            failed = self.socket.connect_ex((host, self.port))
        except OSError as error:
            self.socket.close()
            raise Refusal("bad_request", "cannot connect to %s: %s" % (host, error))
        if failed not in (0, errno.EINPROGRESS):
            self.socket.close()
            self.try_next(os.strerror(failed))
        else:
            self.agent.loop.watch(self.socket.fileno(), select.EPOLLOUT, self.connected)

    def connected(self, _events):
        self.agent.loop.unwatch(self.socket.fileno())
        failed = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failed:
            self.socket.close()
            try:
                self.try_next(os.strerror(failed))
            except Refusal as refusal:
                self.socket = None
                self.finish(refusal.answer)
            return
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.started({})
        self.source = Source(self, os.dup(self.socket.fileno()), OUT)
        self.outlet = Outlet(self.agent.loop, os.dup(self.socket.fileno()), self.taken, self.no_more_input)
        early, self.early = self.early, None
        if early:
            self.outlet.write(early)
        if self.input_ended:
            self.outlet.end()

    def data(self, payload):
        if self.outlet is None:
            self.early += payload
        else:
            self.outlet.write(payload)

    def end_input(self):
        self.input_ended = True
        if self.outlet is not None:
            self.outlet.end()

    def no_more_input(self):
        self.input_ended = True
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the other end is gone already
        self.maybe_done()

    def output(self, kind, data):
        super().output(kind, data)
        if self.window <= 0 and not self.muted:
            self.source.pause()

    def more_room(self):
        if self.source is not None:
            self.source.go()

    def source_ended(self, source):
        self.output_ended = True
        super().output(OUT, b"")
        self.maybe_done()

    def maybe_done(self):
        if self.output_ended and self.outlet.fd is None and self.live:
            self.abandon()
            self.finish({"ok": True})

    def abandon(self):
        self.muted = True
        if self.socket is not None:
            self.agent.loop.unwatch(self.socket.fileno())
            open_socket, self.socket = self.socket, None
            if self.source is not None:
                self.source.close()
                self.outlet.ended = None
                self.outlet.close()
            open_socket.close()


class Archive(Exec):
    """A directory as a tar stream, made or taken apart by this very file in a process of its own."""

    FLAG = "--pack"

    def __init__(self, agent, sid, request):
        self.path = take(request, "path", str, required=True)
        self.stage = None
        self.prepare(request)
        helper = [sys.executable or "python3", os.path.abspath(__file__), self.FLAG, self.path, self.stage or ""]
        given = {key: request[key] for key in ("user", "window") if key in request}
        super().__init__(agent, sid, dict(given, args=helper, stdin=self.FLAG == "--unpack"))

    def prepare(self, request):
        os.listdir(self.path)  # refuses what is no directory, or not there

    def detach(self):
        self.live, self.muted = False, True
        self.end("cancelled")  # half a directory is of no use to anybody
        self.abandon()


class Unpack(Archive):
    """A directory on its way from the host: a new one appears whole, in an existing one each file does."""

    FLAG = "--unpack"

    def prepare(self, request):
        self.path = os.path.realpath(self.path)
        folder = os.path.dirname(self.path)
        if take(request, "make_parents", bool, False):
            os.makedirs(folder, exist_ok=True)
        os.listdir(self.path if os.path.exists(self.path) else folder)
        if not os.path.exists(self.path):
            self.stage = os.path.join(folder, ".forkd-%s" % os.urandom(12).hex())

    def exited(self, status):
        if self.stage is not None and os.path.isdir(self.stage) and os.fork() == 0:
            import shutil

            try:
                shutil.rmtree(self.stage, ignore_errors=True)  # may be large: not in the event loop
            finally:
                os._exit(0)
        super().exited(status)


class Watch(Stream):
    """Changes below a directory, as JSON lines, from the kernel's inotify."""

    KINDS = ((0x100 | 0x80, "create"), (0x2, "write"), (0x4, "chmod"), (0x200 | 0x400, "remove"), (0x40, "rename"))
    MASK = 0x100 | 0x80 | 0x2 | 0x4 | 0x200 | 0x40 | 0x400
    ONLY_DIRECTORIES, IS_DIRECTORY, OVERFLOW, MOVED_TO = 0x01000000, 0x40000000, 0x4000, 0x80
    EVENT = struct.Struct("iIII")

    def __init__(self, agent, sid, request):
        super().__init__(agent, sid, request)
        import ctypes

        self.root = take(request, "path", str, required=True)
        self.recursive = take(request, "recursive", bool, False)
        self.folders = {}
        self.lost = False
        os.listdir(self.root)
        # SAFETY: both calls take and return plain numbers and a string the kernel copies during the call.
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.errno = ctypes.get_errno
        self.fd = self.libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self.fd < 0:
            raise OSError(self.errno(), os.strerror(self.errno()))
        try:
            self.add("")
        except BaseException:
            os.close(self.fd)
            raise
        self.open()
        self.started({})
        agent.loop.watch(self.fd, select.EPOLLIN, self.ready)

    def add(self, folder, late=False):
        path = os.path.join(self.root, folder) if folder else self.root
        number = -1
        if len(self.folders) < MAX_WATCHES:
            number = self.libc.inotify_add_watch(self.fd, os.fsencode(path), self.MASK | self.ONLY_DIRECTORIES)
        if number < 0:
            if not folder:
                raise OSError(self.errno(), os.strerror(self.errno()), path)
            self.lost = self.lost or os.path.isdir(path)
            return
        self.folders[number] = folder
        if self.recursive:
            with os.scandir(path) as found:
                inner = [(os.path.join(folder, item.name), item.is_dir(follow_symlinks=False)) for item in found]
            for name, directory in inner:
                if late:  # made before the watch stood
                    self.tell({"type": "create", "path": name, "dir": directory})
                if directory:
                    self.add(name, late)

    def ready(self, _events=0):
        try:
            data = read(self.fd, CHUNK)
        except BlockingIOError:
            return
        at = 0
        while at < len(data):
            number, mask, _, length = self.EVENT.unpack_from(data, at)
            name = os.fsdecode(data[at + self.EVENT.size : at + self.EVENT.size + length].rstrip(b"\0"))
            at += self.EVENT.size + length
            self.seen(number, mask, name)

    def seen(self, number, mask, name):
        folder = self.folders.get(number)
        if mask & 0x8000:  # IN_IGNORED: that directory is gone
            self.folders.pop(number, None)
            if folder == "":
                self.abandon()
                self.finish({"ok": True})
            return
        if mask & self.OVERFLOW:
            self.lost = True
        elif folder is not None and (name or folder == ""):
            path = os.path.join(folder, name)
            directory = bool(mask & self.IS_DIRECTORY)
            for bits, kind in self.KINDS:
                if mask & bits:
                    self.tell({"type": kind, "path": path, "dir": directory})
            if directory and self.recursive and mask & (0x100 | self.MOVED_TO):
                try:
                    self.add(path, late=True)
                except OSError:
                    pass  # gone again already; its removal is told
        if self.lost and self.tell({"type": "overflow", "path": "", "dir": True}):
            self.lost = False

    def tell(self, event):
        """Send an event if there is room for it; a host that does not read loses events and hears so."""
        line = encode(event) + b"\n"
        if len(line) > self.window:
            self.lost = True
            return False
        self.output(OUT, line)
        return True

    def more_room(self):
        if self.lost and self.tell({"type": "overflow", "path": "", "dir": True}):
            self.lost = False

    def abandon(self):
        if self.fd is not None:
            self.agent.loop.unwatch(self.fd)
            os.close(self.fd)
            self.fd = None


# -- files: small requests -------------------------------------------------------------------------------------------


def describe(name, path, status):
    entry = {
        "name": name,
        "type": FILE_TYPES.get(stat.S_IFMT(status.st_mode), "file"),
        "size": status.st_size,
        "mode": stat.S_IMODE(status.st_mode),
        "mtime": status.st_mtime,
        "uid": status.st_uid,
        "gid": status.st_gid,
    }
    try:
        name.encode()
    except UnicodeEncodeError:
        entry["name_b64"] = base64.b64encode(os.fsencode(name)).decode()
    if stat.S_ISLNK(status.st_mode):
        entry["target"] = os.readlink(path)
    return entry


def op_list(request):
    entries, size, truncated = [], 0, False
    with os.scandir(take(request, "path", str, required=True)) as found:
        for item in found:
            if len(entries) >= MAX_ENTRIES or size > MAX_LIST:
                truncated = True
                break
            try:
                entry = describe(item.name, item.path, item.stat(follow_symlinks=False))
            except FileNotFoundError:
                continue  # removed while we looked
            entries.append(entry)
            size += 200 + len(os.fsencode(item.name + entry.get("target", "")))
    entries.sort(key=lambda entry: entry["name"])
    return {"ok": True, "entries": entries, "truncated": truncated}


def op_stat(request):
    path = take(request, "path", str, required=True)
    status = os.stat(path) if take(request, "follow", bool, False) else os.lstat(path)
    return {"ok": True, "entry": describe(os.path.basename(path.rstrip("/")) or "/", path, status)}


def op_mkdir(request):
    path = take(request, "path", str, required=True)
    mode = take_count(request, "mode", 0o755, 0o7777)
    if take(request, "parents", bool, False):
        os.makedirs(path, mode, exist_ok=True)
    else:
        os.mkdir(path, mode)
    return {"ok": True}


def op_remove(request):
    path = take(request, "path", str, required=True)
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
    elif take(request, "recursive", bool, False):
        import shutil

        shutil.rmtree(path)
    else:
        os.rmdir(path)
    return {"ok": True}


def op_move(request):
    source, target = take(request, "from", str, required=True), take(request, "to", str, required=True)
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        import shutil  # /tmp is a file system of its own

        shutil.move(source, target)
    return {"ok": True}


def op_chmod(request):
    mode = take_count(request, "mode", limit=0o7777, required=True)
    os.chmod(take(request, "path", str, required=True), mode)
    return {"ok": True}


# -- the machine -----------------------------------------------------------------------------------------------------


class Machine:
    """What resume changes about the guest as a whole."""

    def now(self):
        return time_ns()

    def hostname(self):
        return socket.gethostname()

    def set_clock(self, nanoseconds):
        time.clock_settime_ns(time.CLOCK_REALTIME, nanoseconds)

    def add_entropy(self, seed):
        fd = os.open("/dev/urandom", os.O_WRONLY)
        try:
            # SAFETY: struct rand_pool_info is two ints (bits of entropy, bytes) and the bytes; copied during the call.
            fcntl.ioctl(fd, 0x40085203, struct.pack("ii", len(seed) * 8, len(seed)) + seed)  # RNDADDENTROPY
            fcntl.ioctl(fd, 0x5207)  # SAFETY: RNDRESEEDCRNG takes no argument.
        finally:
            os.close(fd)

    def set_hostname(self, name):
        socket.sethostname(name)

    def set_machine_id(self, machine_id):
        fd = os.open("/etc/machine-id", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # Not truncated first: the kernel would give back the page it has and take another.
            write_all(fd, machine_id.encode() + b"\n")
            if os.lseek(fd, 0, os.SEEK_END) > 33:
                os.ftruncate(fd, 33)
        finally:
            os.close(fd)

    def set_network(self, network):
        """Give the first real interface its address, route and resolver."""
        names = sorted(name for name in os.listdir("/sys/class/net") if name != "lo")
        if not names:
            raise OSError(errno.ENODEV, "there is no network device")
        name = names[0].encode()
        mask = struct.pack(">I", (0xFFFFFFFF << (32 - network["prefix"])) & 0xFFFFFFFF)
        address, gateway = socket.inet_aton(network["address"]), socket.inet_aton(network["gateway"])

        def of(packed):  # struct sockaddr_in
            return struct.pack("<H2x4s8x", socket.AF_INET, packed)

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            # SAFETY: struct ifreq is 40 bytes: the name, then an address or the flags as a short; copied.
            fcntl.ioctl(any_socket, 0x8916, struct.pack("16s16s8x", name, of(address)))  # SIOCSIFADDR
            fcntl.ioctl(any_socket, 0x891C, struct.pack("16s16s8x", name, of(mask)))  # SIOCSIFNETMASK
            fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh22x", name, 0x41))  # SIOCSIFFLAGS: up, running
            # SAFETY: struct rtentry is 120 bytes: padding, destination, gateway, mask, flags (up, gateway), the rest 0.
            route = struct.pack("8x16s16s16sH62x", of(b"\0" * 4), of(gateway), of(b"\0" * 4), 0x3)
            try:
                fcntl.ioctl(any_socket, 0x890B, route)  # SIOCADDRT
            except FileExistsError:
                pass  # the snapshot had it
        try:
            os.unlink("/etc/resolv.conf")  # where it is a link into a folder that is not there
        except FileNotFoundError:
            pass
        with open("/etc/resolv.conf", "w") as file:
            file.write("nameserver %s\n" % network["dns"])


class RecordingMachine(Machine):
    """For tests: changes nothing, remembers what would have been changed, and shows it in ping."""

    def __init__(self):
        self.recorded = {}
        self.offset = 0

    def now(self):
        return time_ns() + self.offset

    def hostname(self):
        return self.recorded.get("hostname", "forkd-test")

    def set_clock(self, nanoseconds):
        self.offset = nanoseconds - time_ns()

    def add_entropy(self, seed):
        self.recorded["entropy"] = seed.hex()

    def set_hostname(self, name):
        self.recorded["hostname"] = name

    def set_machine_id(self, machine_id):
        self.recorded["machine_id"] = machine_id

    def set_network(self, network):
        self.recorded["network"] = network


# -- evaluators ------------------------------------------------------------------------------------------------------


class Worker:
    """A child that says {"ready": true} and then answers JSON lines one at a time: runs the evals.

    ``python`` is true for the warm interpreter, which can be interrupted and reseeded by signals.
    """

    def __init__(self, agent, argv, python, env=None):
        self.agent = agent
        self.argv = argv
        self.python = python
        self.extra_env = env or {}
        self.pid = None
        self.ready = False
        self.hello = {}
        self.problem = None
        self.queue = collections.deque()
        self.current = None
        self.asked = 0
        self.news = {}
        self.waiting = None

    def start(self):
        self.news = {}
        try:
            process = subprocess.Popen(
                self.argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd="/",
                env=dict(os.environ, **dict(self.agent.env, **self.extra_env)),
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            self.problem = "%s did not start: %s" % (self.argv[0], error)
            self.fail_waiting()
            self.tell()
            return
        process.returncode = 0  # the agent reaps; subprocess must not
        self.pid = process.pid
        self.agent.workers[self.pid] = self
        self.inlet = Outlet(self.agent.loop, os.dup(process.stdin.fileno()))
        self.fd = os.dup(process.stdout.fileno())
        process.stdin.close()
        process.stdout.close()
        os.set_blocking(self.fd, False)
        self.buffer = bytearray()
        self.agent.loop.watch(self.fd, select.EPOLLIN, self.readable)

    def submit(self, ask):
        self.queue.append(ask)
        if self.pid is None:
            self.start()
        self.next()

    def next(self):
        if not self.ready or self.current is not None or not self.queue:
            return
        self.current = self.queue.popleft()
        self.asked += 1
        message = {"id": str(self.asked), "code": self.current.code}
        if self.news:
            message["env"], self.news = self.news, {}
        self.inlet.write(encode(message) + b"\n")

    def readable(self, _events=0):
        try:
            data = read(self.fd, CHUNK)
        except BlockingIOError:
            return False
        self.buffer += data
        if not data or len(self.buffer) > MAX_RESPONSE:
            self.kill()  # it closed its end, or talks nonsense
            self.agent.loop.unwatch(self.fd)
            return False
        if b"\n" in data:
            lines = self.buffer.split(b"\n")
            self.buffer = lines.pop()
            for line in lines:
                self.heard(line)
        return True

    def heard(self, line):
        try:
            message = decode(line.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            if not self.ready:
                self.problem = '%s said %r in place of {"ready": true}' % (self.argv[0], bytes(line[:200]))
            return
        if not self.ready:
            self.ready = message.get("ready") is True
            self.hello = message
            self.problem = message.get("problem") if self.ready else "%s is not ready" % self.argv[0]
            self.tell()
        elif self.current is not None and str(message.get("id")) == str(self.asked):
            ask, self.current = self.current, None
            ask.answered(self.translate(message))
        self.next()

    def translate(self, message):
        """The evaluator's answer in the protocol's words."""
        if "error" in message:
            answer = {"code": "eval_error", "error": str(message["error"])}
            trace = message.get("traceback", message.get("stack"))
            if trace is not None:
                answer["traceback"] = str(trace)
        elif self.python:
            answer = {"result": message.get("result")}
        else:
            answer = {"result_json": message.get("result")}
        for key in ("stdout", "truncated"):
            if key in message:
                answer[key] = message[key]
        return answer

    def stop(self, ask):
        """Time is up or the host lost interest: the ask is answered soon, whatever the code does."""
        if ask in self.queue:
            self.queue.remove(ask)
            ask.answered({})
        elif ask is self.current and self.python:
            kill(self.pid, signal.SIGINT)
            self.agent.loop.after(KILL_GRACE, lambda: ask is self.current and self.kill())
        elif ask is self.current:
            ask.answered({})  # cannot be interrupted; its late answer releases the line

    def forget(self, ask):
        """The session is over: drop it if it has not begun."""
        if ask in self.queue:
            self.queue.remove(ask)
            self.agent.loop.stop(ask.timer)

    def kill(self):
        if self.pid is not None:
            kill_group(self.pid, signal.SIGKILL)

    def reseed(self):
        # The interpreter sees the signal before it can read anything sent after it, and also amid an eval.
        if self.pid is not None and self.python:
            kill(self.pid, signal.SIGURG)

    def exited(self, status):
        while self.readable():
            pass  # an answer may still be in the pipe
        was_ready, self.ready, self.pid = self.ready, False, None
        self.agent.loop.unwatch(self.fd)
        os.close(self.fd)
        self.inlet.close()
        how = "signal %d" % os.WTERMSIG(status) if os.WIFSIGNALED(status) else "code %d" % os.WEXITSTATUS(status)
        how = "the interpreter exited (%s)" % how
        if self.current is not None:
            ask, self.current = self.current, None
            ask.answered({"code": "interpreter_exited", "error": how, "stdout": ""})
        if was_ready:
            self.start()  # a fresh one for the next eval
        else:
            self.problem = self.problem or how
            self.fail_waiting()
            self.tell()

    def tell(self):
        """Whoever waits for it to be ready hears how that went, once."""
        stream, self.waiting = self.waiting, None
        if stream is not None:
            stream.settled(self)

    def fail_waiting(self):
        while self.queue:
            self.queue.popleft().answered({"code": "interpreter_exited", "error": self.problem, "stdout": ""})


# -- the agent -------------------------------------------------------------------------------------------------------


class Agent:
    """The link, the session and everything that runs."""

    def __init__(self, fd, sync, machine, is_socket, vsock=False):
        self.pid = getpid()
        self.fd = fd
        self.out_fd = fd
        self.sync = sync
        self.machine = machine
        self.is_socket = is_socket
        self.vsock = vsock
        self.loop = Loop()
        self.env = {}
        self.workdir = "/"
        self.user = None
        self.streams = {}
        self.procs = {}
        self.ended = collections.OrderedDict()  # commands that ended with nobody listening
        self.workers = {}
        self.evaluator = None
        self.lang = "python"
        self.watched_workers = []
        self.notes = []
        self.numpy = "not-installed"
        self.out = bytearray()
        self.tail = b""
        self.buffer = bytearray()
        self.greeting = False
        self.session = False
        self.locked = True
        self.ops = {
            "ping": self.op_ping,
            "resume": self.op_resume,
            "clock": self.op_clock,
            "procs": self.op_procs,
            "list": op_list,
            "stat": op_stat,
            "mkdir": op_mkdir,
            "remove": op_remove,
            "move": op_move,
            "chmod": op_chmod,
        }
        self.stream_ops = {
            "exec": Exec,
            "attach": self.attach,
            "eval": Eval,
            "prepare": Prepare,
            "read": Read,
            "write": Write,
            "pack": Archive,
            "unpack": Unpack,
            "watch": Watch,
            "dial": Dial,
        }

    # the link

    def serve(self):
        """For ever; on a socket, until the host closes it."""
        self.loop.watch(self.fd, EDGE, self.port_ready)
        while True:
            self.loop.turn()
            self.flush()

    def port_ready(self, _events):
        try:
            data = read(self.fd, CHUNK)
        except ConnectionResetError:  # a socket whose host left something unread
            data = b""
        if data:
            try:
                self.feed(data)
            except Exception as error:  # whatever it was, the agent must hear the next token
                log(refusal_of(error).get("traceback", repr(error)))
                self.end_session()
            finally:
                # Edge-triggered, so that a port without a host does not wake us for ever; this asks for the next edge.
                self.loop.epoll.modify(self.fd, EDGE)
        else:
            self.host_gone()

    def host_gone(self):
        if self.vsock:
            self.end_session()
            self.loop.unwatch(self.fd)
            # The same number, so that nobody who holds it is wrong.
            knocking = knock()
            os.dup2(knocking, self.fd, inheritable=False)
            os.close(knocking)
            self.loop.watch(self.fd, EDGE, self.port_ready)
        elif self.is_socket:
            for pid in list(self.procs) + list(self.workers):
                kill_group(pid, signal.SIGKILL)
            raise SystemExit(0)
        self.end_session()

    def send(self, kind, sid, payload=b""):
        if self.session:
            self.out += HEADER.pack(len(payload), kind, sid)
            self.out += payload
            if len(self.out) >= CHUNK:
                self.flush()

    def flush(self):
        """Write what is waiting; blocks until the host took it."""
        try:
            while self.out:
                del self.out[: write(self.out_fd, self.out)]
        except OSError:
            self.out.clear()
            self.host_gone()

    def respond(self, sid, answer):
        payload = encode(answer)
        if len(payload) > MAX_RESPONSE:
            payload = encode({"ok": False, "code": "os_error", "error": "the answer is too long"})
        for start in range(0, len(payload) - MAX_FRAME, MAX_FRAME):
            self.send(MORE, sid, payload[start : start + MAX_FRAME])
        self.send(RESPONSE, sid, payload[(len(payload) - 1) // MAX_FRAME * MAX_FRAME :])

    # sessions

    def feed(self, data):
        """Take bytes from the host: a token anywhere in them starts a new session."""
        recent = self.tail + data
        self.tail = recent[-(len(self.sync) - 1) :]
        at = recent.rfind(self.sync)
        if at >= 0:
            self.end_session()
            self.greeting = True
            self.buffer += recent[at + len(self.sync) :]
        elif self.session or self.greeting:
            self.buffer += data
        if self.greeting and len(self.buffer) >= 16:
            nonce = bytes(self.buffer[:16])
            del self.buffer[:16]
            self.begin_session(nonce)
        if self.session:
            try:
                self.parse()
            except BadFrame as error:
                self.respond(0, {"ok": False, "code": "bad_frame", "error": str(error)})
                self.flush()
                self.end_session()

    def end_session(self):
        self.greeting = False
        self.session = False
        self.locked = True
        if self.buffer or self.out:
            self.buffer.clear()
            self.out.clear()
        if self.streams:
            streams, self.streams = self.streams, {}
            for stream in streams.values():
                self.loop.guard(stream.detach)

    def begin_session(self, nonce):
        self.greeting = False
        self.session = True
        hello = {
            "nonce": nonce.hex(),
            "protocol": PROTOCOL,
            "agent": VERSION,
            "python": PYTHON,
            "numpy": self.numpy,
            "pid": self.pid,
            "lang": self.lang,
            "warmup_ready": self.warmup_ready(),
            "locked": self.locked,
            "notes": self.notes,
        }
        self.out += SYNC_MARK + nonce
        self.send(HELLO, 0, encode(hello))

    def parse(self):
        buffer = self.buffer
        while self.session and len(buffer) >= HEADER.size:
            length, kind, sid = HEADER.unpack_from(buffer)
            if length > MAX_FRAME:
                raise BadFrame("a frame of %d bytes" % length)
            end = HEADER.size + length
            if len(buffer) < end:
                return
            payload = bytes(buffer[HEADER.size : end])
            del buffer[:end]
            self.handle(kind, sid, payload)

    def handle(self, kind, sid, payload):
        if kind == NOOP:
            return
        if kind == REQUEST:
            self.request(sid, payload)
            return
        if kind not in (DATA_IN, CONTROL, CREDIT, CANCEL):
            raise BadFrame("a frame of type %d" % kind)
        stream = self.streams.get(sid)
        if stream is None:
            return  # it ended while this frame was on its way
        if kind == DATA_IN:
            stream.granted -= len(payload)
            if stream.granted < 0:
                raise BadFrame("more input than was granted")
        elif kind == CREDIT and len(payload) != U32.size:
            raise BadFrame("a credit of %d bytes" % len(payload))
        try:
            if kind == DATA_IN and payload:
                stream.data(payload)
            elif kind == DATA_IN:
                stream.end_input()
            elif kind == CREDIT:
                stream.credit(U32.unpack(payload)[0])
            elif kind == CANCEL:
                stream.cancel()
            else:
                stream.control(parse_object(payload))
        except Exception as error:  # as for requests; a stream that cannot go on is ended
            if kind == CONTROL:
                log("control message ignored: %s" % error)
            else:
                stream.finish(refusal_of(error))
                stream.abandon()

    def request(self, sid, payload):
        if sid == 0 or sid in self.streams:
            raise BadFrame("a request on stream %d" % sid)
        try:
            request = parse_object(payload)
            op = take(request, "op", str, required=True)
            if op not in self.ops and op not in self.stream_ops:
                raise Refusal("bad_op", "there is no op %s" % op)
            if self.locked and op not in ("ping", "resume"):
                raise Refusal("locked", "the guest is locked until it is resumed")
            if op in self.stream_ops:
                self.stream_ops[op](self, sid, request)
            else:
                self.respond(sid, self.ops[op](request))
        except Exception as error:  # whatever the host asks for, PID 1 lives
            self.respond(sid, refusal_of(error))

    # processes

    def reap(self, _events=0):
        """Collect every child that ended, orphans of others included."""
        try:
            while read(self.wakeup, 4096):
                pass
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            owner = self.procs.pop(pid, None) or self.workers.pop(pid, None)
            if owner is not None:
                self.loop.guard(owner.exited, status)

    def catch_signals(self):
        self.wakeup, writer = os.pipe()
        os.set_blocking(self.wakeup, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        # Handlers, not SIG_IGN: a command would inherit that. SIGINT is what Ctrl-Alt-Del sends to PID 1.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, lambda *_: None)
        self.loop.watch(self.wakeup, select.EPOLLIN, self.reap)

    # requests about the guest as a whole

    def op_ping(self, request):
        answer = {
            "ok": True,
            "pong": True,
            "numpy_version": self.numpy,
            "pid": os.getpid(),
            "agent_lang": self.lang,
            "warmup_ready": self.warmup_ready(),
            "hostname": self.machine.hostname(),
            "time": self.machine.now() / 1e9,
        }
        if isinstance(self.machine, RecordingMachine):
            answer["recorded"] = self.machine.recorded
        return answer

    def op_resume(self, request):
        machine, notes = self.machine, []
        machine_id = take_hex(request, "machine_id", 32)
        env = take_env(request)
        steps = [
            ("the clock", machine.set_clock, take_count(request, "time_ns")),
            ("the random generator", machine.add_entropy, take_hex(request, "entropy", 128)),
            ("the host name", machine.set_hostname, take(request, "hostname", str)),
            ("the machine id", machine.set_machine_id, machine_id and machine_id.hex()),
            ("the network", machine.set_network, take_network(request)),
        ]
        for what, step, value in steps:
            if value is not None:
                try:
                    step(value)
                except OSError as error:
                    notes.append("cannot set %s: %s" % (what, error))
        if "env" in request and (env or self.env):
            self.evaluator.news.update(dict.fromkeys(self.env), **env)
            self.env = env
        if request.get("entropy") is not None:
            self.evaluator.reseed()
        self.locked = False
        return {"ok": True, "time_ns": machine.now(), "notes": notes}

    def op_clock(self, request):
        delta = take(request, "delta_ns", int, required=True)
        if abs(delta) >= 1 << 62:
            raise Refusal("bad_request", "delta_ns is too large")
        if delta:
            self.machine.set_clock(self.machine.now() + delta)
        return {"ok": True, "time_ns": self.machine.now()}

    def op_procs(self, request):
        rows = []
        for each in list(self.ended.values()) + list(self.procs.values()):
            row = {"pid": each.pid, "args": each.args, "started": each.begun, "attached": each.live}
            row.update(running=each.status is None, pty=each.terminal is not None, detached=each.detached)
            row.update(tag=each.tag, stdin=each.stdin is not None and not each.stdin.ending)
            rows.append(row)
        return {"ok": True, "procs": rows}

    @staticmethod
    def attach(agent, sid, request):
        pid = take_count(request, "pid", required=True)
        process = agent.procs.get(pid) or agent.ended.get(pid)
        if process is None:
            raise Refusal("no_such_process", "there is no process %d" % pid)
        process.attach(sid, request)

    def remember(self, process):
        """Keep what a command said and how it ended for whoever attaches; the oldest are forgotten."""
        self.ended[process.pid] = process
        while len(self.ended) > MAX_ENDED:
            self.ended.popitem(last=False)

    # warm-up

    def warmup_ready(self):
        for worker in self.watched_workers:
            if not worker.ready:
                return False
        return True

    def warm(self, recipe):
        """Start the interpreter and the image's warm-up command; wait for them, but not for ever."""
        script = os.path.abspath(__file__)
        extra = {key: recipe[key] for key in ("FORKD_WARMUP_PY",) if recipe.get(key)}
        interpreter = Worker(self, [sys.executable or "python3", script, "--interpreter"], True, extra)
        self.evaluator = interpreter
        self.watched_workers.append(interpreter)
        lang = recipe.get("FORKD_AGENT_LANG") or "python"
        argv = self.recipe_value(recipe, "FORKD_WARMUP_CMD", split_words, [])
        if argv:
            command = Worker(self, argv, False)
            self.watched_workers.append(command)
            if lang != "python":
                self.lang, self.evaluator = lang, command
        elif lang != "python":
            self.notes.append("FORKD_AGENT_LANG=%s does nothing without FORKD_WARMUP_CMD" % lang)
        for worker in self.watched_workers:
            worker.start()
        late = []
        limit = self.recipe_value(recipe, "FORKD_WARMUP_TIMEOUT", float, WARMUP_SECONDS)
        timer = self.loop.after(limit, lambda: late.append(True))
        while not late and any(not each.ready and each.pid is not None for each in self.watched_workers):
            self.loop.turn()
        self.loop.stop(timer)
        for worker in self.watched_workers:
            if worker.problem or not worker.ready:
                self.notes.append(worker.problem or "%s was not ready in time" % worker.argv[0])
        self.numpy = interpreter.hello.get("numpy") or self.numpy

    def furnish(self, image):
        """Take the image's own defaults for commands: environment, working directory, user."""
        env, workdir, user = take_env(image), take(image, "workdir", str), take(image, "user", str)
        if workdir is not None and not os.path.isdir(workdir):
            raise Refusal("bad_cwd", "there is no directory %s" % workdir)
        os.environ.update(env)
        if self.evaluator is not None:
            self.evaluator.news.update(env)
        self.workdir = workdir or self.workdir
        if user is not None:
            self.user = None if user in ("root", "0", "0:0", "root:root") else user

    def recipe_value(self, recipe, key, convert, default):
        if not recipe.get(key):
            return default
        try:
            return convert(recipe[key])
        except ValueError as error:
            self.notes.append("%s is not understood: %s" % (key, error))
            return default

    def rehearse(self):
        """Go through a whole session once, so that all a restored child runs first is loaded and allocated."""
        resume = {
            "op": "resume",
            "time_ns": self.machine.now(),
            "entropy": os.urandom(64).hex(),
            "hostname": self.machine.hostname(),
            "machine_id": os.urandom(16).hex(),
            "env": {},
        }
        asks = [resume, {"op": "ping"}, {"op": "clock", "delta_ns": 0}]
        if self.evaluator.ready:
            asks += [{"op": "eval", "code": "1", "timeout": 5}, {"op": "eval", "code": "print(1)", "timeout": 5}]
        frames = [encode(ask) for ask in asks]
        script = b"".join(HEADER.pack(len(each), REQUEST, sid) + each for sid, each in enumerate(frames, 1))
        self.out_fd = os.open(os.devnull, os.O_WRONLY)
        for turn in range(REHEARSALS):
            if turn == REHEARSALS // 2:
                self.plugs = plug()
            self.feed(self.sync + os.urandom(16) + script)
            while self.streams:
                self.loop.turn()
            self.flush()
        self.end_session()
        os.close(self.out_fd)
        self.out_fd = self.fd
        if isinstance(self.machine, RecordingMachine):
            self.machine = RecordingMachine()
        gc.freeze()  # the collector then leaves these pages alone


def split_words(text):
    import shlex

    return shlex.split(text)


def parse_object(payload):
    message = decode(payload.decode("utf-8"))
    if not isinstance(message, dict):
        raise Refusal("bad_request", "the message must be a JSON object")
    return message


# -- the warm interpreter --------------------------------------------------------------------------------------------


class Printed(io.BufferedIOBase):
    """Keeps the first MAX_TEXT bytes written since the last ``take``, and cannot be closed."""

    def __init__(self):
        self.kept = b""
        self.truncated = False

    def writable(self):
        return True

    def write(self, data):
        size = memoryview(data).nbytes
        room = MAX_TEXT - len(self.kept)
        self.truncated = self.truncated or size > room
        if room > 0:
            if not self.kept:
                self.kept = bytearray()
            self.kept += bytes(data)[:room]
        return size

    def take(self):
        """The text, and whether there was more; the next one begins."""
        kept, truncated = self.kept, self.truncated
        self.kept, self.truncated = b"", False
        return kept.decode("utf-8", "replace"), truncated

    def close(self):
        pass


class Interpreter:
    """Answers JSON lines on descriptor 0 with JSON lines on descriptor 1; see Worker."""

    def __init__(self):
        import builtins
        import random
        import types

        # User code gets /dev/null; the channel moves to numbers it does not expect and children do not inherit.
        self.inlet, self.outlet = os.dup(0), os.dup(1)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.close(null)
        sys.argv = [""]
        sys.path[0] = ""
        self.printed = Printed()
        self.stdout, self.stderr = (
            io.TextIOWrapper(self.printed, encoding="utf-8", errors="backslashreplace", write_through=True)
            for _ in range(2)
        )
        self.program = sys.modules["__main__"]  # kept alive: its functions are this program
        sys.modules["__main__"] = types.ModuleType("__main__")
        self.names = sys.modules["__main__"].__dict__
        self.names["__builtins__"] = builtins
        self.random = random
        self.running = False
        self.count = 0
        self.pid = getpid()
        signal.signal(signal.SIGINT, self.on_interrupt)
        signal.signal(signal.SIGURG, self.on_reseed)
        signal.siginterrupt(signal.SIGURG, False)  # do not disturb user code that waits in the kernel

    def warm(self):
        """Load what evals need; returns what to say of it."""
        ready, names = {"ready": True}, self.names
        try:
            import numpy

            names["numpy"] = names["np"] = numpy
            ready["numpy"] = numpy.__version__
        except ImportError:
            pass
        except Exception as error:  # a broken numpy must not cost the interpreter
            ready["problem"] = "numpy cannot be imported: %r" % error
        warmup = os.environ.pop("FORKD_WARMUP_PY", None)
        if warmup:
            failed = self.evaluate(warmup).get("traceback")
            if failed:
                ready["problem"] = "FORKD_WARMUP_PY failed: %s" % failed
        rehearsal = ("1", "print(1)", "_ = 1\n_", "del _", "1/0")
        for code in rehearsal + (("numpy.ones(3).sum()",) if "numpy" in names else ()):
            self.line_of(self.evaluate(code))
        self.on_reseed(0, None)
        self.plugs = plug()
        gc.freeze()
        return ready

    def serve(self):
        """Until the agent closes its end."""
        write_all(self.outlet, self.line_of(self.warm()))
        pending = b""
        while True:
            while b"\n" not in pending:
                data = read(self.inlet, CHUNK)
                if not data:
                    return
                pending += data
            line, _, pending = pending.partition(b"\n")
            ask = decode(line.decode())
            env = ask.get("env")
            if env:
                self.set_env(env)
            answer = self.evaluate(ask["code"])
            answer["id"] = ask["id"]
            line = self.line_of(answer)
            sent = write(self.outlet, line)
            if sent < len(line):
                write_all(self.outlet, line[sent:])

    @staticmethod
    def set_env(env):
        for key, value in env.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value

    def on_interrupt(self, _number, _frame):
        if self.running:
            raise KeyboardInterrupt

    def on_reseed(self, _number, _frame):
        self.random.seed()
        numpy_random = sys.modules.get("numpy.random")
        if numpy_random is not None:
            import array

            # The whole state at once, from plain numbers: to seed it would make numpy go through much more of itself.
            numpy_random.set_state(("MT19937", array.array("I", os.urandom(4 * 624)), 624))
        openssl = sys.modules.get("_ssl")
        if openssl is not None:
            openssl.RAND_add(os.urandom(32), 32.0)

    def evaluate(self, code):
        self.count += 1
        name = "<eval %d>" % self.count
        sys.stdout, sys.stderr = self.stdout, self.stderr
        try:
            try:
                self.running = True
                answer = {"result": self.run(code, name)}
                self.running = False
            except BaseException as error:  # SystemExit and KeyboardInterrupt are answers too
                self.running = False
                answer = self.explain(error, code, name)
        except KeyboardInterrupt as error:  # hit between the lines above
            self.running = False
            answer = self.explain(error, code, name)
        if getpid() != self.pid:
            os._exit(0)  # a fork made by user code: only the original answers
        if self.printed.kept or self.printed.truncated:
            answer["stdout"], truncated = self.printed.take()
            if truncated:
                answer["truncated"] = True
        else:
            answer["stdout"] = ""
        return answer

    def run(self, code, name):
        try:  # most evals are one expression, for which no syntax tree need be made
            only = compile(code, name, "eval", dont_inherit=True)
        except SyntaxError:
            only = None
        if only is None:
            return self.run_statements(code, name)
        text = repr(eval(only, self.names))
        return text if len(text) <= MAX_TEXT else self.cut(text)

    def run_statements(self, code, name):
        import ast

        names = self.names
        tree = compile(code, name, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        if tree.body:
            exec(compile(tree, name, "exec", dont_inherit=True), names)
        if last is None:
            return None
        return self.cut(repr(eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), names)))

    def explain(self, error, code, name):
        import linecache
        import traceback

        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_globals is globals():
            frames = frames.tb_next
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        text = "".join(traceback.format_exception(type(error), error, frames))
        del linecache.cache[name]
        try:
            said = str(error)
        except Exception as second:
            said = "(its text cannot be shown: %s)" % type(second).__name__
        return {"error": self.cut("%s: %s" % (type(error).__name__, said)), "traceback": self.cut(text)}

    def cut(self, text):
        if len(text) > MAX_TEXT:
            self.printed.truncated = True
            return text[:MAX_TEXT]
        return text

    @staticmethod
    def line_of(answer):
        line = encode(answer) + b"\n"
        if len(line) >= MAX_RESPONSE:  # mostly control characters, six bytes each
            for key in ("result", "error", "traceback", "stdout"):
                if answer.get(key):
                    answer[key] = answer[key][: MAX_TEXT // 8]
            answer["truncated"] = True
            line = encode(answer) + b"\n"
        return line


# -- directories as tar streams ---------------------------------------------------------------------------------------


def archive(flag, path, stage):
    """Run one of the two below; a failure is a refusal as a JSON line on stderr and exit code 1."""
    try:
        if flag == "--pack":
            pack(path)
        else:
            unpack(path, stage)
    except Exception as error:  # the edge of the process
        write(2, encode(refusal_of(error)) + b"\n")
        raise SystemExit(1)


def pack(path):
    """The directory's entries, without its own name, to stdout; what vanishes or may not be read is left out."""
    import tarfile

    def add(tar, full, name):
        try:
            status = os.lstat(full)
            if stat.S_ISREG(status.st_mode):
                with open(full, "rb") as source:
                    info = tar.gettarinfo(full, name, source)
                    tar.addfile(info, Padded(source))
            elif stat.S_ISDIR(status.st_mode) or stat.S_ISLNK(status.st_mode):
                tar.addfile(tar.gettarinfo(full, name))
        except (FileNotFoundError, PermissionError):
            return
        if stat.S_ISDIR(status.st_mode):
            for inner in sorted(os.listdir(full)):
                add(tar, os.path.join(full, inner), "%s/%s" % (name, inner))

    with os.fdopen(1, "wb", CHUNK) as out:
        with tarfile.open(fileobj=out, mode="w|", bufsize=CHUNK, format=tarfile.PAX_FORMAT) as tar:
            add(tar, path, ".")


class Padded:
    """A file that reads as zeros where it was truncated since it was measured."""

    def __init__(self, file):
        self.file = file

    def read(self, size):
        data = self.file.read(size)
        return data + bytes(size - len(data))


def unpack(path, stage):
    """The tar stream on stdin becomes directory ``path``; ``stage`` is where a new one grows until it is whole."""
    import tarfile

    base = stage or path
    modes = []
    if stage:
        os.mkdir(stage, 0o755)
    with os.fdopen(0, "rb", CHUNK) as source:
        try:
            with tarfile.open(fileobj=source, mode="r|", bufsize=CHUNK) as tar:
                for member in tar:
                    name = os.path.normpath(member.name)
                    if name.startswith(("/", "../")) or name == "..":
                        raise Refusal("bad_request", "%s leads out of the directory" % member.name)
                    place(tar, member, base, os.path.join(base, name), modes)
        except tarfile.TarError as error:
            raise Refusal("bad_request", "this is no tar archive, or half of one: %s" % error)
        while source.read(CHUNK):
            pass  # padding
    for folder, mode in reversed(modes):
        os.chmod(folder, mode)
    if stage:
        os.rename(stage, path)


def place(tar, member, base, target, modes):
    """Put one entry at ``target``: whole, or not at all. Devices and pipes are left out."""
    if member.isdir():
        os.makedirs(target, exist_ok=True)
        modes.append((target, member.mode & 0o7777))
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    temporary = os.path.join(os.path.dirname(target), ".forkd-%s" % os.urandom(12).hex())
    try:
        if member.isreg():
            with open(temporary, "xb") as file:
                source = tar.extractfile(member)
                for piece in iter(lambda: source.read(CHUNK), b""):
                    file.write(piece)
                os.fchmod(file.fileno(), member.mode & 0o7777)
                os.utime(file.fileno(), (member.mtime, member.mtime))
        elif member.issym():
            os.symlink(member.linkname, temporary)
        elif member.islnk():
            linked = os.path.normpath(member.linkname)
            if linked.startswith(("/", "../")):
                raise Refusal("bad_request", "%s leads out of the directory" % member.linkname)
            os.link(os.path.join(base, linked), temporary)
        else:
            return
        os.rename(temporary, target)
    except BaseException:
        if os.path.lexists(temporary):
            os.unlink(temporary)
        raise


# -- start -----------------------------------------------------------------------------------------------------------


def read_recipe(path):
    """KEY=VALUE lines; matching quotes around a value are removed; the environment wins."""
    recipe = {}
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        lines = []
    for line in lines:
        key, equals, value = line.strip().partition("=")
        value = value.strip()
        if equals and not key.startswith("#"):
            if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
                value = value[1:-1]
            recipe[key.strip()] = value
    recipe.update({key: os.environ[key] for key in list(os.environ) if key.startswith("FORKD_")})
    return recipe


def read_image(path):
    """What the image says about its processes, as forkd wrote it when it built the disk."""
    try:
        with open(path, "rb") as file:
            image = parse_object(file.read())
            if not os.path.isdir(str(image.get("workdir"))):
                image.pop("workdir", None)
            return image
    except (FileNotFoundError, NotADirectoryError):
        return {}


def find_port():
    """The device of the virtio-serial port named forkd.agent; waits for the kernel's word that it appeared."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 15) as events:  # NETLINK_KOBJECT_UEVENT
        events.bind((0, 1))
        while True:
            folder = "/sys/class/virtio-ports"
            for device in os.listdir(folder) if os.path.isdir(folder) else ():
                try:
                    with open("%s/%s/name" % (folder, device)) as file:
                        name = file.read().strip()
                except FileNotFoundError:
                    continue  # not named yet
                if name == PORT_NAME:
                    return "/dev/" + device
            events.recv(65536)


def knock():
    """A connection to the host over vsock: made by us, or, while nobody listens there, awaited from the host."""
    try:
        link = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
        link.connect((socket.VMADDR_CID_HOST, VSOCK_PORT))
        return link.detach()
    except OSError:
        link.close()
    with socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM) as listener:
        listener.bind((socket.VMADDR_CID_ANY, VSOCK_PORT))
        listener.listen(1)
        return listener.accept()[0].detach()


def has_vsock():
    with open("/proc/cmdline") as file:
        return "forkd.vsock" in file.read().split()


def find_sync():
    with open("/proc/cmdline") as file:
        for word in file.read().split():
            if word.startswith("forkd.sync="):
                return word.partition("=")[2]
    raise SystemExit("forkd-agent: no forkd.sync= on the kernel command line")


def loopback_up():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        # SAFETY: struct ifreq is 40 bytes: the name and, here, the flags as a short (IFF_UP | IFF_RUNNING).
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh22x", b"lo", 0x41))  # SIOCSIFFLAGS


def main(argv):
    if argv[:1] == ["--interpreter"]:
        Interpreter().serve()
        return
    if argv[:1] in (["--pack"], ["--unpack"]):
        archive(*argv)
        return
    flags = {"--no-host-effects": False, "--fd": None, "--port": None, "--sync": None, "--recipe": RECIPE}
    flags["--image"] = IMAGE
    words = iter(argv)
    for word in words:
        if word not in flags:
            raise SystemExit("forkd-agent: unknown argument %s" % word)
        flags[word] = True if word == "--no-host-effects" else next(words, None)
    os.umask(0o022)
    if os.getpid() == 1:
        try:
            loopback_up()
        except OSError as error:
            log("cannot bring up the loopback interface: %s" % error)
    is_socket = flags["--fd"] is not None
    vsock = not is_socket and flags["--port"] is None and has_vsock()
    if is_socket:
        fd = int(flags["--fd"])
        os.set_inheritable(fd, False)
    elif vsock:
        fd = knock()
    else:
        fd = os.open(flags["--port"] or find_port(), os.O_RDWR | os.O_NOCTTY)
    machine = RecordingMachine() if flags["--no-host-effects"] else Machine()
    agent = Agent(fd, bytes.fromhex(flags["--sync"] or find_sync()), machine, is_socket, vsock)
    agent.catch_signals()
    try:
        agent.furnish(read_image(flags["--image"]))
    except (Refusal, OSError, ValueError) as error:
        agent.notes.append("%s is not understood: %s" % (flags["--image"], error))
    agent.warm(read_recipe(flags["--recipe"]))
    agent.rehearse()
    agent.serve()


def load_again():
    """Run this program anew, from fresh memory, after all it imports: its parts then lie side by side, on few pages."""
    import marshal

    names = {"__name__": "__main__", "__file__": __file__, "PLUGS": plug()}
    with open(__file__, "rb") as file:
        program = file.read()[16:]
    exec(marshal.loads(program), names)


if __name__ == "__main__":
    if __file__.endswith(".pyc") and "PLUGS" not in globals():
        load_again()
    else:
        main(sys.argv[1:])
