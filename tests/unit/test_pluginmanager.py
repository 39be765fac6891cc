"""Foreign plugins: found, let in whole or left out whole, always by name."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from textwrap import dedent

import pytest

from forkd.config import load_settings
from forkd.linux.hostprobe import HostProbe
from forkd.pluginmanager import DEFAULT_PLUGINS, Plugins, load_plugins

GOOD = """
    '''Notes every event.'''
    from forkd.specs.hookspecs import Check, hookimpl

    __version__ = "1.2"
    seen = []

    @hookimpl
    def forkd_observe(event):
        seen.append(event)

    @hookimpl
    def forkd_doctor_checks():
        return [Check("notes", "PASS", f"{len(seen)} events")]

    @hookimpl
    def forkd_register_commands(commands):
        commands("notes", "NAME:show", "Show the notes.")
"""
BROKEN = {
    "a syntax error": ("def f(:\n", "SyntaxError"),
    "an import that fails": ("import no_such_module_anywhere\n", "No module named 'no_such_module_anywhere'"),
    "an exit at import": ("raise SystemExit(3)\n", "SystemExit"),
    "another contract version": (f"forkd_contract = 99\n{dedent(GOOD)}", "contract version 99"),
    "no hook at all": ("x = 1\n", "implements no hook"),
    "an async hook": (
        "from forkd.specs.hookspecs import hookimpl\n@hookimpl\nasync def forkd_observe(event): pass\n",
        "async def",
    ),
    "a hook that is misspelt": (
        "from forkd.specs.hookspecs import hookimpl\n@hookimpl\ndef forkd_obsreve(event): pass\n",
        "forkd_obsreve",
    ),
    "a hook with an unknown argument": (
        "from forkd.specs.hookspecs import hookimpl\n@hookimpl\ndef forkd_observe(evnt): pass\n",
        "evnt",
    ),
    "an exception in a hook": (
        "from forkd.specs.hookspecs import hookimpl\n"
        "@hookimpl\ndef forkd_register_branch_modes(register): raise ValueError('oops')\n",
        "ValueError: oops",
    ),
    "a taken name": (
        "from forkd.plugins.branch_live import LiveMode\nfrom forkd.specs.hookspecs import hookimpl\n"
        "class Other(LiveMode):\n    name = 'other'\n"
        "@hookimpl\ndef forkd_register_branch_modes(register):\n    register(Other())\n    register(LiveMode())\n",
        "'live' is taken",
    ),
    "a verb of forkd's own": (
        "from forkd.specs.hookspecs import hookimpl\n"
        "@hookimpl\ndef forkd_register_commands(commands):\n"
        "    commands('mine', 'x:y', '')\n    commands('where', 'x:y', '')\n",
        "the command 'where' is forkd's own",
    ),
    "half a contract": (
        "from forkd.specs.hookspecs import hookimpl\nclass Half:\n    name = 'half'\n"
        "@hookimpl\ndef forkd_register_branch_modes(register): register(Half())\n",
        "lacks capture, keeps_running, needs",
    ),
}


@pytest.fixture(autouse=True)
def modules_of_their_own() -> Iterator[None]:
    """Forget what a test imported."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if not name.startswith("forkd."):
            del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "plugins"
    path.mkdir(mode=0o700)
    return path


Write = Callable[[str, str], Path]


@pytest.fixture
def write(folder: Path) -> Write:
    def one(name: str, text: str) -> Path:
        file = folder / f"{name}.py"
        file.write_text(dedent(text).replace("NAME", name))
        file.chmod(0o600)
        return file

    return one


def load(folder: Path, **env: str) -> Plugins:
    return load_plugins(load_settings({"FORKD_DATA_DIR": "/nonexistent", "FORKD_PLUGIN_DIR": str(folder), **env}))


def test_every_bundled_plugin_loads() -> None:
    plugins = load_plugins()
    assert len(plugins.records) == len(DEFAULT_PLUGINS)
    assert [record for record in plugins.records.values() if record.status != "loaded"] == []
    assert "branch mode live" in plugins.records["branch_live"].provides


def test_a_file_in_the_directory_is_a_plugin(folder: Path, write: Write) -> None:
    write("notes_a", GOOD)
    plugins = load(folder)
    record = plugins.records["notes_a"]
    assert (record.status, record.source, record.version, record.about) == (
        "loaded",
        "directory",
        "1.2",
        "Notes every event.",
    )
    assert record.hooks == ["forkd_doctor_checks", "forkd_observe", "forkd_register_commands"]
    plugins.observe({"event": "spawn"})
    assert sys.modules["notes_a"].seen == [{"event": "spawn"}]
    assert "1 events" in [check.detail for check in plugins.checks(HostProbe())]
    assert plugins.commands == {"notes": ("notes_a:show", "Show the notes.")}


def test_a_package_may_import_itself(folder: Path, write: Write) -> None:
    package = folder / "notes_b"
    package.mkdir(mode=0o700)
    (package / "__init__.py").write_text(f"from notes_b.inner import x\n{dedent(GOOD)}")
    (package / "inner.py").write_text("x = 1\n")
    for file in package.iterdir():
        file.chmod(0o600)
    assert load(folder).records["notes_b"].status == "loaded"


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_named_and_left_out_and_the_rest_works(
    folder: Path, write: Write, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    text, reason = BROKEN[case]
    write("a_broken_one", text)
    write("b_good_one", GOOD)
    with caplog.at_level(logging.WARNING):
        plugins = load(folder)
    record = plugins.records["a_broken_one"]
    assert record.status == "failed"
    assert reason in (record.error or "")
    assert "a_broken_one" in caplog.text and str(folder) in caplog.text
    assert plugins.records["b_good_one"].status == "loaded"
    assert "other" not in plugins.branch_modes, "nothing of a plugin that is left out stays"
    rows = [check for check in plugins.checks(HostProbe()) if check.name == "plugins"]
    assert [row.status for row in rows] == ["WARN"]
    assert "a_broken_one" in rows[0].detail


def test_an_observer_or_check_that_raises_is_named_and_not_asked_again(folder: Path, write: Write) -> None:
    raising = (
        "from forkd.specs.hookspecs import hookimpl\n"
        "@hookimpl\ndef HOOK(ARGS):\n    calls.append(1)\n    raise KeyError('x')\ncalls = []\n"
    )
    write("bad_observer", raising.replace("HOOK", "forkd_observe").replace("ARGS", "event"))
    write("bad_doctor", raising.replace("HOOK", "forkd_doctor_checks").replace("ARGS", ""))
    plugins = load(folder)
    plugins.observe({"event": "a"})
    plugins.observe({"event": "b"})
    assert len(sys.modules["bad_observer"].calls) == 1
    assert "forkd_observe" in (plugins.records["bad_observer"].error or "")
    details = " ".join(check.detail for check in plugins.checks(HostProbe()))
    assert "bad_doctor" in details and "bad_observer" in details


BUILDER = """
    from forkd.specs.hookspecs import hookimpl

    class Mine:
        name = "NAME"
        def accepts(self, reference): RETURN
        async def content_key(self, request): return ""
        async def build(self, request, target, progress): ...

    @hookimpl
    def forkd_register_rootfs_builders(register): register(Mine())
"""


def test_a_foreign_rootfs_builder_is_asked_before_the_one_that_takes_nearly_everything(
    folder: Path, write: Write
) -> None:
    write("mine", BUILDER.replace("RETURN", "return reference.startswith('mine:')"))
    write("last", BUILDER.replace("RETURN", "return True").replace("@hookimpl", "@hookimpl(trylast=True)"))
    first = BUILDER.replace("RETURN", "return reference == 'debian'")
    write("first", first.replace("@hookimpl", "@hookimpl(tryfirst=True)"))
    plugins = load(folder)
    asked = ("mine:thing", "busybox:thing", "debian:bookworm", "debian", "what no image can be called")
    assert [plugins.rootfs_builder(each).name for each in asked] == ["mine", "oci", "debian", "first", "last"]


def test_a_rootfs_builder_that_raises_when_asked_is_named_and_passed_over(folder: Path, write: Write) -> None:
    write("bad_builder", BUILDER.replace("RETURN", "raise KeyError('x')"))
    plugins = load(folder)
    assert [plugins.rootfs_builder(each).name for each in ("busybox:1", "busybox:2")] == ["oci", "oci"]
    record = plugins.records["bad_builder"]
    assert (record.status, record.error) == ("failed", "its rootfs builder 'bad_builder' raised: KeyError: 'x'")


def test_a_plugin_is_disabled_by_name_wherever_it_comes_from(folder: Path, write: Write) -> None:
    write("notes_c", GOOD)
    plugins = load(folder, FORKD_DISABLE_PLUGINS="notes_c, branch_live")
    assert plugins.records["notes_c"].status == plugins.records["branch_live"].status == "disabled"
    assert "live" not in plugins.branch_modes
    assert "notes_c" not in sys.modules, "a disabled plugin is not even imported"


def test_what_others_could_have_written_is_not_run(folder: Path, write: Write) -> None:
    file = write("notes_d", GOOD)
    for path, mode in ((file, 0o620), (folder, 0o707)):
        kept = path.stat().st_mode
        path.chmod(mode)
        record = load(folder).records["notes_d"]
        path.chmod(kept)
        assert record.status == "failed"
        assert "can be written by others" in (record.error or "")
        assert "notes_d" not in sys.modules
    if os.geteuid() == 0:
        os.chown(file, 12345, 12345)
        assert "belongs to user 12345" in (load(folder).records["notes_d"].error or "")


def test_a_file_cannot_pose_as_a_module_that_exists(folder: Path, write: Write) -> None:
    write("json", GOOD)
    write("xdrlib", GOOD)
    records = load(folder).records
    assert "taken" in (records["json"].error or "")
    assert "taken" in (records["xdrlib"].error or "")
    write("branch_live", GOOD)
    twice = [record for name, record in load(folder).records.items() if name.startswith("branch_live (")]
    assert "a plugin of this name is loaded from forkd.plugins.branch_live" in (twice[0].error or "")


def test_entry_points_of_installed_packages_are_plugins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    (tmp_path / "notes_e.py").write_text(dedent(GOOD))
    info = tmp_path / "notes_e-3.4.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: notes-e\nVersion: 3.4\n")
    (info / "entry_points.txt").write_text("[forkd]\nnotes = notes_e\nbad = no_such_module_here\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert metadata.version("notes-e") == "3.4"
    records = load(folder).records
    assert (records["notes"].status, records["notes"].source, records["notes"].version) == (
        "loaded",
        "entry point",
        "3.4",
    )
    assert records["bad"].status == "failed"
