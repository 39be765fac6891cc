"""Which sandbox a verb works on: by id, by the address or namespace `forkd ls` shows, or a child of a tag."""

from __future__ import annotations

from typing import Any

import click
import pytest
from click.testing import CliRunner

from forkd.cli import from_image, ping, quickstart, run, snapshot
from forkd.cli.target import target
from forkd.sdk.async_controller import AsyncController
from forkd.specs.errors import SandboxNotFound


class Daemon(AsyncController):
    async def list_sandboxes(self, *rest: Any, **fields: Any) -> list[dict[str, Any]]:
        return [
            {"id": "sb-1", "guest_addr": "127.0.0.1:1", "netns": None},
            {"id": "sb-2", "guest_addr": "127.0.0.1:2", "netns": "forkd-2"},
        ]


async def chosen(*args: str) -> str:
    context = ping.command.make_context("ping", list(args))
    with context:
        async with Daemon("http://x") as controller, target(controller, context.params["sandbox_id"], None) as found:
            return found


async def test_a_sandbox_is_found_by_what_the_list_says_of_it() -> None:
    assert await chosen("--sandbox", "any") == "any"
    assert await chosen("--target", "127.0.0.1:2") == "sb-2"
    assert await chosen("--child", "forkd-2") == "sb-2"
    with pytest.raises(SandboxNotFound, match=r"10\.42\.0\.2:8888"):
        await chosen("--target", "10.42.0.2:8888")


@pytest.mark.parametrize("args", [[], ["--sandbox", "a", "--tag", "b"], ["--target", "a", "--child", "b"]])
def test_a_sandbox_is_named_in_one_way(args: list[str]) -> None:
    done = CliRunner().invoke(ping.command, args)
    assert (done.exit_code, "give --tag TAG" in done.output) == (2, True)


def test_options_that_others_scripts_give_are_taken() -> None:
    given: list[tuple[click.Command, list[str]]] = [
        (snapshot.command, ["--tag", "x", "--rootfs", "y", "--keep-workdir"]),
        (from_image.command, ["x", "--tag", "x", "--tap", "tap0"]),
        (run.command, ["--image", "x", "--tap", "tap0", "true"]),
        (quickstart.command, ["-y"]),
    ]
    for command, args in given:
        assert command.make_context("x", [*args]).params.get("tap") == ("tap0" if "--tap" in args else None)
