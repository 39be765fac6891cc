"""Every test gets a PostgreSQL of its own, already up and filled: a fork of one that was filled once."""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor

from forkd.extras.e2b import Sandbox
from forkd.extras.toolbox import Toolbox

SCHEMA = "CREATE TABLE account (name text PRIMARY KEY, cents int); INSERT INTO account VALUES ('ada', 100), ('bob', 50)"
CASES = {
    "a transfer": "UPDATE account SET cents = cents + CASE name WHEN 'ada' THEN -30 ELSE 30 END",
    "a closed account": "DELETE FROM account WHERE name = 'bob'",
    "a dropped table": "DROP TABLE account; CREATE TABLE account (name text, cents int)",
}


def sql(sandbox: Sandbox, text: str) -> str:
    """What psql answers, on one line."""
    status, said = Toolbox(sandbox).run(f'psql -qAt -v ON_ERROR_STOP=1 -c "{text}"')
    if status != 0:
        raise SystemExit(said)
    return " ".join(said.split())


def state(sandbox: Sandbox) -> str:
    return sql(sandbox, "SELECT name || '=' || cents FROM account ORDER BY name") or "empty"


def run_case(sandbox: Sandbox, text: str) -> str:
    sql(sandbox, text)
    return state(sandbox)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parent", default="postgres-fixture", help="snapshot with PostgreSQL running")
    parser.add_argument("--dry-run", action="store_true", help="accepted as in other recipes: no model is needed here")
    options = parser.parse_args()
    with Sandbox.create(options.parent) as sandbox:
        sql(sandbox, SCHEMA)
        children = sandbox.fork(len(CASES))
        try:
            with ThreadPoolExecutor() as pool:
                for name, rows in zip(CASES, pool.map(run_case, children, CASES.values()), strict=True):
                    print(f"{name}: {rows}")
        finally:
            for child in children:
                child.kill()
        print(f"the fixture itself: {state(sandbox)}")


if __name__ == "__main__":
    main()
