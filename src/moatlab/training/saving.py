"""Writes the files of a run: the checkpoint, the model, the best model and the record."""

from contextlib import suppress
from typing import Any

from moatlab.models.weights import write_weights
from moatlab.runtime import distributed
from moatlab.runtime.errors import NotWritten
from moatlab.training.checkpoint import Progress, Weights, environment_of, save_checkpoint
from moatlab.training.logbook import Logbook
from moatlab.training.outcome import Verdict
from moatlab.training.run_folder import RunFolder, RunRecord
from moatlab.training.setup import Session


class Saver:
    """Only the first of several processes writes."""

    def __init__(self, session: Session, folder: RunFolder, progress: Progress, log: Logbook) -> None:
        self.session, self.folder, self.progress, self.log = session, folder, progress, log
        self.environment = environment_of(session)
        self.record: RunRecord | None = None  # the last one
        self.model: str | None = None  # checksum in the model's file
        self.final: dict[str, Any] | None = None  # accuracies on the test images
        self.verdict: Verdict | None = None

    def save(self, good: Weights | None, status: str, message: str | None = None) -> RunRecord | None:
        """If the disk is full, a running run continues and keeps its last checkpoint."""
        try:
            if distributed.is_first():
                save_checkpoint(self.folder, self.session, self.progress, good)
                self.model = write_weights(self.folder.model, self.session.model, self.session.description)
                if self.session.average:
                    write_weights(self.folder.average_model, self.session.average.model, self.session.description)
            return self.write_record(status, message)
        except NotWritten as error:
            if status != "running":
                raise
            self._report(error)
            return None

    def save_best_if_possible(self) -> None:
        try:
            if distributed.is_first():
                write_weights(self.folder.best_model, self.session.model, self.session.description)
            self.progress.best_written = True
        except NotWritten as error:
            self._report(error)
            self.progress.best_written = False

    def _report(self, error: NotWritten) -> None:
        with suppress(NotWritten):
            self.log.event("not written", f"{error}; training continues, and earlier files are kept")

    def write_record(self, status: str, message: str | None = None) -> RunRecord:
        session, progress, recipe, images = self.session, self.progress, self.session.recipe, self.session.images
        source = {"name": images.name, "sha256": images.sha256, "source": images.source, "note": images.note}
        sizes = {"trained_on": len(session.batches.y), "held_out": recipe.holdout, "test": len(images.test_y)}
        watched = {"monitor": recipe.monitor, "monitored": len(session.watched_y)}
        best = progress.best_epoch is not None and progress.best_written
        self.record = RunRecord(
            status=status,
            recipe=recipe.sha256,
            method=recipe.method,
            cycle=str(session.method),
            epochs=recipe.epochs,
            steps_per_epoch=session.steps_per_epoch,
            setting=session.setting,
            planned=session.planned.as_dict(session.epoch_images),
            counted=progress.cost.as_dict(session.epoch_images),
            flops=progress.cost.flops(session.image_flops * distributed.count()),
            data={**source, **sizes, "classes": len(images.classes), **watched},
            environment=self.environment,
            steps_done=progress.step,
            healing=progress.healing_cost.as_dict(session.epoch_images),
            monitoring=progress.monitor_cost.as_dict(session.epoch_images * distributed.count()),
            train_seconds=round(progress.train_seconds, 3),
            monitor_seconds=round(progress.monitor_seconds, 3),
            best={"epoch": progress.best_epoch or 0, "pgd7": progress.best_pgd7} if best else None,
            model=self.model,
            metrics=self.folder.metrics_sha256 if status == "finished" else None,
            outcome=self.verdict.outcome if self.verdict else None,
            outcome_reason=self.verdict.reason if self.verdict else "",
            collapsed_at=self.verdict.collapsed_at if self.verdict else None,
            recovered=self.verdict.recovered if self.verdict else [],
            alarms=progress.alarms,
            kept_epoch=progress.kept_epoch,
            skipped_steps=progress.skipped,
            checks=progress.checks,
            final=self.final,
            message=message,
        )
        if distributed.is_first():
            self.folder.write_record(self.record)
        return self.record
