"""Robust image classifiers at single-step cost: MOAT, IMOAT and the baselines of their paper.

    import moatlab
    record = moatlab.train(moatlab.make_recipe("moat:2"), "runs/mine")
    model = moatlab.load("runs/mine")

Names are loaded when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moatlab.data import load_images
    from moatlab.errors import RunFailed, UserError
    from moatlab.evaluation import evaluate
    from moatlab.methods import parse_method
    from moatlab.models import load
    from moatlab.monitor import measure
    from moatlab.recipe import Recipe, make_recipe
    from moatlab.sweep import compare
    from moatlab.training import train

__all__ = [
    "Recipe",
    "RunFailed",
    "UserError",
    "compare",
    "evaluate",
    "load",
    "load_images",
    "make_recipe",
    "measure",
    "parse_method",
    "train",
]

_HOME = {
    "Recipe": "recipe",
    "RunFailed": "errors",
    "UserError": "errors",
    "compare": "sweep",
    "evaluate": "evaluation",
    "load": "models",
    "load_images": "data",
    "make_recipe": "recipe",
    "measure": "monitor",
    "parse_method": "methods",
    "train": "training",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("moatlab")
    if name not in _HOME:
        raise AttributeError(f"module 'moatlab' has no attribute '{name}'")
    return getattr(import_module(f"moatlab.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
