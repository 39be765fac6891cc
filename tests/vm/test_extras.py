"""E2B's shape on real machines, and the agent frameworks' own objects where they are installed."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from forkd import Controller, ControllerError
from forkd.extras.autogen import BlockResult, run_blocks
from forkd.extras.e2b import CommandExitException, Sandbox, TimeoutException
from forkd.extras.openai_agents import fork_into
from forkd.extras.toolbox import Toolbox

pytestmark = pytest.mark.vm
PARENT = "python-numpy"


@pytest.fixture
def controller(daemon: Any) -> Iterator[Controller]:  # type: ignore[override]
    with Controller(daemon.url) as made:
        yield made


def test_code_in_the_shape_of_e2b_runs(controller: Controller) -> None:
    with Sandbox.create(PARENT, metadata={"who": "me"}, envs={"NAME": "forkd"}, controller=controller) as sandbox:
        heard: list[tuple[str, str]] = []
        ran = sandbox.commands.run(
            "echo $NAME $MORE; echo oops >&2; pwd",
            envs={"MORE": "é"},
            cwd="/tmp",
            on_stdout=lambda text: heard.append(("out", text)),
            on_stderr=lambda text: heard.append(("err", text)),
        )
        assert (ran.stdout, ran.stderr, ran.exit_code) == ("forkd é\n/tmp\n", "oops\n", 0)
        assert "".join(text for kind, text in heard if kind == "out") == ran.stdout
        assert "".join(text for kind, text in heard if kind == "err") == ran.stderr
        with pytest.raises(CommandExitException) as failed:
            sandbox.commands.run("echo half; exit 4")
        assert (failed.value.exit_code, failed.value.stdout) == (4, "half\n")
        with pytest.raises(TimeoutException):
            sandbox.commands.run("sleep 600", timeout=1)

        reader = sandbox.commands.run("read x; echo got $x", background=True, stdin=True)
        assert reader.pid in [row["pid"] for row in sandbox.commands.list()]
        reader.send_stdin("word\n")
        assert reader.wait().stdout == "got word\n"
        sleeper = sandbox.commands.run("sleep 600", background=True, timeout=0)
        assert sleeper.kill() is True
        with pytest.raises(CommandExitException) as killed:
            sleeper.wait()
        assert (killed.value.exit_code, sleeper.kill()) == (137, False)

        assert sandbox.files.write("/tmp/deep/er/a.txt", "héllo").size == 6
        assert sandbox.files.read("/tmp/deep/er/a.txt") == "héllo"
        assert sandbox.files.read("/tmp/deep/er/a.txt", format="bytes") == "héllo".encode()
        assert [(entry.name, entry.type) for entry in sandbox.files.list("/tmp/deep")] == [("er", "dir")]
        assert sandbox.files.rename("/tmp/deep/er/a.txt", "/tmp/deep/b.txt").name == "b.txt"
        assert (sandbox.files.make_dir("/tmp/deep/c/d"), sandbox.files.make_dir("/tmp/deep/c/d")) == (True, False)
        sandbox.files.remove("/tmp/deep")
        assert not sandbox.files.exists("/tmp/deep/b.txt")

        assert [row["id"] for row in Sandbox.list({"who": "me"}, controller=controller)] == [sandbox.sandbox_id]
        assert Sandbox.list({"who": "you"}, controller=controller) == []
        same = Sandbox.connect(sandbox.sandbox_id, controller=controller)
        assert same.get_info()["timeout_secs"] == 300
        same.set_timeout(1000)
        assert same.get_info()["timeout_secs"] == 1000
        assert same.is_running()
    assert not sandbox.is_running()
    assert sandbox.kill() is False
    with pytest.raises(ControllerError):
        Sandbox.connect(sandbox.sandbox_id, controller=controller)


def test_tools_run_and_a_handoff_goes_on_in_a_fork(controller: Controller) -> None:
    with Sandbox.create(PARENT, controller=controller) as sandbox:
        first, second = Toolbox(sandbox), Toolbox(sandbox)
        assert first.write_file("/srv/note", "from the first") == "wrote 14 bytes to /srv/note"
        fork_into(second, first)
        assert second.read_file("/srv/note") == "from the first"
        second.write_file("/srv/note", "changed")
        assert first.read_file("/srv/note") == "from the first"
        assert second.run_python("print(6 * 7)") == "42\n"
        assert second.run_command("exit 3") == "[exit code 3]"
        assert "No such file" in second.read_file("/nowhere")
        blocks = [("python", "print('one')"), ("sh", "echo two; exit 5"), ("sh", "echo three")]
        assert run_blocks(second, blocks) == BlockResult(5, "one\ntwo\n")
        second.sandbox.kill()


def needs(module: str) -> pytest.MarkDecorator:
    """For tests with a framework itself: run them where it is installed."""
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed")


@needs("langchain_core")
def test_langchain_calls_the_tools(controller: Controller) -> None:
    from forkd.extras.langchain import sandbox_tools

    with Sandbox.create(PARENT, controller=controller) as sandbox:
        tools = {tool.name: tool for tool in sandbox_tools(sandbox)}
        assert tools["run_python"].invoke({"code": "print(1 + 1)"}) == "2\n"
        assert set(tools["write_file"].args) == {"path", "content"}


@needs("crewai")
def test_crewai_calls_the_tools(controller: Controller) -> None:
    from forkd.extras.crewai import sandbox_tools

    with Sandbox.create(PARENT, controller=controller) as sandbox:
        tools = {tool.name: tool for tool in sandbox_tools(sandbox)}
        assert tools["run_command"].run(command="echo hi") == "hi\n"


@needs("autogen_core")
def test_autogen_executes_code_and_restarts_at_the_beginning(controller: Controller) -> None:
    from autogen_core import CancellationToken
    from autogen_core.code_executor import CodeBlock

    from forkd.extras.autogen import code_executor

    async def use(box: Toolbox) -> list[Any]:
        executor = code_executor(box)
        await executor.start()
        blocks = [CodeBlock(language="sh", code="echo x >> /srv/log; wc -l < /srv/log")]
        runs = [await executor.execute_code_blocks(blocks, CancellationToken()) for _ in range(2)]
        await executor.restart()
        runs.append(await executor.execute_code_blocks(blocks, CancellationToken()))
        await executor.stop()
        return runs

    box = Toolbox(Sandbox.create(PARENT, controller=controller))
    runs = asyncio.run(use(box))
    box.sandbox.kill()
    assert [(run.exit_code, run.output.strip()) for run in runs] == [(0, "1"), (0, "2"), (0, "1")]
    assert controller.list_sandboxes() == []


@needs("agents")
def test_openai_agents_gets_function_tools_and_a_forking_handoff(controller: Controller) -> None:
    from agents import Agent, RunContextWrapper

    from forkd.extras.openai_agents import forking_handoff, sandbox_tools

    with Sandbox.create(PARENT, controller=controller) as sandbox:
        source, box = Toolbox(sandbox), Toolbox(sandbox)
        agent = Agent(name="tester", tools=sandbox_tools(box))
        assert [tool.name for tool in agent.tools] == ["run_command", "run_python", "read_file", "write_file"]
        handoff = forking_handoff(agent, box, source)
        assert asyncio.run(handoff.on_invoke_handoff(RunContextWrapper(None), "")) is agent
        assert box.sandbox.sandbox_id != sandbox.sandbox_id
        box.sandbox.kill()
