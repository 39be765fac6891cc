"""Recipes and Dockerfiles: what they say is what is built, and what makes no sense is refused with its place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forkd.sdk.dockerfile import read_dockerfile
from forkd.sdk.recipe import Check, Defaults, Evaluate, Files, Recipe, Run, Warm, read_recipe, step_key
from forkd.specs.errors import BadInput

ROOT = Path(__file__).parents[3]


def recipe(tmp_path: Path, text: str) -> Recipe:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return read_recipe(path)


def dockerfile(tmp_path: Path, text: str) -> Recipe:
    path = tmp_path / "Dockerfile"
    path.write_text(text)
    return read_dockerfile(path)


def test_a_recipe_is_read_step_by_step(tmp_path: Path) -> None:
    (tmp_path / "script.sh").write_text("#!/bin/sh\n")
    (tmp_path / "script.sh").chmod(0o755)
    read = recipe(
        tmp_path,
        """
        image = "debian:bookworm"
        packages = ["jq"]
        mem_mib = 256
        [[step]]
        run = "echo a | cat"
        [[step]]
        run = ["ls", "/"]
        timeout_secs = 5
        [[step]]
        copy = "script.sh"
        to = "/opt/"
        [[step]]
        write = "hello"
        to = "/etc/hello"
        mode = "0600"
        [[step]]
        eval = "import json"
        [[step]]
        warm = ["node", "x.js"]
        lang = "node"
        [[step]]
        env = { A = "b" }
        workdir = "/srv"
        [ready]
        run = "true"
        """,
    )
    assert read == Recipe(
        name="mine",
        image="debian:bookworm",
        packages=("jq",),
        mem_mib=256,
        steps=(
            Run(("sh", "-c", "echo a | cat")),
            Run(("ls", "/"), 5),
            Files(((tmp_path / "script.sh", "/opt/script.sh", 0o755),)),
            Files((("hello", "/etc/hello", 0o600),)),
            Evaluate("import json"),
            Warm(("node", "x.js"), "node"),
            Defaults({"A": "b"}, "/srv"),
        ),
        ready=Check(("sh", "-c", "true")),
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "image"),
        ("image = 3", "image"),
        ("image = 'x'\nimges = 'y'", "imges"),
        ("image = 'x'\n[[step]]\n", "step 1 does nothing"),
        ("image = 'x'\n[[step]]\nrun = 'a'\neval = 'b'", "two things"),
        ("image = 'x'\n[[step]]\ncopy = 'nothing'\nto = '/x'", "no file"),
        ("image = 'x'\n[[step]]\ncopy = '../../etc/passwd'\nto = '/x'", "not below"),
        ("image = 'x'\n[[step]]\nwrite = 'a'\nto = 'relative'", "starts with /"),
        ("image = 'x'\n[[step]]\nwrite = 'a'\nto = '/x'\nmode = 'rw'", "octal"),
        ("image = 'x'\n[[step]]\ncopy = '/etc/*'\nto = '/x'", "no pattern below"),
        ("image = 'x'\n[[step]]\nrun = 'make'\nenv = { CC = 'cc' }", "step 1: env has no effect beside run"),
        ("image = 'x'\n[[step]]\nrun = 'make'\nto = '/x'", "to has no effect beside run"),
        ("image = 'x'\n[[step]]\nuser = 'me'\nlang = 'node'", "lang has no effect beside env"),
        ("image = 'x'\n[ready]\n", "either run or eval"),
        ("not toml", "mine.toml"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        recipe(tmp_path, text)


def test_a_link_does_not_lead_out_of_the_context(tmp_path: Path) -> None:
    (tmp_path / "context").mkdir()
    (tmp_path / "secret").write_text("x")
    (tmp_path / "context" / "link").symlink_to("../secret")
    with pytest.raises(BadInput, match="not below"):
        dockerfile(tmp_path / "context", "FROM x\nCOPY link /x")
    (tmp_path / "context" / "folder").mkdir()
    (tmp_path / "context" / "folder" / "link").symlink_to("../../secret")
    with pytest.raises(BadInput, match="leads out"):
        dockerfile(tmp_path / "context", "FROM x\nCOPY folder /x")


def test_a_step_is_another_one_when_anything_before_it_or_a_file_changes(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    copy = Files(((tmp_path / "a", "/a", 0o644),))
    first = step_key("base", copy)
    assert first == step_key("base", copy)
    assert first != step_key("other", copy)
    (tmp_path / "a").write_text("2")
    assert first != step_key("base", copy)


def test_a_dockerfile_is_read_as_docker_reads_it(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "main.py").write_text("print(1)")
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    read = dockerfile(
        tmp_path,
        """# syntax=docker/dockerfile:1
FROM python:3.12-slim

ENV A=1 B="two words" PATH=$PATH:/opt
ENV OLD style value
WORKDIR /srv
RUN echo one && \\
    # a comment in between
    echo two
RUN ["echo", "three"]
COPY app /srv/app
COPY *.txt /srv/
user nobody
EXPOSE 80
CMD ["python"]
""",
    )
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*.*")}
    assert read.image == "python:3.12-slim"
    assert read.steps == (
        Defaults({"A": "1", "B": "two words", "PATH": "$PATH:/opt"}, expand=True),
        Defaults({"OLD": "style value"}, expand=True),
        Defaults(workdir="/srv", expand=True),
        Run(("sh", "-c", "echo one &&     echo two")),
        Run(("echo", "three")),
        Files(((tmp_path / "app" / "main.py", "/srv/app/main.py", modes["main.py"]),)),
        Files(
            (
                (tmp_path / "a.txt", "/srv/a.txt", modes["a.txt"]),
                (tmp_path / "b.txt", "/srv/b.txt", modes["b.txt"]),
            )
        ),
        Defaults(user="nobody", expand=True),
    )


def test_a_dockerfiles_relative_paths_stay_so_until_the_guest_says_where_it_is(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    read = dockerfile(
        tmp_path,
        "FROM x\nWORKDIR\tapp\nENV\tA b\nCOPY a.txt .\nCOPY a.txt b.txt ./src\nCOPY a.txt c\nCOPY a.txt ..\nRUN\tls",
    )
    copied = [[path for _, path, _ in step.pairs] for step in read.steps if isinstance(step, Files)]
    assert copied == [["./a.txt"], ["./src/a.txt", "./src/b.txt"], ["c"], ["../a.txt"]]
    others = [step for step in read.steps if not isinstance(step, Files)]
    assert others == [Defaults(workdir="app", expand=True), Defaults({"A": "b"}, expand=True), Run(("sh", "-c", "ls"))]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no FROM"),
        ("RUN true", "first instruction"),
        ("FROM a\nFROM b", "one FROM"),
        ("FROM a AS b", "one image"),
        ("FROM a\nADD x /y", ":2: ADD is not understood"),
        ("FROM a\nCOPY --from=b x /y", "flags of COPY"),
        ("FROM a\nRUN --mount=type=cache x", "flags of RUN"),
        ("FROM a\nCOPY x $HOME/", "variables in COPY"),
        ("FROM a\nCOPY x", "source and a target"),
        ('FROM a\nRUN ["a"', "not JSON"),
        ("FROM a\nENV A", "no value"),
        ("FROM a\nWORKDIR", "says nothing"),
    ],
)
def test_a_dockerfile_beyond_the_subset_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        dockerfile(tmp_path, text)


@pytest.mark.parametrize("path", sorted((ROOT / "recipes/parents").glob("*.toml")), ids=lambda path: path.stem)
def test_every_parent_we_ship_is_a_recipe_and_has_a_check(path: Path) -> None:
    read = read_recipe(path)
    assert read.ready is not None
    assert read.name == path.stem
    assert read.packages
    for package in read.packages:
        assert re.fullmatch(r"[a-z0-9][a-z0-9+.-]+", package), package  # Debian's rule for names
