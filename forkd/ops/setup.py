"""Set-up: have a guest kernel and an initramfs ready."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forkd.provision import KernelFiles, add_kernel, ensure_kernel
from forkd.runtime import Progress, Runtime


async def kernel_files(runtime: Runtime, progress: Progress, given: Path | None = None) -> KernelFiles:
    """The kernel new parents boot: the one given, the one the settings name, or Debian's. Raises KernelMissing."""
    if (kernel := given or runtime.settings.kernel) is not None:
        return await add_kernel(runtime.settings.data_dir, kernel, None, progress)
    return await ensure_kernel(runtime.settings.data_dir, progress)


async def setup(runtime: Runtime, progress: Progress, given: Path | None = None) -> dict[str, Any]:
    """Make everything ready that can be made ready before the first image, and say what there is."""
    kernel = await kernel_files(runtime, progress, given)
    info = await runtime.engine().describe()
    return {
        "kernel": str(kernel.vmlinuz),
        "initrd": str(kernel.initrd),
        "kernel_digest": kernel.digest,
        "kernel_version": kernel.version,
        "engine": f"{info.platform.engine} {info.platform.engine_version}",
        "accelerator": info.platform.accelerator,
        "why": info.why,
    }
