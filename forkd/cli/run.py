"""`forkd run`: one command in a fresh child of an image."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from typing import TYPE_CHECKING, Any

import click

from forkd.cli.common import cache_option, json_option, local_reference, progress_bar, tap_option, with_controller
from forkd.cli.exec import finish, run_in
from forkd.cli.target import target

if TYPE_CHECKING:
    from forkd.sdk.async_controller import AsyncController


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option("--image", required=True, help="debian:SUITE, or the path of a directory or tar file.")
@click.option("--extra", "extras", multiple=True, help="Package to add; repeatable.")
@cache_option
@click.option("--kernel", envvar="FORKD_KERNEL", help="Kernel to boot instead of the one `forkd setup` fetches.")
@tap_option
@click.option("--timeout-secs", type=click.FloatRange(0, min_open=True), default=60.0, show_default=True)
@json_option
@click.argument("args", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
    image: str,
    extras: tuple[str, ...],
    kernel: str | None,
    tap: str | None,
    timeout_secs: float,
    as_json: bool,
    args: tuple[str, ...],
) -> None:
    """Run a command in a fresh child of IMAGE and exit with its code.

    The first run builds and warms the image and keeps it as a snapshot; the next ones only fork, until the image, the
    kernel or forkd's agent is another. To go without asking a registry each time, name the image with its digest.
    """
    image = local_reference(image)
    kernel = os.path.abspath(kernel) if kernel else None

    async def work(controller: AsyncController) -> dict[str, Any]:
        with progress_bar() as progress:
            boot = await controller.setup(progress, kernel)
            disk = await controller.build_rootfs(image, progress, extras=list(extras))
            tag = run_tag(image, disk["digest"], boot["kernel_digest"], os.path.basename(boot["initrd"]))
            if tag not in {row["tag"] for row in await controller.list_snapshots() if row["bootable"]}:
                fields = {"image": image, "extras": list(extras), "kernel": kernel, "tap": tap}
                await controller.create_snapshot(tag, progress, reuse=True, **fields)
        async with target(controller, None, tag) as chosen:
            return await run_in(controller, chosen, list(args), timeout_secs, {}, as_json)

    sys.exit(finish(with_controller(work), as_json))


def run_tag(image: str, *facts: str) -> str:
    """The tag an image's snapshot is kept under: readable, and another for another disk, kernel or initramfs.

    The initramfs has the agent in it, and its name says which.
    """
    slug = re.sub(r"[^A-Za-z0-9]+", "-", image).strip("-")[:40]
    key = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:12]
    return f"run-{slug}-{key}"
