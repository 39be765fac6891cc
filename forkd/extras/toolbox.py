"""What an agent gets to use: functions with names, types and docstrings, which every framework's tools are made of."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Callable
from typing import Any

from forkd.extras.e2b import Sandbox
from forkd.extras.e2b_commands import CommandExitException, TimeoutException
from forkd.sdk.errors import ControllerError

OUTPUT_LIMIT = 20_000
"""Characters of output a model is shown: the first and the last of them."""


class Toolbox:
    """Tools on one sandbox. ``sandbox`` may be replaced, by a fork of it for example; the tools then use that one."""

    def __init__(self, sandbox: Sandbox, timeout: float = 60) -> None:
        self.sandbox = sandbox
        self.timeout = timeout

    def functions(self) -> list[Callable[..., str]]:
        """Every tool."""
        return [self.run_command, self.run_python, self.read_file, self.write_file]

    def run_command(self, command: str) -> str:
        """Run a line of shell in the sandbox. Answers its output, and its exit code if that is not 0."""
        status, said = self.run(command)
        return said if status == 0 else f"{said}[exit code {status}]"

    def run_python(self, code: str) -> str:
        """Run Python code in the sandbox as a script. Answers what it prints, or its traceback."""
        return self.run_command(f"python3 -c {shlex.quote(code)}")

    def read_file(self, path: str) -> str:
        """Read a text file of the sandbox."""
        try:
            return shortened(self.sandbox.files.read(path, format="bytes").decode(errors="replace"))
        except ControllerError as error:
            return _refused(error)

    def write_file(self, path: str, content: str) -> str:
        """Write a text file in the sandbox, making the directories it is in."""
        try:
            return f"wrote {self.sandbox.files.write(path, content).size} bytes to {path}"
        except ControllerError as error:
            return _refused(error)

    def run(self, command: str) -> tuple[int, str]:
        """Exit code and output of a line of shell, in the order it came; 124 if it took too long."""
        pieces: list[str] = []
        try:
            self.sandbox.commands.run(command, on_stdout=pieces.append, on_stderr=pieces.append, timeout=self.timeout)
            status = 0
        except CommandExitException as error:
            pieces.append(f"[{error.error}]\n" if error.error else "")
            status = error.exit_code
        except TimeoutException:
            pieces.append(f"[killed after {self.timeout:g} s]\n")
            status = 124
        return status, shortened("".join(pieces))


def shortened(text: str) -> str:
    """At most OUTPUT_LIMIT characters, and how many were left out."""
    if len(text) <= OUTPUT_LIMIT:
        return text
    half = OUTPUT_LIMIT // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


def _refused(error: ControllerError) -> str:
    """What a model is told, so that it can try something else; raises what it cannot help."""
    if error.status >= 500 or error.code == "sandbox_not_found":
        raise error
    return f"[{error}]"


def framework(module: str, package: str) -> Any:
    """An agent framework's module. Raises ImportError that names the package to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise
        raise ImportError(f"{module} is not installed: pip install {package}", name=module) from error
