"""A sandbox as AutoGen's ``CodeExecutor``."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from forkd.extras.e2b import Sandbox
from forkd.extras.toolbox import Toolbox, framework

LANGUAGES = {"python": "python3", "python3": "python3", "py": "python3", "sh": "sh", "bash": "bash", "shell": "sh"}
SCRIPT = "/tmp/autogen-block"


@dataclass(frozen=True, slots=True)
class BlockResult:
    """How a run of code blocks ended."""

    exit_code: int
    output: str


def run_blocks(box: Toolbox, blocks: list[tuple[str, str]]) -> BlockResult:
    """Run ``(language, code)`` blocks in order, until one fails."""
    said: list[str] = []
    for number, (language, code) in enumerate(blocks):
        interpreter = LANGUAGES.get(language.lower())
        if interpreter is None:
            known = ", ".join(sorted(LANGUAGES))
            return BlockResult(1, "".join([*said, f"{language!r} is no language of this executor: {known}\n"]))
        path = f"{SCRIPT}-{number}"
        box.sandbox.files.write(path, code)
        status, output = box.run(f"{interpreter} {path}")
        said.append(output)
        if status != 0:
            return BlockResult(status, "".join(said))
    return BlockResult(0, "".join(said))


def code_executor(sandbox: Sandbox | Toolbox) -> Any:
    """A ``CodeExecutor`` that runs Python and shell blocks; ``restart`` goes back to the state it began with."""
    library = framework("autogen_core.code_executor", "autogen-core")
    box = sandbox if isinstance(sandbox, Toolbox) else Toolbox(sandbox)

    class ForkdCodeExecutor(library.CodeExecutor):  # type: ignore[name-defined,misc]
        """Runs code blocks in a forkd sandbox."""

        component_type = "code_executor"
        _kept: Sandbox | None = None

        async def execute_code_blocks(self, code_blocks: list[Any], cancellation_token: Any) -> Any:
            """Run the blocks in order, until one fails."""
            blocks = [(block.language, block.code) for block in code_blocks]
            future = asyncio.ensure_future(asyncio.to_thread(run_blocks, box, blocks))
            cancellation_token.link_future(future)
            done = await future
            return library.CodeResult(exit_code=done.exit_code, output=done.output)

        async def start(self) -> None:
            """Keep an untouched fork to go back to."""
            self._kept = (await asyncio.to_thread(box.sandbox.fork, 1))[0]

        async def stop(self) -> None:
            """End that fork, if there is one; the sandbox is its owner's to end."""
            kept, self._kept = self._kept, None
            if kept is not None:
                await asyncio.to_thread(kept.kill)

        async def restart(self) -> None:
            """End the sandbox and go on in a fork of the state it began with."""
            if self._kept is None:
                raise RuntimeError("the executor was not started: nothing is kept to go back to")
            used, box.sandbox = box.sandbox, (await asyncio.to_thread(self._kept.fork, 1))[0]
            await asyncio.to_thread(used.kill)

    return ForkdCodeExecutor()
