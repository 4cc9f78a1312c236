"""Adversarial training for PyTorch image classifiers at the cost of single-step training: MOAT, IMOAT, baselines.

    import moatlab
    run = moatlab.train(my_model, "my_images", method="moat:2")
    moatlab.evaluate(run.model, x, y, attacks=["aa"])

Names are imported on first use, so that importing the package is fast.
"""

from typing import TYPE_CHECKING, Any

from moatlab.runtime.lazy import lazily

if TYPE_CHECKING:
    from moatlab.data.arrays import as_images
    from moatlab.data.loading import load_images
    from moatlab.evaluation.evaluator import evaluate
    from moatlab.methods.batches import add_stage
    from moatlab.methods.language import parse_method
    from moatlab.models.registry import load
    from moatlab.report.leaderboard import write_leaderboard
    from moatlab.report.page import write_report
    from moatlab.reproduce.comparison import compare
    from moatlab.runtime.errors import RunFailed, UserError
    from moatlab.training.api import TrainedRun, train
    from moatlab.training.making import make_recipe
    from moatlab.training.monitor import measure
    from moatlab.training.own_loop import make_batch
    from moatlab.training.recipe import Recipe

__all__ = ["Recipe", "RunFailed", "TrainedRun", "UserError", "add_stage", "as_images", "compare", "evaluate", "load"]
__all__ += ["load_images", "make_batch", "make_recipe", "measure", "parse_method", "train", "write_leaderboard"]
__all__ += ["write_report"]

_public = lazily(
    __name__,
    {
        "data.arrays": "as_images",
        "data.loading": "load_images",
        "evaluation.evaluator": "evaluate",
        "methods.batches": "add_stage",
        "methods.language": "parse_method",
        "models.registry": "load",
        "report.leaderboard": "write_leaderboard",
        "report.page": "write_report",
        "reproduce.comparison": "compare",
        "runtime.errors": "RunFailed UserError",
        "training.api": "TrainedRun train",
        "training.making": "make_recipe",
        "training.monitor": "measure",
        "training.own_loop": "make_batch",
        "training.recipe": "Recipe",
    },
)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("moatlab")
    return _public(name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
