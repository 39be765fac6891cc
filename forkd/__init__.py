"""forkd: boot a microVM once, warm it, fork children that share its memory copy-on-write."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from forkd.sdk.async_controller import AsyncController as AsyncController
    from forkd.sdk.async_sandbox import AsyncSandbox as AsyncSandbox
    from forkd.sdk.controller import Controller as Controller
    from forkd.sdk.errors import BranchMode as BranchMode
    from forkd.sdk.errors import CommandResult as CommandResult
    from forkd.sdk.errors import ControllerError as ControllerError
    from forkd.sdk.sandbox import Sandbox as Sandbox
    from forkd.specs.errors import ForkdError as ForkdError
    from forkd.specs.hookspecs import hookimpl as hookimpl

# name → module; imported when first used, so that `import forkd` costs nothing
_HOMES = {
    "AsyncController": "forkd.sdk.async_controller",
    "AsyncSandbox": "forkd.sdk.async_sandbox",
    "BranchMode": "forkd.sdk.errors",
    "CommandResult": "forkd.sdk.errors",
    "Controller": "forkd.sdk.controller",
    "ControllerError": "forkd.sdk.errors",
    "ForkdError": "forkd.specs.errors",
    "Sandbox": "forkd.sdk.sandbox",
    "hookimpl": "forkd.specs.hookspecs",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'forkd' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
