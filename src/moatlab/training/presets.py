"""Named settings that a recipe starts from."""

from pathlib import Path
from typing import Any

from moatlab.data.known import SPECS
from moatlab.data.sizes import Sizes

PAPER: dict[str, Any] = {
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
MINI = PAPER | {"data": "mini", "width": 16, "epochs": 21, "eps": "16/255", "augment": False, "holdout": 500}

# For the user's own images; `for_images` adds the rest.
OWN = {name: value for name, value in PAPER.items() if name not in ("batch_size", "holdout")}
OWN |= {"data": "mini", "epochs": 30}
FEWEST_STEPS = 16  # per epoch, with batches of at least SMALLEST_BATCH images
SMALLEST_BATCH = 8

PRESETS: dict[str, dict[str, Any]] = {
    "mini": MINI,
    "mini-long": MINI | {"bn_in_attack": "eval", "batch_size": 32, "lr": 0.1, "epochs": 36},
    "small": PAPER | {"width": 16, "epochs": 30, "holdout": 1000},
    "paper": PAPER,
    "paper-kim": PAPER | {"final_norm": False, "bn_in_attack": "eval", "std": (0.2023, 0.1994, 0.2010)},
    "own": OWN,
}


def default_preset(data: str | Path | None) -> str:
    return "mini" if data in (None, "mini") else "paper" if data in SPECS else "own"


def for_images(images: Sizes, holdout: int | None = None) -> dict[str, int]:
    """Held-out images and batch size, from the number and the size of the images only."""
    holdout = min(1000, images.train // 10) if holdout is None else holdout
    side = max(images.height, images.width)
    size = 128 if side <= 64 else 64 if side <= 128 else 32
    while size > SMALLEST_BATCH and (images.train - holdout) // size < FEWEST_STEPS:
        size //= 2
    return {"holdout": holdout, "batch_size": size}
