"""SGD and AdamW, with PyTorch's fused kernels.

Creating the classes of torch.optim imports PyTorch's compiler, which adds two seconds to the start of every run; the
functions behind them do not.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

FUSED = ("cpu", "cuda")  # where the fused kernels are known to respect `found_inf`


class Optimizer(ABC):
    """`state` holds the tensors of each trained parameter, which a checkpoint keeps.

    GradScaler sets `grad_scale` and `found_inf` if the third name below exists, and deletes them after the step.
    """

    grad_scale: Tensor  # both may be missing
    found_inf: Tensor  # if it is 1, a step does nothing
    _step_supports_amp_scaling = True

    def __init__(self, parameters: Iterable[nn.Parameter], *, lr: float, momentum: float, weight_decay: float) -> None:
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.param_groups = [{"params": self.parameters}]  # read by GradScaler
        # Zeros instead of None: PyTorch would leave a new buffer uninitialised if fp16 overflows in the first step.
        self.state: dict[Tensor, list[Tensor]] = {parameter: self.zeros(parameter) for parameter in self.parameters}

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def reset(self) -> None:
        for tensors in self.state.values():
            for tensor in tensors:
                tensor.zero_()

    @torch.no_grad()
    def step(self) -> None:
        given: list[Tensor] = [parameter for parameter in self.parameters if parameter.grad is not None]
        gradients = [parameter.grad for parameter in given if parameter.grad is not None]
        fused = all(parameter.device.type in FUSED for parameter in given)
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if not fused and found_inf is not None and bool(found_inf):
            return
        how = {"grad_scale": scale, "found_inf": found_inf} if fused else {}
        self.update(given, gradients, fused=fused, **how)
        torch.clear_autocast_cache()  # a model with its own autocast might use the old weights

    @abstractmethod
    def zeros(self, parameter: Tensor) -> list[Tensor]:
        """The state of a parameter before the first step."""

    @abstractmethod
    def update(self, parameters: list[Tensor], gradients: list[Tensor], **how: Any) -> None:
        """Change the parameters and their state in place; `how` goes to PyTorch's function."""


class Sgd(Optimizer):
    """v <- momentum v + (gradient + weight_decay p), p <- p - lr v: torch.optim.SGD(fused=True), bit for bit."""

    def zeros(self, parameter: Tensor) -> list[Tensor]:
        return [torch.zeros_like(parameter, requires_grad=False)] if self.momentum else []

    def update(self, parameters: list[Tensor], gradients: list[Tensor], **how: Any) -> None:
        sgd(
            parameters,
            gradients,
            [next(iter(self.state[parameter]), None) for parameter in parameters],
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            dampening=0,
            nesterov=False,
            maximize=False,
            **how,
        )


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), beta1 = momentum, beta2 = 0.999, epsilon = 1e-8:
    torch.optim.AdamW(fused=True), bit for bit. The state is the two means of gradients and the number of steps."""

    def zeros(self, parameter: Tensor) -> list[Tensor]:
        fused = parameter.device.type in FUSED
        steps = torch.zeros((), device=parameter.device if fused else "cpu")
        return [*(torch.zeros_like(parameter, requires_grad=False) for _ in range(2)), steps]

    def update(self, parameters: list[Tensor], gradients: list[Tensor], **how: Any) -> None:
        means, squares, steps = ([self.state[p][i] for p in parameters] for i in range(3))
        adamw(
            parameters,
            gradients,
            means,
            squares,
            [],
            steps,
            lr=self.lr,
            beta1=self.momentum,
            beta2=0.999,
            eps=1e-8,
            weight_decay=self.weight_decay,
            amsgrad=False,
            maximize=False,
            **how,
        )


OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": Sgd, "adamw": AdamW}
