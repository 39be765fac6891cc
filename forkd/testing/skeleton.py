"""New plugins: a skeleton that works, with a package and a test around it."""

from __future__ import annotations

import keyword
from pathlib import Path

from forkd.specs.errors import BadInput

SKELETONS = Path(__file__).parent / "skeletons"
KINDS = ("branch-mode", "memory-backend", "rootfs-builder", "hub-transport", "engine", "command", "observer")

PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{dashed}"
version = "0.1.0"
dependencies = ["forkd"]

[project.optional-dependencies]
test = ["forkd[testing]"]

[project.entry-points.forkd]
{name} = "{name}"

[tool.setuptools]
py-modules = ["{name}"]

[tool.pytest.ini_options]
trio_mode = true
"""

SUITE = '''\
"""{name} keeps the contract of its kind."""

import pytest
from {name} import {cls}

from {module} import {suite}


class Test{cls}({suite}):
    @pytest.fixture
    def {fixture}(self):
        return {cls}()
'''

TESTS = {
    "branch-mode": ("forkd.testing.branch", "BranchModeContract", "mode"),
    "memory-backend": ("forkd.testing.memory", "MemoryBackendContract", "backend"),
    "rootfs-builder": ("forkd.testing.rootfs", "RootfsBuilderContract", "builder"),
    "hub-transport": ("forkd.testing.hub", "HubTransportContract", "transport"),
}

REQUESTS = """
    @pytest.fixture
    def request_(self, tmp_path_factory):
        path = tmp_path_factory.mktemp("image") / "image.zip"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("etc/os-release", "ID=test\\n")
            archive.writestr("bin/true", "")
        return ImageRequest(f"{name}:{{path}}")

    @pytest.fixture
    def bad_request(self):
        return ImageRequest("{name}:/no/such/file.zip")
"""

BASE = """
    @pytest.fixture
    def base(self):
        return "{name}://test"
"""

ENGINE_TEST = '''\
"""The engine says what it is; `forkd plugin check --rootfs FILE` boots machines with it."""

from {name} import {cls}
from forkd.specs.engine import EngineContext


async def test_it_describes_this_host(tmp_path):
    info = await {cls}(EngineContext(tmp_path)).describe()
    assert info.platform.engine == "{name}"
'''

COMMAND_TEST = '''\
"""What the verb counts."""

from {name} import by_image


def test_sizes_are_added_up_by_image():
    rows = [{{"image": "a", "physical_bytes": 1}}, {{"image": "a", "physical_bytes": 2}}, {{}}]
    assert by_image(rows) == {{"a": 3, "(a file)": 0}}
'''

OBSERVER_TEST = '''\
"""Events become lines."""

import json

import {name}


def test_an_event_is_a_line(tmp_path, monkeypatch):
    monkeypatch.setenv({name}.VARIABLE, str(tmp_path / "events"))
    {name}.forkd_observe({{"event": "spawn", "id": "x"}})
    assert json.loads((tmp_path / "events").read_text()) == {{"event": "spawn", "id": "x"}}
'''


def class_name(name: str) -> str:
    """``my_mode`` as ``MyMode``."""
    return "".join(word.title() for word in name.split("_"))


def source(kind: str, name: str) -> str:
    """The plugin's text, with its own names in it. Raises BadInput."""
    if kind not in KINDS:
        raise BadInput(f"there is no kind {kind!r}", hint=f"there are: {', '.join(KINDS)}")
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower() or name.startswith("_"):
        raise BadInput(f"{name!r} cannot be a plugin's name", hint="use lower-case letters, digits and underscores")
    placeholder = f"skeleton_{kind.replace('-', '_')}"
    text = (SKELETONS / f"{kind.replace('-', '_')}.py").read_text()
    text = text.replace(placeholder, name).replace(class_name(placeholder), class_name(name))
    return text.replace(placeholder.upper(), name.upper())


def test_source(kind: str, name: str) -> str:
    """A test for it."""
    cls = class_name(name)
    if kind in TESTS:
        module, suite, fixture = TESTS[kind]
        text = SUITE.format(name=name, cls=cls, module=module, suite=suite, fixture=fixture)
        if kind == "rootfs-builder":
            text = text.replace("import pytest\n", "import zipfile\n\nimport pytest\n", 1)
            text = text.replace("from forkd", "from forkd.specs.rootfs import ImageRequest\nfrom forkd", 1)
            text += REQUESTS.format(name=name)
        if kind == "hub-transport":
            text += BASE.format(name=name)
        return text
    template = {"engine": ENGINE_TEST, "command": COMMAND_TEST, "observer": OBSERVER_TEST}[kind]
    return template.format(name=name, cls=cls)


def write(kind: str, name: str, folder: Path) -> list[Path]:
    """Write the package ``folder/name``: plugin, test, pyproject.toml. Raises BadInput if it exists."""
    text = source(kind, name)
    target = folder / name
    try:
        target.mkdir(parents=True)
    except FileExistsError:
        raise BadInput(f"{target} exists already") from None
    files = {
        f"{name}.py": text,
        f"test_{name}.py": test_source(kind, name),
        "pyproject.toml": PYPROJECT.format(name=name, dashed=f"forkd-{name.replace('_', '-')}"),
    }
    for file, content in files.items():
        (target / file).write_text(content)
    return [target / file for file in files]
