"""Training from Python: your model, your data, one call; and the call behind it, which the command line makes, too."""

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from moatlab.data.arrays import as_images
from moatlab.data.images import Images
from moatlab.data.loading import load_images
from moatlab.models.registry import load
from moatlab.models.weights import read_weights, set_weights
from moatlab.runtime import console, distributed
from moatlab.runtime.device import Machine
from moatlab.runtime.errors import UserError
from moatlab.training.recipe import Recipe, default_name, make_recipe, option_name
from moatlab.training.run_folder import RunFolder, RunRecord
from moatlab.training.setup import Session
from moatlab.training.trainer import Trainer


@dataclass(frozen=True)
class TrainedRun:
    """What `train` returns: the run's folder, its record, and the model, in eval mode."""

    folder: Path
    record: RunRecord
    model: nn.Module


def train(
    model: nn.Module | str | Recipe,
    data: Any = None,
    *,
    method: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    data_dir: str | Path | None = None,
    max_steps: int | None = None,
    checkpoint_every: float = 600.0,
    stream: bool | None = None,
    threads: int | None = None,
    device: str = "auto",
    verbose: bool | None = None,
    **options: Any,
) -> TrainedRun:
    """Train `model` on `data` with a method, and return the run: its folder, its record and the trained model.

        run = moatlab.train(my_model, (x, y), method="imoat:2,5,8", eps="8/255", epochs=30)
        moatlab.evaluate(run.model, test_x, test_y, attacks=["aa"])

    `model` is a module of yours (images in [0, 1] to logits; it is trained in place) or a name, as for --model. `data`
    is a name, a folder or an .npz file, as for --data; or images and labels, `(x, y)` or `((x, y), (test_x, test_y))`,
    bytes (N, H, W, C) or floats (N, C, H, W) in [0, 1]. All other options of `moat train` are options here, `preset`
    among them. The run goes to `out` (runs/NAME if not given); `resume` continues the run that is there. `verbose`:
    progress on stderr; if it is not given, where that is a terminal or a notebook.

    `train(recipe, folder)` trains a whole recipe.
    """
    own: nn.Module | None = None
    images: Images | None = None
    if isinstance(model, Recipe):
        if data is None:
            raise UserError("train(recipe, folder) needs a folder for the run")
        if out is not None or method is not None or options:
            raise UserError("train(recipe, folder) takes all the rest from the recipe")
        recipe, folder = model, Path(data)
    else:
        if not isinstance(model, nn.Module | str):
            raise UserError(f"the model is a {type(model).__name__}; it must be a torch.nn.Module, or a name")
        own = model if isinstance(model, nn.Module) else None
        data = "mini" if data is None else data
        images = _given_images(data)
        name = f"{type(model).__module__}:{type(model).__qualname__}" if own is not None else model
        recipe = make_recipe(method or "moat:2", model=name, data=images.name if images else str(data), **options)
        folder = Path(out) if out else _free_folder(recipe, options.get("preset"), resume)
    with console.verbosity(verbose):
        console.note(f"the run is in {folder}")
        where: dict[str, Any] = {"data_dir": data_dir, "stream": stream, "images": images, "model": own}
        how: dict[str, Any] = {"resume": resume, "max_steps": max_steps, "checkpoint_every": checkpoint_every}
        record = train_recipe(recipe, folder, machine=Machine(device, threads), **where, **how)
    trained = own.eval() if own is not None else load(folder, trust_model_code=True)
    return TrainedRun(folder, record, trained)


def _given_images(data: Any) -> Images | None:
    """Images that are in memory already; None for a name or a path."""
    if isinstance(data, tuple | list):
        if len(data) != 2:
            raise UserError("data must be a pair: (x, y), or ((x, y), (test_x, test_y))")
        pairs = data if isinstance(data[0], tuple | list) else [data]
        return as_images(*pairs)
    if not isinstance(data, Images | str | Path):
        raise UserError(f"data is a {type(data).__name__}; it must be a name, a folder, or tensors: (x, y)")
    return data if isinstance(data, Images) else None


def _free_folder(recipe: Recipe, preset: str | None, resume: bool) -> Path:
    """runs/NAME, runs/NAME_2 and so on: the first that is free or, to resume, the last that is not. Several processes
    must all name the same: they take the first."""
    first = Path("runs") / default_name(recipe, preset)
    folders = [first]
    while distributed.launched() == 1 and folders[-1].exists():
        folders.append(first.with_name(f"{first.name}_{len(folders) + 1}"))
    return folders[-2] if resume and len(folders) > 1 else folders[-1]


def train_recipe(
    recipe: Recipe,
    out: str | Path,
    *,
    machine: Machine | None = None,
    data_dir: str | Path | None = None,
    resume: bool = False,
    max_steps: int | None = None,
    checkpoint_every: float = 600.0,
    stream: bool | None = None,
    images: Images | None = None,
    model: nn.Module | None = None,
) -> RunRecord:
    """Train a recipe into the folder `out`, and return the run's record.

    With `resume` a run that was stopped continues, to the same bits as one that never stopped; a finished one is left
    alone. `max_steps` stops the run early, counted from its first step, as ctrl-C would. Processes that torchrun
    started train it together; when it restarts them, they resume from the last checkpoint. `stream` leaves the images
    of a folder on the disk; `images` and `model` are the user's own, which the recipe names.
    """
    folder, resume = RunFolder(out), resume or distributed.restarts() > 0
    distributed.connect()
    for name, value in recipe:
        distributed.agree(f"recipes ({option_name(name)})", value)
    distributed.agree("--max-steps", max_steps)
    distributed.from_first(lambda: folder.check(recipe, resume=resume))
    finished = distributed.from_first(lambda: folder.finished_record(recipe) if resume else None)
    if finished:
        if images is not None and finished.data["sha256"] != images.sha256:
            raise UserError(f"{folder.path} is a finished run on other images; name another folder")
        console.note(f"{folder.path} is already finished")
        if model is not None:
            set_weights(model, distributed.from_first(lambda: read_weights(folder.path)[0]), folder.path)
        return finished
    with ExitStack() as inside:
        device = inside.enter_context(_as_before(machine or Machine(), folder).in_use())
        if recipe.deterministic and device.type == "cuda" and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
            raise UserError("deterministic training on a GPU needs CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment")
        images = images or load_images(recipe.data, data_dir, stream=stream)
        session = Session(recipe, device, images, model, resuming=bool(folder.checkpoints))
        inside.callback(session.batches.close)
        distributed.agree("data", session.identity)
        inside.enter_context(session.arithmetic())
        distributed.from_first(lambda: inside.enter_context(folder.for_one_process()))
        # Once more: until now another process may have worked here.
        distributed.from_first(lambda: folder.check(recipe, resume=resume))
        last_step = session.total_steps if max_steps is None else min(max_steps, session.total_steps)
        return Trainer(session, folder).run(last_step, checkpoint_every)


def _as_before(machine: Machine, folder: RunFolder) -> Machine:
    """With as many threads as the run was started with, if nobody says how many and there are cores for them."""
    if machine.threads is None and folder.record.exists() and distributed.launched() == 1:
        try:
            threads = int(folder.read_record().environment.get("threads", 0))
        except (UserError, TypeError, ValueError):
            threads = 0
        if 0 < threads <= distributed.cores():
            return Machine(machine.device, threads)
    return machine
