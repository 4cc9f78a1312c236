"""Progress of a run: the bar, rows on the terminal, lines in metrics.jsonl and events.jsonl, trackers."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from moatlab.runtime import console, distributed
from moatlab.runtime.errors import NotWritten
from moatlab.runtime.files import append_line
from moatlab.training.checkpoint import Progress
from moatlab.training.monitor import PASSES
from moatlab.training.recipe import Recipe
from moatlab.training.run_folder import RunFolder, RunRecord
from moatlab.training.setup import Session
from moatlab.training.trackers import Tracker, Trackers

FEW_STEPS = 100  # in a whole run
ROW = "{:>5} {:<10} {:>6} {:>6} {:>5} {:>5} {:>5} {:>5} {:>6} {:>7} {:>9}"
HEADINGS = ("epoch", "stage", "lr", "loss", "clean", "fgsm", "pgd7", "align", "passes", "train s", "monitor s")


class Logbook:
    def __init__(self, folder: RunFolder, progress: Progress, trackers: Sequence[Tracker] = ()) -> None:
        self.folder, self.progress = folder, progress
        self.trackers = Trackers(trackers if distributed.is_first() else (), self._left_out)

    def start(self, recipe: Recipe) -> None:
        self.trackers.call("start", self.folder.path, recipe, self.progress.history)

    def epoch(self, line: dict[str, Any], examples: Sequence[Tensor] = ()) -> None:
        """Write the line of an epoch, or raise NotWritten. `examples`: clean and adversarial images for trackers."""
        if distributed.is_first():
            append_line(self.folder.metrics, line)
        self.progress.history.append(line)
        measured = ["-"] * 4
        if line["pgd7"] is not None:
            measured = [f"{100 * line[name]:.1f}" for name in ("clean", "fgsm", "pgd7")] + [f"{line['alignment']:.2f}"]
        work = [f"{line['passes']:.4g}", f"{line['train_seconds']:.1f}", f"{line['monitor_seconds']:.1f}"]
        work += [f"{100 * line['pgd7_average']:>9.1f}"] if line.get("pgd7_average") is not None else []
        numbers = [f"{line['lr']:.4f}", f"{line['loss']:.3f}", *measured, *work]
        console.note(ROW.format(line["epoch"], line["stage"][:10], *numbers) + " ".join(["", *numbers[9:]]))
        self.trackers.call("epoch", line, dict(zip(("plain", "pgd7"), examples, strict=False)))

    def event(self, name: str, message: str, **facts: Any) -> None:
        """A warning that is also kept in events.jsonl."""
        progress = self.progress
        line = {"event": name, "step": progress.step, "epochs": progress.epochs_logged, "message": message, **facts}
        console.warn(message)
        if distributed.is_first():
            append_line(self.folder.events, line)
        progress.events.append(line)
        self.trackers.call("event", line)

    def _left_out(self, message: str) -> None:
        with suppress(NotWritten):
            self.event("tracker left out", message)

    def end(self, record: RunRecord | None) -> None:
        """The run has ended; the record shows how."""
        if record:
            self.trackers.call("end", record)
        self.trackers.close()


class RunBar(console.Bar):
    """Progress in passes over the training set, those of the monitor included."""

    def __init__(self, session: Session, progress: Progress) -> None:
        recipe = session.recipe
        self.session, self.progress = session, progress
        self.per_image = PASSES / (session.steps_per_epoch * recipe.batch_size)  # of the monitor
        checks = sum(map(session.is_watched, range(recipe.epochs)))
        watched = checks * len(session.watched_y) + len(session.images.test_y)
        watched *= 2 if session.average else 1
        total = session.planned.passes / session.epoch_images + watched * self.per_image
        super().__init__(recipe.method, total, self.work())

    def work(self, images_watched: float = 0) -> float:
        """The part of the plan that is done, without healing, which is not planned."""
        progress, session = self.progress, self.session
        cost = progress.cost + progress.spare + progress.healing_cost * -1
        passes = cost.passes / session.epoch_images
        checks = sum(line["pgd7"] is not None for line in progress.history) * (2 if session.average else 1)
        return passes + (checks * len(session.watched_y) + images_watched) * self.per_image

    def show(self, images_watched: float = 0) -> None:
        session, step = self.session, self.progress.step
        stage = session.stage_at(min(step, session.total_steps - 1), self.progress.replaced)
        epoch = min(step // session.steps_per_epoch + 1, session.recipe.epochs)
        title = f"epoch {epoch}/{session.recipe.epochs} {stage}"
        self.update(self.work(images_watched), f"step {step}/{session.total_steps}", title=title)


def announce(session: Session) -> None:
    recipe, method, epochs = session.recipe, session.method, session.recipe.epochs
    steps, size, images = session.steps_per_epoch, recipe.batch_size, len(session.batches.y)
    cycle = f" = {method}" if str(method) != recipe.method else ""
    passes = console.counted(session.planned.passes / session.epoch_images, "pass")
    if any(stage.entry.at_most for stage in session.method.stages):
        passes = f"at most {passes}"
    console.note(f"{recipe.method}{cycle}: {passes} over {console.counted(images, 'training image')}")
    console.note(session.setting)
    if session.images.note:
        console.note(f"{session.images.name}: {session.images.note}")
    if session.images.warning:
        console.warn(f"{session.images.name}: {session.images.warning}")
    if steps * epochs < FEW_STEPS:
        smaller = f"a --batch-size below {size} or " if steps < 10 and size > 8 else ""
        few = f"only {console.counted(steps * epochs, 'step')} in all, {steps} per epoch"
        console.warn(f"{few}; use {smaller}more --epochs")
    elif steps * size < 0.9 * images:
        left = console.counted(images - steps * size, "image")
        console.warn(f"an epoch of {steps} batches of {size} leaves out {left}")
    often = "each epoch" if recipe.monitor_every == 1 else f"every {recipe.monitor_every} epochs"
    console.note(f"accuracy in % after {often}, on {len(session.watched_y):,} {recipe.watched}:")
    if not method.ends_cycle(epochs - 1):
        last, better = method.stage_at(epochs - 1, epochs), method.epochs_to_end_of_cycle(epochs)
        console.warn(f"epoch {epochs} is at the stage {last}; --epochs {better} would end at the cycle's last stage")
    console.note(ROW.format(*HEADINGS) + ("  avg pgd7" if session.average else ""))
