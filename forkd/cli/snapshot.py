"""`forkd snapshot`: boot a rootfs and capture it, or capture a running sandbox."""

from __future__ import annotations

import os
from typing import Any

import click

from forkd.cli.common import json_option, print_json, progress_bar, tap_option, with_controller


@click.command("snapshot")
@click.option("--tag", help="Tag of the new snapshot.")
@click.option("--rootfs", envvar="FORKD_ROOTFS", help="An ext4 image, as `forkd parent build` makes.")
@click.option("--from-sandbox", "sandbox_id", help="Capture this running sandbox instead; it goes on.")
@click.option("--mode", help="Capture it in this mode: full, diff, live, or one of a plugin.")
@click.option("--diff", is_flag=True, help="Write only what it changed: --mode diff.")
@click.option("--live", is_flag=True, help="Write only what it changed, while it runs on: --mode live.")
@click.option("--no-wait", is_flag=True, help="With --live: return as soon as it runs on; see `forkd images`.")
@click.option("--kernel", envvar="FORKD_KERNEL", help="Kernel to boot instead of the one `forkd setup` fetches.")
@click.option("--rw", is_flag=True, help="Accepted for compatibility: every child may write, to an overlay in its RAM.")
@click.option("--boot-wait-secs", default=0.0, show_default=True, help="Extra seconds to let the guest settle.")
@click.option("--mem-size-mib", default=512, show_default=True, help="RAM of the machine.")
@click.option("--vcpus", default=1, show_default=True, help="Virtual CPUs, 1 to 8.")
@click.option(
    "--volume",
    "volumes",
    multiple=True,
    metavar="HOST:GUEST[:ro|rw]",
    help="An ext4 image of the host, mounted in the guest at GUEST; repeatable. The image is never written: with rw, "
    "the default, each child keeps what it writes in its own RAM.",
)
@tap_option
@click.option(
    "--keep-workdir",
    is_flag=True,
    expose_value=False,
    help="Accepted for compatibility: a boot that fails says what was in its console.",
)
@click.option("--warmup", multiple=True, help="Python to run in the warm interpreter first; repeatable.")
@json_option
def command(
    tag: str | None,
    rootfs: str | None,
    sandbox_id: str | None,
    mode: str | None,
    diff: bool,
    live: bool,
    no_wait: bool,
    kernel: str | None,
    rw: bool,
    boot_wait_secs: float,
    mem_size_mib: int,
    vcpus: int,
    volumes: tuple[str, ...],
    tap: str | None,
    warmup: tuple[str, ...],
    as_json: bool,
) -> None:
    """Boot a root file system, wait until its agent is ready, capture it; or capture a running sandbox.

    \b
    forkd snapshot --tag base --rootfs ./debian-bookworm.ext4
    forkd snapshot --tag later --from-sandbox sb-… --live
    """
    if (mode is not None) + diff + live > 1:
        raise click.UsageError("--mode, --diff and --live exclude each other")
    mode = "diff" if diff else "live" if live else mode
    if sandbox_id is not None:
        if _given("rootfs"):
            raise click.UsageError("give --rootfs or --from-sandbox, not both")
        if no_wait and mode != "live":
            raise click.UsageError("--no-wait needs --live")
        info = with_controller(
            lambda controller: controller.branch_sandbox(sandbox_id, tag=tag, mode=mode, wait=not no_wait)
        )
        show(info, as_json)
        return
    if mode is not None or no_wait:
        raise click.UsageError("--mode, --diff, --live and --no-wait belong to --from-sandbox")
    if tag is None or rootfs is None:
        raise click.UsageError("give --tag and --rootfs, or --from-sandbox")
    fields = {
        "rootfs": os.path.abspath(rootfs),
        "kernel": os.path.abspath(kernel) if kernel else None,
        "rw": rw,
        "boot_wait_secs": boot_wait_secs,
        "mem_size_mib": mem_size_mib,
        "vcpus": vcpus,
        "volumes": [_volume(text) for text in volumes],
        "tap": tap,
        "warmup": list(warmup),
    }
    with progress_bar() as progress:
        info = with_controller(lambda controller: controller.create_snapshot(tag, progress, **fields))
    show(info, as_json)


def _given(name: str) -> bool:
    """Whether an option is on the command line itself; the environment holds for every command."""
    return click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def _volume(text: str) -> dict[str, Any]:
    """A volume as it is written on the command line; host paths may have colons."""
    rest, _, mode = text.rpartition(":")
    if mode not in ("ro", "rw"):
        rest, mode = text, "rw"
    host, _, guest = rest.rpartition(":")
    if not host or not guest:
        raise click.UsageError(f"--volume {text!r} is not HOST:GUEST[:ro|rw]")
    return {"host_path": os.path.abspath(host), "guest_path": guest, "read_only": mode == "ro"}


def show(info: dict[str, Any], as_json: bool) -> None:
    """What was made, and for a capture what it cost."""
    if as_json:
        print_json(info)
        return
    for key in ("tag", "dir", "parent_tag", "pause_ms", "diff_physical_bytes"):
        if key in ("tag", "dir") or (info.get("branched_from") and info.get(key) is not None):
            click.echo(f"{key}: {info[key]}")
    if info["status"] != "ready":
        click.echo(f"status: {info['status']}")
