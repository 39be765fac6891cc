"""Children that misbehave: each is held by its limits, the limit is named, and neighbours and daemon go on."""

from __future__ import annotations

import os

import pytest
import trio

from forkd.linux import cgroup
from forkd.linux.hostprobe import HostProbe
from forkd.sdk.async_controller import AsyncController
from forkd.sdk.errors import ControllerError

PARENT = "python-numpy"
LIMITS = {"memory_limit_mib": 144, "cpu_limit": 0.3, "pids_limit": 64}
pytestmark = [
    pytest.mark.vm,
    pytest.mark.skipif(
        os.geteuid() != 0 or not {"memory", "cpu", "pids"} <= set(cgroup.homes(cgroup.hierarchies(HostProbe().read))),
        reason="needs root and cgroup controllers",
    ),
]
ABUSES = {
    "fork bomb": (["python3", "-c", "import os\nwhile True: os.fork()"], "cpu_limit"),
    "cpu burn": (["python3", "-c", "while True: pass"], "cpu_limit"),
    "flood": (["yes"], "cpu_limit"),
    "disk fill": (["sh", "-c", "cat /dev/zero > /fill; cat /dev/zero > /tmp/fill"], "memory_limit_mib"),
    "allocation": (["python3", "-c", "b = []\nwhile True: b.append(b'x' * (1 << 20))"], "memory_limit_mib"),
}


async def named(controller: AsyncController, sandbox_id: str, limit: str) -> None:
    """Return once the limit is named: in the sandbox's description, or in how it ended."""
    while True:
        try:
            if limit in (await controller.get_sandbox(sandbox_id))["limits_hit"]:
                return
        except ControllerError as error:
            assert limit in str(error), error
            return
        await trio.sleep(0.1)


@pytest.mark.parametrize("what", ABUSES)
async def test_an_abuser_is_held_by_its_limit_which_is_named_and_its_neighbour_goes_on(
    controller: AsyncController, what: str
) -> None:
    command, limit = ABUSES[what]
    (abuser,) = await controller.spawn_sandboxes(PARENT, 1, **LIMITS)
    (neighbour,) = await controller.spawn_sandboxes(PARENT, 1)
    await controller.eval_code(neighbour["id"], "open('/root/kept', 'w').write('kept'); kept = 7")

    async def abuse() -> None:
        try:
            await controller.exec_command(abuser["id"], command, 600)
        except ControllerError:
            return  # it ended under the command

    async with trio.open_nursery() as nursery:
        nursery.start_soon(abuse)
        with trio.fail_after(120):
            await named(controller, abuser["id"], limit)
        for number in range(5):
            assert (await controller.eval_code(neighbour["id"], f"{number} + 1", 60))["result"] == str(number + 1)
        # what it had it has, it can be forked beside the abuser, and no limit was held against it
        kept = await controller.eval_code(neighbour["id"], "(kept, open('/root/kept').read())", 60)
        assert kept["result"] == "(7, 'kept')"
        now = await controller.get_sandbox(neighbour["id"])
        assert (now["pid"], now["status"], now["limits_hit"]) == (neighbour["pid"], "running", [])
        (other,) = await controller.fork_sandbox(neighbour["id"], 1)
        assert (await controller.eval_code(other["id"], "kept", 60))["result"] == "7"
        nursery.cancel_scope.cancel()
    alive = {row["id"] for row in await controller.list_sandboxes()}
    assert {neighbour["id"], other["id"]} <= alive
