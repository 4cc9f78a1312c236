"""The training loop, from top to bottom: step after step, and after each epoch a look at the watched images."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from moatlab.data import Images
from moatlab.methods.cost import Cost
from moatlab.methods.language import Method, Stage
from moatlab.methods.meter import Meter
from moatlab.methods.stages import stage_loss
from moatlab.models import users_code
from moatlab.models.weights import read_weights, set_weights
from moatlab.runtime import console, distributed
from moatlab.runtime.device import full_precision, left_as_found, same_bits
from moatlab.runtime.environment import keep_freed_memory
from moatlab.runtime.errors import Interrupted, NotWritten, RunFailed, UserError
from moatlab.runtime.randomness import key
from moatlab.runtime.signals import Caught, signals_caught
from moatlab.training.checkpoint import save_model
from moatlab.training.continuation import keep_progress, new_record, take_up
from moatlab.training.logbook import Logbook, announce
from moatlab.training.monitor import PASSES as MONITOR_PASSES
from moatlab.training.monitor import collapsed_at, judge, measure
from moatlab.training.nan_guard import Guard
from moatlab.training.recipe import Recipe, option_name
from moatlab.training.run_folder import RunFolder, RunRecord
from moatlab.training.schedules import SCHEDULES
from moatlab.training.setup import Session, choose_device, context_of, prepare


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    data_dir: str | Path | None = None,
    resume: bool = False,
    max_steps: int | None = None,
    checkpoint_every: float = 600.0,
    stream: bool | None = None,
    images: Images | None = None,
    model: nn.Module | None = None,
) -> RunRecord:
    """Train a model by a recipe into the folder `out`, and return the run's record.

    With `resume` a run that was stopped goes on, to the same bits as one that never stopped; a finished one is left
    alone. `max_steps` stops the run early, counted from its first step, as ctrl-C would. Processes that torchrun
    started train it together; what it starts anew goes on from the last checkpoint. `stream` leaves the images of a
    folder on the disk; `images` and `model` are the user's own, which the recipe names.
    """
    folder, resume = RunFolder(Path(out)), resume or distributed.restarts() > 0
    distributed.connect()
    for name, value in recipe:
        distributed.agree(f"recipes ({option_name(name)})", value)
    distributed.agree("--max-steps", max_steps)
    distributed.from_first(lambda: folder.check(recipe, resume=resume))
    finished = distributed.from_first(lambda: folder.finished_record(recipe) if resume else None)
    if finished:
        if images is not None and finished.data["sha256"] != images.sha256:
            raise UserError(f"{folder.path} is a finished run on other images; name another folder")
        console.note(f"{folder.path} is already finished")
        if model is not None:
            set_weights(model, distributed.from_first(lambda: read_weights(folder.path)[0]), folder.path)
        return finished
    keep_freed_memory()
    if recipe.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA is first used
    with ExitStack() as inside:
        inside.enter_context(left_as_found(choose_device(recipe.device), recipe.threads))
        session = prepare(
            recipe, data_dir, continuing=bool(folder.checkpoints), stream=stream, images=images, model=model
        )
        inside.callback(session.batches.close)
        distributed.agree("data", session.identity)
        if session.precision == "fp32":
            inside.enter_context(full_precision())
        if recipe.deterministic or session.device.type == "cpu":
            inside.enter_context(same_bits(strict=recipe.deterministic))
        distributed.from_first(lambda: inside.enter_context(folder.for_one_process()))
        # Once more: until now another process may have worked here.
        distributed.from_first(lambda: folder.check(recipe, resume=resume))
        last_step = session.total_steps if max_steps is None else min(max_steps, session.total_steps)
        return Run(session, folder).until(last_step, checkpoint_every)


class Run:
    """A session (what is trained), a folder (where it goes) and how far it is."""

    def __init__(self, session: Session, folder: RunFolder) -> None:
        self.session, self.folder = session, folder
        self.progress, self.good = take_up(session, folder)
        self.record = new_record(session)
        self.meter = Meter()
        self.guard = Guard(session)
        self.loss_sum = torch.tensor(self.progress.loss_sum, device=session.device)
        # Work is counted in passes over the training set; watching an image costs its share of one.
        self.watching_image = MONITOR_PASSES / (session.steps_per_epoch * session.recipe.batch_size)
        watched = session.recipe.epochs * len(session.watched_y) + len(session.images.test_y)
        total = session.method.cost(session.recipe.epochs).passes + watched * self.watching_image
        self.pace = console.Pace(total, self.work())
        self.caught = Caught()

    def until(self, last_step: int, checkpoint_every: float) -> RunRecord:
        session, progress = self.session, self.progress
        announce(session)
        self.log = Logbook(self.folder, progress)
        self.bar = console.Bar(session.recipe.method, self.pace.total)
        with self.meter.counting(session.model), signals_caught() as self.caught, self.bar:
            with suppress(NotWritten):  # a full disk is told of when more than this is to be written
                self.describe("running")
            try:
                try:
                    self.loop(last_step, checkpoint_every)
                    self.save("finished" if self.record.final else "stopped")
                except Interrupted as error:
                    self.save("interrupted", str(error))
                    where = f"{error} after step {progress.step} of {session.total_steps}"
                    raise Interrupted(f"{where}; nothing is lost", error.signal_number) from None
            except RunFailed as error:
                with suppress(NotWritten):
                    self.describe("failed", str(error))
                raise
            finally:
                self.log.close()
        distributed.highest(0)  # all files are written when any process goes on
        if self.record.status == "stopped":
            where = f"stopped after step {progress.step} of {session.total_steps}"
            console.note(f"{where}; continue with --resume, ETA {self.pace.eta(self.work())}")
        return self.record

    def loop(self, last_step: int, checkpoint_every: float) -> None:
        session, progress = self.session, self.progress
        saved_at = time.monotonic()
        while True:
            if progress.step == (progress.epochs_logged + 1) * session.steps_per_epoch:
                self.end_epoch()
                saved_at = time.monotonic()
            if number := distributed.highest(self.caught.number or 0):  # all stop at the same step
                Caught(number).raise_if_any()
            if progress.step >= last_step or progress.stopped:
                break
            self.step()
            self.show_progress()
            if distributed.highest(time.monotonic() - saved_at >= checkpoint_every):
                self.save_if_possible()
                saved_at = time.monotonic()
        if progress.step == session.total_steps or progress.stopped:
            self.evaluate()

    # --- a step

    @property
    def method(self) -> Method:
        """The method of the current epoch: the recipe's, or after a collapse the one that took its place."""
        return self.session.then if self.progress.replaced else self.session.method

    def stage_at(self, step: int) -> Stage:
        """The stage of a step of the current epoch."""
        return self.method.stage_at(step // self.session.steps_per_epoch, self.session.recipe.epochs)

    def step(self) -> None:
        """One step of the optimizer. Every draw in it is a function of (seed, step)."""
        session, recipe, progress, step = self.session, self.session.recipe, self.progress, self.progress.step
        begun = time.perf_counter()
        stage = self.stage_at(step)
        x, y = session.batches.at(step)
        rank = [] if distributed.is_first() else [distributed.number()]
        torch.manual_seed(key(recipe.seed, "inside the model", step, *rank))  # dropout and the like
        context = context_of(session, step)
        self.guard.begin_step()
        # A model or a stage of theirs may fail, memory may lack, or another process be gone.
        with users_code(f"{self.where(step)} failed", RunFailed), distributed.together():
            loss = stage_loss(stage, context, x, y)
            session.optimizer.zero_grad()
            # Trained are the parameters, and no input that a stage left in the graph.
            session.scaler.scale(loss).backward(inputs=self.guard.trained)  # type: ignore[no-untyped-call]
        session.optimizer.lr = self.learning_rate(step)
        self.loss_sum += self.guard.update(step, distributed.mean(loss.detach()))
        distributed.copy_from_first(session.model.buffers())  # running statistics, which each has of its own part
        counted = self.meter.take()
        if counted != stage.step_cost:
            raise RunFailed(
                f"stage {stage} declares {stage.step_cost.kinds} forwards, input, weight and double backwards a step, "
                f"but {counted.kinds} were counted; correct its cost in moatlab.methods.language.STAGES"
            )
        progress.cost += counted
        if progress.replaced:
            planned = session.method.stage_at(step // session.steps_per_epoch, recipe.epochs).step_cost
            progress.healing_cost += counted + planned * -1
        progress.step += 1
        if self.guard.is_time_to_look(step):
            self.look()
        self.add_seconds(begun)

    def add_seconds(self, begun: float) -> None:
        """To the time of training: also that of a look, in which an accelerator does what it was given before."""
        seconds = time.perf_counter() - begun
        self.progress.epoch_seconds += seconds
        self.progress.train_seconds += seconds

    def look(self) -> None:
        """Nothing is measured or saved once a weight or a running statistic is not a number."""
        session, progress = self.session, self.progress
        epoch_begun = (progress.step - 1) // session.steps_per_epoch * session.steps_per_epoch
        for number in self.guard.bad_steps():
            step = epoch_begun + number
            images = session.batches.numbers(step).tolist()
            shown = ", ".join(map(str, images[:3])) + (f" and {len(images) - 3} more" if len(images) > 3 else "")
            what = f"the loss or a gradient became NaN or infinite at {self.where(step)}, images {shown}"
            facts = {"at_step": step + 1, "stage": str(self.stage_at(step)), "lr": self.learning_rate(step)}
            with suppress(NotWritten):
                self.log.event("nan", f"{what}; {session.recipe.on_nan}", **facts, images=images)
            if session.recipe.on_nan == "stop":
                raise self.failure(what)
            progress.skipped += 1
            progress.epoch_skipped += 1
        if progress.step and not self.guard.weights_are_finite():
            raise self.failure(f"the weights are no longer finite after {self.where(progress.step - 1)}")
        if not self.guard.gradients_fit():
            raise self.failure(
                "the gradients do not fit into fp16, and steps are skipped: use --precision bf16 or fp32"
            )

    def where(self, step: int) -> str:
        epoch = step // self.session.steps_per_epoch
        return f"step {step + 1} (epoch {epoch + 1}, stage {self.stage_at(step)}, lr {self.learning_rate(step):.3g})"

    def failure(self, what: str) -> RunFailed:
        kept = f"the last good checkpoint is kept in {self.folder.path}"
        return RunFailed(f"{what}; {kept}, and a lower --lr in a new folder may help")

    # --- the end of an epoch

    def end_epoch(self) -> None:
        """Measure the watched images, write the epoch's line, act where robustness is lost, save."""
        session, recipe, progress = self.session, self.session.recipe, self.progress
        begun = time.perf_counter()
        self.look()
        self.add_seconds(begun)
        if progress.epoch_skipped == session.steps_per_epoch:
            raise self.failure(f"every step of epoch {progress.epochs_logged + 1} was skipped")
        epoch = progress.epochs_logged
        begun = time.perf_counter()
        examples: list[Tensor] = []
        measured = self.measure(session.watched_x, session.watched_y, examples)
        seconds = time.perf_counter() - begun
        progress.monitor_seconds += seconds
        progress.monitor_cost += sum(distributed.from_all(self.meter.take()), Cost())
        stage = self.stage_at(progress.step - 1)
        comparable = self.method.ends_cycle(epoch)
        self.log.epoch({
            "epoch": epoch + 1, "stage": str(stage), "k": stage.value, "lr": self.learning_rate(progress.step - 1),
            "loss": self.loss_sum.item() / (session.steps_per_epoch - progress.epoch_skipped), **measured,
            "monitor": recipe.monitor, "comparable": comparable,
            "passes": progress.cost.passes / session.steps_per_epoch,
            "train_seconds": round(progress.epoch_seconds, 3), "monitor_seconds": round(seconds, 3),
        }, examples)  # fmt: skip
        progress.epochs_logged += 1
        progress.epoch_seconds, progress.epoch_skipped = 0.0, 0
        self.loss_sum.zero_()
        if comparable:
            if recipe.monitor == "holdout" and measured["pgd7"] > progress.best_pgd7:
                progress.best_epoch, progress.best_pgd7 = epoch + 1, measured["pgd7"]
                progress.best_written = self.save_best_if_possible()
            self.watch_for_collapse()
        self.save_if_possible()

    def watch_for_collapse(self) -> None:
        """Act by the recipe where a comparable check shows catastrophic overfitting, and where it is over."""
        progress, recipe = self.progress, self.session.recipe
        checks = [line for line in progress.history if line["comparable"]]
        verdict, epoch, now = judge(checks), progress.epochs_logged, checks[-1]
        at_the_end = progress.step == self.session.total_steps
        best = max(check["pgd7"] for check in checks)
        facts = {name: now[name] for name in ("fgsm", "pgd7", "alignment")} | {"epoch": epoch, "best_pgd7": best}
        shown = f"pgd7 {100 * now['pgd7']:.1f} % (best {100 * best:.1f} %), fgsm {100 * now['fgsm']:.1f} %"
        if verdict == "good":
            if progress.alarmed:
                progress.alarmed = False
                # Once it has collapsed twice, it would again: then it is healed to the end.
                if recipe.on_collapse == "heal" and len(progress.alarms) == 1:
                    progress.replaced = False
                goes_on = f"; on with {self.method}" if recipe.on_collapse == "heal" else ""
                self.log.event("recovered", f"robustness is back at epoch {epoch}: {shown}{goes_on}", **facts)
            if recipe.on_collapse != "warn":
                weights = self.session.model.state_dict()
                self.good = {name: tensor.detach().cpu().clone() for name, tensor in weights.items()}
                progress.good_epoch = epoch
        elif verdict == "collapsed" and (not progress.alarmed or (at_the_end and recipe.on_collapse != "warn")):
            if not progress.alarmed:
                progress.alarms.append(epoch)
            what = f"robustness collapsed at epoch {epoch}: {shown}, alignment {now['alignment']:.2f}"
            action = self.answer_to_collapse()
            self.log.event("collapse", f"{what}; {action}", **facts, action=recipe.on_collapse)

    def answer_to_collapse(self) -> str:
        """Do what the recipe says, and say what was done."""
        progress, recipe, policy = self.progress, self.session.recipe, self.session.recipe.on_collapse
        if policy == "warn":
            progress.alarmed = True
            return "--on-collapse stop, rollback or heal would act on it"
        if policy == "stop" or progress.step == self.session.total_steps:
            self.go_back()
            progress.stopped, progress.kept_epoch = True, progress.good_epoch
            return f"ended with the model of epoch {progress.good_epoch}"
        progress.replaced = True
        if policy == "heal":
            progress.alarmed = True
            return f"healing with {recipe.then} until it is back"
        self.go_back()
        return f"back to the model of epoch {progress.good_epoch}, and on with {recipe.then}"

    def go_back(self) -> None:
        """The weights of the last good epoch, with the momentum at rest."""
        assert self.good is not None  # an alarm needs a check that was better
        self.session.model.load_state_dict(self.good)
        torch.clear_autocast_cache()
        for velocity in self.session.optimizer.velocity.values():
            velocity.zero_()

    def evaluate(self) -> None:
        """The one look at the test images."""
        device, images = self.session.device, self.session.images
        measured = self.measure(images.test_x.to(device), images.test_y.to(device))
        self.record.final = measured | {"images": len(images.test_y)}
        checks = [(line["epoch"], line["pgd7"]) for line in self.progress.history if line["comparable"]]
        self.record.collapsed_at = collapsed_at(checks)
        self.log.end(self.session.recipe, measured)

    def measure(self, x: Tensor, y: Tensor, keep: list[Tensor] | None = None) -> dict[str, float]:
        recipe = self.session.recipe
        with users_code(f"measuring accuracy after step {self.progress.step} failed", RunFailed):
            return measure(
                self.session.model, x, y, eps=recipe.eps_value, norm=recipe.norm, seed=recipe.seed, tick=self.tick,
                keep=keep, shared=True,
            )  # fmt: skip

    # --- what stays

    def save(self, status: str, message: str | None = None) -> None:
        """The model, the checkpoint and the record; never weights that are not finite over good ones."""
        self.look()
        self.progress.loss_sum = self.loss_sum.item()
        if distributed.is_first():
            keep_progress(self.session, self.folder, self.progress, self.good)
            self.record.model = save_model(self.folder.model, self.session.model, self.session.description)
        self.describe(status, message)

    def save_if_possible(self) -> None:
        """Where there is no room for a checkpoint the run goes on, and the last one stays."""
        try:
            self.save("running")
        except NotWritten as error:
            self._tell_of_full_disk(error)

    def save_best_if_possible(self) -> bool:
        try:
            if distributed.is_first():
                save_model(self.folder.best_model, self.session.model, self.session.description)
        except NotWritten as error:
            self._tell_of_full_disk(error)
            return False
        return True

    def _tell_of_full_disk(self, error: NotWritten) -> None:
        with suppress(NotWritten):
            self.log.event("not written", f"{error}; training goes on, and earlier files stay")

    def describe(self, status: str, message: str | None = None) -> None:
        record, progress = self.record, self.progress
        record.status, record.message, record.steps_done = status, message, progress.step
        record.counted = progress.cost.as_dict(self.session.steps_per_epoch)
        record.metrics = self.folder.metrics_sha256 if status == "finished" else None
        record.healing = progress.healing_cost.as_dict(self.session.steps_per_epoch)
        record.alarms, record.kept_epoch, record.skipped_steps = progress.alarms, progress.kept_epoch, progress.skipped
        record.monitoring = progress.monitor_cost.as_dict()
        record.train_seconds = round(progress.train_seconds, 3)
        record.monitor_seconds = round(progress.monitor_seconds, 3)
        if progress.best_epoch is not None and progress.best_written:
            record.best = {"epoch": progress.best_epoch, "pgd7": progress.best_pgd7}
        if distributed.is_first():
            self.folder.write_record(record)

    def learning_rate(self, step: int) -> float:
        recipe = self.session.recipe
        schedule = SCHEDULES[recipe.schedule]
        return schedule(step, epochs=recipe.epochs, steps_per_epoch=self.session.steps_per_epoch, peak=recipe.lr)

    def work(self) -> float:
        """What is done of the plan: healing comes on top of it."""
        passes = (self.progress.cost.passes - self.progress.healing_cost.passes) / self.session.steps_per_epoch
        return passes + self.progress.epochs_logged * len(self.session.watched_y) * self.watching_image

    def show_progress(self, images_watched: int = 0) -> None:
        recipe, step = self.session.recipe, self.progress.step
        epoch = min(step // self.session.steps_per_epoch, recipe.epochs - 1)
        stage = self.method.stage_at(epoch, recipe.epochs)
        done = self.work() + images_watched * self.watching_image
        text = f"step {step}/{self.session.total_steps}  ETA {self.pace.eta(done)}"
        self.bar.update(done, text, title=f"epoch {epoch + 1}/{recipe.epochs} {stage}")

    def tick(self, images_watched: int) -> None:
        """Called while accuracies are measured: shows how far that is, and lets ctrl-C through."""
        self.show_progress(images_watched)
        if distributed.count() == 1:  # or else when all of them are done measuring
            self.caught.raise_if_any()
