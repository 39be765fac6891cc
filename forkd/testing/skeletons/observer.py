"""Observer: every event as a JSON line in a file of its own, and a row in ``forkd doctor`` that says whether it can."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

from forkd.specs.hookspecs import Check, hookimpl
from forkd.specs.host import Host

forkd_contract = 1
VARIABLE = "SKELETON_OBSERVER_FILE"


@hookimpl
def forkd_observe(event: dict[str, Any]) -> None:
    """Called for every event, in order. Must not block for long and must not raise: one short append."""
    path = os.environ.get(VARIABLE)
    if path:
        with open(path, "a", encoding="utf-8") as out:
            out.write(json.dumps(event, default=str) + "\n")


@hookimpl
def forkd_doctor_checks(host: Host) -> Iterable[Check]:
    """Called by ``forkd doctor``; whatever it asks of the host it asks ``host``."""
    path = os.environ.get(VARIABLE)
    if not path:
        return [Check("skeleton_observer", "SKIP", f"{VARIABLE} is not set, so events are not written")]
    folder = os.path.dirname(path) or "."
    free = host.free_bytes(folder)
    if free is not None and free < 1 << 20:
        return [Check("skeleton_observer", "FAIL", f"{folder} is full", "free some space there")]
    return [Check("skeleton_observer", "PASS", f"events go to {path}")]
