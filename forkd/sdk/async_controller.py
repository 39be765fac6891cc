"""AsyncController: the REST API as methods. The sync Controller is generated from this file."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any

import httpx

from forkd.config import DEFAULT_URL
from forkd.sdk.async_channel import Channel, channel_of, upgrade_headers
from forkd.sdk.async_files import FileMethods
from forkd.sdk.async_lifecycle import LifecycleMethods
from forkd.sdk.async_look import LookMethods
from forkd.sdk.async_processes import ProcessMethods
from forkd.sdk.discover import own_socket
from forkd.sdk.errors import ControllerError

OnProgress = Callable[[str, float | None], None]
OnTransfer = Callable[[str, float | None, int | None], None]
"""``(step, fraction, bytes in all)`` of a transfer."""
OnOutput = Callable[[str, bytes], None]
NDJSON = "application/x-ndjson"
GRACE = 10.0
"""Seconds by which the connection outlasts a time limit the daemon keeps."""
UNIX = "unix://"
UNPROXIED = ("all://127.0.0.1", "all://localhost", "all://[::1]")
"""This host itself, which no proxy of the environment (``HTTP_PROXY``) can reach and none may be told the token of."""


class AsyncController(ProcessMethods, FileMethods, LifecycleMethods, LookMethods):
    """Talks to a forkd app. Answers are plain dicts with the field names of the REST API."""

    def __init__(
        self,
        base_url: str | None = None,
        token: str | None = None,
        timeout: float | None = 60.0,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """``base_url`` defaults to ``FORKD_URL``, then to the daemon of the data directory, then to the default port.

        It is http://, https://, or unix:// and the path of a daemon's socket. ``token`` defaults to ``FORKD_TOKEN``.
        """
        base_url = base_url or os.environ.get("FORKD_URL")
        if base_url is None and transport is None and (path := own_socket()) is not None:
            base_url = f"{UNIX}{path}"
        if base_url is not None and base_url.startswith(UNIX):
            transport = transport or httpx.AsyncHTTPTransport(uds=base_url.removeprefix(UNIX))
            base_url = "http://forkd"
        self.base_url = (base_url or DEFAULT_URL).rstrip("/")
        self.timeout = timeout
        token = token or os.environ.get("FORKD_TOKEN")
        headers = {"authorization": f"Bearer {token}"} if token else {}
        direct = dict.fromkeys(UNPROXIED)
        self._client = httpx.AsyncClient(
            base_url=self.base_url, headers=headers, timeout=timeout, transport=transport, mounts=direct
        )

    async def __aenter__(self) -> AsyncController:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connection."""
        await self._client.aclose()

    # -- the host ----------------------------------------------------------------------------------------------------

    async def version(self) -> dict[str, Any]:
        """Version of forkd and of its API."""
        return await self._call("GET", "/version")

    async def list_plugins(self) -> list[dict[str, Any]]:
        """Every plugin, with its status and what it provides."""
        return await self._call("GET", "/v1/plugins")

    async def setup(
        self, on_progress: OnProgress | None = None, kernel: str | None = None, refresh: bool = False
    ) -> dict[str, Any]:
        """Fetch the guest kernel if it is not there, or, with ``refresh``, again.

        With ``kernel``, a path of the daemon's host, that one is taken in.
        """
        return await self._stream("/v1/setup", {"kernel": kernel, "refresh": refresh}, on_progress)

    async def doctor(self) -> list[dict[str, Any]]:
        """Whether the host is fit: rows of name, status (PASS, WARN, FAIL, SKIP), detail and hint."""
        return await self._call("GET", "/v1/doctor")

    async def cleanup(self, remove: bool = False) -> list[dict[str, Any]]:
        """What dead processes left; removed if asked."""
        return await self._call("POST", "/v1/cleanup", {"remove": remove})

    # -- snapshots ---------------------------------------------------------------------------------------------------

    async def list_snapshots(self) -> list[dict[str, Any]]:
        """All snapshots."""
        return await self._call("GET", "/v1/snapshots")

    async def get_snapshot(self, tag: str) -> dict[str, Any]:
        """One snapshot."""
        return await self._call("GET", f"/v1/snapshots/{_quote(tag)}")

    async def create_snapshot(self, tag: str, on_progress: OnProgress | None = None, **fields: Any) -> dict[str, Any]:
        """Boot a parent (``image=`` or ``rootfs=``, ``kernel=``, ``mem_size_mib=`` …) and capture it."""
        return await self._stream("/v1/snapshots", {"tag": tag, **fields}, on_progress)

    async def snapshot_info(self, tag: str) -> dict[str, Any]:
        """Lineage and sizes of one snapshot."""
        return await self._call("GET", f"/v1/snapshots/{_quote(tag)}/info")

    async def compact_snapshot(self, tag: str, to: str) -> dict[str, Any]:
        """Flatten a chain into a new snapshot."""
        return await self._call("POST", f"/v1/snapshots/{_quote(tag)}/compact", {"to": to})

    async def set_pool(self, tag: str, size: int) -> dict[str, Any]:
        """Let ``size`` machines wait, warm, for the snapshot's next children (0: none); returns when they do."""
        return await self._call("PUT", f"/v1/snapshots/{_quote(tag)}/pool", {"size": size})

    async def delete_snapshot(self, tag: str, cascade: bool = False, force: bool = False) -> None:
        """Remove a snapshot."""
        query = {name: "true" for name, value in (("cascade", cascade), ("force", force)) if value}
        await self._call("DELETE", f"/v1/snapshots/{_quote(tag)}", params=query)

    async def update_snapshot(
        self, tag: str, pinned: bool | None = None, labels: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """Pin a snapshot, so that it is not removed, or unpin it; give it other labels. What is None stays."""
        given = {"pinned": pinned, "labels": labels}
        body = {key: value for key, value in given.items() if value is not None}
        return await self._call("PATCH", f"/v1/snapshots/{_quote(tag)}", body)

    async def prune_snapshots(self, rules: list[dict[str, Any]], dry_run: bool = True) -> dict[str, Any]:
        """Remove what rules (``labels``, ``keep_last``, ``older_than_secs``, ``max_bytes``) let go, or say what."""
        return await self._call("POST", "/v1/snapshots/prune", {"rules": rules, "dry_run": dry_run})

    async def build_rootfs(self, image: str, on_progress: OnProgress | None = None, **fields: Any) -> dict[str, Any]:
        """Build a disk from an image."""
        return await self._stream("/v1/rootfs", {"image": image, **fields}, on_progress)

    # -- packs and registries ----------------------------------------------------------------------------------------

    async def pack(
        self, tag: str, out: str | None = None, on_progress: OnTransfer | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Write a snapshot's pack to ``out``, a path of the daemon's host (``bundle=``, ``since=``, ``sign=`` …)."""
        return await self._transfer("/v1/hub/pack", {"tag": tag, "out": out, **fields}, on_progress)

    async def unpack(self, path: str, on_progress: OnTransfer | None = None, **fields: Any) -> dict[str, Any]:
        """Take in a pack file of the daemon's host (``tag=``, ``force=``, ``trust=``)."""
        return await self._transfer("/v1/hub/unpack", {"path": path, **fields}, on_progress)

    async def push(self, tag: str, target: str, on_progress: OnTransfer | None = None, **fields: Any) -> dict[str, Any]:
        """Send a snapshot to a registry, or as a pack to a URL (``hub=``, ``sign=``, ``description=`` …)."""
        return await self._transfer("/v1/hub/push", {"tag": tag, "target": target, **fields}, on_progress)

    async def pull(self, target: str, on_progress: OnTransfer | None = None, **fields: Any) -> dict[str, Any]:
        """Fetch a snapshot from a registry, or a pack from a URL (``hub=``, ``tag=``, ``force=``, ``trust=``)."""
        return await self._transfer("/v1/hub/pull", {"target": target, **fields}, on_progress)

    async def hub_packages(self, hub: str | None = None, words: str = "") -> list[dict[str, Any]]:
        """What a registry offers, filtered by words."""
        query = {name: value for name, value in (("hub", hub), ("words", words)) if value}
        return await self._call("GET", "/v1/hub/packages", params=query)

    async def hub_check(self, target: str, hub: str | None = None) -> dict[str, Any]:
        """Whether a package would run on the daemon's host; nothing but its manifest is fetched."""
        return await self._call("POST", "/v1/hub/check", {"target": target, "hub": hub})

    async def hub_login(self, url: str, **fields: Any) -> None:
        """Keep a login for a registry (``token=`` or ``username=``, ``password=``), or ``forget=True`` it."""
        await self._call("POST", "/v1/hub/login", {"url": url, **fields})

    async def hub_keygen(self, name: str = "default") -> dict[str, Any]:
        """Make a signing key; answers its public part."""
        return await self._call("POST", "/v1/hub/keys", {"name": name})

    async def hub_sign(self, path: str, key: str = "default") -> dict[str, Any]:
        """Sign a pack file of the daemon's host."""
        return await self._call("POST", "/v1/hub/sign", {"path": path, "key": key})

    async def hub_trusted(self) -> list[dict[str, Any]]:
        """Keys that are trusted."""
        return await self._call("GET", "/v1/hub/trusted")

    async def hub_trust(self, name: str, key: str | None = None) -> list[dict[str, Any]]:
        """Trust a public key under a name; without a key, stop trusting that name."""
        return await self._call("POST", "/v1/hub/trusted", {"name": name, "key": key})

    # -- sandboxes ---------------------------------------------------------------------------------------------------

    async def spawn_sandboxes(
        self,
        snapshot_tag: str,
        n: int = 1,
        per_child_netns: bool = False,
        memory_limit_mib: int | None = None,
        prewarm: bool = False,
        live_fork: bool = False,
        hugepages: bool = False,
        **fields: Any,
    ) -> list[dict[str, Any]]:
        """Fork ``n`` children, all of them or none.

        With ``partial=True`` those that come up stay; if some failed, ControllerError has status 207 and its body both
        lists, ``sandboxes`` and ``failed``.
        """
        asked = {"per_child_netns": per_child_netns, "memory_limit_mib": memory_limit_mib, "prewarm": prewarm}
        asked |= {"live_fork": live_fork, "hugepages": hugepages}
        body = {"snapshot_tag": snapshot_tag, "n": n, **{key: value for key, value in asked.items() if value}, **fields}
        return await self._call("POST", "/v1/sandboxes", body)

    async def fork_sandbox(self, sandbox_id: str, n: int = 1, **fields: Any) -> list[dict[str, Any]]:
        """Fork ``n`` children of a running sandbox, all from the same instant; failures as in ``spawn_sandboxes``."""
        return await self._call("POST", f"/v1/sandboxes/{_quote(sandbox_id)}/fork", {"n": n, **fields})

    async def list_sandboxes(self, labels: list[str] | None = None, status: str | None = None) -> list[dict[str, Any]]:
        """All running sandboxes, or those with every label (name=value, or name) and a status."""
        params: dict[str, Any] = {"label": labels or [], **({"status": status} if status else {})}
        return await self._call("GET", "/v1/sandboxes", params=params)

    async def get_sandbox(self, sandbox_id: str) -> dict[str, Any]:
        """One sandbox."""
        return await self._call("GET", f"/v1/sandboxes/{_quote(sandbox_id)}")

    async def update_sandbox(self, sandbox_id: str, **fields: Any) -> dict[str, Any]:
        """Change a running sandbox's limits and details; the fields are those of ``spawn_sandboxes``."""
        return await self._call("PATCH", f"/v1/sandboxes/{_quote(sandbox_id)}", fields)

    async def kill_sandbox(self, sandbox_id: str) -> None:
        """End a sandbox."""
        await self._call("DELETE", f"/v1/sandboxes/{_quote(sandbox_id)}")

    async def branch_sandbox(
        self,
        sandbox_id: str,
        tag: str | None = None,
        diff: bool = False,
        measure_diff: bool = False,
        mode: str | None = None,
        wait: bool = True,
        parent_tag: str | None = None,
        labels: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """Capture a running sandbox into a new snapshot; ``mode`` is full, diff or live."""
        fields: dict[str, Any] = {"tag": tag, "diff": diff or None, "measure_diff": measure_diff or None, "mode": mode}
        fields |= {"parent_tag": parent_tag, "labels": labels}
        body = {key: value for key, value in fields.items() if value is not None}
        return await self._call("POST", f"/v1/sandboxes/{_quote(sandbox_id)}/branch", {**body, "wait": wait})

    async def exec_command(
        self, sandbox_id: str, args: list[str], timeout_secs: float = 30, **fields: Any
    ) -> dict[str, Any]:
        """Run a command to its end."""
        body = {"args": args, "timeout_secs": timeout_secs, **fields}
        return await self._call("POST", f"/v1/sandboxes/{_quote(sandbox_id)}/exec", body, lasts=timeout_secs)

    async def exec_stream(
        self, sandbox_id: str, args: list[str], on_output: OnOutput, timeout_secs: float = 30, **fields: Any
    ) -> dict[str, Any]:
        """Run a command; ``on_output("stdout" or "stderr", bytes)`` gets its output as it comes."""
        body = {"args": args, "timeout_secs": timeout_secs, **fields}
        path = f"/v1/sandboxes/{_quote(sandbox_id)}/exec"

        def on_event(event: dict[str, Any]) -> None:
            on_output(event["event"], base64.b64decode(event["data"]))

        return await self._events(path, body, on_event)

    async def eval_code(self, sandbox_id: str, code: str, timeout_secs: float = 30) -> dict[str, Any]:
        """Evaluate code in the warm interpreter."""
        body = {"code": code, "timeout_secs": timeout_secs}
        return await self._call("POST", f"/v1/sandboxes/{_quote(sandbox_id)}/eval", body, lasts=timeout_secs)

    async def prepare_sandbox(
        self,
        sandbox_id: str,
        env: dict[str, str] | None = None,
        workdir: str | None = None,
        user: str | None = None,
        args: list[str] | None = None,
        lang: str | None = None,
        timeout_secs: float = 60,
    ) -> None:
        """Change what children of its branches begin with: defaults of commands, a warm runtime (``args``)."""
        given = {"env": env, "workdir": workdir, "user": user, "args": args, "lang": lang}
        body = {key: value for key, value in given.items() if value is not None}
        path = f"/v1/sandboxes/{_quote(sandbox_id)}/prepare"
        await self._call("POST", path, {**body, "timeout_secs": timeout_secs}, lasts=timeout_secs)

    async def ping_sandbox(self, sandbox_id: str) -> dict[str, Any]:
        """Ask the agent in the guest."""
        return await self._call("POST", f"/v1/sandboxes/{_quote(sandbox_id)}/ping", {})

    async def sandbox_stats(self, sandbox_id: str) -> dict[str, Any]:
        """Memory and CPU time a sandbox costs the host."""
        return await self._call("GET", f"/v1/sandboxes/{_quote(sandbox_id)}/stats")

    # -- workspaces --------------------------------------------------------------------------------------------------

    async def list_workspaces(self) -> list[dict[str, Any]]:
        """All workspaces."""
        return await self._call("GET", "/v1/workspaces")

    async def create_workspace(self, name: str, snapshot_tag: str, **fields: Any) -> dict[str, Any]:
        """Fork one child under a name; ``fields`` as for ``spawn_sandboxes``."""
        return await self._call("POST", "/v1/workspaces", {"name": name, "snapshot_tag": snapshot_tag, **fields})

    async def get_workspace(self, name: str) -> dict[str, Any]:
        """One workspace."""
        return await self._call("GET", f"/v1/workspaces/{_quote(name)}")

    async def suspend_workspace(self, name: str, diff: bool = False) -> dict[str, Any]:
        """Capture its state, then end its sandbox."""
        return await self._call("POST", f"/v1/workspaces/{_quote(name)}/suspend", {"diff": diff})

    async def resume_workspace(self, name: str) -> dict[str, Any]:
        """Bring it back."""
        return await self._call("POST", f"/v1/workspaces/{_quote(name)}/resume", {})

    async def delete_workspace(self, name: str) -> None:
        """End its sandbox and remove its states."""
        await self._call("DELETE", f"/v1/workspaces/{_quote(name)}")

    # -- below -------------------------------------------------------------------------------------------------------

    async def _call(
        self, method: str, path: str, body: Any = None, params: dict[str, str] | None = None, lasts: float = 0.0
    ) -> Any:
        """One request; ``lasts`` is a time limit the daemon keeps, so the connection has to outlast it."""
        timeout = None if self.timeout is None else max(self.timeout, lasts + GRACE)
        try:
            response = await self._client.request(method, path, json=body, params=params, timeout=timeout)
        except httpx.TransportError as error:
            raise _unreachable(error, self.base_url) from error
        if response.status_code == 207 or not response.is_success:
            raise _error(response)
        return response.json() if response.content else None

    async def _transfer(self, path: str, body: Any, on_progress: OnTransfer | None) -> Any:
        def on_event(event: dict[str, Any]) -> None:
            if on_progress is not None:
                on_progress(event["step"], event["fraction"], event.get("total_bytes"))

        return await self._events(path, body, on_event)

    async def _stream(self, path: str, body: Any, on_progress: OnProgress | None) -> Any:
        def on_event(event: dict[str, Any]) -> None:
            if on_progress is not None:
                on_progress(event["step"], event["fraction"])

        return await self._events(path, body, on_event)

    async def _channel(self, path: str, params: dict[str, str] | None = None) -> Channel:
        request = self._client.build_request("GET", path, params=params, headers=upgrade_headers())
        return channel_of(await self._bytes(request))

    async def _bytes(self, request: httpx.Request) -> httpx.Response:
        try:
            response = await self._client.send(request, stream=True)
        except httpx.TransportError as error:
            raise _unreachable(error, self.base_url) from error
        if response.status_code != 101 and not response.is_success:
            await response.aread()
            raise _error(response)
        return response

    async def _events(
        self,
        path: str,
        body: Any,
        on_event: Callable[[dict[str, Any]], None],
        method: str = "POST",
        params: dict[str, str] | None = None,
    ) -> Any:
        last: dict[str, Any] = {}
        try:
            async with self._client.stream(
                method, path, json=body, params=params, headers={"accept": NDJSON}, timeout=None
            ) as response:
                if not response.is_success:
                    await response.aread()
                    raise _error(response)
                async for line in response.aiter_lines():
                    event = json.loads(line)
                    if event["event"] in ("result", "error"):
                        last = event  # nothing follows, but the stream is read to its end
                    else:
                        on_event(event)
        except httpx.TransportError as error:
            raise _unreachable(error, self.base_url) from error
        if "result" in last:
            return last["result"]
        last = last or {"status": 502, "error": "the answer ended early", "code": "transfer_error"}
        raise ControllerError(last["status"], last, path)


def _quote(part: str) -> str:
    from urllib.parse import quote

    return quote(part, safe="")


def _error(response: httpx.Response) -> ControllerError:
    try:
        body = response.json()
    except ValueError:
        body = response.text
    return ControllerError(response.status_code, body, str(response.url))


def _unreachable(error: httpx.TransportError, url: str) -> ControllerError:
    """No answer at all: status 503 if nobody is there, 504 if it took too long."""
    late = isinstance(error, httpx.TimeoutException)
    words = f"{url} did not answer in time" if late else f"{url} cannot be reached: {error or type(error).__name__}"
    body = {"error": words, "code": "daemon_unreachable", "hint": "is it running? start it with: forkd daemon"}
    return ControllerError(504 if late else 503, body, url)
