"""The training loop, from top to bottom: steps, and after each epoch a measurement on the watched images."""

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from moatlab.attacks.catalog import WATCHED
from moatlab.data.images import Images
from moatlab.methods.batches import prepare_loss
from moatlab.methods.cost import Cost
from moatlab.methods.meter import Meter
from moatlab.runtime import console, distributed
from moatlab.runtime.device import Machine
from moatlab.runtime.errors import Interrupted, NotWritten, RunFailed, users_code
from moatlab.runtime.randomness import key
from moatlab.runtime.signals import Caught, signals_caught
from moatlab.training.checkpoint import start_or_resume
from moatlab.training.collapse import CollapsePolicy
from moatlab.training.logbook import Logbook, RunBar, announce
from moatlab.training.memory import running_out
from moatlab.training.monitor import MEASURED, measure
from moatlab.training.nan_guard import NanGuard
from moatlab.training.outcome import outcome_of
from moatlab.training.perturbation import perturb, restore
from moatlab.training.recipe import Recipe
from moatlab.training.run_folder import RunFolder, RunRecord
from moatlab.training.saving import Saver
from moatlab.training.setup import Session
from moatlab.training.trackers import Tracker

CHECKED = 128  # watched images in a check within an epoch
POLL_STEPS = 10  # between two exchanges of signals and clocks among processes


class Trainer:
    """A session (what is trained), a folder (where it is written) and the progress."""

    def __init__(self, session: Session, folder: RunFolder, trackers: Sequence[Tracker] = ()) -> None:
        self.session, self.folder = session, folder
        self.progress, good = start_or_resume(session, folder)
        self.log = Logbook(folder, self.progress, trackers)
        self.guard = NanGuard(session, self.progress, self.log)
        self.policy = CollapsePolicy(session, self.progress, self.log, good)
        self.saver = Saver(session, folder, self.progress, self.log)
        self.bar = RunBar(session, self.progress)
        self.meter = Meter()
        self.last_batch: tuple[int, Tensor, Tensor] | None = None
        self.caught = Caught()
        self.loss_sum = torch.tensor(self.progress.loss_sum, device=session.device)

    def run(self, last_step: int, checkpoint_every: float) -> RunRecord:
        """Train up to `last_step`, and test if the run is complete. However it ends, a record is written."""
        session, progress = self.session, self.progress
        announce(session)
        with self.counting(), signals_caught() as self.caught, self.bar:
            with suppress(NotWritten):  # a full disk is reported at the first checkpoint
                self.saver.write_record("running")
            try:
                self.log.start(session.recipe)
                try:
                    self.loop(last_step, checkpoint_every)
                    record = self.save("finished" if self.saver.final else "stopped")
                except Interrupted as error:
                    self.save("interrupted", str(error))
                    where = f"{error} after step {progress.step} of {session.total_steps}"
                    raise Interrupted(f"{where}; nothing is lost", error.signal_number) from None
            except RunFailed as error:
                with suppress(NotWritten):
                    self.saver.write_record("failed", str(error))
                raise
            finally:
                self.log.end(self.saver.record)
        distributed.highest(0)  # no process continues before all files are written
        assert record is not None
        if record.status == "stopped":
            rest = f"continue with --resume, ETA {self.bar.eta(self.bar.work())}"
            console.note(f"stopped after step {progress.step} of {session.total_steps}; {rest}")
        return record

    @contextmanager
    def counting(self) -> Iterator[None]:
        average = self.session.average
        also = self.meter.counting(average.model) if average else nullcontext()
        with self.meter.counting(self.session.model), also:
            yield

    def loop(self, last_step: int, checkpoint_every: float) -> None:
        session, progress, recipe = self.session, self.progress, self.session.recipe
        saved_at, saved_step = time.monotonic(), progress.step
        while True:
            if progress.step == (progress.epochs_logged + 1) * session.steps_per_epoch:
                self.end_epoch()
                saved_at, saved_step = time.monotonic(), progress.step
            if distributed.count() == 1 or progress.step % POLL_STEPS == 0:  # all stop or save at the same step
                is_due = progress.step > saved_step and time.monotonic() - saved_at >= checkpoint_every
                signal, due = distributed.highest(self.caught.number or 0, is_due)
                Caught(signal or None).raise_if_any()
                if due:
                    self.save()
                    saved_at, saved_step = time.monotonic(), progress.step
            if progress.step >= last_step or progress.stopped:
                break
            self.step()
            if recipe.check_every and progress.step % recipe.check_every == 0:
                self.check()
            self.bar.show()
        if progress.step == session.total_steps or progress.stopped:
            self.test()

    def step(self) -> None:
        """One training step. Every draw in it is a function of (seed, step)."""
        session, recipe, progress, step = self.session, self.session.recipe, self.progress, self.progress.step
        begun = time.perf_counter()
        stage = session.stage_at(step, progress.replaced)
        x, y = self.batch(session.batch_step(step, progress.replaced))
        session.dropout(step)
        rank = [] if distributed.is_first() else [distributed.number()]
        torch.manual_seed(key(recipe.seed, "inside the model", step, *rank))  # dropout
        self.guard.begin_step()
        # The user's model or stage may fail, memory may run out, or another process may have ended.
        where = session.where(step, progress.replaced)
        with users_code(f"{where} failed", RunFailed), distributed.together(), running_out(session, where):
            context = session.context(step, progress.replaced)
            loss_of = prepare_loss(stage, context, x, y)
            moved = perturb(session.model, loss_of, recipe.awp) if recipe.awp else []
            loss = loss_of()
            session.optimizer.zero_grad()
            # Of the parameters, and of what the stage asks for; other inputs may be left in the graph.
            leaves = [leaf for leaf, _ in context.watched]
            session.scaler.scale(loss).backward(inputs=[*self.guard.trained, *leaves])  # type: ignore[no-untyped-call]
            for leaf, action in context.watched:
                assert leaf.grad is not None
                action(leaf.grad)
        mean_loss = distributed.mean(loss.detach())
        session.optimizer.lr, session.optimizer.momentum = session.learning_rate(step), session.momentum(step)
        bad = self.guard.hold_back(step, mean_loss)
        if session.scaler.is_enabled():
            session.scaler.step(session.optimizer)  # type: ignore[arg-type]  # ours have all that it reads
            session.scaler.update()
        else:
            session.optimizer.step()
        restore(moved)
        self.guard.restore_buffers(bad)
        self.loss_sum += torch.where(bad, 0.0, mean_loss)
        distributed.copy_from_first(session.model.buffers())  # running statistics, which differ between processes
        if session.average:
            session.average.update(session.model, step + 1)
        self.count(session.work(step, progress.replaced), f"stage {stage}", at_most=stage.entry.at_most)
        progress.step += 1
        if self.guard.is_time_to_look(step):
            self.guard.look()
        self.add_seconds(begun)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The batch of a step, which a replay stage asks for several times in a row."""
        if self.last_batch is None or self.last_batch[0] != step:
            self.last_batch = (step, *self.session.batches.at(step))
        return self.last_batch[1:]

    def count(self, planned: Cost, what: str, *, at_most: bool = False) -> None:
        """Add the counted cost of the step, which must equal the cost that its stage declares; or, if that is a bound,
        keep it on average over the steps so far."""
        progress, counted = self.progress, self.meter.take()
        if at_most:
            progress.spare += planned + counted * -1
        if min(progress.spare.kinds) < 0 if at_most else counted != planned:
            kinds = "forwards, input, weight and double backwards"
            batches = [tuple(cost.as_dict(self.session.batch).values())[1:] for cost in (planned, counted)]
            declared = f"{what} declares {batches[0]} {kinds} per step, but {batches[1]} were counted"
            raise RunFailed(f"{declared}; correct forwards=, input_backwards=, ... in add_stage")
        progress.cost += counted
        if progress.replaced:
            progress.healing_cost += counted + self.session.work(progress.step) * -1

    def add_seconds(self, begun: float) -> None:
        """Training time, including `guard.look`, which waits for the queued work of a GPU."""
        seconds = time.perf_counter() - begun
        self.progress.epoch_seconds += seconds
        self.progress.train_seconds += seconds

    def check(self) -> None:
        """Measure pgd7 on a few watched images, for --on-collapse heal --check-every."""
        begun, few = time.perf_counter(), slice(CHECKED)
        measured = self.measure(self.session.model, self.session.watched_x[few], self.session.watched_y[few])
        self.progress.monitor_cost += sum(distributed.from_all(self.meter.take()), Cost())
        self.progress.monitor_seconds += time.perf_counter() - begun
        self.policy.check(measured["pgd7"])

    def end_epoch(self) -> None:
        """Measure on the watched images if it is time, write the epoch's line, act on a collapse, save."""
        session, recipe, progress = self.session, self.session.recipe, self.progress
        begun = time.perf_counter()
        self.guard.look()
        self.add_seconds(begun)
        if progress.epoch_skipped == session.steps_per_epoch:
            raise self.guard.failure(f"every step of epoch {progress.epochs_logged + 1} was skipped")
        epoch = progress.epochs_logged
        begun = time.perf_counter()
        examples: list[Tensor] = []
        watched = session.is_watched(epoch, progress.replaced)
        measured: dict[str, Any] = dict.fromkeys(MEASURED)
        if watched:
            measured = self.measure_all(epoch, session.watched_x, session.watched_y, examples)
        seconds = time.perf_counter() - begun
        progress.monitor_seconds += seconds
        progress.monitor_cost += sum(distributed.from_all(self.meter.take()), Cost())
        stage = session.stage_at(progress.step - 1, progress.replaced)
        comparable = watched and (session.then if progress.replaced else session.method).ends_cycle(epoch)
        line = {
            "epoch": epoch + 1,
            "stage": str(stage),
            "k": stage.value,
            "lr": session.learning_rate(progress.step - 1),
            "loss": self.loss_sum.item() / (session.steps_per_epoch - progress.epoch_skipped),
            **measured,
            "monitor": recipe.monitor,
            "comparable": comparable,
            "passes": progress.cost.passes / session.epoch_images,
            "train_seconds": round(progress.epoch_seconds, 3),
            "monitor_seconds": round(seconds, 3),
        }
        self.log.epoch(line, examples)
        progress.epochs_logged += 1
        progress.epoch_seconds, progress.epoch_skipped = 0.0, 0
        self.loss_sum.zero_()
        if comparable:
            if recipe.monitor == "holdout" and measured["pgd7"] > progress.best_pgd7:
                progress.best_epoch, progress.best_pgd7 = epoch + 1, measured["pgd7"]
                self.saver.save_best_if_possible()
            self.policy.watch()
        self.save()

    def test(self) -> None:
        """Measure on the test images, once."""
        device, images = self.session.device, self.session.images
        measured = self.measure_all(None, images.test_x.to(device), images.test_y.to(device))
        self.saver.final = measured | {"images": len(images.test_y)}
        self.saver.verdict = outcome_of(self.progress.history, len(images.classes))

    def measure_all(self, epoch: int | None, x: Tensor, y: Tensor, keep: list[Tensor] | None = None) -> dict[str, Any]:
        """Of the model and, with names that end in _average, of its average, whose buffers are those of `epoch`."""
        session, measured = self.session, dict[str, Any](self.measure(self.session.model, x, y, keep))
        if session.average:
            if epoch is not None:
                session.average.update_buffers(session.model, session.images_to_estimate(epoch))
            found = self.measure(session.average.model, x, y)
            measured |= {f"{name}_average": found[name] for name in WATCHED}
        return measured

    def measure(self, model: nn.Module, x: Tensor, y: Tensor, keep: list[Tensor] | None = None) -> dict[str, float]:
        recipe = self.session.recipe
        where = f"measuring accuracy after step {self.progress.step}"
        with users_code(f"{where} failed", RunFailed), running_out(self.session, where):
            return measure(
                model, x, y, eps=recipe.eps, norm=recipe.norm, seed=recipe.seed, tick=self.tick, keep=keep, shared=True
            )

    def tick(self, images_watched: float) -> None:
        """Show the progress of a measurement, and stop at ctrl-C."""
        self.bar.show(images_watched)
        if distributed.count() == 1:  # several stop together, after the measurement
            self.caught.raise_if_any()

    def save(self, status: str = "running", message: str | None = None) -> RunRecord | None:
        """Save, unless weights are no longer finite. A running run continues if the disk is full."""
        self.guard.look()
        self.progress.loss_sum = self.loss_sum.item()
        return self.saver.save(self.policy.good, status, message)


@contextmanager
def rehearsal(recipe: Recipe, machine: Machine, images: Images, model: nn.Module | None = None) -> Iterator[Trainer]:
    """A trainer in a temporary folder, ready to take real steps of the model or a copy of `model`, for timing them."""
    with ExitStack() as inside:
        device = inside.enter_context(machine.in_use())
        folder = RunFolder(inside.enter_context(TemporaryDirectory()))
        with console.verbosity(False):
            trainer = Trainer(Session(recipe, device, images, copy.deepcopy(model)), folder)
        inside.callback(trainer.session.batches.close)
        inside.enter_context(trainer.session.arithmetic())
        inside.enter_context(trainer.counting())
        yield trainer
