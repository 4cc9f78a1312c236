"""The time and memory of a run, estimated before it starts from a few steps on random images."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from moatlab.data.images import Images
from moatlab.data.sizes import Sizes
from moatlab.runtime import distributed
from moatlab.runtime.console import note
from moatlab.runtime.device import Machine
from moatlab.runtime.errors import UserError
from moatlab.runtime.randomness import generator
from moatlab.training.budget import forwards_of
from moatlab.training.memory import free_bytes, step_bytes
from moatlab.training.recipe import Recipe
from moatlab.training.trainer import Trainer, rehearsal

FEW_STEPS = 3  # after one to warm up
SECONDS = 2.0  # of measuring, but at least two steps after the first
FGSM = 5  # forwards that take as long as a step of fgsm: two, an input backward and a weight backward


@dataclass(frozen=True)
class Estimate:
    seconds: float | None  # of the whole run, monitoring included; None if a step does not fit into memory
    needed: int  # bytes of a training step
    free: int | None


def estimate_run(recipe: Recipe, machine: Machine, images: Sizes) -> Estimate:
    """Of the whole run; no image is read."""
    second, needed, free = measure_step(recipe, machine, images)
    return Estimate(None if second is None else second * forwards_of(recipe, images), needed, free)


def measured_seconds(recipe: Recipe, machine: Machine, images: Sizes, model: nn.Module | None = None) -> float:
    """Per forward of one image. Prints that it measures."""
    if distributed.launched() > 1:
        raise UserError("a budget of time is for one process; under torchrun, give it in passes or FLOPs")
    note("timing a few steps ...")
    second, needed, free = measure_step(recipe, machine, images, model)
    if second is None:
        raise UserError(f"a step needs {needed / 1e9:.1f} GB and {(free or 0) / 1e9:.1f} GB are free; use --batch-size")
    return second


def measure_step(
    recipe: Recipe, machine: Machine, images: Sizes, model: nn.Module | None = None
) -> tuple[float | None, int, int | None]:
    """Seconds per forward of one image (None if a step does not fit into memory), from the median of some steps of
    fgsm; the bytes of a step, and those that are free. `model`: the user's own, of which a copy is timed."""
    short = {"method": "fgsm", "then": "pgd:2", "holdout": 0, "monitor": "train", "on_collapse": "warn", "init": None}
    short |= {"awp": 0.0}
    with rehearsal(recipe.model_copy(update=short), machine, random_images(recipe, images), model) as trainer:
        image, fixed = step_bytes(trainer.session)
        needed, free = recipe.batch_size * image + fixed, free_bytes(trainer.session.device)
        if free is not None and needed > free:
            return None, needed, free
        taken: list[float] = []
        begun = time.monotonic()
        while len(taken) < 3 or time.monotonic() - begun < SECONDS:
            taken.append(real_step(trainer, len(taken) % FEW_STEPS))
    return statistics.median(taken[1:]) / FGSM / recipe.batch_size, needed, free


def random_images(recipe: Recipe, images: Sizes) -> Images:
    """Enough for the measured steps, of the given size and classes."""
    draws, count = generator(0, "images to measure"), recipe.batch_size * (FEW_STEPS + 1)
    shape = (count, images.height, images.width, images.channels)
    x = torch.randint(256, shape, generator=draws, dtype=torch.uint8)
    y = torch.randint(images.classes, (count,), generator=draws)
    classes, half = tuple(map(str, range(images.classes))), (0.5,) * images.channels
    return Images(recipe.data, x, y, x[:1], y[:1], classes, half, half, "random", None, "")


def real_step(trainer: Trainer, step: int) -> float:
    """Seconds taken by one training step, at this step of the run."""
    trainer.progress.step = step
    return timed(trainer.step, trainer.session.device)


def timed(step: Callable[[], object], device: torch.device) -> float:
    begun = time.perf_counter()
    step()
    torch.get_device_module(device).synchronize()
    return time.perf_counter() - begun
