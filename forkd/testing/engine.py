"""The contract of engines. It boots one real machine for each class, and restores it many times."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import trio

from forkd.guestlink import GuestLink, ResumeInfo
from forkd.linux.mapping import read_maps
from forkd.linux.process import start_time
from forkd.specs.branch import MemoryView
from forkd.specs.engine import (
    GHOST,
    IDLE_NIC,
    TEMPLATE,
    USER_NETWORK,
    VOLUMES,
    BootSpec,
    Engine,
    EngineContext,
    Machine,
    MemoryImage,
    RestoreSpec,
    Slot,
)
from forkd.specs.errors import ForkdError, LaunchFailed, MachineGone, SnapshotIncompatible
from forkd.specs.hookspecs import EngineFactory
from forkd.store.capture import StageSink
from forkd.store.digests import sparse256_file

DEADLINE = 180.0
SECRET = "the-guest-remembers"


@dataclass(frozen=True, slots=True)
class Saved:
    """A warm machine on disk."""

    spec: RestoreSpec
    sync: bytes


class EngineContract:
    """Subclass it and give the class-scoped fixtures ``engine_factory`` and ``boot_spec`` (a guest with our agent)."""

    @pytest.fixture(scope="class")
    @classmethod
    def saved(
        cls, engine_factory: EngineFactory, boot_spec: BootSpec, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Saved]:
        """Boot, have the guest remember something, save it."""
        directory = tmp_path_factory.mktemp("engine")
        yield trio.run(_boot_and_save, engine_factory(EngineContext(directory / "cache")), boot_spec, directory)

    @pytest.fixture
    def engine(self, engine_factory: EngineFactory, tmp_path: Path) -> Engine:
        """A new engine."""
        return engine_factory(EngineContext(tmp_path / "cache"))

    @pytest.fixture
    def slot(self, tmp_path: Path) -> Iterator[Slot]:
        """A slot in which no process may be left after the test."""
        directory = tmp_path / "slot"
        directory.mkdir()
        yield Slot("sb-contract", directory)
        assert processes_in(directory) == []

    @pytest.fixture
    async def machine(self, engine: Engine, saved: Saved, slot: Slot) -> AsyncIterator[Machine]:
        """A restored machine, running."""
        machine = await engine.restore(saved.spec, slot)
        yield machine
        await machine.kill()

    async def test_it_says_what_it_would_run_on_and_says_it_again(self, engine: Engine) -> None:
        info = await engine.describe()
        assert info.platform.engine == engine.name
        assert info.platform.engine_version
        assert info.capabilities <= {GHOST, TEMPLATE, IDLE_NIC, USER_NETWORK, VOLUMES}
        assert info.why
        assert await engine.describe() == info

    async def test_device_state_of_another_platform_is_refused_naming_both(self, engine: Engine) -> None:
        here = await engine.describe()
        engine.check(here.platform, here)
        for name in ("engine_version", "accelerator", "arch"):
            other = msgspec.structs.replace(here.platform, **{name: "99.0-other"})
            with pytest.raises(SnapshotIncompatible) as refused:
                engine.check(other, here)
            assert "99.0" in refused.value.message
            assert refused.value.hint

    async def test_a_restored_guest_remembers_and_its_image_stays_as_it_was(
        self, engine: Engine, saved: Saved, tmp_path: Path
    ) -> None:
        image = Path(saved.spec.memory.path)
        before = sparse256_file(image)
        for turn in range(2):
            directory = tmp_path / f"slot-{turn}"
            directory.mkdir()
            machine = await engine.restore(saved.spec, Slot(f"sb-{turn}", directory))
            try:
                async with linked(machine, saved.sync) as link:
                    assert (await link.eval("secret", timeout=DEADLINE)).result == repr(SECRET)
                    await link.eval("secret = 'changed'", timeout=DEADLINE)
            finally:
                await machine.kill()
        assert sparse256_file(image) == before

    async def test_a_paused_guest_stands_still_and_resuming_twice_is_harmless(
        self, machine: Machine, saved: Saved
    ) -> None:
        async with linked(machine, saved.sync) as link:
            await link.eval("1", timeout=DEADLINE)
            await machine.pause()
            answered = False
            with trio.move_on_after(0.5):
                await link.eval("1", timeout=DEADLINE)
                answered = True
            assert not answered
            await machine.resume()
            await machine.resume()
            assert (await link.eval("1 + 1", timeout=DEADLINE)).result == "2"

    async def test_ram_is_where_it_says_whole_and_private(self, machine: Machine, saved: Saved) -> None:
        regions = machine.ram()
        assert [region.offset for region in regions] == sorted(region.offset for region in regions)
        assert sum(region.length for region in regions) == saved.spec.memory.size
        for region in regions:
            inside = [
                mapping
                for mapping in read_maps(machine.pid)
                if mapping.start < region.address + region.length and region.address < mapping.end
            ]
            assert inside
            assert all(mapping.private for mapping in inside)

    async def test_device_state_is_saved_without_ram(self, machine: Machine) -> None:
        await machine.pause()
        state = await machine.save_devices()
        await machine.resume()
        assert 0 < len(state) < 16 << 20

    async def test_kill_is_verified_and_may_be_repeated(self, machine: Machine) -> None:
        start_time(machine.pid)
        await machine.kill()
        with pytest.raises((FileNotFoundError, ProcessLookupError)):
            start_time(machine.pid)
        await machine.kill()

    async def test_a_vmm_that_ends_is_reported_and_its_methods_say_so(self, machine: Machine) -> None:
        os.kill(machine.pid, 9)
        with trio.fail_after(DEADLINE):
            words = await machine.wait()
        assert str(machine.pid) in words
        for method in (machine.pause, machine.resume):
            with pytest.raises(MachineGone):
                await method()
        with pytest.raises(MachineGone):
            machine.ram()

    async def test_state_that_cannot_be_loaded_is_one_error_with_the_whole_story(
        self, engine: Engine, saved: Saved, slot: Slot, tmp_path: Path
    ) -> None:
        (tmp_path / "garbage").write_bytes(b"this is no device state" * 100)
        spec = RestoreSpec(
            tmp_path / "garbage", saved.spec.memory, saved.spec.rootfs, saved.spec.hardware, saved.spec.platform
        )
        with pytest.raises(LaunchFailed) as failed, trio.fail_after(DEADLINE):
            await engine.restore(spec, slot)
        assert "command: " in failed.value.message
        assert processes_in(slot.directory) == []

    async def test_a_cancelled_launch_leaves_no_process(self, engine: Engine, saved: Saved, tmp_path: Path) -> None:
        await engine.describe()
        for turn in range(6):
            directory = tmp_path / f"slot-{turn}"
            directory.mkdir()
            machine: Machine | None = None
            with trio.move_on_after(0.004 * turn):
                machine = await engine.restore(saved.spec, Slot(f"sb-{turn}", directory))
            if machine is not None:
                await machine.kill()
            assert processes_in(directory) == []

    async def test_a_machine_that_is_gone_cannot_be_adopted(self, engine: Engine, slot: Slot) -> None:
        with pytest.raises(MachineGone):
            await engine.adopt(slot, 2**22 - 1, 1)


def processes_in(directory: Path) -> list[int]:
    """Processes that work in a slot, zombies left out."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                if Path(os.readlink(f"{entry.path}/cwd")) == directory:
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@asynccontextmanager
async def linked(machine: Machine, sync: bytes) -> AsyncIterator[GuestLink]:
    """A session with the guest's agent; the machine's agent channel is used up by it."""
    async with trio.open_nursery() as nursery:
        with trio.fail_after(DEADLINE):
            link = await GuestLink.open(machine.agent, sync, nursery, resume=ResumeInfo.fresh("sb-contract"))
            try:
                await link.ready()
            except ForkdError as error:
                raise AssertionError(f"the guest does not answer: {await machine.wait()}") from error
        yield link
        nursery.cancel_scope.cancel()


async def _boot_and_save(engine: Engine, spec: BootSpec, directory: Path) -> Saved:
    sync = bytes.fromhex(spec.agent_sync)
    (directory / "slot").mkdir()
    info = await engine.describe()
    machine = await engine.boot(spec, Slot("sb-contract", directory / "slot"))
    sink = StageSink(directory, spec.hardware.mem_mib << 20)
    try:
        async with linked(machine, sync) as link:
            await link.eval(f"secret = {SECRET!r}", timeout=DEADLINE)
            await machine.pause()
            await sink.write_devices(await machine.save_devices())
            await sink.write_image(MemoryView(machine.pid, tuple(machine.ram())))
    finally:
        await machine.kill()
    image = MemoryImage(str(directory / "memory.bin"), spec.hardware.mem_mib << 20)
    return Saved(RestoreSpec(sink.vmstate, image, spec.rootfs, spec.hardware, info.platform), sync)
