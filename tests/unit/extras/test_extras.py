"""Extras work without the frameworks they are for, and say which package is missing."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from forkd.extras import autogen, crewai, langchain, openai_agents
from forkd.extras.autogen import BlockResult, run_blocks
from forkd.extras.e2b import CommandExitException, CommandResult, Sandbox, TimeoutException
from forkd.extras.toolbox import OUTPUT_LIMIT, Toolbox, shortened
from forkd.sdk.errors import ControllerError

FRAMEWORKS = {
    "langchain_core": (langchain.sandbox_tools, "langchain-core"),
    "crewai": (crewai.sandbox_tools, "crewai"),
    "agents": (openai_agents.sandbox_tools, "openai-agents"),
    "autogen_core": (autogen.code_executor, "autogen-core"),
}


class Outputs:
    """A sandbox that answers every command from a table and keeps files in a dict."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.kept: dict[str, Any] = {}
        self.commands = self.files = self

    def run(self, command: str, on_stdout: Callable[[str], None], **options: Any) -> CommandResult:
        answer = self.answers[command]
        if isinstance(answer, Exception):
            raise answer
        on_stdout(answer)
        return CommandResult(answer, "", 0)

    def write(self, path: str, data: str) -> None:
        self.kept[path] = data

    def read(self, path: str, format: str) -> bytes:
        raise ControllerError(404, {"error": f"{path} is not there", "code": self.answers[path]}, "")


def box(answers: dict[str, Any]) -> Toolbox:
    sandbox: Any = Outputs(answers)
    return Toolbox(sandbox)


@pytest.mark.parametrize("module", sorted(FRAMEWORKS))
def test_a_framework_that_is_not_there_is_named_with_its_package(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, package = FRAMEWORKS[module]
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)

    class Missing:
        def find_spec(self, name: str, *rest: Any) -> None:
            if name.partition(".")[0] == module:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(ImportError, match=f"pip install {package}"):
        make(box({}))


def test_importing_the_extras_imports_no_framework() -> None:
    names = ["autogen", "crewai", "e2b", "langchain", "openai_agents", "toolbox"]
    code = f"import sys\nfor name in {names}: __import__('forkd.extras.' + name)\n"
    code += f"print([name for name in {sorted(FRAMEWORKS)} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_model_is_told_how_a_command_failed() -> None:
    failed = CommandExitException(CommandResult("", "no", 3))
    tools = box({"fine": "yes\n", "bad": failed, "slow": TimeoutException("late")})
    assert tools.run_command("fine") == "yes\n"
    assert tools.run_command("bad") == "[exit code 3]"
    assert tools.run_command("slow") == "[killed after 60 s]\n[exit code 124]"


def test_a_model_is_told_of_a_missing_file_but_not_of_a_missing_sandbox() -> None:
    tools = box({"/a": "guest_file_not_found", "/b": "sandbox_not_found"})
    assert tools.read_file("/a") == "[/a is not there]"
    with pytest.raises(ControllerError):
        tools.read_file("/b")


def test_long_output_is_cut_in_the_middle() -> None:
    assert shortened("x" * OUTPUT_LIMIT) == "x" * OUTPUT_LIMIT
    cut = shortened("a" * OUTPUT_LIMIT + "b" * OUTPUT_LIMIT)
    assert cut.startswith("aaa") and cut.endswith("bbb") and f"[{OUTPUT_LIMIT} characters left out]" in cut


def test_code_blocks_run_in_order_until_one_fails() -> None:
    failed = CommandExitException(CommandResult("", "", 2))
    tools = box({"python3 /tmp/autogen-block-0": "one\n", "sh /tmp/autogen-block-1": failed})
    assert run_blocks(tools, [("python", "print('one')"), ("sh", "exit 2"), ("sh", "never")]) == BlockResult(2, "one\n")
    assert run_blocks(tools, [("cobol", "")]).exit_code == 1


def test_every_tool_has_the_docstring_and_types_a_model_is_shown() -> None:
    for function in box({}).functions():
        assert function.__doc__
        assert function.__annotations__["return"] == "str"
    assert importlib.import_module("forkd.extras").__doc__


class Calls:
    """A controller that notes what it is asked, and whose commands print and fail."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def fork(self, source: str, n: int, **fields: Any) -> list[dict[str, Any]]:
        self.asked.append((source, n, fields))
        return [{"id": f"child-{index}"} for index in range(n)]

    def start_process(self, sandbox_id: str, **fields: Any) -> dict[str, Any]:
        self.asked.append((sandbox_id, fields))
        return {"pid": 7}

    def follow_process(self, sandbox_id: str, pid: int, on_output: Callable[[str, bytes], None]) -> dict[str, Any]:
        on_output("stdout", b"out")
        return {"reason": "not_found", "exit_code": 126, "error": "the argument list is too long", "lost": 0}


def test_a_fork_takes_its_count_and_time_as_e2b_spells_them() -> None:
    calls: Any = Calls()
    sandbox = Sandbox({"id": "sb"}, calls)
    assert [child.sandbox_id for child in sandbox.fork(count=2, timeout=60)] == ["child-0", "child-1"]
    assert len(sandbox.fork(3)) == 3
    assert calls.asked == [("sb", 2, {"all_children": {"timeout_secs": 60}}), ("sb", 3, {})]


def test_a_command_takes_its_arguments_in_the_order_of_e2b() -> None:
    calls: Any = Calls()
    heard: list[str] = []
    with pytest.raises(CommandExitException, match="the argument list is too long"):
        Sandbox({"id": "sb"}, calls).commands.run("ls", None, {"A": "b"}, "me", "/tmp", heard.append, None, True, 5)
    assert heard == ["out"]
    asked = {"shell": "ls", "env": {"A": "b"}, "user": "me", "cwd": "/tmp", "stdin": True, "timeout_secs": 5}
    asked["attach"] = True  # nothing is lost before the output is followed
    assert calls.asked == [("sb", asked)]
    assert Toolbox(Sandbox({"id": "sb"}, calls)).run("ls") == (126, "out[the argument list is too long]\n")
