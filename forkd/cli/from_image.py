"""`forkd from-image`: image reference to snapshot."""

from __future__ import annotations

import os

import click

from forkd.cli.common import (
    cache_option,
    json_option,
    local_reference,
    print_json,
    progress_bar,
    tap_option,
    with_controller,
)


@click.command("from-image")
@click.argument("image")
@click.option("--tag", required=True, help="Tag of the new snapshot.")
@click.option("--extra", "extras", multiple=True, help="Package to add; repeatable.")
@click.option("--size-mib", default=1536, show_default=True, help="Size of the root file system.")
@click.option("--mem-size-mib", default=512, show_default=True, help="RAM of the machine.")
@click.option("--vcpus", default=1, show_default=True, help="Virtual CPUs, 1 to 8.")
@click.option("--warmup", multiple=True, help="Python to run in the warm interpreter first; repeatable.")
@cache_option
@click.option("--kernel", envvar="FORKD_KERNEL", help="Kernel to boot instead of the one `forkd setup` fetches.")
@tap_option
@click.option("--boot-wait-secs", default=0.0, show_default=True, help="Extra seconds to let the guest settle.")
@json_option
def command(
    image: str,
    tag: str,
    extras: tuple[str, ...],
    size_mib: int,
    mem_size_mib: int,
    vcpus: int,
    warmup: tuple[str, ...],
    kernel: str | None,
    tap: str | None,
    boot_wait_secs: float,
    as_json: bool,
) -> None:
    """Build a rootfs from IMAGE, boot it, warm it and capture it as a snapshot.

    IMAGE is debian:SUITE, an image of any registry (python:3.12-slim, oci://HOST/NAME:TAG), or the path of a
    directory or tar file. An image without Python is given one, for the agent, outside its own paths.

    \b
    forkd from-image debian:bookworm --tag py --extra python3-numpy
    forkd from-image oci://localhost:5000/app:v1 --tag app
    """
    fields = {
        "image": local_reference(image),
        "extras": list(extras),
        "size_mib": size_mib,
        "mem_size_mib": mem_size_mib,
        "vcpus": vcpus,
        "warmup": list(warmup),
        "kernel": os.path.abspath(kernel) if kernel else None,
        "tap": tap,
        "boot_wait_secs": boot_wait_secs,
    }
    with progress_bar() as progress:
        info = with_controller(lambda controller: controller.create_snapshot(tag, progress, **fields))
    if as_json:
        print_json(info)
    else:
        click.echo(f"tag: {info['tag']}\ndir: {info['dir']}")
