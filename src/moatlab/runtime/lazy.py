"""Public names that are imported when they are first used, so that importing a package costs nothing."""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazily(package: str, homes: dict[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__`. `homes` maps each module below the package to the names that it provides."""
    home = {name: module for module, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(import_module(f"{package}.{home[name]}"), name)

    return get
