"""Where a run stands, on the disk: atomic, and safe to load (tensors and numbers, nothing that can run)."""

from __future__ import annotations

import json
import pickle
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from moatlab.cost import Cost
from moatlab.errors import UserError
from moatlab.files import SCHEMA, atomic
from moatlab.models import METADATA_KEY, set_weights


@dataclass
class Progress:
    """All that a run knows beside its weights. Random draws need no state: they are functions of the step."""

    step: int = 0
    epochs_logged: int = 0
    metrics_bytes: int = 0
    loss_sum: float = 0.0  # over the steps of the current epoch
    cost: Cost = field(default_factory=Cost)
    monitor_cost: Cost = field(default_factory=Cost)
    epoch_seconds: float = 0.0
    train_seconds: float = 0.0
    monitor_seconds: float = 0.0
    best_epoch: int | None = None
    best_pgd7: float = -1.0


def save_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.SGD,
    progress: Progress,
    scaler: torch.amp.GradScaler,
) -> None:
    momentum = [optimizer.state[p].get("momentum_buffer") for p in model.parameters()]
    content = {
        "schema": SCHEMA,
        "model": model.state_dict(),
        "momentum": momentum,
        "scaler": scaler.state_dict(),
        "progress": asdict(progress),
    }
    with atomic(path) as file:
        torch.save(content, file)


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.SGD, scaler: torch.amp.GradScaler) -> Progress:
    """Put the weights, the momentum and the scale of fp16 gradients back and say where the run stood."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        if content["schema"] != SCHEMA:
            raise UserError(f"{path} has schema {content['schema']}; this version of moatlab reads {SCHEMA}")
        weights, momentum, state = content["model"], content["momentum"], content["progress"]
        scaler.load_state_dict(content["scaler"])
    except (
        OSError,
        RuntimeError,
        EOFError,
        KeyError,
        TypeError,
        ValueError,
        pickle.UnpicklingError,
    ) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"the checkpoint {path} can't be read ({reason})") from None
    set_weights(model, weights, path)
    for parameter, buffer in zip(model.parameters(), momentum, strict=True):
        if buffer is not None:
            optimizer.state[parameter]["momentum_buffer"] = laid_out_like(parameter, buffer)
    state |= {name: Cost(**state[name]) for name in ("cost", "monitor_cost")}
    return Progress(**state)


def laid_out_like(parameter: Tensor, buffer: Tensor) -> Tensor:
    """A copy of `buffer` with the strides of `parameter`: fused SGD walks raw memory and never looks at strides."""
    copy = torch.empty_like(parameter).copy_(buffer)
    assert copy.stride() == parameter.stride()
    return copy


def save_model(path: Path, model: nn.Module, description: dict[str, Any]) -> None:
    """Weights and what is needed to rebuild the model. One metadata key: the file format shuffles several."""
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    text = json.dumps({"schema": SCHEMA, **description}, sort_keys=True)
    with atomic(path) as file:
        file.write(safetensors.torch.save(tensors, metadata={METADATA_KEY: text}))
