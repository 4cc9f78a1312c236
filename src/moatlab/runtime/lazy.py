"""Public names imported on first use, so that importing a package is fast."""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazily(package: str, homes: dict[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__`. `homes` maps modules of the package to the names they provide."""
    home = {name: module for module, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(import_module(f"{package}.{home[name]}"), name)

    return get
