"""Detects NaN and infinite losses, gradients and weights. Recorded on the device each step, read now and then."""

from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import Tensor

from moatlab.runtime.errors import NotWritten, RunFailed
from moatlab.training.checkpoint import Progress
from moatlab.training.logbook import Logbook
from moatlab.training.setup import Session

LOOK_STEPS = 50  # between two reads from a GPU, which make it wait; on a CPU every step is read
SMALLEST_SCALE = 1e-3  # of fp16 gradients; it starts at 65536 and is halved at each overflow


class NanGuard:
    """Keeps gradients that are not finite from changing the model.

    `--on-nan stop` ends the run at the first such step; `skip` leaves weights, momentum and BatchNorm's statistics as
    they were before it. In fp16, gradients overflow by design and GradScaler skips those steps; only the loss counts.
    """

    def __init__(self, session: Session, progress: Progress, log: Logbook) -> None:
        self.session, self.progress, self.log = session, progress, log
        self.skipping = session.recipe.on_nan == "skip"
        self.trained = [parameter for parameter in session.model.parameters() if parameter.requires_grad]
        # By name: a model may replace the tensor of a buffer. Some buffers hold -inf by design, such as masks.
        self.finite_at_first = [name for name, tensor in self.state().items() if bool(all_finite([tensor]))]
        self.bad = torch.zeros(session.steps_per_epoch, dtype=torch.bool, device=session.device)  # by step of the epoch
        self.before: dict[str, Tensor] = {}

    def state(self) -> dict[str, Tensor]:
        return dict([*self.session.model.named_parameters(), *self.session.model.named_buffers()])

    def begin_step(self) -> None:
        buffers = self.session.model.named_buffers() if self.skipping else ()
        self.before = {name: buffer.detach().clone() for name, buffer in buffers}

    def hold_back(self, step: int, loss: Tensor) -> Tensor:
        """Whether the loss or a gradient is not finite. If so, the optimizer's next step does nothing: a fused kernel
        reads `found_inf` on the device, without a synchronisation."""
        bad = ~torch.isfinite(loss)
        if not self.session.scaler.is_enabled():  # else it checks the gradients itself
            bad |= ~all_finite(parameter.grad for parameter in self.trained if parameter.grad is not None)
            self.session.optimizer.found_inf = (bad if self.skipping else bad | self.bad.any()).float()
        self.bad[step % len(self.bad)] = bad
        return bad

    def restore_buffers(self, bad: Tensor) -> None:
        """Undo what a skipped step did to the buffers."""
        with torch.no_grad():
            for name, buffer in self.session.model.named_buffers() if self.before else ():
                if name in self.before:
                    buffer.copy_(torch.where(bad, self.before[name], buffer))

    def is_time_to_look(self, step: int) -> bool:
        return self.session.device.type == "cpu" or (step + 1) % LOOK_STEPS == 0

    def look(self) -> None:
        """Report bad steps. Raise RunFailed for `--on-nan stop`, and if a weight or a buffer is no longer finite."""
        session, progress = self.session, self.progress
        epoch_begun = (progress.step - 1) // session.steps_per_epoch * session.steps_per_epoch
        bad_steps: list[int] = self.bad.nonzero().flatten().tolist()
        self.bad.zero_()
        for number in bad_steps:
            step = epoch_begun + number
            stage, images = (
                session.stage_at(step, progress.replaced),
                session.batches.numbers(session.batch_step(step)).tolist(),
            )
            shown = ", ".join(map(str, images[:3])) + (f" and {len(images) - 3} more" if len(images) > 3 else "")
            what = f"the loss or a gradient became NaN or infinite at {session.where(step, progress.replaced)}"
            what += f", images {shown}"
            facts = {"at_step": step + 1, "stage": str(stage), "lr": session.learning_rate(step), "images": images}
            with suppress(NotWritten):
                self.log.event("nan", f"{what}; {session.recipe.on_nan}", **facts)
            if not self.skipping:
                raise self.failure(what)
            progress.skipped += 1
            progress.epoch_skipped += 1
        state = self.state()
        if progress.step and not bool(all_finite(state[name] for name in self.finite_at_first)):
            where = session.where(progress.step - 1, progress.replaced)
            raise self.failure(f"the weights are no longer finite after {where}")
        if session.precision == "fp16" and session.scaler.get_scale() < SMALLEST_SCALE:
            raise self.failure("the gradients overflow in fp16: use --precision bf16 or fp32")

    def failure(self, what: str) -> RunFailed:
        return RunFailed(f"{what}; a lower --lr may help (the last good checkpoint is kept in {self.log.folder.path})")


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """By sums, which NaN and infinity propagate through: on a CPU a hundred times faster than a maximum. Values beyond
    1e30 may sum to infinity; no model trains with those."""
    sums = [tensor.detach().sum(dtype=torch.float32) for tensor in tensors if tensor.is_floating_point()]
    return torch.stack(sums).isfinite().all() if sums else torch.tensor(True)
