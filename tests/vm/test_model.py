"""Random sequences of fork, write, branch, rollback, promote, kill, prune against a model of files and values."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forkd.sdk.async_controller import AsyncController

pytestmark = pytest.mark.vm
PARENT = "python-numpy"
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["fork", "write", "write", "branch", "rollback", "promote", "kill", "prune"]),
        st.integers(0, 7),
        st.integers(0, 99),
    ),
    min_size=3,
    max_size=10,
)
State = tuple[int, int]
MOST = 4


class World:
    """The sandboxes as they should be: what each holds in a variable and in a file, its snapshots, its source."""

    def __init__(self, controller: AsyncController) -> None:
        self.controller = controller
        self.states: dict[str, State] = {}
        self.tags: dict[str, list[tuple[str, State]]] = {}
        self.sources: dict[str, str] = {}
        self.label = secrets.token_hex(4)

    async def begin(self) -> None:
        made = await self.controller.spawn_sandboxes(PARENT, 1)
        await self.write(made[0]["id"], 0)

    async def write(self, one: str, value: int) -> None:
        await self.controller.eval_code(one, f"value = {value}")
        await self.controller.write_file(one, "/root/value", str(value + 1).encode())
        self.states[one] = (value, value + 1)

    async def step(self, kind: str, which: int, value: int) -> None:
        if not self.states:
            await self.begin()
        one = sorted(self.states)[which % len(self.states)]
        if kind == "write":
            await self.write(one, value)
        elif kind == "fork" and len(self.states) < MOST:
            made = (await self.controller.fork(one, 1))[0]["id"]
            self.states[made], self.sources[made] = self.states[one], one
        elif kind == "branch":
            tag = f"t-model-{secrets.token_hex(4)}"
            await self.controller.branch_sandbox(one, tag, mode="live", labels={"model": self.label})
            self.tags.setdefault(one, []).append((tag, self.states[one]))
        elif kind == "rollback" and self.tags.get(one):
            tag, state = self.tags[one][value % len(self.tags[one])]
            await self.controller.rollback(one, tag)
            self.states[one] = state
        elif kind == "promote" and self.sources.get(one) in self.states:
            source = self.sources[one]
            await self.controller.promote(one)
            self.states[source] = self.states.pop(one)
        elif kind == "kill":
            await self.controller.kill_sandbox(one)
            del self.states[one]

        elif kind == "prune":
            await self.prune(value % 3)

    async def prune(self, keep_last: int) -> None:
        """What is pruned can be gone back to no more; what stays can be used, and what runs runs."""
        rule = {"labels": [f"model={self.label}"], "keep_last": keep_last}
        done = await self.controller.prune_snapshots([rule], dry_run=False)
        gone = {row["tag"] for row in done["rows"] if row["action"] == "remove"}
        known = {tag for tags in self.tags.values() for tag, _ in tags}
        listed = {row["tag"] for row in await self.controller.list_snapshots() if row["bootable"]}
        assert gone <= known and listed & known == known - gone
        for tag in known - gone:
            await self.controller.snapshot_info(tag)  # refuses a chain with a link missing
        self.tags = {one: [pair for pair in tags if pair[0] not in gone] for one, tags in self.tags.items()}

    async def compare(self) -> None:
        assert {row["id"] for row in await self.controller.list_sandboxes()} == set(self.states)
        for one, (value, written) in self.states.items():
            assert (await self.controller.eval_code(one, "value"))["result"] == str(value)
            assert await self.controller.read_file(one, "/root/value") == str(written).encode()

    async def end(self) -> None:
        for row in await self.controller.list_sandboxes():
            await self.controller.kill_sandbox(row["id"])
        rows = await self.controller.list_snapshots()
        for row in rows:
            if row["tag"].startswith("t-model-"):
                await self.controller.delete_snapshot(row["tag"], force=True)


def run_sequences(data_dir: Path, count: int) -> int:
    """Run ``count`` sequences; how many steps they had."""
    from forkd.sdk.inprocess import hosted_app

    done = 0

    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(STEPS)
    def sequences(steps: list[tuple[str, int, int]]) -> None:
        async def main() -> None:
            nonlocal done
            with trio.fail_after(300):
                async with (
                    hosted_app() as transport,
                    AsyncController("http://forkd", timeout=None, transport=transport) as controller,
                ):
                    world = World(controller)
                    try:
                        await world.begin()
                        for kind, which, value in steps:
                            await world.step(kind, which, value)
                            done += 1
                        await world.compare()
                    finally:
                        with trio.CancelScope(shield=True):
                            await world.end()

        trio.run(main)

    sequences()
    return done


@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_sandboxes_never_diverge_from_the_model(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, count: int, record_property: Any
) -> None:
    monkeypatch.setenv("FORKD_DATA_DIR", str(data_dir))
    record_property("steps", run_sequences(data_dir, count))
