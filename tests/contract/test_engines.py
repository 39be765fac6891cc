"""Every engine of ours keeps the contract."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest
import trio

from forkd.linux.hostprobe import HostProbe
from forkd.plugins.engine_firecracker.engine import FirecrackerEngine
from forkd.plugins.engine_qemu.engine import QemuEngine
from forkd.provision import find_kernel
from forkd.specs.engine import BootSpec
from forkd.specs.hookspecs import EngineFactory
from forkd.specs.models import Hardware
from forkd.testing.engine import EngineContract
from forkd.testing.template import TemplateContract
from tests.conftest import parent_disk

pytestmark = pytest.mark.vm
NO_FIRECRACKER = FirecrackerEngine.why_not(HostProbe())


@pytest.fixture(scope="class")
def boot_spec(data_dir: Path) -> BootSpec:
    kernel = trio.run(find_kernel, data_dir)
    return BootSpec(
        kernel.kernel, kernel.initrd, parent_disk(data_dir), Hardware(vcpus=1, mem_mib=256), secrets.token_hex(16)
    )


@pytest.mark.kvm
@pytest.mark.skipif(NO_FIRECRACKER is not None, reason=str(NO_FIRECRACKER))
class TestFirecracker(EngineContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine_factory(cls) -> EngineFactory:
        return FirecrackerEngine


class TestQemu(EngineContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine_factory(cls) -> EngineFactory:
        return QemuEngine


@pytest.mark.slow
class TestQemuWithTwoCpus(EngineContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine_factory(cls) -> EngineFactory:
        return QemuEngine

    @pytest.fixture(scope="class")
    @classmethod
    def boot_spec(cls, boot_spec: BootSpec) -> BootSpec:
        import dataclasses

        return dataclasses.replace(boot_spec, hardware=Hardware(vcpus=2, mem_mib=192))


class TestQemuClones(TemplateContract):
    @pytest.fixture(scope="class")
    @classmethod
    def engine_factory(cls) -> EngineFactory:
        return QemuEngine
