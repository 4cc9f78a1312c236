"""Named settings that a recipe starts from."""

import math
from pathlib import Path
from typing import Any

from moatlab.data.known import SPECS
from moatlab.data.sizes import Sizes
from moatlab.methods.language import parse_method

# The network of Rice et al. (2020), attacks in train mode.
BASE: dict[str, Any] = {
    "data": "cifar10",
    "model": "preact_resnet18",
    "width": 64,
    "shortcut": "activated",
    "final_norm": True,
    "schedule": "cyclic",
    "eps": "8/255",
    "lr": 0.2,
    "momentum": 0.9,
    "weight_decay": 5e-4,
    "batch_size": 128,
    "augment": True,
    "bn_in_attack": "train",
    "holdout": 0,
    "seed": 0,
}
MINI = BASE | {"data": "mini", "width": 16, "epochs": 21, "eps": "16/255", "augment": False, "holdout": 500}
MINI |= {"precision": "fp32"}  # on every machine, so that its results can be compared

# For the user's own images; `for_images` adds the rest.
OWN = {name: value for name, value in BASE.items() if name not in ("batch_size", "holdout")}
OWN |= {"data": "mini", "epochs": 30}
KIM_STD = (0.2023, 0.1994, 0.2010)  # of CIFAR-10, in Kim et al.'s code
FEWEST_STEPS = 16  # per epoch, with batches of at least SMALLEST_BATCH images
SMALLEST_BATCH = 8

PRESETS: dict[str, dict[str, Any]] = {
    "mini": MINI,
    "mini-long": MINI | {"bn_in_attack": "eval", "batch_size": 32, "lr": 0.1, "epochs": 36},
    "laptop": BASE | {"width": 16, "stem": "4x4s2", "epochs": 30, "holdout": 1000},
    # The paper follows Kim et al. (2021); on CIFAR-10 with KIM_STD.
    "paper": BASE | {"final_norm": False, "bn_in_attack": "eval", "cycle_momentum": True},
    "paper-fast": BASE | {"shortcut": "raw", "cycle_momentum": True},  # Wong et al. (2020): fast_adversarial
    "own": OWN,
}


def default_preset(data: str | Path | None) -> str:
    """For CIFAR by the hardware: `paper` takes days without a GPU. Only then torch is imported, which is slow."""
    if data in (None, "mini"):
        return "mini"
    if data not in SPECS:
        return "own"
    import torch

    return "paper" if torch.cuda.is_available() else "laptop"


def paper_epochs(method: str, schedule: str) -> int:
    """60 epochs; 200 for stepwise, rounded up to whole cycles (201 for three stages)."""
    if schedule != "stepwise":
        return 60
    length = len(parse_method(method).slots)
    return math.ceil(200 / length) * length


def for_images(images: Sizes, holdout: int | None = None) -> dict[str, int]:
    """Held-out images and batch size, from the number and the size of the images only."""
    holdout = min(1000, images.train // 10) if holdout is None else holdout
    side = max(images.height, images.width)
    size = 128 if side <= 64 else 64 if side <= 128 else 32
    while size > SMALLEST_BATCH and (images.train - holdout) // size < FEWEST_STEPS:
        size //= 2
    return {"holdout": holdout, "batch_size": size}
