"""`forkd wp-bench`: userfaultfd write protection on a memfd, measured."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

from forkd.cli.common import fail, json_option, print_json

if TYPE_CHECKING:
    from forkd.specs.errors import ForkdError


@click.command("wp-bench")
@click.option("--region-mib", type=click.IntRange(1, 65536), default=64, show_default=True)
@click.option(
    "--snapshot", default="/tmp/forkd-wp-bench.snapshot", show_default=True, help="File to write; removed after."
)
@json_option
def command(region_mib: int, snapshot: str, as_json: bool) -> None:
    """Write-protect a memfd, copy it while a writer changes it, and verify that the copy is of one instant."""
    from forkd.linux.userfaultfd import wp_bench

    try:
        result = dataclasses.asdict(wp_bench(region_mib, snapshot))
    except OSError as error:
        fail(_refusal(error))
    if as_json:
        print_json(result)
        return
    click.echo("forkd wp-bench")
    for key, value in result.items():
        click.echo(f"  {key:24}{value:.2f}" if isinstance(value, float) else f"  {key:24}{value}")


def _refusal(error: OSError) -> ForkdError:
    """An error about a file is about --snapshot; any other comes from userfaultfd."""
    from forkd.specs.errors import BadInput, HostNotReady

    if error.filename is not None:
        return BadInput(f"{error.filename} cannot be written: {error.strerror}", hint="give another file: --snapshot")
    hint = "run as root, or set vm.unprivileged_userfaultfd=1"
    return HostNotReady(f"userfaultfd is not to be had: {error.strerror or error}", hint=hint)
