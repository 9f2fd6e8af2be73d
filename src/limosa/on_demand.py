"""Packages whose names are loaded when they are first asked for: a command loads what it needs, and nothing else."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class OnDemand(ModuleType):
    """A package that has, in ``_WHERE``, its names and the module of each."""

    _WHERE: dict[str, str]

    def __getattr__(self, name: str) -> Any:
        where = self.__dict__["_WHERE"]
        if name not in where:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{self.__name__}.{where[name]}"), name)
        self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Keep a name that is also a module's (``operation.move``) that of what is in the module."""
        if isinstance(value, ModuleType) and name in self.__dict__["_WHERE"]:
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted(self.__dict__["_WHERE"])


def on_demand(package: str) -> None:
    """Make a package that has ``_WHERE`` such a one.

    Args:
        package: its ``__name__``.
    """
    sys.modules[package].__class__ = OnDemand
