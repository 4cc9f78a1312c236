"""The time and memory of a run on the user's own images, estimated before it starts."""

import time
from dataclasses import dataclass

import torch

from moatlab.data.images import Images
from moatlab.data.sizes import Sizes
from moatlab.reproduce.benchmark import FEW_STEPS, real_step
from moatlab.runtime.device import Machine
from moatlab.runtime.randomness import generator
from moatlab.training.memory import free_bytes, step_bytes
from moatlab.training.monitor import PASSES
from moatlab.training.recipe import Recipe
from moatlab.training.setup import TRAIN_SAMPLE
from moatlab.training.trainer import rehearsal

LONGEST = 10.0  # seconds of measuring, after which no further step is taken


@dataclass(frozen=True)
class Estimate:
    seconds: float | None  # of the whole run, monitoring included; None if a step does not fit into memory
    needed: int  # bytes of a training step
    free: int | None


def estimate_run(recipe: Recipe, machine: Machine, images: Sizes) -> Estimate:
    """From the fastest of a few fgsm steps (two passes each) on random images; no image is read."""
    short = {"method": "fgsm", "then": "pgd:2", "holdout": 0, "monitor": "train", "on_collapse": "warn", "init": None}
    with rehearsal(recipe.model_copy(update=short), machine, random_images(recipe, images)) as trainer:
        image, fixed = step_bytes(trainer.session)
        needed, free = recipe.batch_size * image + fixed, free_bytes(trainer.session.device)
        if free is not None and needed > free:
            return Estimate(None, needed, free)
        taken: list[float] = []
        begun = time.monotonic()
        while len(taken) <= FEW_STEPS and (len(taken) < 2 or time.monotonic() - begun < LONGEST):
            taken.append(real_step(trainer, len(taken)))
    a_pass = min(taken[1:]) / 2 / recipe.batch_size  # seconds of one image
    trained = (images.train - recipe.holdout) // recipe.batch_size * recipe.batch_size
    sample = min(TRAIN_SAMPLE, images.train - recipe.holdout)
    watched = {"holdout": recipe.holdout, "train": sample, "test": images.test}[recipe.monitor]
    watched = min(watched, recipe.monitor_images or watched) * -(-recipe.epochs // recipe.monitor_every)
    steps = trained // recipe.batch_size
    passes = recipe.planned_work(steps, recipe.batch_size, images.classes).passes
    return Estimate(a_pass * (passes + PASSES * (watched + images.test)), needed, free)


def random_images(recipe: Recipe, images: Sizes) -> Images:
    """Enough for the measured steps, of the given size and classes."""
    draws, count = generator(0, "images to measure"), recipe.batch_size * (FEW_STEPS + 1)
    shape = (count, images.height, images.width, images.channels)
    x = torch.randint(256, shape, generator=draws, dtype=torch.uint8)
    y = torch.randint(images.classes, (count,), generator=draws)
    classes, half = tuple(map(str, range(images.classes))), (0.5,) * images.channels
    return Images(recipe.data, x, y, x[:1], y[:1], classes, half, half, "random", None, "")
