"""The training loop, from top to bottom: step after step, and after each epoch a look at the watched images."""

from __future__ import annotations

import time
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from moatlab import display
from moatlab.attacks.meter import Meter
from moatlab.checkpoint import Progress, load_checkpoint, save_checkpoint, save_model
from moatlab.environment import describe_environment, keep_freed_memory
from moatlab.errors import Interrupted, RunFailed, UserError
from moatlab.interrupts import Caught, signals_caught
from moatlab.monitor import PASSES as MONITOR_PASSES
from moatlab.monitor import collapsed_at, measure
from moatlab.precision import full_precision
from moatlab.preparation import Session, prepare
from moatlab.randomness import generator, key
from moatlab.recipe import Recipe
from moatlab.runfolder import RunFolder, RunRecord
from moatlab.schedules import SCHEDULES
from moatlab.stages import Context, stage_loss

LOSS_CHECK_STEPS = 50  # how often an accelerator is asked whether a loss was NaN; the CPU is asked every step
SMALLEST_SCALE = 1e-3  # of fp16 gradients; it begins at 65536 and is halved at each overflow
ROW = "{:>5} {:<11} {:>7} {:>6} {:>6} {:>6} {:>6} {:>7} {:>8} {:>8}"


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    data_dir: str | Path | None = None,
    resume: bool = False,
    max_steps: int | None = None,
    checkpoint_every: float = 600.0,
) -> RunRecord:
    """Train a model by a recipe into the folder `out`, and return the run's record.

    With `resume` a run that was stopped goes on, to the same bits as one that never stopped; a finished one is left
    alone. `max_steps` stops the run early, counted from its first step, as ctrl-C would.
    """
    folder = RunFolder(Path(out))
    folder.check(recipe, resume=resume)
    if resume and (finished := folder.finished_record()):
        display.note(f"{folder.path} is already finished")
        return finished
    keep_freed_memory()
    threads = torch.get_num_threads()
    torch.set_num_threads(recipe.threads)
    try:
        with torch.random.fork_rng():
            session = prepare(recipe, data_dir, continuing=folder.checkpoint.exists())
            last_step = session.total_steps if max_steps is None else min(max_steps, session.total_steps)
            with full_precision() if session.precision == "fp32" else nullcontext():
                return Run(session, folder).until(last_step, checkpoint_every)
    finally:
        torch.set_num_threads(threads)


class Run:
    """A session (what is trained), a folder (where it goes) and how far it is."""

    def __init__(self, session: Session, folder: RunFolder) -> None:
        self.session, self.folder = session, folder
        self.progress, self.record = self._continue() if folder.checkpoint.exists() else self._begin()
        self.meter = Meter()
        self.trained = [parameter for parameter in session.model.parameters() if parameter.requires_grad]
        state = [*session.model.parameters(), *session.model.buffers()]  # a buffer may hold -inf by design, as masks do
        self.finite_at_first = [tensor for tensor in state if bool(torch.isfinite(tensor).all())]
        self.loss_sum = torch.tensor(self.progress.loss_sum, device=session.device)
        self.first_bad_step = torch.tensor(-1, device=session.device)
        # Work is counted in passes over the training set; watching an image costs its share of one.
        self.watching_image = MONITOR_PASSES / (session.steps_per_epoch * session.recipe.batch_size)
        watched = session.recipe.epochs * len(session.watched_y) + len(session.images.test_y)
        total = session.method.cost(session.recipe.epochs).passes + watched * self.watching_image
        self.pace = display.Pace(total, self.work())
        self.caught = Caught()

    def _begin(self) -> tuple[Progress, RunRecord]:
        session, recipe, images = self.session, self.session.recipe, self.session.images
        data = {
            "name": images.name, "sha256": images.sha256, "source": images.source, "note": images.note,
            "trained_on": len(session.batches.y), "held_out": recipe.holdout, "test": len(images.test_y),
            "classes": len(images.classes), "monitor": recipe.monitor, "monitored": len(session.watched_y),
        }  # fmt: skip
        record = RunRecord(
            status="running", method=recipe.method, cycle=str(session.method), epochs=recipe.epochs,
            steps_per_epoch=session.steps_per_epoch, setting=recipe.setting,
            planned=session.method.cost(recipe.epochs).as_dict(), counted=Progress().cost.as_dict(), data=data,
            environment=environment_of(session),
        )  # fmt: skip
        self.folder.path.mkdir(parents=True, exist_ok=True)
        self.folder.write_recipe(recipe)
        self.folder.metrics.write_text("")
        self.folder.write_record(record)
        save_checkpoint(self.folder.checkpoint, session.model, session.optimizer, Progress(), session.scaler)
        return Progress(), record

    def _continue(self) -> tuple[Progress, RunRecord]:
        session, record = self.session, self.folder.read_record()
        if record.data["sha256"] != session.images.sha256:
            raise UserError(
                f"{session.recipe.data} is not the data that the run in {self.folder.path} was started with"
            )
        progress = load_checkpoint(self.folder.checkpoint, session.model, session.optimizer, session.scaler)
        with self.folder.metrics.open("ab") as file:
            file.truncate(progress.metrics_bytes)
        record.status, record.message = "running", None
        record.environment = environment_of(session)
        self.folder.write_record(record)
        display.note(f"continuing {self.folder.path} at step {progress.step} of {session.total_steps}")
        return progress, record

    def until(self, last_step: int, checkpoint_every: float) -> RunRecord:
        session, progress = self.session, self.progress
        announce(session)
        self.board = tensorboard(self.folder, progress.epochs_logged)
        self.bar = display.Bar(session.recipe.method, self.pace.total)
        with self.meter.counting(session.model), signals_caught() as self.caught, self.bar:
            try:
                try:
                    self.loop(last_step, checkpoint_every)
                    self.save("finished" if self.record.final else "stopped")
                except Interrupted as error:
                    self.save("interrupted", str(error))
                    where = f"{error} after step {progress.step} of {session.total_steps}"
                    raise Interrupted(f"{where}; nothing is lost", error.signal_number) from None
            except RunFailed as error:
                self.describe("failed", str(error))
                raise
            finally:
                if self.board:
                    self.board.close()
        if self.record.status == "stopped":
            where = f"stopped after step {progress.step} of {session.total_steps}"
            display.note(f"{where}; continue with --resume, ETA {self.pace.eta(self.work())}")
        return self.record

    def loop(self, last_step: int, checkpoint_every: float) -> None:
        session, progress = self.session, self.progress
        saved_at = time.monotonic()
        while True:
            if progress.step == (progress.epochs_logged + 1) * session.steps_per_epoch:
                self.end_epoch()
                saved_at = time.monotonic()
            self.caught.raise_if_any()
            if progress.step >= last_step:
                break
            self.step()
            self.show_progress()
            if time.monotonic() - saved_at >= checkpoint_every:
                self.save("running")
                saved_at = time.monotonic()
        if progress.step == session.total_steps:
            self.evaluate()

    def step(self) -> None:
        """One step of the optimizer. Every draw in it is a function of (seed, step)."""
        session, recipe, progress, step = self.session, self.session.recipe, self.progress, self.progress.step
        begun = time.perf_counter()
        stage = session.method.stage_at(step // session.steps_per_epoch, recipe.epochs)
        x, y = session.batches.at(step)
        torch.manual_seed(key(recipe.seed, "inside the model", step))  # dropout and the like
        draws = generator(recipe.seed, "stage", step, device=session.device)
        model, classes = session.trained_model, len(session.images.classes)
        context = Context(model, model, recipe.eps_value, draws, classes, recipe.bn_in_attack)
        loss = stage_loss(stage, context, x, y)
        session.optimizer.zero_grad(set_to_none=True)
        # Trained are the parameters, and no input that a stage left in the graph.
        session.scaler.scale(loss).backward(inputs=self.trained)  # type: ignore[no-untyped-call]
        self.watch_loss(loss.detach())
        for group in session.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        session.scaler.step(session.optimizer)
        session.scaler.update()
        counted = self.meter.take()
        if counted != stage.step_cost:
            raise RunFailed(
                f"stage {stage} declares {stage.step_cost.kinds} forwards, input, weight and double backwards a step, "
                f"but {counted.kinds} were counted; correct its cost in moatlab.methods.STAGES"
            )
        progress.cost += counted
        progress.step += 1
        seconds = time.perf_counter() - begun
        progress.epoch_seconds += seconds
        progress.train_seconds += seconds

    def watch_loss(self, loss: torch.Tensor) -> None:
        """Add up the loss and stop at one that is not finite: before the weights are touched where asking is cheap."""
        step = self.progress.step
        self.loss_sum += loss
        newly_bad = (self.first_bad_step < 0) & ~torch.isfinite(loss)
        self.first_bad_step = torch.where(newly_bad, step, self.first_bad_step)
        if self.session.device.type == "cpu" or step % LOSS_CHECK_STEPS == 0:
            self.raise_if_bad()

    def raise_if_bad(self) -> None:
        if (step := int(self.first_bad_step)) >= 0:
            raise self.failure(f"the loss became NaN or infinite at {self.where(step)}")

    def raise_if_not_finite(self) -> None:
        """Nothing is measured or saved once the loss, a weight or a running statistic is not a number."""
        self.raise_if_bad()
        if not all(bool(torch.isfinite(tensor).all()) for tensor in self.finite_at_first):
            raise self.failure(f"the weights are no longer finite after {self.where(self.progress.step - 1)}")
        if self.session.precision == "fp16" and self.session.scaler.get_scale() < SMALLEST_SCALE:
            raise self.failure(
                "the gradients do not fit into fp16, and steps are skipped: use --precision bf16 or fp32"
            )

    def where(self, step: int) -> str:
        epoch = step // self.session.steps_per_epoch
        stage = self.session.method.stage_at(epoch, self.session.recipe.epochs)
        return f"step {step + 1} (epoch {epoch + 1}, stage {stage}, lr {self.learning_rate(step):.3g})"

    def failure(self, what: str) -> RunFailed:
        kept = f"the last good checkpoint is kept in {self.folder.path}"
        return RunFailed(f"{what}; {kept}, and a lower --lr in a new folder may help")

    def end_epoch(self) -> None:
        """Measure the watched images, write the epoch's line, save."""
        session, recipe, progress = self.session, self.session.recipe, self.progress
        self.raise_if_not_finite()
        epoch = progress.epochs_logged
        begun = time.perf_counter()
        accuracy = measure(
            session.model,
            session.watched_x,
            session.watched_y,
            eps=recipe.eps_value,
            seed=recipe.seed,
            tick=self.tick,
        )
        seconds = time.perf_counter() - begun
        progress.monitor_seconds += seconds
        progress.monitor_cost += self.meter.take()
        stage = session.method.stage_at(epoch, recipe.epochs)
        line = {
            "epoch": epoch + 1, "stage": str(stage), "k": stage.value, "lr": self.learning_rate(progress.step - 1),
            "loss": self.loss_sum.item() / session.steps_per_epoch, **accuracy, "monitor": recipe.monitor,
            "passes": progress.cost.passes / session.steps_per_epoch,
            "train_seconds": round(progress.epoch_seconds, 3), "monitor_seconds": round(seconds, 3),
        }  # fmt: skip
        self.folder.append_metrics(line)
        show_row(line)
        if self.board:
            for name in ("lr", "loss", "clean", "fgsm", "pgd7", "passes", "train_seconds", "monitor_seconds"):
                self.board.add_scalar(name, line[name], epoch + 1)
            self.board.flush()
        comparable = recipe.monitor == "holdout" and session.method.ends_cycle(epoch)
        if comparable and accuracy["pgd7"] > progress.best_pgd7:
            progress.best_epoch, progress.best_pgd7 = epoch + 1, accuracy["pgd7"]
            save_model(self.folder.best_model, session.model, session.description)
        progress.epochs_logged += 1
        progress.metrics_bytes = self.folder.metrics.stat().st_size
        progress.epoch_seconds = 0.0
        self.loss_sum.zero_()
        self.save("running")

    def evaluate(self) -> None:
        """The one look at the test images."""
        session, recipe, images = self.session, self.session.recipe, self.session.images
        x, y = images.test_x.to(session.device), images.test_y.to(session.device)
        accuracy = measure(session.model, x, y, eps=recipe.eps_value, seed=recipe.seed, tick=self.tick)
        self.record.final = accuracy | {"images": len(y)}
        self.record.collapsed_at = collapsed_at([line["pgd7"] for line in self.folder.read_metrics()], session.method)

    def save(self, status: str, message: str | None = None) -> None:
        """The model, the checkpoint and the record; never weights that are not finite over good ones."""
        session, self.progress.loss_sum = self.session, self.loss_sum.item()
        self.raise_if_not_finite()
        save_model(self.folder.model, session.model, session.description)
        save_checkpoint(self.folder.checkpoint, session.model, session.optimizer, self.progress, session.scaler)
        self.describe(status, message)

    def describe(self, status: str, message: str | None = None) -> None:
        record, progress = self.record, self.progress
        record.status, record.message, record.steps_done = status, message, progress.step
        record.counted = progress.cost.as_dict(self.session.steps_per_epoch)
        record.monitoring = progress.monitor_cost.as_dict()
        record.train_seconds = round(progress.train_seconds, 3)
        record.monitor_seconds = round(progress.monitor_seconds, 3)
        if progress.best_epoch is not None:
            record.best = {"epoch": progress.best_epoch, "pgd7": progress.best_pgd7}
        self.folder.write_record(record)

    def learning_rate(self, step: int) -> float:
        recipe = self.session.recipe
        schedule = SCHEDULES[recipe.schedule]
        return schedule(step, epochs=recipe.epochs, steps_per_epoch=self.session.steps_per_epoch, peak=recipe.lr)

    def work(self) -> float:
        passes = self.progress.cost.passes / self.session.steps_per_epoch
        return passes + self.progress.epochs_logged * len(self.session.watched_y) * self.watching_image

    def show_progress(self, images_watched: int = 0) -> None:
        recipe, step = self.session.recipe, self.progress.step
        epoch = min(step // self.session.steps_per_epoch, recipe.epochs - 1)
        stage = self.session.method.stage_at(epoch, recipe.epochs)
        done = self.work() + images_watched * self.watching_image
        text = f"step {step}/{self.session.total_steps}  ETA {self.pace.eta(done)}"
        self.bar.update(done, text, title=f"epoch {epoch + 1}/{recipe.epochs} {stage}")

    def tick(self, images_watched: int) -> None:
        """Called while accuracies are measured: shows how far that is, and lets ctrl-C through."""
        self.show_progress(images_watched)
        self.caught.raise_if_any()


def environment_of(session: Session) -> dict[str, Any]:
    return describe_environment() | {"device": str(session.device), "precision": session.precision}


def announce(session: Session) -> None:
    recipe, method, epochs = session.recipe, session.method, session.recipe.epochs
    cycle = f" = {method}" if str(method) != recipe.method else ""
    passes = method.cost(epochs).passes
    display.note(f"{recipe.method}{cycle}: {passes:g} passes over {len(session.batches.y):,} training images")
    display.note(recipe.setting)
    if not method.ends_cycle(epochs - 1):
        last, better = method.stage_at(epochs - 1, epochs), method.epochs_to_end_of_cycle(epochs)
        display.warn(f"{epochs} epochs end at the stage {last}; --epochs {better} would end at the cycle's last stage")
    display.note(ROW.format("epoch", "stage", "lr", "loss", "clean", "fgsm", "pgd7", "passes", "train s", "watch s"))


def show_row(line: dict[str, Any]) -> None:
    percent = [f"{100 * line[name]:.1f}" for name in ("clean", "fgsm", "pgd7")]
    seconds = [f"{line['train_seconds']:.1f}", f"{line['monitor_seconds']:.1f}"]
    numbers = [f"{line['lr']:.4f}", f"{line['loss']:.3f}", *percent, f"{line['passes']:g}", *seconds]
    display.note(ROW.format(line["epoch"], line["stage"], *numbers))


def tensorboard(folder: RunFolder, epochs_logged: int) -> Any:
    """A TensorBoard writer into the run folder, where TensorBoard is installed."""
    if find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder.path), purge_step=epochs_logged + 1)
