"""Prewarm: capture a new sandbox and throw that away, so that its first branch is as quick as the later ones."""

from __future__ import annotations

import trio

from forkd.ops.branch import quickest_mode
from forkd.ops.capture import no_step
from forkd.runtime import Runtime
from forkd.sandbox import Sandbox
from forkd.specs.errors import ForkdError
from forkd.store.capture import StageSink
from forkd.store.files import remove_tree


async def prewarm(runtime: Runtime, sandbox: Sandbox) -> None:
    """Capture ``sandbox`` into its own slot and remove that; what fails is said in its warnings and does no harm.

    A later delta is against the snapshot the sandbox came from, as ever: prewarming resets nothing.
    """
    assert sandbox.source is not None
    manifest = sandbox.source.manifest
    scratch = sandbox.slot.directory / "prewarm"
    try:
        scratch.mkdir()
        mode = await quickest_mode(runtime, sandbox)
        async with sandbox.capturing:
            await mode.capture(sandbox.machine, StageSink(scratch, manifest.hardware.mem_mib << 20), no_step)
    except (ForkdError, OSError) as error:
        sandbox.info.warnings.append(f"not prewarmed: {error}")
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(remove_tree, scratch)
