"""Robust image classifiers at single-step cost: MOAT, IMOAT and the baselines of their paper.

    import moatlab
    run = moatlab.train(my_model, "my_images", method="moat:2")
    moatlab.evaluate(run.model, x, y, attacks=["aa"])

Names are loaded when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moatlab.data import load_images
    from moatlab.data.arrays import as_images
    from moatlab.evaluation.evaluator import evaluate
    from moatlab.methods.language import parse_method
    from moatlab.methods.stages import add_stage, make_batch
    from moatlab.models import load
    from moatlab.reproduce.comparison import compare
    from moatlab.runtime.errors import RunFailed, UserError
    from moatlab.training.api import TrainedRun, train
    from moatlab.training.monitor import measure
    from moatlab.training.recipe import Recipe, make_recipe

__all__ = [
    "Recipe",
    "RunFailed",
    "TrainedRun",
    "UserError",
    "add_stage",
    "as_images",
    "compare",
    "evaluate",
    "load",
    "load_images",
    "make_batch",
    "make_recipe",
    "measure",
    "parse_method",
    "train",
]

_HOME = {
    "Recipe": "training.recipe",
    "RunFailed": "runtime.errors",
    "TrainedRun": "training.api",
    "UserError": "runtime.errors",
    "add_stage": "methods.stages",
    "as_images": "data.arrays",
    "compare": "reproduce.comparison",
    "evaluate": "evaluation.evaluator",
    "load": "models",
    "load_images": "data",
    "make_batch": "methods.stages",
    "make_recipe": "training.recipe",
    "measure": "training.monitor",
    "parse_method": "methods.language",
    "train": "training.api",
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
