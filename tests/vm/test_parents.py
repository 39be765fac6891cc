"""The parents we ship are what they promise: built for real, with children at work."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import trio
from websockets.sync.client import connect

from forkd import Controller
from forkd.sdk.async_controller import AsyncController
from forkd.sdk.building import build_recipe
from forkd.sdk.recipe import read_recipe
from tests.conftest import run_forkd
from tests.vm.test_recipes import OF_ITS_OWN, dry_run

pytestmark = pytest.mark.vm
PARENTS = Path(__file__).parents[2] / "recipes/parents"
CHILDREN = 10


async def built(
    controller: AsyncController, name: str, fresh_tag: Callable[[str], str], **values: Any
) -> list[dict[str, Any]]:
    """Ten children of a parent we ship."""
    tag = fresh_tag(name)
    await build_recipe(controller, read_recipe(PARENTS / f"{name}.toml"), tag, lambda step, fraction: None)
    return await controller.spawn_sandboxes(tag, CHILDREN)


async def each(children: list[dict[str, Any]], ask: Callable[[str], Any]) -> list[Any]:
    answers: list[Any] = [None] * len(children)

    async def one(index: int) -> None:
        answers[index] = await ask(children[index]["id"])

    async with trio.open_nursery() as nursery:
        for index in range(len(children)):
            nursery.start_soon(one, index)
    return answers


async def test_python_numpy_is_built_and_forked(controller: AsyncController, fresh_tag: Callable[[str], str]) -> None:
    children = await built(controller, "python-numpy", fresh_tag)
    answers = await each(children, lambda id: controller.eval_code(id, "numpy.arange(4).sum(), numpy.random.rand()"))
    assert len({answer["result"] for answer in answers}) == CHILDREN, "each has its own random numbers"
    assert all("6" in answer["result"] for answer in answers)


async def test_nodejs_answers_evals_as_json_and_siblings_differ(
    controller: AsyncController, fresh_tag: Callable[[str], str]
) -> None:
    children = await built(controller, "nodejs", fresh_tag)
    code = "({list: [1, 2].map(x => x * 2), random: Math.random(), id: crypto.randomUUID(), env: process.version})"
    answers = await each(children, lambda id: controller.eval_code(id, code, 60))
    values = [answer["result_json"] for answer in answers]
    assert all(value["list"] == [2, 4] for value in values), answers
    assert len({value["random"] for value in values}) == len({value["id"] for value in values}) == CHILDREN
    child = children[0]["id"]
    await controller.eval_code(child, "globalThis.kept = {a: 1}")
    assert (await controller.eval_code(child, "console.log('hi'); kept"))["result_json"] == {"a": 1}
    failed = await controller.eval_code(child, "undefined.x")
    assert "TypeError" in failed["error"] and failed["exit_code"] == 1


async def test_postgres_is_ready_in_every_child_and_each_has_its_own_data(
    controller: AsyncController, fresh_tag: Callable[[str], str]
) -> None:
    children = await built(controller, "postgres-fixture", fresh_tag)

    async def write_and_read(id: str) -> str:
        sql = f"CREATE TABLE t AS SELECT '{id}' AS who, generate_series(1, 100) AS n; SELECT DISTINCT who FROM t"
        done = await controller.exec_command(id, ["psql", "-Atqc", sql], 120)
        assert done["exit_code"] == 0, done
        return str(done["stdout"])

    answers = await each(children, write_and_read)
    assert [answer.strip() for answer in answers] == [child["id"] for child in children]


def test_the_recipe_for_postgres_does_what_it_says(daemon: Any, data_dir: Path) -> None:
    built = run_forkd(data_dir, "build", "--replace", str(PARENTS / f"{OF_ITS_OWN}.toml"), timeout=1800)
    assert built.returncode == 0, built.stderr
    dry_run(OF_ITS_OWN, daemon)


ON_DEMAND = sorted({path.stem for path in PARENTS.glob("*.toml")} - {"nodejs", "postgres-fixture", "python-numpy"})
"""Parents no default test builds."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_DEMAND)
def test_a_parent_is_built_by_one_command_and_its_children_do_what_it_is_for(
    name: str, data_dir: Path, daemon: Any
) -> None:
    built = run_forkd(data_dir, "build", "--replace", str(PARENTS / f"{name}.toml"), timeout=3600)
    assert built.returncode == 0, built.stderr
    with Controller(daemon.url) as controller:
        children = controller.spawn_sandboxes(name, 3)
        for number, child in enumerate(children):
            USES[name](Child(controller, daemon.url, child["id"], number))
        for child in children:
            controller.kill_sandbox(child["id"])


@dataclass(frozen=True, slots=True)
class Child:
    """One of three, with a number of its own."""

    controller: Controller
    url: str
    id: str
    number: int

    def eval(self, code: str) -> str:
        answer = self.controller.eval_code(self.id, code)
        assert answer["error"] is None, answer
        return str(answer["result"])

    def sh(self, line: str) -> str:
        done = self.controller.exec_command(self.id, ["sh", "-c", line], timeout_secs=300)
        assert done["exit_code"] == 0, done
        return str(done["stdout"])


def draw(child: Child) -> None:
    """A table and a picture of it."""
    code = f"df = pd.DataFrame({{'a': np.arange(4) + {child.number}}}); figure = plt.figure(); plt.plot(df.a)"
    child.eval(code + "; import io; out = io.BytesIO(); figure.savefig(out, format='png')")
    assert child.eval("[int(df.a.sum()), out.getvalue()[1:4]]") == f"[{6 + 4 * child.number}, b'PNG']"


def run_cells(child: Child) -> None:
    """Cells in the kernel, which remembers the ones before, of this child only."""
    child.sh(f"kernel-run 'x = [{child.number}]'")
    assert child.sh("kernel-run 'print(json.dumps(x * 2))'") == f"[{child.number}, {child.number}]\n"


def work(child: Child) -> None:
    """A small repository with a test that passes, looked through with the other tools."""
    assert child.sh("pwd") == "/workspace\n"
    child.sh(f"git init -q && echo 'def test_it(): assert {child.number} < 3' > test_it.py && python3 -m pytest -q")
    child.sh("git add . && git -c user.name=me -c user.email=me@localhost commit -qm first")
    assert child.sh("rg -c assert") == "test_it.py:1\n"
    assert child.sh("git log --format=%s | jq -R .") == '"first"\n'
    assert child.sh(f"echo 'select {child.number} + 1' | sqlite3") == f"{child.number + 1}\n"
    assert child.sh(f"node -p '{child.number} * 2'") == f"{child.number * 2}\n"
    assert child.eval(f"int(pandas.Series([{child.number}, 1]).sum())") == str(child.number + 1)


def build_and_test(child: Child) -> None:
    """A C program compiled and a test of it."""
    child.sh(f"cd /workspace && echo 'int main(void) {{ return {child.number}; }}' > it.c && cc -o it it.c")
    assert child.sh("cd /workspace; ./it; echo $?") == f"{child.number}\n"
    child.sh("cd /workspace && echo 'def test_it(): pass' > test_it.py && python3 -m pytest -q && git --version")


def browse(child: Child) -> None:
    """A page served inside the guest, rendered by its browser, asked for from outside as Playwright would."""
    page = f"<body><h1 id=x></h1><script>x.textContent = 'child ' + {child.number} * 2</script>"
    child.sh(f"mkdir -p /srv/www && cat > /srv/www/index.html <<'EOF'\n{page}\nEOF")
    child.sh("cd /srv/www && (setsid python3 -m http.server 8000 > /dev/null 2>&1 < /dev/null &)")
    child.sh("until curl -sf http://127.0.0.1:8000/ > /dev/null; do sleep 0.2; done")
    ports = f"{child.url}/v1/sandboxes/{child.id}/ports/9222"
    (tab,) = [one for one in httpx.get(f"{ports}/json/list", timeout=60).json() if one["type"] == "page"]
    path = urlsplit(tab["webSocketDebuggerUrl"]).path
    with connect(f"{ports.replace('http', 'ws', 1)}{path}", max_size=None, open_timeout=60) as socket:
        numbers = itertools.count(1)

        def ask(method: str, **params: object) -> dict[str, Any]:
            number = next(numbers)
            socket.send(json.dumps({"id": number, "method": method, "params": params}))
            while (answer := json.loads(socket.recv(timeout=300))).get("id") != number:
                pass  # an event
            result: dict[str, Any] = answer["result"]
            return result

        ask("Page.navigate", url="http://127.0.0.1:8000/")
        ready = "new Promise(done => document.readyState == 'complete' ? done() : addEventListener('load', done))"
        ask("Runtime.evaluate", expression=ready, awaitPromise=True)
        shown = ask("Runtime.evaluate", expression="document.body.innerText")
        assert shown["result"]["value"].strip() == f"child {child.number * 2}"
        picture = base64.b64decode(ask("Page.captureScreenshot", format="png")["data"])
        assert picture[1:4] == b"PNG" and len(picture) > 1000


USES: dict[str, Callable[[Child], None]] = {
    "agent-workbench": work,
    "coding-agent": build_and_test,
    "e2b-codeinterpreter": draw,
    "jupyter-kernel": run_cells,
    "playwright-browser": browse,
}
"""What each parent is for."""
