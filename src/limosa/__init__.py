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

from limosa.version import VERSION

__version__ = VERSION

_WHERE = {
    "arena": "limosa.operation.arena",
    "checkpoint": "limosa.operation",
    "move": "limosa.operation",
    "plan": "limosa.operation",
    "plan_restore": "limosa.operation",
    "ps": "limosa.operation",
    "run": "limosa.job",
    "wait": "limosa.operation",
    "stop": "limosa.operation",
    "recover": "limosa.operation",
    "remove_image": "limosa.operation",
    "resolve": "limosa.operation",
    "restore": "limosa.operation",
    "resume": "limosa.operation",
    "suspend": "limosa.operation",
    "toggle": "limosa.operation",
    "images": "limosa.image",
    "open_image": "limosa.image",
    "verify": "limosa.image.verify",
    "inventory": "limosa.gpu",
    **dict.fromkeys(
        (
            "CheckpointOptions",
            "MoveOptions",
            "PlanCheckpointOptions",
            "RestoreOptions",
            "SuspendOptions",
            "ToggleOptions",
        ),
        "limosa.operation.options",
    ),
    "LimosaError": "limosa.errors",
    "Reason": "limosa.errors",
    "Progress": "limosa.progress",
    **dict.fromkeys(
        (
            "BindingsTooOld",
            "Busy",
            "CancelledUndone",
            "CannotBeMoved",
            "CommandNotExecutable",
            "CommandNotFound",
            "CriuFailed",
            "CriuNotPermitted",
            "DamagedImage",
            "DestinationExists",
            "DriverError",
            "DriverHung",
            "DriverNoSuchProcess",
            "DriverTimeout",
            "DriverTooOld",
            "FailedUndone",
            "GpuUnavailable",
            "HeldByImport",
            "IllegalState",
            "InvalidArgument",
            "InvalidMap",
            "JobSuspended",
            "LeftSuspended",
            "NoCudaState",
            "NoLibrary",
            "NoRoomOnGpu",
            "NoRoomOnHost",
            "NoSuchImage",
            "NoSuchProcess",
            "NoWorkingCriu",
            "NotAProcess",
            "NotAnImage",
            "NotSupported",
            "OwnAncestor",
            "PauseTooLong",
            "PermissionDenied",
            "PidReused",
            "Refused",
            "RunFailed",
            "SymbolMissing",
            "TimedOutUndone",
            "UndoFailed",
            "UnfinishedImage",
            "UnknownGpu",
            "UntrustedImage",
            "UsageError",
            "WrongChip",
            "Zombie",
        ),
        "limosa.errors",
    ),
}

if TYPE_CHECKING:
    from limosa.errors import BindingsTooOld as BindingsTooOld
    from limosa.errors import Busy as Busy
    from limosa.errors import CancelledUndone as CancelledUndone
    from limosa.errors import CannotBeMoved as CannotBeMoved
    from limosa.errors import CommandNotExecutable as CommandNotExecutable
    from limosa.errors import CommandNotFound as CommandNotFound
    from limosa.errors import CriuFailed as CriuFailed
    from limosa.errors import CriuNotPermitted as CriuNotPermitted
    from limosa.errors import DamagedImage as DamagedImage
    from limosa.errors import DestinationExists as DestinationExists
    from limosa.errors import DriverError as DriverError
    from limosa.errors import DriverHung as DriverHung
    from limosa.errors import DriverNoSuchProcess as DriverNoSuchProcess
    from limosa.errors import DriverTimeout as DriverTimeout
    from limosa.errors import DriverTooOld as DriverTooOld
    from limosa.errors import FailedUndone as FailedUndone
    from limosa.errors import GpuUnavailable as GpuUnavailable
    from limosa.errors import HeldByImport as HeldByImport
    from limosa.errors import IllegalState as IllegalState
    from limosa.errors import InvalidArgument as InvalidArgument
    from limosa.errors import InvalidMap as InvalidMap
    from limosa.errors import JobSuspended as JobSuspended
    from limosa.errors import LeftSuspended as LeftSuspended
    from limosa.errors import LimosaError as LimosaError
    from limosa.errors import NoCudaState as NoCudaState
    from limosa.errors import NoLibrary as NoLibrary
    from limosa.errors import NoRoomOnGpu as NoRoomOnGpu
    from limosa.errors import NoRoomOnHost as NoRoomOnHost
    from limosa.errors import NoSuchImage as NoSuchImage
    from limosa.errors import NoSuchProcess as NoSuchProcess
    from limosa.errors import NotAnImage as NotAnImage
    from limosa.errors import NotAProcess as NotAProcess
    from limosa.errors import NotSupported as NotSupported
    from limosa.errors import NoWorkingCriu as NoWorkingCriu
    from limosa.errors import OwnAncestor as OwnAncestor
    from limosa.errors import PauseTooLong as PauseTooLong
    from limosa.errors import PermissionDenied as PermissionDenied
    from limosa.errors import PidReused as PidReused
    from limosa.errors import Reason as Reason
    from limosa.errors import Refused as Refused
    from limosa.errors import RunFailed as RunFailed
    from limosa.errors import SymbolMissing as SymbolMissing
    from limosa.errors import TimedOutUndone as TimedOutUndone
    from limosa.errors import UndoFailed as UndoFailed
    from limosa.errors import UnfinishedImage as UnfinishedImage
    from limosa.errors import UnknownGpu as UnknownGpu
    from limosa.errors import UntrustedImage as UntrustedImage
    from limosa.errors import UsageError as UsageError
    from limosa.errors import WrongChip as WrongChip
    from limosa.errors import Zombie as Zombie
    from limosa.gpu import inventory as inventory
    from limosa.image import images as images
    from limosa.image import open_image as open_image
    from limosa.image.verify import verify as verify
    from limosa.job import run as run
    from limosa.operation.arena import arena as arena
    from limosa.operation.checkpoint import checkpoint as checkpoint
    from limosa.operation.ending import stop as stop
    from limosa.operation.ending import wait as wait
    from limosa.operation.jobs import resolve as resolve
    from limosa.operation.move import move as move
    from limosa.operation.move import resume as resume
    from limosa.operation.move import suspend as suspend
    from limosa.operation.move import toggle as toggle
    from limosa.operation.options import CheckpointOptions as CheckpointOptions
    from limosa.operation.options import MoveOptions as MoveOptions
    from limosa.operation.options import PlanCheckpointOptions as PlanCheckpointOptions
    from limosa.operation.options import RestoreOptions as RestoreOptions
    from limosa.operation.options import SuspendOptions as SuspendOptions
    from limosa.operation.options import ToggleOptions as ToggleOptions
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
    if name == "gpu":  # a package, which becomes our attribute when it is loaded
        return importlib.import_module("limosa.gpu")
    if name not in _WHERE:
        raise AttributeError(f"module 'limosa' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
