"""Write specs/schemas/snapshot.json from the code."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from forkd.specs.models import Snapshot

SCHEMAS = Path(__file__).parents[1] / "specs" / "schemas"


def main() -> None:
    """Write every generated schema."""
    text = json.dumps(msgspec.json.schema(Snapshot), indent=2, ensure_ascii=False) + "\n"
    (SCHEMAS / "snapshot.json").write_text(text)


main()
