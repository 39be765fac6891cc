"""Images from a registry as guests: their own defaults hold, and an image without Python is a guest like any other."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forkd.sdk.async_controller import AsyncController
from tests.oci_support import Entry, Registry, folder, running_registry, symlink, tar_of

pytestmark = pytest.mark.vm
APPLETS = ("sh", "cat", "echo", "id", "pwd", "sha256sum", "head", "ls", "sleep", "test")


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


def busybox_layers(data_dir: Path) -> list[bytes]:
    """A whole image of one static program; the second layer takes a file away again."""
    program = (data_dir / "kernels/default/busybox").read_bytes()
    bottom = [
        *(folder(name) for name in ("bin", "etc", "root", "srv")),
        folder("tmp", 0o1777),
        Entry("bin/busybox", program, mode=0o755),
        *(symlink(f"bin/{name}", "busybox") for name in APPLETS),
        Entry("etc/passwd", b"root:x:0:0::/root:/bin/sh\nagent:x:1000:1000::/srv:/bin/sh\n"),
        Entry("etc/group", b"root:x:0:\nagent:x:1000:\nstaff:x:50:\n"),
        Entry("etc/gone", b"x"),
        Entry("dev/sda", type=tarfile.BLKTYPE),
    ]
    return [tar_of(bottom), tar_of([Entry("etc/.wh.gone"), Entry("srv/hello", b"hello\n", uid=1000)])]


async def test_a_busybox_image_without_python_forks_execs_copies_files_and_branches(
    controller: AsyncController, registry: Registry, data_dir: Path, fresh_tag: Callable[[str], str]
) -> None:
    config = {"Env": ["PATH=/bin", "WHO=the image"], "WorkingDir": "/srv", "User": "agent:staff"}
    registry.push_image("busybox", busybox_layers(data_dir), config=config)
    tag = fresh_tag("busybox")
    await controller.create_snapshot(tag, image=registry.reference("busybox"), mem_size_mib=128, size_mib=128)
    first, second = await controller.spawn_sandboxes(tag, 2)

    told = await controller.exec_command(first["id"], ["sh", "-c", "pwd; id -u; id -g; echo $WHO $HOME; cat hello"])
    assert (told["stdout"], told["exit_code"]) == ("/srv\n1000\n50\nthe image /srv\nhello\n", 0)
    asked = await controller.exec_command(
        first["id"], ["sh", "-c", "pwd; id -u; echo $WHO"], user="root", cwd="/", env={"WHO": "me"}
    )
    assert asked["stdout"] == "/\n0\nme\n"
    gone = await controller.exec_command(first["id"], ["test", "-e", "/etc/gone"])
    assert gone["exit_code"] == 1
    here = await controller.eval_code(first["id"], "import sys; sys.executable")
    assert here["result"] == "'/.forkd/python/bin/python3'"

    await controller.exec_command(first["id"], ["sh", "-c", "cat > /tmp/note"], stdin="written before the branch\n")
    branched = fresh_tag("branched")
    await controller.branch_sandbox(first["id"], tag=branched, mode="diff")
    grandchild = (await controller.spawn_sandboxes(branched))[0]
    note = await controller.exec_command(grandchild["id"], ["cat", "/tmp/note"])
    assert note["stdout"] == "written before the branch\n"
    other = await controller.exec_command(second["id"], ["cat", "/tmp/note"])
    assert other["exit_code"] == 1
