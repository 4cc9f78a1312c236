"""Named settings that a recipe starts from."""

from pathlib import Path
from typing import Any

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

PRESETS: dict[str, dict[str, Any]] = {
    "mini": MINI,
    "mini-long": MINI | {"bn_in_attack": "eval", "batch_size": 32, "lr": 0.1, "epochs": 36},
    "small": PAPER | {"width": 16, "epochs": 30, "holdout": 1000},
    "paper": PAPER,
    "paper-kim": PAPER | {"final_norm": False, "bn_in_attack": "eval", "std": (0.2023, 0.1994, 0.2010)},
}


def default_preset(data: str | Path | None) -> str:
    return "mini" if data in (None, "mini") else "paper"
