"""`forkd snapshot`: boot a rootfs and capture it."""

from __future__ import annotations

import os

import click

from forkd.cli.common import json_option, print_json, progress_bar, with_controller


@click.command("snapshot")
@click.option("--tag", required=True, help="Tag of the new snapshot.")
@click.option("--rootfs", envvar="FORKD_ROOTFS", required=True, help="An ext4 image, as `forkd parent build` makes.")
@click.option("--kernel", envvar="FORKD_KERNEL", help="Kernel to boot instead of the one `forkd setup` fetches.")
@click.option("--rw", is_flag=True, help="Accepted for compatibility: every child may write, to an overlay in its RAM.")
@click.option("--boot-wait-secs", default=0.0, show_default=True, help="Extra seconds to let the guest settle.")
@click.option("--mem-size-mib", default=512, show_default=True, help="RAM of the machine.")
@click.option("--vcpus", default=1, show_default=True, help="Virtual CPUs, 1 to 8.")
@click.option("--warmup", multiple=True, help="Python to run in the warm interpreter first; repeatable.")
@json_option
def command(
    tag: str,
    rootfs: str,
    kernel: str | None,
    rw: bool,
    boot_wait_secs: float,
    mem_size_mib: int,
    vcpus: int,
    warmup: tuple[str, ...],
    as_json: bool,
) -> None:
    """Boot a root file system, wait until its agent is ready, capture it."""
    fields = {
        "rootfs": os.path.abspath(rootfs),
        "kernel": os.path.abspath(kernel) if kernel else None,
        "rw": rw,
        "boot_wait_secs": boot_wait_secs,
        "mem_size_mib": mem_size_mib,
        "vcpus": vcpus,
        "warmup": list(warmup),
    }
    with progress_bar() as progress:
        info = with_controller(lambda controller: controller.create_snapshot(tag, progress, **fields))
    if as_json:
        print_json(info)
    else:
        click.echo(f"tag: {info['tag']}\ndir: {info['dir']}")
