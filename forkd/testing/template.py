"""The contract of engines with templates: a cloned machine keeps every promise of a restored one, and some more."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from forkd.specs.engine import Engine, Machine, MachineTemplate, Slot, TemplateEngine
from forkd.specs.errors import LaunchFailed
from forkd.testing.engine import DEADLINE, SECRET, EngineContract, Saved, linked, processes_in


class TemplateContract(EngineContract):
    """Every test of the engine contract with a clone as the machine, and what only templates promise."""

    @pytest.fixture
    async def template(self, engine: Engine, saved: Saved, tmp_path: Path) -> AsyncIterator[MachineTemplate]:
        """A template whose source is gone already."""
        assert isinstance(engine, TemplateEngine)
        directory = tmp_path / "template"
        directory.mkdir()
        slot = Slot("sb-template", directory)
        machine = await engine.restore(saved.spec, slot)
        try:
            async with linked(machine, saved.sync) as link:
                await link.eval("warm = True", timeout=DEADLINE)
                template = await engine.freeze(machine, slot, resume=False)
        finally:
            await machine.kill()
        yield template
        await template.close()

    @pytest.fixture
    async def machine(self, template: MachineTemplate, slot: Slot) -> AsyncIterator[Machine]:
        """A cloned machine, running."""
        machine = await template.clone(slot)
        yield machine
        await machine.kill()

    async def test_clones_remember_what_the_template_knew_and_nothing_of_each_other(
        self, template: MachineTemplate, saved: Saved, tmp_path: Path
    ) -> None:
        machines = []
        try:
            for number in range(3):
                machines.append(await template.clone(_slot(tmp_path, number)))
            for number, machine in enumerate(machines):
                async with linked(machine, saved.sync) as link:
                    code = f"before = (secret, warm, globals().get('own')); own = {number}; before"
                    answer = await link.eval(code, timeout=DEADLINE)
                    assert answer.result == repr((SECRET, True, None))
        finally:
            for machine in machines:
                await machine.kill()

    async def test_a_clone_lives_on_without_its_template(
        self, template: MachineTemplate, machine: Machine, saved: Saved, tmp_path: Path
    ) -> None:
        await template.close()
        async with linked(machine, saved.sync) as link:
            assert (await link.eval("secret", timeout=DEADLINE)).result == repr(SECRET)
        with pytest.raises(LaunchFailed):
            await template.clone(_slot(tmp_path, 0))

    async def test_a_clone_works_in_its_slot(self, machine: Machine, slot: Slot) -> None:
        assert processes_in(slot.directory) == [machine.pid]

    async def test_a_clone_can_be_a_template_again(
        self, engine: Engine, machine: Machine, slot: Slot, saved: Saved, tmp_path: Path
    ) -> None:
        assert isinstance(engine, TemplateEngine)
        async with linked(machine, saved.sync) as link:
            await link.eval("generation = 2", timeout=DEADLINE)
            second = await engine.freeze(machine, slot, resume=True)
            grandchild = await second.clone(_slot(tmp_path, 0))
            await second.close()
            try:
                async with linked(grandchild, saved.sync) as other:
                    assert (await other.eval("(secret, generation)", timeout=DEADLINE)).result == repr((SECRET, 2))
            finally:
                await grandchild.kill()
            assert (await link.eval("generation", timeout=DEADLINE)).result == "2"

    async def test_a_cancelled_clone_leaves_no_process(self, template: MachineTemplate, tmp_path: Path) -> None:
        for turn in range(6):
            slot = _slot(tmp_path, turn)
            machine: Machine | None = None
            with trio.move_on_after(0.002 * turn):
                machine = await template.clone(slot)
            if machine is not None:
                await machine.kill()
            assert processes_in(slot.directory) == []
        assert os.path.exists(f"/proc/{template.pid}")


def _slot(directory: Path, number: int) -> Slot:
    made = directory / f"slot-{number}"
    made.mkdir()
    return Slot(f"sb-{number}", made)
