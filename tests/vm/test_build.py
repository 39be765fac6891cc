"""`forkd build`: steps run in a VM, each stays as a snapshot, and the parents we ship are what they promise."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from forkd.sdk.async_controller import AsyncController
from forkd.sdk.building import build_recipe
from forkd.sdk.dockerfile import read_dockerfile
from forkd.sdk.recipe import read_recipe
from forkd.specs.errors import BuildFailed
from tests.oci_support import Registry, running_registry
from tests.vm.test_images import busybox_layers

pytestmark = pytest.mark.vm
PARENTS = Path(__file__).parents[2] / "recipes/parents"
CHILDREN = 10


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture
async def steps(controller: AsyncController) -> AsyncIterator[list[str]]:
    """Tags of steps, to be removed after the test."""
    tags: list[str] = []
    yield tags
    there = {row["tag"] for row in await controller.list_snapshots()}
    for tag in reversed(tags):
        if tag in there:
            await controller.delete_snapshot(tag, force=True)


async def test_a_dockerfile_becomes_a_parent_and_only_what_changed_is_built_again(
    controller: AsyncController,
    registry: Registry,
    data_dir: Path,
    tmp_path: Path,
    fresh_tag: Callable[[str], str],
    steps: list[str],
) -> None:
    registry.push_image("base", busybox_layers(data_dir), config={"Env": ["PATH=/bin"], "WorkingDir": "/srv"})
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "greet.sh").write_text("#!/bin/sh\necho hello from $WHO in $(pwd) as $(id -u)\n")
    (tmp_path / "app" / "greet.sh").chmod(0o755)
    text = [
        f"FROM {registry.reference('base')}",
        "ENV WHO=docker PATH=$PATH:/srv/app",
        "WORKDIR app",
        "COPY app .",
        "RUN echo built > /srv/app/mark",
        "USER agent",
    ]
    path = tmp_path / "Dockerfile"
    path.write_text("\n".join(text))

    async def build(tag: str) -> tuple[str, list[bool]]:
        from dataclasses import replace

        recipe = replace(read_dockerfile(path), mem_mib=128, size_mib=128)
        built = await build_recipe(controller, recipe, tag, lambda step, fraction: None)
        steps.extend(row["tag"] for row in built["steps"] if row["tag"] not in steps)
        child = (await controller.spawn_sandboxes(tag))[0]["id"]
        done = await controller.exec_command(child, ["sh", "-c", "greet.sh; cat mark"])
        await controller.kill_sandbox(child)
        return done["stdout"] + done["stderr"], [row["cached"] for row in built["steps"]]

    said, cached = await build(fresh_tag("docker"))
    assert said == "hello from docker in /srv/app as 1000\nbuilt\n"
    assert cached == [False] * 6
    assert await build(fresh_tag("again")) == (said, [True] * 6)
    text[4] = "RUN echo otherwise > /srv/app/mark"
    path.write_text("\n".join(text))
    said, cached = await build(fresh_tag("changed"))
    assert said.endswith("otherwise\n")
    assert cached == [True] * 4 + [False] * 2

    path.write_text(f"FROM {registry.reference('base')}\nRUN echo about to fail; exit 7")
    with pytest.raises(BuildFailed, match="ended with 7: about to fail"):
        await build(fresh_tag("failing"))
    assert await controller.list_sandboxes() == []


async def built(
    controller: AsyncController, name: str, fresh_tag: Callable[[str], str], **values: Any
) -> list[dict[str, Any]]:
    """Ten children of a parent we ship."""
    tag = fresh_tag(name)
    await build_recipe(controller, read_recipe(PARENTS / f"{name}.toml"), tag, lambda step, fraction: None)
    return await controller.spawn_sandboxes(tag, CHILDREN)


async def each(children: list[dict[str, Any]], ask: Callable[[str], Any]) -> list[Any]:
    answers: list[Any] = [None] * len(children)

    async def one(index: int) -> None:
        answers[index] = await ask(children[index]["id"])

    async with trio.open_nursery() as nursery:
        for index in range(len(children)):
            nursery.start_soon(one, index)
    return answers


async def test_python_numpy_is_built_and_forked(controller: AsyncController, fresh_tag: Callable[[str], str]) -> None:
    children = await built(controller, "python-numpy", fresh_tag)
    answers = await each(children, lambda id: controller.eval_code(id, "numpy.arange(4).sum(), numpy.random.rand()"))
    assert len({answer["result"] for answer in answers}) == CHILDREN, "each has its own random numbers"
    assert all("6" in answer["result"] for answer in answers)


async def test_nodejs_answers_evals_as_json_and_siblings_differ(
    controller: AsyncController, fresh_tag: Callable[[str], str]
) -> None:
    children = await built(controller, "nodejs", fresh_tag)
    code = "({list: [1, 2].map(x => x * 2), random: Math.random(), id: crypto.randomUUID(), env: process.version})"
    answers = await each(children, lambda id: controller.eval_code(id, code, 60))
    values = [answer["result_json"] for answer in answers]
    assert all(value["list"] == [2, 4] for value in values), answers
    assert len({value["random"] for value in values}) == len({value["id"] for value in values}) == CHILDREN
    child = children[0]["id"]
    await controller.eval_code(child, "globalThis.kept = {a: 1}")
    assert (await controller.eval_code(child, "console.log('hi'); kept"))["result_json"] == {"a": 1}
    failed = await controller.eval_code(child, "undefined.x")
    assert "TypeError" in failed["error"] and failed["exit_code"] == 1


async def test_postgres_is_ready_in_every_child_and_each_has_its_own_data(
    controller: AsyncController, fresh_tag: Callable[[str], str]
) -> None:
    children = await built(controller, "postgres-fixture", fresh_tag)

    async def write_and_read(id: str) -> str:
        sql = f"CREATE TABLE t AS SELECT '{id}' AS who, generate_series(1, 100) AS n; SELECT DISTINCT who FROM t"
        done = await controller.exec_command(id, ["psql", "-Atqc", sql], 120)
        assert done["exit_code"] == 0, done
        return str(done["stdout"])

    answers = await each(children, write_and_read)
    assert [answer.strip() for answer in answers] == [child["id"] for child in children]


async def test_the_verb_builds_a_recipe_and_says_what_it_did(
    forkd: Any, controller: AsyncController, tmp_path: Path, fresh_tag: Callable[[str], str], steps: list[str]
) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        'image = "debian:bookworm"\npackages = ["python3-numpy"]\nmem_mib = 256\n'
        '[[step]]\neval = "warm = 42"\n[[step]]\nwrite = "text"\nto = "/opt/new/file"\n'
        "[ready]\neval = \"warm, open('/opt/new/file').read()\"\nexpect = \"(42, 'text')\"\n"
    )
    tag = fresh_tag("verb")
    done = forkd("build", str(recipe), "--tag", tag, "--json", timeout=600)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    steps.extend(row["tag"] for row in told["steps"])
    assert [row["step"] for row in told["steps"]] == ["from debian:bookworm", "eval warm = 42", "copy to /opt/new/file"]
    child = (await controller.spawn_sandboxes(steps[1]))[0]["id"]
    assert (await controller.eval_code(child, "warm"))["result"] == "42", "a step can be forked too"
    taken = forkd("build", str(recipe), "--tag", tag, timeout=600)
    assert (taken.returncode, "exists already" in taken.stderr) == (1, True)
    assert forkd("build", str(recipe), "--tag", tag, "--replace", timeout=600).returncode == 0
    assert forkd("build", str(tmp_path), "--tag", tag).returncode == 2
