"""Checkpoints: starting a run, saving it, and resuming it bit for bit.

They are written atomically and are safe to load: they hold tensors and numbers, no code.
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
from moatlab.training.recipe import Recipe, load_recipe
from moatlab.training.run_folder import RunFolder
from moatlab.training.setup import Session

Weights = dict[str, Tensor]


@dataclass
class Progress:
    """The state of a run apart from its weights. Random draws need none: they are functions of the step."""

    step: int = 0
    epochs_logged: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)  # the lines of metrics.jsonl
    events: list[dict[str, Any]] = field(default_factory=list)  # the lines of events.jsonl
    loss_sum: float = 0.0  # over the steps of the current epoch
    epoch_skipped: int = 0  # steps of the current epoch skipped by --on-nan skip
    skipped: int = 0
    cost: Cost = field(default_factory=Cost)
    healing_cost: Cost = field(default_factory=Cost)  # beyond the plan, because of a collapse
    monitor_cost: Cost = field(default_factory=Cost)
    spare: Cost = field(default_factory=Cost)  # planned and not used by stages whose cost is a bound
    epoch_seconds: float = 0.0
    train_seconds: float = 0.0
    monitor_seconds: float = 0.0
    best_epoch: int | None = None
    best_pgd7: float = -1.0
    best_written: bool = True  # whether model_best.safetensors is of that epoch
    good_epoch: int | None = None  # the last one before a collapse; the checkpoint keeps its weights
    kept_epoch: int | None = None  # set if the final weights are those of an earlier epoch
    alarms: list[int] = field(default_factory=list)  # the epochs of the monitor's alarms
    alarmed: bool = False
    replaced: bool = False  # --then is the method, until recovery (heal) or to the end (rollback)
    stopped: bool = False  # --on-collapse stop has ended the run
    checks: list[tuple[int, float]] = field(default_factory=list)  # --check-every: step, pgd7 accuracy


COMMENT = b"sha256 "
SEAL_LENGTH = len(COMMENT) + 64


def save_checkpoint(folder: RunFolder, session: Session, progress: Progress, good: Weights | None) -> None:
    """`good`: the weights of the last epoch before a collapse, if the policy may restore them."""
    content = {
        "schema": SCHEMA,
        "identity": session.identity,
        "model": session.model.state_dict(),
        "good": good,
        "optimizer": [session.optimizer.state.get(p, []) for p in session.model.parameters()],
        "scaler": session.scaler.state_dict(),
        "average": session.average.model.state_dict() if session.average else None,
        "memory": session.memory,
        "progress": asdict(progress),
    }
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with atomic(folder.checkpoint, previous=folder.previous_checkpoint) as file:
        file.write(seal(buffer.getvalue()))


def seal(archive: bytes) -> bytes:
    """Add a checksum to a zip archive, which is what torch.save writes, as its comment."""
    archive = archive[:-2] + SEAL_LENGTH.to_bytes(2, "little")
    return archive + COMMENT + hashlib.sha256(archive).hexdigest().encode()


def load_checkpoint(path: Path, session: Session, identity: str) -> tuple[Progress, Weights | None]:
    """Load weights, optimizer state and the scale of fp16 gradients; return the progress and the last good weights."""
    try:
        sealed = read_whole(path)
        if seal(sealed[:-SEAL_LENGTH]) != sealed:  # before anything in it is parsed
            raise ValueError("its checksum does not fit: it is truncated or damaged")
        file = io.BytesIO(sealed)
        check_archive(file)
        file.seek(0)
        content = torch.load(file, map_location="cpu", weights_only=True)
        if content["schema"] != SCHEMA:
            raise UserError(f"{path} has schema {content['schema']}; this version of moatlab reads {SCHEMA}")
        if content["identity"] != identity:
            raise ValueError("it is of another run: another recipe, or other data")
        state = content["progress"]
        costs = {name: Cost(**state[name]) for name in ("cost", "healing_cost", "monitor_cost", "spare")}
        new, parameters = session.optimizer.state, list[Tensor](session.model.parameters())
        pairs = zip(parameters, content["optimizer"], strict=True)
        states = {parameter: laid_out_like(new[parameter], read) for parameter, read in pairs if parameter in new}
        progress = Progress(**state | costs)
        set_weights(session.model, content["model"], path)
        if session.average:
            set_weights(session.average.model, content["average"], path)
        session.memory |= {
            name: kept.to(session.device) if kept.dim() else kept for name, kept in content["memory"].items()
        }
        session.scaler.load_state_dict(content["scaler"])
        session.optimizer.state |= states
    except (*UNREADABLE, pickle.UnpicklingError) as error:
        raise UserError(f"the checkpoint {path} can't be read ({first_line(error)})") from None
    return progress, content["good"]


def laid_out_like(new: list[Tensor], read: list[Tensor]) -> list[Tensor]:
    """Copies of `read` with the strides of `new`: fused kernels read raw memory and ignore strides."""
    if [tensor.shape for tensor in read] != [tensor.shape for tensor in new]:
        raise ValueError("it is of another model")
    return [torch.empty_like(tensor).copy_(stored) for tensor, stored in zip(new, read, strict=True)]


def start_or_resume(session: Session, folder: RunFolder) -> tuple[Progress, Weights | None]:
    """Resume if the folder has a checkpoint, else start. The first process does it; the others copy its state."""
    begin = _resume if folder.checkpoints else _start
    loaded = distributed.from_first(lambda: (*begin(session, folder), session.scaler.state_dict(), session.memory))
    progress, good, scale, memory = loaded
    session.scaler.load_state_dict(scale)
    session.memory |= {name: kept.to(session.device) if kept.dim() else kept for name, kept in memory.items()}
    states = [tensor for tensors in session.optimizer.state.values() for tensor in tensors]
    models = [session.model] + ([session.average.model] if session.average else [])
    weights = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    distributed.copy_from_first([*weights, *states])
    return progress, good


def _start(session: Session, folder: RunFolder) -> tuple[Progress, None]:
    if folder.record.exists():  # the first checkpoint is written before it
        raise UserError(f"the run in {folder.path} has lost its checkpoint; start again in another folder")
    with atomic(folder.recipe) as file:
        file.write(session.recipe.to_toml().encode())
    restore_lines(folder.metrics, [])
    restore_lines(folder.events, [])
    save_checkpoint(folder, session, Progress(), None)
    return Progress(), None


def _resume(session: Session, folder: RunFolder) -> tuple[Progress, Weights | None]:
    try:
        record = folder.read_record()
        if record.data.get("sha256") != session.images.sha256:
            raise UserError(f"{session.recipe.data} is not the data that the run in {folder.path} was started with")
        now = environment_of(session)
        for name in ("device", "precision", "threads", "torch", "cpu"):
            old, new = (str(one.get(name)).partition(":")[0] for one in (record.environment, now))  # without GPU number
            if old != new:
                console.warn(f"the run resumes with another {name} ({new}, not {old}); its last bits may differ")
    except Damaged as error:
        console.warn(f"{error}; it is written again")
    before = load_recipe(folder.recipe)
    progress, good = _load_newest(session, folder, f"{before.sha256} {session.images.sha256}")
    if before != session.recipe:
        extend(session, folder, before, progress, good)
    restore_lines(folder.metrics, progress.history)
    restore_lines(folder.events, progress.events)
    console.note(f"resuming {folder.path} at step {progress.step} of {session.total_steps}")
    return progress, good


def extend(session: Session, folder: RunFolder, before: Recipe, progress: Progress, good: Weights | None) -> None:
    """Give the run more epochs: of a recipe, only those may differ. The checkpoint is written first; should the process
    end before the recipe is, the earlier checkpoint still belongs to the earlier recipe."""
    more = f"the run in {folder.path} can't have {session.recipe.epochs} epochs"
    instead = f"train on from its weights in another folder, with --init {folder.path}"
    if progress.stopped:
        raise UserError(f"{more}: it was ended by --on-collapse stop; {instead}")
    if not session.has_same_past(before, progress.step):
        what = f"the {before.schedule} learning rates and stages of the {progress.step} steps taken depend on"
        raise UserError(f"{more}: {what} its {before.epochs} epochs; {instead}")
    save_checkpoint(folder, session, progress, good)
    with atomic(folder.recipe) as file:
        file.write(session.recipe.to_toml().encode())
    console.note(f"the run has {session.recipe.epochs} epochs now, not {before.epochs}")


def environment_of(session: Session) -> dict[str, Any]:
    count = distributed.count()
    return describe_environment() | {"device": str(session.device), "precision": session.precision, "processes": count}


def _load_newest(session: Session, folder: RunFolder, identity: str) -> tuple[Progress, Weights | None]:
    """Load the newest intact checkpoint. A damaged one is renamed, so that the next save does not replace the intact
    one with it."""
    failures = []
    for path in folder.checkpoints:
        try:
            found = load_checkpoint(path, session, identity)
        except UserError as error:
            failures.append(str(error))
        else:
            if failures:
                console.warn(f"{failures[0]}; it is renamed to checkpoint_damaged.pt, and the one before it is used")
                folder.checkpoint.replace(folder.checkpoint.with_name("checkpoint_damaged.pt"))
            return found
    raise UserError("; ".join(failures) + "; start again in another folder")
