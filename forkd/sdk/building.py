"""Builds a recipe: every step runs in a VM and stays as a snapshot, so the next build begins where this one differs."""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Awaitable
from string import Template
from typing import Any

import trio

from forkd.sdk.async_controller import AsyncController, OnProgress
from forkd.sdk.errors import ControllerError
from forkd.sdk.recipe import Check, Defaults, Evaluate, Files, Recipe, Run, Step, Warm, read_file, step_key
from forkd.specs.errors import BuildFailed, TagTaken

FORMAT = "1"
TAIL = 2000
POLL_SECONDS = 0.25


async def build_recipe(
    controller: AsyncController,
    recipe: Recipe,
    tag: str,
    on_progress: OnProgress,
    *,
    replace: bool = False,
    cache: bool = True,
) -> dict[str, Any]:
    """Build ``recipe`` as the snapshot ``tag``; the answer has ``steps``: title, tag and whether it was cached.

    Steps stay as snapshots named ``build-…``, each of which can be forked; the result stands alone. Raises BuildFailed
    with the step's own last words, TagTaken before anything is done, ControllerError for what the daemon refuses.
    """
    rows = await controller.list_snapshots()
    there, known = {row["tag"] for row in rows}, {row["tag"] for row in rows if row["bootable"]}
    if not replace and tag in there:
        raise TagTaken(f"snapshot {tag!r} exists already", hint="replace it with --replace, or give another --tag")
    disk = await controller.build_rootfs(
        recipe.image, on_progress, extras=list(recipe.packages), size_mib=recipe.size_mib
    )
    version = (await controller.version())["version"]
    facts = (FORMAT, version, disk["digest"], recipe.mem_mib, recipe.vcpus)
    keys = [hashlib.sha256(repr(facts).encode()).hexdigest()]
    for step in recipe.steps:
        keys.append(step_key(keys[-1], step))
    tags = [f"build-{key[:20]}" for key in keys]
    begin = max((index for index, name in enumerate(tags) if name in known), default=None) if cache else None
    in_the_way = {row["tag"] for row in rows if row["status"] == "failed"} | (set() if cache else known)
    for name in reversed([name for name in tags if name in in_the_way]):
        await _gone(controller.delete_snapshot(name, force=True))
    if begin is None:
        size = {"size_mib": recipe.size_mib, "mem_size_mib": recipe.mem_mib, "vcpus": recipe.vcpus}
        image = {"image": recipe.image, "extras": list(recipe.packages)}
        await controller.create_snapshot(tags[0], on_progress, **image, **size)
    await _run_steps(controller, recipe, tags, begin or 0, on_progress)
    if recipe.ready is not None:
        await _check_child(controller, tags[-1], recipe.ready, on_progress)
    if tag in there:
        await _gone(controller.delete_snapshot(tag, force=True))
    on_progress(f"writing {tag}", None)
    info = await controller.compact_snapshot(tags[-1], tag)
    titles = [f"from {recipe.image}", *(step.title() for step in recipe.steps)]
    rows = [
        {"step": title, "tag": name, "cached": begin is not None and index <= begin}
        for index, (title, name) in enumerate(zip(titles, tags, strict=True))
    ]
    return {"tag": tag, "dir": info["dir"], "steps": rows}


async def _run_steps(
    controller: AsyncController, recipe: Recipe, tags: list[str], begin: int, on_progress: OnProgress
) -> None:
    """The steps that are not cached, in one sandbox, a snapshot after each."""
    if begin == len(recipe.steps):
        return
    sandbox = (await controller.spawn_sandboxes(tags[begin]))[0]["id"]
    try:
        for number, step in enumerate(recipe.steps[begin:], begin + 1):
            on_progress(f"step {number} of {len(recipe.steps)}: {step.title()}", None)
            await _do(controller, sandbox, step)
            await controller.branch_sandbox(sandbox, tag=tags[number], mode="diff")
    finally:
        with trio.CancelScope(shield=True):
            await _gone(controller.kill_sandbox(sandbox))


async def _gone(removal: Awaitable[None]) -> None:
    """Whatever the end of something says, except that it had ended: then what it ended of is the news."""
    try:
        await removal
    except ControllerError as error:
        if error.status != 404:
            raise


async def _do(controller: AsyncController, sandbox: str, step: Step) -> None:
    if isinstance(step, Run):
        done = await controller.exec_command(sandbox, list(step.args), step.timeout_secs)
        if done["exit_code"] != 0:
            said = done["error"] or (done["stdout"] + done["stderr"])[-TAIL:].strip()
            raise BuildFailed(f"{step.title()} ended with {done['exit_code']}: {said}")
    elif isinstance(step, Files):
        paths = await _absolute(controller, sandbox, [path for _, path, _ in step.pairs])
        for (source, _, mode), path in zip(step.pairs, paths, strict=True):
            data = await trio.to_thread.run_sync(read_file, source)
            await controller.write_file(sandbox, path, data, mode=mode, make_parents=True)
    elif isinstance(step, Evaluate):
        answer = await controller.eval_code(sandbox, step.code, step.timeout_secs)
        if answer["error"] is not None:
            raise BuildFailed(f"{step.title()} failed: {answer['error']}")
    elif isinstance(step, Warm):
        await controller.prepare_sandbox(sandbox, args=list(step.args), lang=step.lang, timeout_secs=step.timeout_secs)
    else:
        await _set(controller, sandbox, step)


async def _set(controller: AsyncController, sandbox: str, step: Defaults) -> None:
    env, workdir, user = step.env, step.workdir, step.user
    if step.expand:
        there = await _variables(controller, sandbox, [*env.values(), workdir or "", user or ""])
        env = {name: Template(value).safe_substitute(there) for name, value in env.items()}
        workdir = workdir and Template(workdir).safe_substitute(there)
        user = user and Template(user).safe_substitute(there)
        if workdir is not None:
            (workdir,) = await _absolute(controller, sandbox, [workdir])
            await controller.make_directory(sandbox, workdir, parents=True)
    await controller.prepare_sandbox(sandbox, env=env, workdir=workdir, user=user)


async def _absolute(controller: AsyncController, sandbox: str, paths: list[str]) -> list[str]:
    """Guest paths as commands there would take them; where they begin, only the guest knows: the image may say it."""
    if all(path.startswith("/") for path in paths):
        return paths
    done = await controller.exec_command(sandbox, ["pwd"])
    if done["exit_code"] != 0:
        raise BuildFailed(f"where {paths[0]} is cannot be had: {done['error'] or done['stderr'][-TAIL:]}")
    here = done["stdout"].removesuffix("\n")
    return [posixpath.normpath(posixpath.join(here, path)) for path in paths]


async def _variables(controller: AsyncController, sandbox: str, texts: list[str]) -> dict[str, str]:
    """The guest's values of all variables the texts name."""
    names = sorted({name for text in texts for name in re.findall(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)", text)})
    if not names:
        return {}
    script = "printf '%s\\0' " + " ".join(f'"${name}"' for name in names)
    done = await controller.exec_command(sandbox, ["sh", "-c", script])
    if done["exit_code"] != 0:
        raise BuildFailed(f"the values of {', '.join(names)} cannot be had: {done['error'] or done['stderr'][-TAIL:]}")
    return dict(zip(names, done["stdout"].split("\0"), strict=False))


async def _check_child(controller: AsyncController, tag: str, check: Check, on_progress: OnProgress) -> None:
    """Fork a child and ask it until it is ready: what is promised is about children, so a child is asked."""
    on_progress("asking a child whether it is ready", None)
    sandbox = (await controller.spawn_sandboxes(tag))[0]["id"]
    last = ""
    try:
        with trio.move_on_after(check.timeout_secs):
            while True:
                last = await _asked(controller, sandbox, check)
                if not last:
                    return
                await trio.sleep(POLL_SECONDS)
        raise BuildFailed(f"a child was not ready after {check.timeout_secs:g} s: {last[-TAIL:]}")
    finally:
        with trio.CancelScope(shield=True):
            await _gone(controller.kill_sandbox(sandbox))


async def _asked(controller: AsyncController, sandbox: str, check: Check) -> str:
    """What is still missing; nothing if it is ready."""
    if check.run is not None:
        done = await controller.exec_command(sandbox, list(check.run), check.timeout_secs)
        if done["exit_code"] != 0:
            return (
                f"{check.run[-1]} ended with {done['exit_code']}: {done['stdout']}{done['stderr']}{done['error'] or ''}"
            )
        right = check.expect is None or done["stdout"].strip() == str(check.expect).strip()
        return "" if right else f"{check.run[-1]} said {done['stdout'].strip()!r}, not {check.expect!r}"
    assert check.eval is not None
    answer = await controller.eval_code(sandbox, check.eval, check.timeout_secs)
    if answer["error"] is not None:
        return str(answer["error"])
    value = answer["result"] if answer["result"] is not None else answer["result_json"]
    return "" if check.expect is None or value == check.expect else f"{check.eval} is {value!r}, not {check.expect!r}"
