"""Where a run stands, on the disk: atomic, and safe to load (tensors and numbers, nothing that can run)."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from moatlab.methods.cost import Cost
from moatlab.models.weights import METADATA_KEY, UNREADABLE, check_archive, fingerprint, first_line, set_weights
from moatlab.runtime.errors import UserError
from moatlab.runtime.files import SCHEMA, atomic, read_whole
from moatlab.training.optimizer import Sgd


@dataclass
class Progress:
    """All that a run knows beside its weights. Random draws need no state: they are functions of the step."""

    step: int = 0
    epochs_logged: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)  # the lines of metrics.jsonl: what the monitor goes by
    events: list[dict[str, Any]] = field(default_factory=list)  # the lines of events.jsonl
    loss_sum: float = 0.0  # over the steps of the current epoch
    epoch_skipped: int = 0  # steps of the current epoch that --on-nan skip left out
    skipped: int = 0
    cost: Cost = field(default_factory=Cost)
    healing_cost: Cost = field(default_factory=Cost)  # beyond the plan, because of a collapse
    monitor_cost: Cost = field(default_factory=Cost)
    epoch_seconds: float = 0.0
    train_seconds: float = 0.0
    monitor_seconds: float = 0.0
    best_epoch: int | None = None
    best_pgd7: float = -1.0
    best_written: bool = True  # is model_best.safetensors of that epoch?
    good_epoch: int | None = None  # the last one before a collapse, whose weights a checkpoint keeps
    kept_epoch: int | None = None  # where the run ends with the weights of an earlier epoch
    alarms: list[int] = field(default_factory=list)  # the epochs of the monitor's alarms
    alarmed: bool = False
    replaced: bool = False  # the method is the one of --then, for now (heal) or for good (rollback)
    stopped: bool = False  # --on-collapse stop has ended the run


COSTS = ("cost", "healing_cost", "monitor_cost")
COMMENT = b"sha256 "


def save_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: Sgd,
    progress: Progress,
    scaler: torch.amp.GradScaler,
    *,
    identity: str = "",
    good: dict[str, Tensor] | None = None,
    previous: Path | None = None,
) -> None:
    """`identity` names the run: a checkpoint of another one is not taken for it. `good`: weights to go back to."""
    content = {
        "schema": SCHEMA,
        "identity": identity,
        "model": model.state_dict(),
        "good": good,
        "momentum": [optimizer.velocity.get(p) for p in model.parameters()],
        "scaler": scaler.state_dict(),
        "progress": asdict(progress),
    }
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with atomic(path, previous=previous) as file:
        file.write(seal(buffer.getvalue()))


def seal(archive: bytes) -> bytes:
    """A zip archive, which is what torch.save makes, with a checksum of all of it as its comment."""
    length = len(COMMENT) + 64
    archive = archive[:-2] + length.to_bytes(2, "little")
    return archive + COMMENT + hashlib.sha256(archive).hexdigest().encode()


def unseal(content: bytes) -> bytes:
    """The content, if its checksum fits. Nothing in it is looked at before."""
    archive, comment = content[: -len(COMMENT) - 64], content[-len(COMMENT) - 64 :]
    if comment != COMMENT + hashlib.sha256(archive).hexdigest().encode():
        raise ValueError("its checksum does not fit: it is torn or damaged")
    return content


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: Sgd, scaler: torch.amp.GradScaler, *, identity: str = ""
) -> tuple[Progress, dict[str, Tensor] | None]:
    """Put the weights, the momentum and the scale of fp16 gradients back; where the run stood, and its good weights."""
    try:
        file = io.BytesIO(unseal(read_whole(path)))
        check_archive(file)
        file.seek(0)
        content = torch.load(file, map_location="cpu", weights_only=True)
        if content["schema"] != SCHEMA:
            raise UserError(f"{path} has schema {content['schema']}; this version of moatlab reads {SCHEMA}")
        if content["identity"] != identity:
            raise ValueError("it is of another run: another recipe, or other data")
        momentum, state = content["momentum"], content["progress"]
        progress = Progress(**state | {name: Cost(**state[name]) for name in COSTS})
        for parameter, buffer in zip(model.parameters(), momentum, strict=True):
            if buffer is not None and buffer.shape != parameter.shape:
                raise ValueError("it is of another model")
        set_weights(model, content["model"], path)
        scaler.load_state_dict(content["scaler"])
        for parameter, buffer in zip(model.parameters(), momentum, strict=True):
            if buffer is not None:
                optimizer.velocity[parameter] = laid_out_like(parameter, buffer)
    except (*UNREADABLE, pickle.UnpicklingError) as error:
        raise UserError(f"the checkpoint {path} can't be read ({first_line(error)})") from None
    return progress, content["good"]


def laid_out_like(parameter: Tensor, buffer: Tensor) -> Tensor:
    """A copy of `buffer` with the strides of `parameter`: fused SGD walks raw memory and never looks at strides."""
    copy = torch.empty_like(parameter).copy_(buffer)
    assert copy.stride() == parameter.stride()
    return copy


def save_model(path: Path, model: nn.Module, description: dict[str, Any]) -> str:
    """Weights and what is needed to rebuild the model. One metadata key: the file format shuffles several.

    Returns the checksum that is in the file.
    """
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    description = {"schema": SCHEMA, **description}
    digest = fingerprint(tensors, description)
    text = json.dumps({**description, "sha256": digest}, sort_keys=True)
    with atomic(path) as file:
        file.write(safetensors.torch.save(tensors, metadata={METADATA_KEY: text}))
    return digest
