"""How a run begins, and how it goes on after any ending: from the newest checkpoint that is whole, to the same bits."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moatlab.runtime import console, distributed
from moatlab.runtime.environment import describe_environment
from moatlab.runtime.errors import Damaged, UserError
from moatlab.runtime.files import restore_lines
from moatlab.training.checkpoint import Progress, load_checkpoint, save_checkpoint
from moatlab.training.run_folder import RunFolder, RunRecord
from moatlab.training.setup import Session

Good = dict[str, Tensor] | None  # the weights of the last good epoch, where a collapse may call for them


def take_up(session: Session, folder: RunFolder) -> tuple[Progress, Good]:
    """Begin or go on, as the folder says. The first process reads and writes; the others get what it has."""
    start = go_on if folder.checkpoints else begin
    progress, good, scale = distributed.from_first(lambda: (*start(session, folder), session.scaler.state_dict()))
    session.scaler.load_state_dict(scale)
    velocities = session.optimizer.velocity.values()
    distributed.copy_from_first([*session.model.parameters(), *session.model.buffers(), *velocities])
    return progress, good


def begin(session: Session, folder: RunFolder) -> tuple[Progress, Good]:
    if folder.record.exists():  # it is written after the first checkpoint
        raise UserError(f"the run in {folder.path} has lost its checkpoint; begin anew in another folder")
    folder.write_recipe(session.recipe)
    restore_lines(folder.metrics, [])
    restore_lines(folder.events, [])
    keep_progress(session, folder, Progress(), None)
    return Progress(), None


def go_on(session: Session, folder: RunFolder) -> tuple[Progress, Good]:
    try:
        record = folder.read_record()
        if record.data.get("sha256") != session.images.sha256:
            raise UserError(f"{session.recipe.data} is not the data that the run in {folder.path} was started with")
        warn_of_a_move(record.environment, environment_of(session))
    except Damaged as error:
        console.warn(f"{error}; it is made anew")
    progress, good = newest_progress(session, folder)
    restore_lines(folder.metrics, progress.history)
    restore_lines(folder.events, progress.events)
    console.note(f"continuing {folder.path} at step {progress.step} of {session.total_steps}")
    return progress, good


def warn_of_a_move(before: dict[str, Any], now: dict[str, Any]) -> None:
    for name in ("device", "precision", "torch", "cpu"):
        old, new = (str(one.get(name)).partition(":")[0] for one in (before, now))  # whichever GPU it is
        if old != new:
            told = f"the run goes on with another {name} ({new}, not {old})"
            console.warn(f"{told}; it will not end with the bits of one that never stopped")


def newest_progress(session: Session, folder: RunFolder) -> tuple[Progress, Good]:
    """Where the newest checkpoint stands that is whole, with its weights and momentum put back.

    A damaged one is put aside, or it would take the place of the whole one when the next is written.
    """
    failures = []
    for path in folder.checkpoints:
        try:
            found = load_checkpoint(path, session.model, session.optimizer, session.scaler, identity=session.identity)
        except UserError as error:
            failures.append(str(error))
            continue
        if failures:
            console.warn(f"{failures[0]}; it is put aside, and the one before it is used")
            folder.checkpoint.replace(folder.checkpoint.with_name("checkpoint_damaged.pt"))
        return found
    raise UserError("; ".join(failures) + "; begin anew in another folder")


def keep_progress(session: Session, folder: RunFolder, progress: Progress, good: Good) -> None:
    save_checkpoint(
        folder.checkpoint, session.model, session.optimizer, progress, session.scaler, identity=session.identity,
        good=good, previous=folder.previous_checkpoint,
    )  # fmt: skip


def new_record(session: Session) -> RunRecord:
    recipe, images = session.recipe, session.images
    data = {
        "name": images.name, "sha256": images.sha256, "source": images.source, "note": images.note,
        "trained_on": len(session.batches.y), "held_out": recipe.holdout, "test": len(images.test_y),
        "classes": len(images.classes), "monitor": recipe.monitor, "monitored": len(session.watched_y),
    }  # fmt: skip
    return RunRecord(
        status="running", recipe=recipe.sha256, method=recipe.method, cycle=str(session.method), epochs=recipe.epochs,
        steps_per_epoch=session.steps_per_epoch, setting=recipe.setting,
        planned=session.method.cost(recipe.epochs).as_dict(), counted=Progress().cost.as_dict(), data=data,
        environment=environment_of(session),
    )  # fmt: skip


def environment_of(session: Session) -> dict[str, Any]:
    return describe_environment() | {
        "device": str(session.device), "precision": session.precision, "processes": distributed.count(),
    }  # fmt: skip
