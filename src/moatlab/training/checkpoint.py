"""Where a run is, on the disk, and how it starts or resumes from there, to the same bits.

A checkpoint is atomic, and safe to load: it holds tensors and numbers, nothing that can run.
"""

import hashlib
import io
import pickle
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moatlab.methods.cost import Cost
from moatlab.models.weights import UNREADABLE, check_archive, set_weights
from moatlab.runtime import console, distributed
from moatlab.runtime.environment import describe_environment
from moatlab.runtime.errors import Damaged, UserError, first_line
from moatlab.runtime.files import SCHEMA, atomic, read_whole, restore_lines
from moatlab.training.run_folder import RunFolder
from moatlab.training.setup import Session

Weights = dict[str, Tensor]


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


def save_checkpoint(folder: RunFolder, session: Session, progress: Progress, good: Weights | None) -> None:
    """`good`: the weights of the last good epoch, where a collapse may call for them."""
    optimizer = session.optimizer
    content = {
        "schema": SCHEMA,
        "identity": session.identity,
        "model": session.model.state_dict(),
        "good": good,
        "momentum": [optimizer.velocity.get(p) for p in session.model.parameters()],
        "scaler": session.scaler.state_dict(),
        "progress": asdict(progress),
    }
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with atomic(folder.checkpoint, previous=folder.previous_checkpoint) as file:
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


def load_checkpoint(path: Path, session: Session) -> tuple[Progress, Weights | None]:
    """Put the weights, the momentum and the scale of fp16 gradients back; where the run was, and its good weights."""
    model = session.model
    try:
        file = io.BytesIO(unseal(read_whole(path)))
        check_archive(file)
        file.seek(0)
        content = torch.load(file, map_location="cpu", weights_only=True)
        if content["schema"] != SCHEMA:
            raise UserError(f"{path} has schema {content['schema']}; this version of moatlab reads {SCHEMA}")
        if content["identity"] != session.identity:
            raise ValueError("it is of another run: another recipe, or other data")
        momentum, state = content["momentum"], content["progress"]
        progress = Progress(**state | {name: Cost(**state[name]) for name in COSTS})
        for parameter, buffer in zip(model.parameters(), momentum, strict=True):
            if buffer is not None and buffer.shape != parameter.shape:
                raise ValueError("it is of another model")
        set_weights(model, content["model"], path)
        session.scaler.load_state_dict(content["scaler"])
        for parameter, buffer in zip(model.parameters(), momentum, strict=True):
            if buffer is not None:
                session.optimizer.velocity[parameter] = laid_out_like(parameter, buffer)
    except (*UNREADABLE, pickle.UnpicklingError) as error:
        raise UserError(f"the checkpoint {path} can't be read ({first_line(error)})") from None
    return progress, content["good"]


def laid_out_like(parameter: Tensor, buffer: Tensor) -> Tensor:
    """A copy of `buffer` with the strides of `parameter`: fused SGD walks raw memory and never looks at strides."""
    copy = torch.empty_like(parameter).copy_(buffer)
    assert copy.stride() == parameter.stride()
    return copy


def start_or_resume(session: Session, folder: RunFolder) -> tuple[Progress, Weights | None]:
    """As the folder says. The first process reads and writes; the others get what it has."""
    begin = _resume if folder.checkpoints else _start
    progress, good, scale = distributed.from_first(lambda: (*begin(session, folder), session.scaler.state_dict()))
    session.scaler.load_state_dict(scale)
    velocities = session.optimizer.velocity.values()
    distributed.copy_from_first([*session.model.parameters(), *session.model.buffers(), *velocities])
    return progress, good


def _start(session: Session, folder: RunFolder) -> tuple[Progress, None]:
    if folder.record.exists():  # it is written after the first checkpoint
        raise UserError(f"the run in {folder.path} has lost its checkpoint; start again in another folder")
    folder.write_recipe(session.recipe)
    restore_lines(folder.metrics, [])
    restore_lines(folder.events, [])
    save_checkpoint(folder, session, Progress(), None)
    return Progress(), None


def _resume(session: Session, folder: RunFolder) -> tuple[Progress, Weights | None]:
    try:
        record = folder.read_record()
        if record.data.get("sha256") != session.images.sha256:
            raise UserError(f"{session.recipe.data} is not the data that the run in {folder.path} was started with")
        warn_of_a_move(record.environment, environment_of(session))
    except Damaged as error:
        console.warn(f"{error}; it is written again")
    progress, good = _newest(session, folder)
    restore_lines(folder.metrics, progress.history)
    restore_lines(folder.events, progress.events)
    console.note(f"resuming {folder.path} at step {progress.step} of {session.total_steps}")
    return progress, good


def warn_of_a_move(before: dict[str, Any], now: dict[str, Any]) -> None:
    for name in ("device", "precision", "threads", "torch", "cpu"):
        old, new = (str(one.get(name)).partition(":")[0] for one in (before, now))  # whichever GPU it is
        if old != new:
            console.warn(f"the run resumes with another {name} ({new}, not {old}); its last bits may differ")


def environment_of(session: Session) -> dict[str, Any]:
    count = distributed.count()
    return describe_environment() | {"device": str(session.device), "precision": session.precision, "processes": count}


def _newest(session: Session, folder: RunFolder) -> tuple[Progress, Weights | None]:
    """The newest checkpoint that is whole, with its weights and momentum put back.

    A damaged one is put aside, or it would take the place of the whole one when the next is written.
    """
    failures = []
    for path in folder.checkpoints:
        try:
            found = load_checkpoint(path, session)
        except UserError as error:
            failures.append(str(error))
            continue
        if failures:
            console.warn(f"{failures[0]}; it is put aside, and the one before it is used")
            folder.checkpoint.replace(folder.checkpoint.with_name("checkpoint_damaged.pt"))
        return found
    raise UserError("; ".join(failures) + "; start again in another folder")
