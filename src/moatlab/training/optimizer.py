"""Stochastic gradient descent, with PyTorch's fused kernel."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

FUSED = ("cpu", "cuda")  # where the fused kernel is known to respect `found_inf`


class Sgd:
    """v <- momentum v + (gradient + weight_decay p), p <- p - lr v: torch.optim.SGD(fused=True), bit for bit.

    Creating that class imports PyTorch's compiler, which adds two seconds to the start of every run; the function
    behind it does not. GradScaler sets `grad_scale` and `found_inf` if the third name below exists, and deletes them
    after the step.
    """

    grad_scale: Tensor  # both may be missing
    found_inf: Tensor  # if it is 1, a step does nothing
    _step_supports_amp_scaling = True

    def __init__(self, parameters: Iterable[nn.Parameter], *, lr: float, momentum: float, weight_decay: float) -> None:
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.param_groups = [{"params": self.parameters}]  # read by GradScaler
        # Zeros instead of None: PyTorch would leave a new buffer uninitialised if fp16 overflows in the first step.
        self.velocity = {p: torch.zeros_like(p, requires_grad=False) for p in self.parameters if momentum}

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        pairs = [(parameter, parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        fused = all(parameter.device.type in FUSED for parameter, _ in pairs)
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if not fused and found_inf is not None and bool(found_inf):
            return
        sgd(
            [parameter for parameter, _ in pairs],
            [gradient for _, gradient in pairs],
            [self.velocity.get(parameter) for parameter, _ in pairs],
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            dampening=0,
            nesterov=False,
            maximize=False,
            fused=fused,
            grad_scale=scale if fused else None,
            found_inf=found_inf if fused else None,
        )
        torch.clear_autocast_cache()  # a model with its own autocast might use the old weights
