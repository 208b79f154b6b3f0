"""Packages that import what they export when it is first asked for.

torch, transformers and PEFT take seconds to import, which `branchline --version` or a usage error
need not wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_exports(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__`.

    Args:
        package: its `__name__`.
        homes: by the name of what it exports, the module below the package that has it.  None may
            be called like a module of the package: whoever imports that module would hide it.
    """

    def get(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(import_module(f"{package}.{home}"), name)
        setattr(import_module(package), name, found)
        return found

    return get
