"""Is the loss, a gradient or a weight no longer a number? Noted on the device at every step, asked for now and then."""

from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import Tensor

from moatlab.runtime.errors import NotWritten, RunFailed
from moatlab.training.checkpoint import Progress
from moatlab.training.logbook import Logbook
from moatlab.training.setup import Session

LOOK_STEPS = 50  # how often an accelerator, which would have to wait, is asked; the CPU is asked at every step
SMALLEST_SCALE = 1e-3  # of fp16 gradients; it begins at 65536 and is halved at each overflow


class NanGuard:
    """Lets the optimizer update the weights only by gradients that are finite.

    With `--on-nan stop` the first step that has others is the last; with `skip` it is as if it had not been: neither
    weights, momentum nor BatchNorm's statistics move. In fp16 gradients overflow now and then by design; PyTorch's
    GradScaler leaves such steps out by itself, and only a loss that is not finite counts here.
    """

    def __init__(self, session: Session, progress: Progress, log: Logbook) -> None:
        self.session, self.progress, self.log = session, progress, log
        self.skipping = session.recipe.on_nan == "skip"
        self.trained = [parameter for parameter in session.model.parameters() if parameter.requires_grad]
        # By name, for a model may put another tensor in a buffer's place. One may hold -inf by design, as masks do.
        self.finite_at_first = [name for name, tensor in self.state().items() if bool(all_finite([tensor]))]
        self.bad = torch.zeros(session.steps_per_epoch, dtype=torch.bool, device=session.device)  # steps of an epoch
        self.before: dict[str, Tensor] = {}

    def state(self) -> dict[str, Tensor]:
        return dict([*self.session.model.named_parameters(), *self.session.model.named_buffers()])

    def begin_step(self) -> None:
        buffers = self.session.model.named_buffers() if self.skipping else ()
        self.before = {name: buffer.detach().clone() for name, buffer in buffers}

    def hold_back(self, step: int, loss: Tensor) -> Tensor:
        """Keep the optimizer's next step from doing anything where the loss or a gradient is not finite; is it so?

        PyTorch's fused SGD does nothing where `found_inf` is 1, so that nobody has to wait for the answer.
        """
        bad = ~torch.isfinite(loss)
        if not self.session.scaler.is_enabled():  # where it is, it looks at the gradients itself
            bad |= ~all_finite(parameter.grad for parameter in self.trained if parameter.grad is not None)
            self.session.optimizer.found_inf = (bad if self.skipping else bad | self.bad.any()).float()
        self.bad[step % len(self.bad)] = bad
        return bad

    def restore_buffers(self, bad: Tensor) -> None:
        """Those of before a bad step, where such steps are skipped."""
        with torch.no_grad():
            for name, buffer in self.session.model.named_buffers() if self.before else ():
                if name in self.before:
                    buffer.copy_(torch.where(bad, self.before[name], buffer))

    def is_time_to_look(self, step: int) -> bool:
        return self.session.device.type == "cpu" or (step + 1) % LOOK_STEPS == 0

    def look(self) -> None:
        """Nothing is measured or saved once a weight or a running statistic is not a number."""
        session, progress = self.session, self.progress
        epoch_begun = (progress.step - 1) // session.steps_per_epoch * session.steps_per_epoch
        bad_steps: list[int] = self.bad.nonzero().flatten().tolist()
        self.bad.zero_()
        for number in bad_steps:
            step = epoch_begun + number
            stage, images = session.stage_at(step, progress.replaced), session.batches.numbers(step).tolist()
            shown = ", ".join(map(str, images[:3])) + (f" and {len(images) - 3} more" if len(images) > 3 else "")
            where = session.where(step, progress.replaced)
            what = f"the loss or a gradient became NaN or infinite at {where}, images {shown}"
            facts = {"at_step": step + 1, "stage": str(stage), "lr": session.learning_rate(step), "images": images}
            with suppress(NotWritten):
                self.log.event("nan", f"{what}; {session.recipe.on_nan}", **facts)
            if not self.skipping:
                raise self.failure(what)
            progress.skipped += 1
            progress.epoch_skipped += 1
        if progress.step and not self.weights_are_finite():
            where = session.where(progress.step - 1, progress.replaced)
            raise self.failure(f"the weights are no longer finite after {where}")
        if session.precision == "fp16" and session.scaler.get_scale() < SMALLEST_SCALE:
            raise self.failure(
                "the gradients do not fit into fp16, and steps are skipped: use --precision bf16 or fp32"
            )

    def failure(self, what: str) -> RunFailed:
        kept = f"the last good checkpoint is kept in {self.log.folder.path}"
        return RunFailed(f"{what}; {kept}, and a lower --lr in a new folder may help")

    def weights_are_finite(self) -> bool:
        state = self.state()
        return bool(all_finite(state[name] for name in self.finite_at_first))


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """By sums, which a NaN or an infinity carries through: on a CPU a hundredth of the time of looking for the largest.

    Numbers beyond 1e30 may add up to infinity themselves; no model trains with such.
    """
    sums = [tensor.detach().sum(dtype=torch.float32) for tensor in tensors if tensor.is_floating_point()]
    return torch.stack(sums).isfinite().all() if sums else torch.tensor(True)
