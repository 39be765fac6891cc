"""`forkd workspace`: named sandboxes that are suspended and resumed."""

from __future__ import annotations

from typing import Any

import click

from forkd.cli.common import json_option, print_json, with_controller


@click.group("workspace")
def command() -> None:
    """Named sandboxes whose state outlives them; needs a daemon."""


@command.command("create")
@click.argument("name")
@click.option("--snapshot", "tag", required=True, help="Snapshot to fork from; it is never changed.")
@click.option("--per-child-netns", is_flag=True, help="Give it a network of its own.")
@click.option("--memory-limit-mib", type=click.IntRange(1), help="Memory limit.")
@json_option
def create(name: str, tag: str, per_child_netns: bool, memory_limit_mib: int | None, as_json: bool) -> None:
    """Fork one child of a snapshot under NAME."""
    fields = {"per_child_netns": per_child_netns, "memory_limit_mib": memory_limit_mib}
    show([with_controller(lambda controller: controller.create_workspace(name, tag, **fields))], as_json, one=True)


@command.command("suspend")
@click.argument("name")
@click.option("--diff", is_flag=True, help="Write only what changed since it was resumed.")
@json_option
def suspend(name: str, diff: bool, as_json: bool) -> None:
    """Capture its state, then end its sandbox."""
    show([with_controller(lambda controller: controller.suspend_workspace(name, diff))], as_json, one=True)


@command.command("resume")
@click.argument("name")
@json_option
def resume(name: str, as_json: bool) -> None:
    """Bring it back from its last state."""
    show([with_controller(lambda controller: controller.resume_workspace(name))], as_json, one=True)


@command.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List workspaces."""
    rows: list[dict[str, Any]] = with_controller(lambda controller: controller.list_workspaces())
    show(rows, as_json)
    if not rows:
        click.echo("no workspaces", err=True)


@command.command("delete")
@click.argument("name")
@json_option
def delete(name: str, as_json: bool) -> None:
    """End its sandbox and remove its states; the snapshot it came from stays."""
    with_controller(lambda controller: controller.delete_workspace(name))
    if as_json:
        print_json({"name": name, "deleted": True})
    else:
        click.echo(f"✓ {name}")


def show(rows: list[dict[str, Any]], as_json: bool, one: bool = False) -> None:
    """One line each, or JSON."""
    if as_json:
        print_json(rows[0] if one else rows)
        return
    for row in rows:
        state, live = row["current_state_tag"] or "-", row["live_sandbox_id"] or "-"
        line = f"{row['name']:24} {row['status']:10} source={row['source_snapshot_tag']} state={state} live={live}"
        click.echo(line)
        if row.get("reason"):
            click.echo(f"  {row['reason']}", err=True)
