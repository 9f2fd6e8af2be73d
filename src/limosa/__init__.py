"""Limosa moves, suspends and checkpoints running GPU jobs.

The functions are what the command line's verbs are made of: plain, thread-safe, without signal handlers of their own.
Importing this package loads none of them; each is loaded when it is first named.

Examples:
    >>> import limosa
    >>> callable(limosa.move)
    True
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "arena": "limosa.operation.arena",
    "checkpoint": "limosa.operation",
    "move": "limosa.operation",
    "plan": "limosa.operation",
    "plan_restore": "limosa.operation",
    "ps": "limosa.operation",
    "recover": "limosa.operation",
    "remove_image": "limosa.operation",
    "resolve": "limosa.operation",
    "restore": "limosa.operation",
    "resume": "limosa.operation",
    "suspend": "limosa.operation",
    "toggle": "limosa.operation",
    "open_image": "limosa.image",
    "verify": "limosa.image.verify",
    "inventory": "limosa.gpu",
    "LimosaError": "limosa.errors",
    "Reason": "limosa.errors",
    "Progress": "limosa.progress",
}

if TYPE_CHECKING:
    from limosa.errors import LimosaError as LimosaError
    from limosa.errors import Reason as Reason
    from limosa.gpu import inventory as inventory
    from limosa.image import open_image as open_image
    from limosa.image.verify import verify as verify
    from limosa.operation.arena import arena as arena
    from limosa.operation.checkpoint import checkpoint as checkpoint
    from limosa.operation.jobs import resolve as resolve
    from limosa.operation.move import move as move
    from limosa.operation.move import resume as resume
    from limosa.operation.move import suspend as suspend
    from limosa.operation.move import toggle as toggle
    from limosa.operation.plan import plan as plan
    from limosa.operation.plan import plan_restore as plan_restore
    from limosa.operation.ps import ps as ps
    from limosa.operation.recover import recover as recover
    from limosa.operation.remove_image import remove_image as remove_image
    from limosa.operation.restore import restore as restore
    from limosa.progress import Progress as Progress

__all__ = ["__version__", *_WHERE]  # noqa: PLE0604 - every key is a string


def __getattr__(name: str) -> Any:
    """Load a name when it is first asked for."""
    if name not in _WHERE:
        raise AttributeError(f"module 'limosa' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
