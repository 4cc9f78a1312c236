"""Training from Python: your model, your data, one call."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from torch import nn

from moatlab.data import Images
from moatlab.data.arrays import as_images
from moatlab.models import load
from moatlab.runtime import console, distributed
from moatlab.runtime.errors import UserError
from moatlab.training import trainer
from moatlab.training.recipe import Recipe, default_name, make_recipe
from moatlab.training.run_folder import RunRecord


@dataclass(frozen=True)
class TrainedRun:
    """What a call of `train` leaves: the run's folder, its record, and the model, in eval mode."""

    folder: Path
    record: RunRecord
    model: nn.Module


@overload
def train(
    model: nn.Module | str, data: Any = ..., *, method: str = ..., out: str | Path | None = ..., resume: bool = ...,
    data_dir: str | Path | None = ..., max_steps: int | None = ..., checkpoint_every: float = ...,
    stream: bool | None = ..., **options: Any,
) -> TrainedRun: ...  # fmt: skip


@overload
def train(
    model: Recipe, data: str | Path, *, resume: bool = ..., data_dir: str | Path | None = ...,
    max_steps: int | None = ..., checkpoint_every: float = ..., stream: bool | None = ...,
) -> RunRecord: ...  # fmt: skip


def train(
    model: nn.Module | str | Recipe, data: Any = None, *, method: str | None = None, out: str | Path | None = None,
    resume: bool = False, data_dir: str | Path | None = None, max_steps: int | None = None,
    checkpoint_every: float = 600.0, stream: bool | None = None, **options: Any,
) -> TrainedRun | RunRecord:  # fmt: skip
    """Train `model` on `data` by a method, and return the run: its folder, its record and the trained model.

        run = moatlab.train(my_model, (x, y), method="imoat:2,5,8", eps="8/255", epochs=30)
        moatlab.evaluate(run.model, test_x, test_y, attacks=["aa"])

    `model` is a module of yours (images in [0, 1] to logits; it is trained in place) or a name, as for --model. `data`
    is a name, a folder or an .npz file, as for --data; or images and labels, `(x, y)` or `((x, y), (test_x, test_y))`,
    bytes (N, H, W, C) or floats (N, C, H, W) in [0, 1]. All other options of `moat train` are options here, `preset`
    among them. The run goes to `out` (runs/NAME if not given); `resume` goes on with what is there.

    `train(recipe, folder)` trains by a whole recipe, and returns its record.
    """
    running: dict[str, Any] = {
        "data_dir": data_dir, "resume": resume, "max_steps": max_steps, "checkpoint_every": checkpoint_every,
        "stream": stream,
    }  # fmt: skip
    if isinstance(model, Recipe):
        if data is None:
            raise UserError("train(recipe, folder) needs a folder for the run")
        if out is not None or method is not None or options:
            raise UserError("train(recipe, folder) takes all the rest from the recipe")
        return trainer.train(model, data, **running)
    if not isinstance(model, nn.Module | str):
        raise UserError(f"the model is a {type(model).__name__}; it must be a torch.nn.Module, or a name")
    data, method = "mini" if data is None else data, method or "moat:2"
    images = data if isinstance(data, Images) else None
    if isinstance(data, tuple | list):
        if len(data) != 2:
            raise UserError("data must be a pair: (x, y), or ((x, y), (test_x, test_y))")
        pairs = isinstance(data[0], tuple | list)
        images = as_images(data[0], data[1]) if pairs else as_images((data[0], data[1]))
    elif images is None and not isinstance(data, str | Path):
        raise UserError(f"data is a {type(data).__name__}; it must be a name, a folder, or tensors: (x, y)")
    own = isinstance(model, nn.Module)
    name = f"{type(model).__module__}:{type(model).__qualname__}" if own else model
    recipe = make_recipe(method, model=name, data=images.name if images else str(data), **options)
    folder = Path(out) if out else free_folder(recipe, options.get("preset"), resume)
    record = trainer.train(recipe, folder, images=images, model=model if isinstance(model, nn.Module) else None,
                            **running)  # fmt: skip
    if not isinstance(model, nn.Module):
        return TrainedRun(folder, record, load(folder, trust_model_code=True))
    return TrainedRun(folder, record, model.eval())


def free_folder(recipe: Recipe, preset: str | None, resume: bool) -> Path:
    """runs/NAME, runs/NAME_2 and so on: the first that is free or, where a run is to go on, the last that is not. Of
    several processes all must name the same: they take the first."""
    first = Path("runs") / default_name(recipe, preset)
    folders = [first]
    while distributed.launched() == 1 and folders[-1].exists():
        folders.append(first.with_name(f"{first.name}_{len(folders) + 1}"))
    folder = folders[-2] if resume and len(folders) > 1 else folders[-1]
    console.note(f"the run goes to {folder}")
    return folder
