"""Training from Python: `train`, and `train_recipe`, which the command line calls too."""

import os
from collections.abc import Iterable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from torch.utils.data import DataLoader, Dataset

from moatlab.data.arrays import as_images
from moatlab.data.images import Images
from moatlab.data.loading import load_images
from moatlab.models.outputs import giving_logits
from moatlab.models.registry import load
from moatlab.models.weights import read_weights, set_weights
from moatlab.runtime import console, distributed
from moatlab.runtime.device import Machine
from moatlab.runtime.errors import Interrupted, UserError
from moatlab.training.best import recipe_within
from moatlab.training.front import BEST, Prefer
from moatlab.training.known_trackers import choose_trackers
from moatlab.training.making import default_name, make_recipe
from moatlab.training.memory import check_memory
from moatlab.training.recipe import Recipe, option_name
from moatlab.training.resuming import resumed_recipe
from moatlab.training.run_folder import RunFolder, RunRecord
from moatlab.training.setup import Session
from moatlab.training.trackers import Tracker
from moatlab.training.trainer import Trainer


@dataclass(frozen=True, repr=False)
class TrainedRun:
    """Returned by `train`: the run's folder, its record, and the model in eval mode. `print` shows its accuracies."""

    folder: Path
    record: RunRecord
    model: nn.Module
    images: Images | None = None  # those given to `train` in memory

    def __repr__(self) -> str:
        return f"TrainedRun({str(self.folder)!r}, {self.record.method}, {self.record.status})"

    def __str__(self) -> str:
        return self.record.text(self.folder)

    def _repr_html_(self) -> str:
        return self.record.html(self.folder)


def train(
    model: nn.Module | str | Recipe,
    data: Any = None,
    *,
    method: str | None = None,
    budget: str | None = None,
    prefer: Prefer | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    data_dir: str | Path | None = None,
    max_steps: int | None = None,
    checkpoint_every: float = 600.0,
    stream: bool | None = None,
    threads: int | None = None,
    device: str = "auto",
    trackers: Iterable[str | Tracker] | None = None,
    verbose: bool | None = None,
    **options: Any,
) -> TrainedRun:
    """Train `model` on `data` with a method, and return the run.

        run = moatlab.train(my_model, (x, y), method="imoat:2,5,8", eps="8/255", epochs=30)
        moatlab.evaluate(run.model, test_x, test_y, attacks=["aa"])

    `model` is a module (images in [0, 1] to logits; trained in place) or a name, as for --model. `data` is a name, a
    folder or an .npz file, as for --data; or images and labels: `(x, y)`, a `Dataset` or a `DataLoader`, or two of
    these, `(train, test)`. Images are bytes (N, H, W, C) or floats (N, C, H, W) in [0, 1], which are rounded to bytes.
    `budget` ("30min", "60passes", "2PFLOP") chooses the epochs, and with `method="best"` the method, see `prefer`.
    All other options of `moat train` are accepted. The run is written to `out` (default: runs/NAME); `resume` continues
    the run there. `trackers` get its numbers: names ("tensorboard", "wandb", "mlflow") or your own (default:
    TensorBoard, if it is installed). `verbose`: print progress on stderr (default: if that is a terminal or a
    notebook). `train(recipe, folder)` trains a complete recipe.
    """
    own: nn.Module | None = None
    images: Images | None = None
    if isinstance(model, Recipe):
        if data is None:
            raise UserError("train(recipe, folder) needs a folder for the run")
        if out is not None or method is not None or budget is not None or prefer is not None or options:
            raise UserError("train(recipe, folder) takes no out, method or options; they are in the recipe")
        recipe, folder = model, Path(data)
    else:
        if not isinstance(model, nn.Module | str):
            raise UserError(f"the model is a {type(model).__name__}; it must be a torch.nn.Module or a name")
        own = model if isinstance(model, nn.Module) else None
        data_given, data = data is not None, "mini" if data is None else data
        with console.verbosity(verbose):
            images = _given_images(data)
        name = f"{type(model).__module__}:{type(model).__qualname__}" if own is not None else model
        options |= {"model": name, "data": images.name if images else str(data)}
        sizes, machine = images.sizes if images else None, Machine(device, threads)
        if budget is None and (method == BEST or prefer):
            raise UserError('method="best" needs a budget, such as budget="30min", "60passes" or "2PFLOP"')
        known = options | ({} if data_given else {"data": None})
        how: dict[str, Any] = {"budget": budget is not None, **known}
        asked = None if method == BEST else method
        if resume and out is not None and RunFolder(out).is_begun:
            folder = Path(out)
            recipe = resumed_recipe(RunFolder(folder), asked, **how)
        else:
            if budget:
                limits: dict[str, Any] = {"prefer": prefer, "machine": machine, "own": own}
                with console.verbosity(verbose):
                    recipe = recipe_within(budget, method or "moat:2", images=sizes, **limits, **options)
            else:
                recipe = make_recipe(method or "moat:2", images=sizes, **options)
            folder = Path(out) if out else _free_folder(recipe, options.get("preset"), resume)
            if resume and RunFolder(folder).is_begun:
                recipe = resumed_recipe(RunFolder(folder), asked, **how)
    with console.verbosity(verbose), giving_logits(own) if own is not None else nullcontext():
        console.note(f"the run is in {folder}")
        where: dict[str, Any] = {"data_dir": data_dir, "stream": stream, "images": images, "model": own}
        run: dict[str, Any] = {"resume": resume, "max_steps": max_steps, "checkpoint_every": checkpoint_every}
        run["trackers"] = trackers
        try:
            record = train_recipe(recipe, folder, machine=Machine(device, threads), **where, **run)
        except Interrupted as error:
            again = f'to continue, call moatlab.train again with out="{folder}", resume=True'
            raise Interrupted(f"{error}; {again}", error.signal_number) from None
    trained = own.eval() if own is not None else load(folder, trust_model_code=True)
    return TrainedRun(folder, record, trained, images)


def _given_images(data: Any) -> Images | None:
    """Images in memory; None for a name or a path."""
    if isinstance(data, str | Path):
        return None
    if isinstance(data, Images):
        return data
    if isinstance(data, tuple | list):
        if len(data) != 2:
            raise UserError("data must be a pair: (x, y), or (train, test)")
        return as_images(*data) if all(map(_is_source, data)) else as_images(tuple(data))
    if not isinstance(data, Dataset | DataLoader):
        kinds = "a name, a folder, a Dataset, a DataLoader, or tensors: (x, y)"
        raise UserError(f"data is a {type(data).__name__}; it must be {kinds}")
    return as_images(data)


def _is_source(given: Any) -> bool:
    """Whether it has images and labels: a Dataset, a DataLoader, or a pair whose first entry has several dimensions."""
    if isinstance(given, Dataset | DataLoader):
        return True
    return isinstance(given, tuple | list) and len(given) == 2 and np.ndim(given[0]) > 2


def _free_folder(recipe: Recipe, preset: str | None, resume: bool) -> Path:
    """The first free one of runs/NAME, runs/NAME_2 and so on, or to resume the last existing one. Several processes
    always use runs/NAME, so that all have the same."""
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
    trackers: Iterable[str | Tracker] | None = None,
) -> RunRecord:
    """Train a recipe in the folder `out`, and return the run's record.

    `resume` continues a stopped run, with the same bits as one that never stopped; a finished one is left unchanged.
    `max_steps`, counted from the first step of the run, stops it early. Processes started by torchrun train together;
    after a restart they resume from the last checkpoint. `stream` leaves the images of a folder on the disk. `images`
    and `model` are the user's own. `trackers`: as in `train`.
    """
    followed = choose_trackers(trackers)
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
        device = inside.enter_context(_with_same_threads(machine or Machine(), folder).in_use())
        if recipe.deterministic and device.type == "cuda" and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
            raise UserError("deterministic training on a GPU needs CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment")
        images = images or load_images(recipe.data, data_dir, stream=stream, image_size=recipe.image_size)
        session = Session(recipe, device, images, model, resuming=bool(folder.checkpoints))
        inside.callback(session.batches.close)
        distributed.agree("data", session.identity)
        inside.enter_context(session.arithmetic())
        check_memory(session)
        distributed.from_first(lambda: inside.enter_context(folder.for_one_process()))
        # Again: until the lock was taken, another process may have trained here.
        distributed.from_first(lambda: folder.check(recipe, resume=resume))
        last_step = session.total_steps if max_steps is None else min(max_steps, session.total_steps)
        return Trainer(session, folder, followed).run(last_step, checkpoint_every)


def _with_same_threads(machine: Machine, folder: RunFolder) -> Machine:
    """The machine with as many threads as the run was started with, unless set, or more than there are cores."""
    if machine.threads is None and folder.record.exists() and distributed.launched() == 1:
        with suppress(UserError, TypeError, ValueError):
            threads = int(folder.read_record().environment.get("threads", 0))
            if 0 < threads <= distributed.cores():
                return Machine(machine.device, threads)
    return machine
