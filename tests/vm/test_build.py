"""`forkd build`: steps run in a VM, and each stays as a snapshot."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forkd.sdk.async_controller import AsyncController
from forkd.sdk.building import build_recipe
from forkd.sdk.dockerfile import read_dockerfile
from forkd.specs.errors import BuildFailed
from tests.oci_support import Registry, running_registry
from tests.vm.test_images import busybox_layers

pytestmark = pytest.mark.vm


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
