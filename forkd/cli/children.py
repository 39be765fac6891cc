"""What a child shall be: the options `fork` and `spawn` share, collected into the fields of a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

OPTIONS = (
    click.option(
        "--spawn", type=click.Choice(["auto", "template", "restore"]), help="Clone children, or restore them."
    ),
    click.option("--template", "spawn", flag_value="template", help="The same as --spawn template."),
    click.option("--network", type=click.Choice(["none", "nat", "allowlist"]), default="none", show_default=True),
    click.option("--allow", multiple=True, help="What an allowlist lets through: address, CIDR, name or *.name."),
    click.option("--per-child-netns", is_flag=True, help="Run each VMM in a network namespace of its own."),
    click.option("--live-fork", is_flag=True, help="Hold the memory image in a sealed memfd."),
    click.option("--hugepages", is_flag=True, help="Back that memfd with 2 MiB pages; needs --live-fork."),
    click.option("--memory-limit-mib", type=click.IntRange(1), help="Memory limit of each child."),
    click.option("--cpu-limit", type=click.FloatRange(0.01), help="CPUs each child may use, 0.5 for half of one."),
    click.option("--pids-limit", type=click.IntRange(1), help="Threads the VMM of each child may have."),
    click.option("--io-limit-mibps", type=click.IntRange(1), help="MiB a second each child may read, and write."),
    click.option("--best-effort", is_flag=True, help="A limit this host cannot apply is a warning, not an error."),
)


def child_options(function: F) -> F:
    """Add them; the command takes them as ``**fields`` and gives them to ``checked``."""
    for option in reversed(OPTIONS):
        function = option(function)
    return function


def checked(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, if they go together."""
    if fields["hugepages"] and not fields["live_fork"]:
        raise click.UsageError("--hugepages needs --live-fork")
    return {**fields, "allow": list(fields["allow"])}
