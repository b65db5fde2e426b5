"""Import the public names of a package at their first use, so that a job loads only the modules it needs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def late_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Create the `__getattr__` of a package: `modules` maps each module to its public names, separated by spaces.

    Modules are relative to the package (".layers") or absolute; a module without names is itself the attribute.
    """
    owners = {name: module for module, names in modules.items() for name in names.split() or [module.lstrip(".")]}

    def get(name: str) -> Any:
        """Import a name from its module and store it in the package."""
        if name not in owners:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(owners[name], package)
        value = getattr(module, name) if modules[owners[name]] else module
        setattr(sys.modules[package], name, value)
        return value

    return get
