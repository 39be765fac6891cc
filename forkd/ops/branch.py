"""Branch a running sandbox: capture it into a new snapshot while it goes on."""

from __future__ import annotations

import secrets
import time

import trio

from forkd import __version__
from forkd.ops.capture import Captured, capture_into_stage, no_step
from forkd.ops.describe import describe
from forkd.ops.lifecycle import check_pairs
from forkd.runtime import Runtime
from forkd.sandbox import Sandbox
from forkd.specs.branch import BranchMode, Pause, Step
from forkd.specs.errors import (
    BadInput,
    CapabilityMissing,
    CaptureFailed,
    ChainBroken,
    ForkdError,
    SnapshotNotFound,
    TooBusy,
)
from forkd.specs.models import ParentRef, Snapshot, SnapshotInfo
from forkd.specs.requests import BranchRequest
from forkd.store.capture import MeasuredDelta
from forkd.store.snapshots import Stage, Stored


def mode_name(request: BranchRequest) -> str:
    """The mode a request asks for, in whichever spelling. Raises BadInput for contradictions."""
    legacy = [name for name in ("measure_diff", "diff", "live") if getattr(request, name)]
    if request.mode is not None and legacy:
        raise BadInput(f"mode and {legacy[0]} exclude each other", hint="give mode alone")
    if len(legacy) > 1:
        raise BadInput(f"{' and '.join(legacy)} exclude each other")
    return request.mode or {"diff": "diff", "live": "live"}.get(legacy[0] if legacy else "", "full")


def source_of(sandbox: Sandbox) -> Stored:
    """The snapshot a sandbox was forked from. Raises BadInput for a parent that is being made, which has none."""
    if sandbox.source is None:
        raise BadInput(f"sandbox {sandbox.id} was not forked from a snapshot")
    return sandbox.source


async def quickest_mode(runtime: Runtime, sandbox: Sandbox) -> BranchMode:
    """The mode that holds a sandbox up least, of those its engine is able to."""
    live = runtime.plugins.branch_mode("live")
    engine = runtime.engine(source_of(sandbox).manifest.platform.engine)
    capable = live.needs <= (await engine.describe()).capabilities
    return live if capable else runtime.plugins.branch_mode("diff")


async def branch(
    runtime: Runtime, sandbox_id: str, request: BranchRequest, step: Step = no_step, *, last: bool = False
) -> SnapshotInfo:
    """Capture a sandbox. With ``wait=false`` returns when the source runs again, with status ``writing``.

    After its ``last`` branch the source stays paused.
    """
    mode = runtime.plugins.branch_mode(mode_name(request))
    if not request.wait and not mode.keeps_running:
        raise BadInput("wait=false needs mode live", hint=f"{mode.name} writes while the source stands still")
    check_pairs("labels", request.labels or {})
    sandbox = runtime.sandbox(sandbox_id)
    source = await _source(runtime, sandbox, mode, request)
    cap = runtime.settings.branch_concurrency
    if cap and len(runtime.writing) >= cap:
        raise TooBusy(f"{cap} branches are being captured already", hint="try again in a moment")
    tag = request.tag or f"branch-{sandbox_id}-{secrets.token_hex(2)}"
    work = _Branch(runtime, sandbox, source, mode, runtime.snapshots.stage(tag), request, step, last)
    runtime.failed.pop(tag, None)
    runtime.writing[tag] = _writing_row(work, None)
    pause: Pause = await runtime.nursery.start(work.run)
    if not request.wait:
        row = _writing_row(work, pause)
        if tag in runtime.writing:
            runtime.writing[tag] = row
        return row
    await work.done.wait()
    if work.error is not None:
        raise work.error
    assert work.stored is not None
    return _with_measured(describe(runtime, work.stored), work.measured)


async def _source(runtime: Runtime, sandbox: Sandbox, mode: BranchMode, request: BranchRequest) -> Stored:
    source = source_of(sandbox)
    if request.parent_tag is not None and (request.parent_tag != source.manifest.tag or mode.name == "full"):
        raise BadInput(
            f"parent_tag is {request.parent_tag!r}, but the source was forked from {source.manifest.tag!r}",
            hint="give that tag with mode diff or live, or none",
        )
    info = await runtime.engine(source.manifest.platform.engine).describe()
    if missing := mode.needs - info.capabilities:
        raise CapabilityMissing(
            f"mode {mode.name} needs {', '.join(sorted(missing))}, which engine {info.platform.engine} lacks here",
            hint="use mode diff",
        )
    if mode.name != "full":
        _check_parent(runtime, source)
    return source


def _check_parent(runtime: Runtime, source: Stored) -> None:
    """A delta is worth nothing without the snapshot it is against."""
    try:
        content = runtime.snapshots.load(source.manifest.tag).manifest.content
    except SnapshotNotFound:
        content = ""
    if content != source.manifest.content:
        raise ChainBroken(
            f"snapshot {source.manifest.tag!r}, which the sandbox was forked from, has been removed or replaced",
            hint="use mode full, which needs no parent",
        )


class _Branch:
    """One branch under way: outlives the request that asked for it."""

    def __init__(
        self,
        runtime: Runtime,
        sandbox: Sandbox,
        source: Stored,
        mode: BranchMode,
        stage: Stage,
        request: BranchRequest,
        step: Step,
        last: bool,
    ) -> None:
        self._runtime = runtime
        self.sandbox = sandbox
        self._source = source
        self._mode = mode
        self.stage = stage
        self._request = request
        self._step = step
        self._last = last
        self.done = trio.Event()
        self.error: ForkdError | None = None
        self.stored: Stored | None = None
        self.measured: MeasuredDelta | None = None

    @property
    def builds_on(self) -> str | None:
        """The snapshot that must stay, for what is written is against it."""
        return None if self._mode.name == "full" else self._source.manifest.tag

    async def run(self, task_status: trio.TaskStatus[Pause] = trio.TASK_STATUS_IGNORED) -> None:
        """Capture, commit; whatever fails, nothing half-made is left and the source runs."""
        with self._runtime.reading(self._source.manifest.tag):
            await self._run(task_status)

    async def _run(self, task_status: trio.TaskStatus[Pause]) -> None:
        resumed = _Once(task_status)
        try:
            captured = await capture_into_stage(
                self.sandbox,
                self._mode,
                self.stage,
                self._source.manifest.hardware,
                measure_delta=self._request.measure_diff,
                last=self._last,
                step=self._step,
                task_status=resumed,
            )
            self.measured = captured.measured
            if captured.memory.kind == "delta":
                _check_parent(self._runtime, self._source)
            self._step("commit")
            manifest = captured.seal(self._manifest(captured))
            self.stored = await trio.to_thread.run_sync(self.stage.commit, manifest)
            self._note()
        except (ForkdError, OSError) as error:  # either, raised once the caller is answered, would end the daemon
            self.error = error if isinstance(error, ForkdError) else _unwritten(self.stage, error)
            if not resumed.passed:
                raise self.error from error
            if not self._request.wait:  # a caller that waits is told itself
                self._runtime.failed[self.stage.tag] = self.error.message
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self.stage.abandon)
            self._runtime.writing.pop(self.stage.tag, None)
            self.done.set()

    def _manifest(self, captured: Captured) -> Snapshot:
        source = self._source.manifest
        parent = ParentRef(tag=source.tag, content=source.content) if captured.memory.kind == "delta" else None
        return Snapshot(
            tag=self.stage.tag,
            content="",
            created_at_unix=int(time.time()),
            forkd_version=__version__,
            platform=source.platform,
            hardware=source.hardware,
            vmstate=captured.vmstate,
            memory=captured.memory,
            rootfs=source.rootfs,
            volumes=source.volumes,
            kernel=source.kernel,
            agent_sync=source.agent_sync,
            parent=parent,
            branched_from=self.sandbox.id,
            image=source.image,
            labels=self.sandbox.info.labels if self._request.labels is None else self._request.labels,
        )

    def _note(self) -> None:
        assert self.stored is not None
        info = self.sandbox.info
        info.has_branched = True
        info.branch_count += 1
        info.last_branch_memory_path = str(self.stored.memory)
        manifest = self.stored.manifest
        self._runtime.observe(
            "branch", id=self.sandbox.id, tag=manifest.tag, mode=self._mode.name, pause_ms=manifest.pause_ms
        )


def _unwritten(stage: Stage, error: OSError) -> CaptureFailed:
    return CaptureFailed(
        f"snapshot {stage.tag!r} cannot be written: {error.strerror or error}",
        hint=f"look after the file system of {stage.directory.parent}; the sandbox runs on",
    )


class _Once(trio.TaskStatus[Pause]):
    """Whether the source has run again, and so whether the caller has been answered."""

    def __init__(self, outer: trio.TaskStatus[Pause]) -> None:
        self._outer = outer
        self.passed = False

    def started(self, value: Pause | None = None) -> None:
        """Pass it on."""
        assert value is not None
        self.passed = True
        self._outer.started(value)


def _with_measured(info: SnapshotInfo, measured: MeasuredDelta | None) -> SnapshotInfo:
    """Add what a delta would have cost, if that was asked for."""
    if measured is not None and info.mem_mib is not None:
        info.diff_ms = round(measured.milliseconds)
        info.diff_physical_bytes = measured.size
        info.diff_logical_bytes = info.mem_mib << 20
    return info


def _writing_row(work: _Branch, pause: Pause | None) -> SnapshotInfo:
    return SnapshotInfo(
        tag=work.stage.tag,
        dir=str(work.stage.directory),
        created_at_unix=int(time.time()),
        status="writing",
        bootable=False,
        branched_from=work.sandbox.id,
        parent_tag=work.builds_on,
        pause_ms=round(pause.pause_ms) if pause else None,
        pause_exact_ms=round(pause.pause_ms, 3) if pause else None,
    )
