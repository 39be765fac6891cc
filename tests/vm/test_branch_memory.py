"""Every branch mode on every way to provide RAM; measured deltas; prewarming; growth and disk use of chains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forkd.linux.memfd import huge_page_pool
from forkd.sdk.async_controller import AsyncController

pytestmark = pytest.mark.vm
PARENT = "python-numpy"
Tags = Callable[[str], str]


async def value(controller: AsyncController, sandbox_id: str, code: str) -> str:
    answer = await controller.eval_code(sandbox_id, code, 120)
    assert answer["error"] is None, answer
    return str(answer["result"])


@pytest.fixture
def huge_pages() -> Iterator[None]:
    """Room for a huge-page image of the parent and for two machines that map it."""
    knob = Path("/proc/sys/vm/nr_hugepages")
    before = knob.read_text()
    try:
        knob.write_text(str(int(before) + 3 * 256 + 8))
    except OSError:
        pytest.skip("huge pages cannot be reserved here")
    if huge_page_pool().available < 3 * 256:
        knob.write_text(before)
        pytest.skip("the host has no memory for huge pages")
    yield
    knob.write_text(before)


async def branch_and_inherit(controller: AsyncController, fresh_tag: Tags, source: str, **fields: object) -> None:
    await value(controller, source, "import os, hashlib; blob = os.urandom(5 << 20); 1")
    digest = await value(controller, source, "hashlib.sha256(blob).hexdigest()")
    for mode in ("full", "diff", "live"):
        tag = fresh_tag(mode)
        await controller.branch_sandbox(source, tag=tag, mode=mode)
        (child,) = await controller.spawn_sandboxes(tag, 1)
        assert await value(controller, child["id"], "hashlib.sha256(blob).hexdigest()") == digest
        await controller.kill_sandbox(child["id"])
    assert await value(controller, source, "1 + 1") == "2"


async def test_every_mode_works_on_a_memfd(controller: AsyncController, fresh_tag: Tags) -> None:
    (source,) = await controller.spawn_sandboxes(PARENT, 1, live_fork=True)
    assert source["memory_backend"] == "memfd"
    await branch_and_inherit(controller, fresh_tag, source["id"])


async def test_a_sandbox_on_a_memfd_can_be_branched_after_the_memfd_was_let_go(
    controller: AsyncController, fresh_tag: Tags
) -> None:
    (source,) = await controller.spawn_sandboxes(PARENT, 1, live_fork=True)
    base = PARENT
    for turn in range(5):  # more images than the backend remembers
        (child,) = await controller.spawn_sandboxes(base, 1, live_fork=True)
        base = fresh_tag(f"layer{turn}")
        await controller.branch_sandbox(child["id"], tag=base, mode="diff")
        await controller.kill_sandbox(child["id"])
    (last,) = await controller.spawn_sandboxes(base, 1, live_fork=True)
    await branch_and_inherit(controller, fresh_tag, source["id"])
    assert await value(controller, last["id"], "1 + 1") == "2"


@pytest.mark.root
@pytest.mark.usefixtures("huge_pages")
async def test_every_mode_works_on_huge_pages(controller: AsyncController, fresh_tag: Tags) -> None:
    (source,) = await controller.spawn_sandboxes(PARENT, 1, live_fork=True, hugepages=True)
    assert source["warnings"] == []
    assert "KernelPageSize:     2048 kB" in Path(f"/proc/{source['pid']}/smaps").read_text()
    await branch_and_inherit(controller, fresh_tag, source["id"])


async def test_without_huge_pages_ordinary_ones_do_and_it_is_said(controller: AsyncController) -> None:
    if huge_page_pool().available:
        pytest.skip("this host has huge pages")
    (source,) = await controller.spawn_sandboxes(PARENT, 1, live_fork=True, hugepages=True)
    assert any("huge pages" in warning for warning in source["warnings"])
    assert await value(controller, source["id"], "1 + 1") == "2"


async def test_a_full_branch_can_say_what_a_delta_would_have_cost(controller: AsyncController, fresh_tag: Tags) -> None:
    (source,) = await controller.spawn_sandboxes(PARENT, 1)
    await value(controller, source["id"], "import os; blob = os.urandom(8 << 20); 1")
    info = await controller.branch_sandbox(source["id"], tag=fresh_tag("measured"), measure_diff=True)
    assert info.get("parent_tag") is None
    assert 8 << 20 <= info["diff_physical_bytes"] <= 24 << 20
    assert info["diff_logical_bytes"] == info["mem_mib"] << 20
    assert info["diff_ms"] >= 0
    assert sorted(path.name for path in Path(info["dir"]).iterdir()) == ["memory.bin", "snapshot.json", "vmstate"]


async def test_a_prewarmed_child_is_like_any_other(
    controller: AsyncController, fresh_tag: Tags, data_dir: Path
) -> None:
    children = await controller.spawn_sandboxes(PARENT, 3, prewarm=True)
    assert [child["warnings"] for child in children] == [[], [], []]
    assert not list((data_dir / "run").glob("*/*/prewarm"))
    source = children[0]["id"]
    await value(controller, source, "import os; kept = os.urandom(16).hex()")
    # What was changed before and after the prewarming is all in the first delta.
    await branch_and_inherit(controller, fresh_tag, source)


async def test_a_chain_takes_its_base_and_its_deltas_and_no_more(controller: AsyncController, fresh_tag: Tags) -> None:
    tag, own, changed = PARENT, 0, 0
    for depth in range(1, 6):
        (child,) = await controller.spawn_sandboxes(tag, 1)
        await value(controller, child["id"], f"import os; layer{depth} = os.urandom(4 << 20); 1")
        tag = fresh_tag(f"depth{depth}")
        info = await controller.branch_sandbox(child["id"], tag=tag, mode="diff")
        await controller.kill_sandbox(child["id"])
        own += info["diff_physical_bytes"]
        changed += info["changed_pages"] * 4096
    info = await controller.snapshot_info(tag)
    assert info["chain_depth"] == 5
    base = (await controller.snapshot_info(PARENT))["memory_physical_bytes"]
    assert own <= changed * 1.05
    together = info["unique_bytes"] + info["shared_bytes"]
    assert abs(together - (base + own)) <= 0.05 * (base + own)
    (head,) = await controller.spawn_sandboxes(tag, 1)
    assert await value(controller, head["id"], "[len(eval(f'layer{n}')) >> 20 for n in range(1, 6)]") == str([4] * 5)
