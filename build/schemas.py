"""Write the schemas of our files, specs/schemas/, from the code."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from forkd.specs.models import Snapshot
from forkd.specs.packs import PackManifest, Registry

SCHEMAS = Path(__file__).parents[1] / "specs" / "schemas"


def main() -> None:
    """Write every generated schema."""
    for name, kind in (("snapshot", Snapshot), ("pack", PackManifest), ("registry", Registry)):
        text = json.dumps(msgspec.json.schema(kind), indent=2, ensure_ascii=False) + "\n"
        (SCHEMAS / f"{name}.json").write_text(text)


main()
