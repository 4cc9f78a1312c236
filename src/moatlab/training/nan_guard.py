"""Is the loss, a gradient or a weight no longer a number? Noted on the device at every step, asked for now and then."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from moatlab.training.setup import Session

LOOK_STEPS = 50  # how often an accelerator, which would have to wait, is asked; the CPU is asked at every step
SMALLEST_SCALE = 1e-3  # of fp16 gradients; it begins at 65536 and is halved at each overflow


class Guard:
    """Lets the optimizer update the weights only by gradients that are finite.

    With `--on-nan stop` the first step that has others is the last; with `skip` it is as if it had not been: neither
    weights, momentum nor BatchNorm's statistics move. In fp16 gradients overflow now and then by design; PyTorch's
    GradScaler leaves such steps out by itself, and only a loss that is not finite counts here.
    """

    def __init__(self, session: Session) -> None:
        self.session, self.skipping = session, session.recipe.on_nan == "skip"
        self.trained = [parameter for parameter in session.model.parameters() if parameter.requires_grad]
        # By name, for a model may put another tensor in a buffer's place. One may hold -inf by design, as masks do.
        self.finite_at_first = [name for name, tensor in self.state().items() if bool(all_finite([tensor]))]
        self.bad = torch.zeros(session.steps_per_epoch, dtype=torch.bool, device=session.device)  # steps of an epoch

    def state(self) -> dict[str, Tensor]:
        return dict([*self.session.model.named_parameters(), *self.session.model.named_buffers()])

    def begin_step(self) -> None:
        buffers = self.session.model.named_buffers() if self.skipping else ()
        self.before = {name: buffer.detach().clone() for name, buffer in buffers}

    def update(self, step: int, loss: Tensor) -> Tensor:
        """The optimizer's step, unless the loss or a gradient is not finite; the loss, or 0 if it was not taken.

        PyTorch's fused SGD does nothing where `found_inf` is 1, so that nobody has to wait for the answer.
        """
        optimizer, scaler = self.session.optimizer, self.session.scaler
        bad = ~torch.isfinite(loss)
        if not scaler.is_enabled():  # where it is, it looks at the gradients itself
            bad |= ~all_finite(parameter.grad for parameter in self.trained if parameter.grad is not None)
            optimizer.found_inf = (bad if self.skipping else bad | self.bad.any()).float()
        scaler.step(optimizer)  # type: ignore[arg-type]  # all that it reads of one is there
        scaler.update()
        if self.before:
            with torch.no_grad():
                for name, buffer in self.session.model.named_buffers():
                    if name in self.before:
                        buffer.copy_(torch.where(bad, self.before[name], buffer))
        self.bad[step % len(self.bad)] = bad
        return torch.where(bad, 0.0, loss)

    def is_time_to_look(self, step: int) -> bool:
        return self.session.device.type == "cpu" or (step + 1) % LOOK_STEPS == 0

    def bad_steps(self) -> list[int]:
        """The bad steps since the last look, numbered within their epoch."""
        found: list[int] = self.bad.nonzero().flatten().tolist()
        self.bad.zero_()
        return found

    def weights_are_finite(self) -> bool:
        state = self.state()
        return bool(all_finite(state[name] for name in self.finite_at_first))

    def gradients_fit(self) -> bool:
        """False where fp16 overflows however small the gradients are made: no step is taken any more."""
        return self.session.precision != "fp16" or self.session.scaler.get_scale() >= SMALLEST_SCALE


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """By sums, which a NaN or an infinity carries through: on a CPU a hundredth of the time of looking for the largest.

    Numbers beyond 1e30 may add up to infinity themselves; no model trains with such.
    """
    sums = [tensor.detach().sum(dtype=torch.float32) for tensor in tensors if tensor.is_floating_point()]
    return torch.stack(sums).isfinite().all() if sums else torch.tensor(True)
