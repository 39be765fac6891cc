"""Fifty live branches under load: each is of one instant, and nothing in the source notices."""

from __future__ import annotations

import ast
from collections.abc import Callable

import pytest

from forkd.sdk.async_controller import AsyncController

pytestmark = [pytest.mark.vm, pytest.mark.slow]
PARENT = "python-numpy"
Tags = Callable[[str], str]

STAMP = """
import threading
pages = numpy.zeros((16384, 512), dtype=numpy.int64)
go = True
def stamp():
    count = 0
    while True:
        count += 1
        for page in range(16384):
            if not go:
                return
            pages[page, 0] = count
thread = threading.Thread(target=stamp, daemon=True)
thread.start()
"""
CUTS = """
go = False
thread.join()
seen = pages[:, 0].tolist()
([a - b for a, b in zip(seen, seen[1:]) if a != b], seen[0])
"""
CONNECT = """
import socket
server = socket.create_server(('127.0.0.1', 0))
near = socket.create_connection(server.getsockname())
far, _ = server.accept()
"""


async def value(controller: AsyncController, sandbox_id: str, code: str) -> str:
    answer = await controller.eval_code(sandbox_id, code, 240)
    assert answer["error"] is None, answer
    return str(answer["result"])


async def test_fifty_branches_of_a_guest_that_stamps_64_mib_have_one_cut_each(
    controller: AsyncController, fresh_tag: Tags
) -> None:
    """In the child the stamping stops where the branch caught it, or a little later: one drop, by one, and no page
    from after it. (It must stop at once: a round that went on to its end would cover up what is wrong.)
    """
    (source,) = await controller.spawn_sandboxes(PARENT, 1)
    await value(controller, source["id"], STAMP)
    last = 0
    for turn in range(50):
        tag = fresh_tag(f"cut{turn}")
        info = await controller.branch_sandbox(source["id"], tag=tag, mode="live")
        assert info["changed_pages"] >= 16384 or turn < 2
        (child,) = await controller.spawn_sandboxes(tag, 1)
        drops, count = ast.literal_eval(await value(controller, child["id"], CUTS))
        assert drops in ([], [1]), (turn, drops)
        assert count >= last
        last = count
        await controller.kill_sandbox(child["id"])
        await controller.delete_snapshot(tag)


async def test_a_tcp_connection_and_the_agent_link_survive_fifty_live_branches(
    controller: AsyncController, fresh_tag: Tags
) -> None:
    (source,) = await controller.spawn_sandboxes(PARENT, 1)
    await value(controller, source["id"], CONNECT)
    for turn in range(50):
        tag = fresh_tag(f"tcp{turn}")
        await controller.branch_sandbox(source["id"], tag=tag, mode="live")
        got = await value(controller, source["id"], f"near.sendall(b'{turn:04}'); far.recv(4).decode()")
        assert got == f"'{turn:04}'"
        await controller.delete_snapshot(tag)
