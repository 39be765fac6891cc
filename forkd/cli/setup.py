"""`forkd setup`: fetch the guest kernel; with --host, prepare the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from forkd.cli.common import fail, json_option, print_json, progress_bar, with_controller


@click.command("setup")
@click.option("--host", "host_too", is_flag=True, help="Change kernel settings of this host, as doctor's hints say.")
@click.option("--undo", is_flag=True, help="With --host: put the settings back as they were.")
@click.option("--hugepages", is_flag=True, help="With --host: also reserve 512 huge pages.")
@click.option("--yes", "-y", is_flag=True, help="With --host: do not ask.")
@json_option
def command(host_too: bool, undo: bool, hugepages: bool, yes: bool, as_json: bool) -> None:
    """Fetch the guest kernel by package name and make the initramfs.

    Nothing is installed on the host; everything goes below the data directory. With --host it prepares the host
    instead: it lists what it would change, asks, and remembers what was before for --undo.
    """
    if not host_too and (undo or hugepages or yes):
        raise click.UsageError("--undo, --hugepages and --yes need --host")
    if host_too:
        prepare_host(undo, hugepages, yes, as_json)
        return
    with progress_bar() as progress:
        facts: dict[str, Any] = with_controller(lambda controller: controller.setup(progress))
    if as_json:
        print_json(facts)
        return
    click.echo(f"kernel       {facts['kernel_version']}  {facts['kernel']}")
    click.echo(f"engine       {facts['engine']}")
    click.echo(f"accelerator  {facts['accelerator']} ({facts['why']})")


def prepare_host(undo: bool, hugepages: bool, yes: bool, as_json: bool) -> None:
    """Plan, ask, do."""
    from forkd import hostsetup
    from forkd.linux.hostprobe import HostProbe
    from forkd.specs.errors import ForkdError

    root = Path("/")
    try:
        if undo:
            back = hostsetup.undo(root)
            for key, value in back.items():
                click.echo(f"{key} is {value} again", err=True)
            if not back:
                click.echo("nothing to undo", err=True)
            if as_json:
                print_json({"restored": back})
            return
        plan = hostsetup.plan(HostProbe(root), hugepages=hugepages)
        for change in plan.changes:
            click.echo(f"{change.key}: {change.old} → {change.new}  ({change.why})", err=True)
        if plan.changes and (yes or click.confirm("Change these?", err=True)):
            hostsetup.apply(root, plan.changes)
            done = True
        else:
            done = False
            if not plan.changes:
                click.echo("no setting needs to change", err=True)
        if plan.packages:
            click.echo(f"missing packages, for you to install: apt-get install {' '.join(plan.packages)}", err=True)
    except ForkdError as error:
        fail(error)
    if as_json:
        rows = [{"key": change.key, "old": change.old, "new": change.new} for change in plan.changes]
        print_json({"changed": rows if done else [], "proposed": rows, "packages": list(plan.packages)})
