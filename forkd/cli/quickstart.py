"""`forkd quickstart`: from nothing to forked children, with figures."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from forkd.cli.common import json_option, ms, print_json, progress_bar, table, with_controller
from forkd.cli.fork import fork_and_measure, show

if TYPE_CHECKING:
    from forkd.sdk.async_controller import AsyncController

EXPRESSION = "numpy.zeros(5).tolist()"
EXPECTED = "[0.0, 0.0, 0.0, 0.0, 0.0]"


@click.command("quickstart")
@click.option("-n", "--n", "count", type=click.IntRange(1, 1000), default=10, show_default=True)
@click.option("--image", default="debian:bookworm", show_default=True)
@click.option("--extra", "extras", multiple=True, default=("python3-numpy",), show_default=True)
@click.option("--tag", default="python-numpy", show_default=True, help="Tag under which the parent stays.")
@click.option(
    "-y",
    "--yes",
    is_flag=True,
    expose_value=False,
    help="Accepted for compatibility: nothing of the host is changed, so nothing is asked.",
)
@json_option
def command(count: int, image: str, extras: tuple[str, ...], tag: str, as_json: bool) -> None:
    """Fetch a kernel, build and warm a parent, fork children, have each answer a numpy expression."""

    async def work(controller: AsyncController) -> dict[str, Any]:
        steps: list[tuple[str, float]] = []
        with progress_bar() as progress:
            clock = time.monotonic()
            await controller.setup(progress)
            steps.append(("set-up (kernel, initramfs)", time.monotonic() - clock))
            clock = time.monotonic()
            tags = {row["tag"] for row in await controller.list_snapshots() if row["bootable"]}
            if tag not in tags:
                fields = {"image": image, "extras": list(extras)}
                await controller.create_snapshot(tag, progress, **fields)
            steps.append(("parent (build, boot, warm, capture)", time.monotonic() - clock))
        report = await fork_and_measure(controller, tag, count, EXPRESSION, 0.0, {})
        steps.append((f"fork {count} children", report["fork_ms"] / 1000))
        steps.append(("first answers from all", (report["answer_ms"] - report["fork_ms"]) / 1000))
        return {"steps": steps, "fork": report}

    result = with_controller(work)
    report = result["fork"]
    right = sum((row["answer"] or {}).get("result") == EXPECTED for row in report["children"])
    ok = right == count
    if as_json:
        print_json({**result, "ok": ok})
        sys.exit(0 if ok else 1)
    show(report)
    table(["STEP", "TIME"], [[name, ms(seconds)] for name, seconds in result["steps"]])
    if not ok:
        click.echo(f"demo failed: {right} of {count} children answered {EXPECTED}", err=True)
        sys.exit(1)
    click.echo(f"demo ok: {count} children of {tag!r} answered {EXPRESSION} in {ms(report['answer_ms'] / 1000)}")
