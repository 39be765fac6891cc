"""The one exception tree: each class owns a stable code, an exit status and an HTTP status."""

from __future__ import annotations


class ForkdError(Exception):
    """Anything forkd refuses or fails to do, said in one sentence, with a hint where there is something to do.

    ``code`` is stable and unique; clients may match on it. ``exit_status`` is the CLI's exit code (1 failed, 2 bad
    input) and ``http_status`` the REST status. ``details`` carries machine-readable extras (ids, paths, limits).
    """

    code = "error"
    exit_status = 1
    http_status = 500

    def __init__(self, message: str, *, hint: str | None = None, **details: object) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details

    def as_dict(self) -> dict[str, object]:
        """The JSON body every REST error has: ``error``, ``code``, ``hint`` and, if any, ``details``."""
        body: dict[str, object] = {"error": self.message, "code": self.code, "hint": self.hint}
        if self.details:
            body["details"] = self.details
        return body


# -- bad input -------------------------------------------------------------------------------------------------------


class BadInput(ForkdError):
    """A value the caller gave is outside what is allowed."""

    code = "bad_input"
    exit_status = 2
    http_status = 400


class BadTag(BadInput):
    """A snapshot tag, sandbox name or workspace name breaks the one tag rule."""

    code = "bad_tag"


class BadJson(BadInput):
    """A request body is not JSON, or not of the documented shape."""

    code = "bad_json"


class BodyTooLarge(BadInput):
    """A request body is larger than the limit."""

    code = "body_too_large"
    http_status = 413


class CommandNotFound(BadInput):
    """A program does not exist in the guest, or may not be executed."""

    code = "command_not_found"


class UpgradeRequired(BadInput):
    """This address is a WebSocket, and the request did not ask for one."""

    code = "upgrade_required"
    http_status = 426


class UploadBroken(BadInput):
    """The client went away in the middle of an upload, of which nothing was written."""

    code = "upload_broken"


class RangeNotPossible(BadInput):
    """The part of a file asked for lies behind its end."""

    code = "range_not_possible"
    http_status = 416


class Unauthorized(ForkdError):
    """The request carries no token, or a wrong one."""

    code = "unauthorized"
    http_status = 401


class ForeignOrigin(ForkdError):
    """A page of another site, or a name that is not this host's, is behind a request to a daemon without tokens."""

    code = "foreign_origin"
    http_status = 403


class TokenTooNarrow(ForkdError):
    """The token is good, but for the registry alone."""

    code = "token_too_narrow"
    http_status = 403


# -- things that are not there ---------------------------------------------------------------------------------------


class NotFound(ForkdError):
    """The thing named does not exist."""

    code = "not_found"
    http_status = 404


class SnapshotNotFound(NotFound):
    """No snapshot has this tag."""

    code = "snapshot_not_found"


class SandboxNotFound(NotFound):
    """No running sandbox has this id."""

    code = "sandbox_not_found"


class WorkspaceNotFound(NotFound):
    """No workspace has this name."""

    code = "workspace_not_found"


class GuestFileNotFound(NotFound):
    """A path inside the guest does not exist."""

    code = "guest_file_not_found"


class ProcessNotFound(NotFound):
    """A sandbox has no process with this pid or tag."""

    code = "process_not_found"


# -- conflicts -------------------------------------------------------------------------------------------------------


class Conflict(ForkdError):
    """The request contradicts the present state."""

    code = "conflict"
    http_status = 409


class SandboxPaused(Conflict):
    """A sandbox was paused on purpose, so it answers nothing until it is resumed."""

    code = "sandbox_paused"


class NameTaken(Conflict):
    """Another sandbox has this name."""

    code = "name_taken"


class TagTaken(Conflict):
    """A snapshot with this tag exists already, or is being made."""

    code = "tag_taken"


class SnapshotBroken(Conflict):
    """A snapshot's files are missing, truncated, altered or unreadable."""

    code = "snapshot_broken"


class SnapshotIncompatible(Conflict):
    """A snapshot cannot run on this host: other VMM, accelerator, CPU or machine type."""

    code = "snapshot_incompatible"


class SnapshotNotReady(Conflict):
    """A snapshot is still being written, or its writing failed."""

    code = "snapshot_not_ready"


class SnapshotInUse(Conflict):
    """A snapshot has dependents or running children, so it stays."""

    code = "snapshot_in_use"


class SnapshotPinned(SnapshotInUse):
    """A snapshot is pinned, so it stays until it is unpinned or removed by force."""

    code = "snapshot_pinned"


class ChainBroken(Conflict):
    """A snapshot's ancestors are missing, altered, cyclic or too many."""

    code = "chain_broken"


class CapabilityMissing(Conflict):
    """The engine, memory backend and branch mode asked for do not fit together."""

    code = "capability_missing"
    http_status = 400


# -- the host --------------------------------------------------------------------------------------------------------


class HostNotReady(ForkdError):
    """The host lacks something forkd needs: a program, a kernel image, a permission."""

    code = "host_not_ready"
    http_status = 503


class ToolMissing(HostNotReady):
    """A program is not on PATH."""

    code = "tool_missing"


class KernelMissing(HostNotReady):
    """There is no guest kernel; ``forkd setup`` fetches one."""

    code = "kernel_missing"


class LimitRefused(HostNotReady):
    """A limit on a sandbox cannot be applied on this host, and best effort was not asked for."""

    code = "limit_refused"

    @property
    def refused(self) -> list[str]:
        """The fields that are not applied."""
        found = self.details.get("refused", [])
        return found if isinstance(found, list) else []


class NoSpace(ForkdError):
    """A file system is full, or would be."""

    code = "no_space"
    http_status = 507


class TooBusy(ForkdError):
    """A limit on concurrent work is reached; try again."""

    code = "too_busy"
    http_status = 503


class BuildFailed(ForkdError):
    """A rootfs could not be built."""

    code = "build_failed"


class DaemonUnreachable(ForkdError):
    """No daemon answers at the address given."""

    code = "daemon_unreachable"
    http_status = 503


# -- machines --------------------------------------------------------------------------------------------------------


class EngineError(ForkdError):
    """The VMM did not do what it was asked."""

    code = "engine_error"


class LaunchFailed(EngineError):
    """A VMM did not start; the message has exit code, command line and console tail."""

    code = "launch_failed"


class MachineGone(EngineError):
    """A VMM ended by itself."""

    code = "machine_gone"
    http_status = 502


class OutOfMemory(MachineGone):
    """A VMM was ended because its sandbox reached its memory limit."""

    code = "out_of_memory"


class TemplateRefused(EngineError):
    """A machine cannot be cloned safely; restoring from the snapshot is the way."""

    code = "template_refused"
    http_status = 409


class CloneBroken(EngineError):
    """A clone of a machine lacks what its template had; it was ended."""

    code = "clone_broken"


class CaptureFailed(EngineError):
    """A running machine's state could not be captured; the machine runs on."""

    code = "capture_failed"


# -- the guest -------------------------------------------------------------------------------------------------------


class GuestError(ForkdError):
    """The agent inside the guest reported an error."""

    code = "guest_error"
    http_status = 502


class GuestUnreachable(GuestError):
    """The agent link is closed or never came up."""

    code = "guest_unreachable"


class GuestProtocolError(GuestError):
    """The guest sent bytes that are not the agent protocol; the link was closed."""

    code = "guest_protocol_error"


class GuestTimeout(GuestError):
    """The guest did not answer in time."""

    code = "guest_timeout"
    http_status = 504


class GuestDenied(GuestError):
    """The guest's kernel does not permit it."""

    code = "guest_denied"
    http_status = 403


class PortClosed(GuestError):
    """Nothing listens on this port inside the guest."""

    code = "port_closed"


# -- packs and the hub -----------------------------------------------------------------------------------------------


class PackError(ForkdError):
    """A pack is malformed, altered or too large."""

    code = "pack_error"
    http_status = 422


class TrustError(PackError):
    """A pack's signature is missing, wrong or by an unknown key, and the policy requires one."""

    code = "trust_error"
    http_status = 403


class TransferError(ForkdError):
    """A hub transfer failed and retrying did not help."""

    code = "transfer_error"
    http_status = 502


# -- plugins ---------------------------------------------------------------------------------------------------------


class PluginError(ForkdError):
    """A plugin cannot be loaded, or registers a name that is taken."""

    code = "plugin_error"


def all_errors() -> list[type[ForkdError]]:
    """Every class of the tree, root first."""
    found: list[type[ForkdError]] = []
    queue: list[type[ForkdError]] = [ForkdError]
    while queue:
        cls = queue.pop(0)
        found.append(cls)
        queue.extend(cls.__subclasses__())
    return found
