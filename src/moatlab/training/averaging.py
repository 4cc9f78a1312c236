"""A running average of the weights, which is often more robust than the last weights and costs no pass.

ema   parameters only, with the buffers of the trained model (Gowal et al., 2020; Rebuffi et al., 2021)
swa   a longer average whose BatchNorm statistics are estimated again on training images (Izmailov et al., 2018)
"""

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from moatlab.runtime import distributed

DECAYS = {"ema": 0.995, "swa": 0.999}  # of each step
WARM_UP = 0.025  # share of the steps after which averaging begins
ESTIMATED = 50  # batches, at most, for BatchNorm's statistics


class Average:
    """`model` holds the averaged weights, in eval mode."""

    def __init__(self, model: nn.Module, kind: str, decay: float | None, steps: int) -> None:
        self.model, self.kind = copy.deepcopy(model).eval(), kind
        self.decay, self.first = decay or DECAYS[kind], int(WARM_UP * steps)

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """After a step: average <- d average + (1 - d) weights, d = min(decay, (1 + n)/(10 + n)) at the n-th update.
        During the warm-up the average equals the weights."""
        count = step - self.first
        decay = min(self.decay, (1 + count) / (10 + count)) if count > 0 else 0.0
        for mean, weight in zip(self.model.parameters(), model.parameters(), strict=True):
            mean.lerp_(weight, 1 - decay)

    @torch.no_grad()
    def update_buffers(self, model: nn.Module, images: Iterable[Tensor]) -> None:
        """At the end of an epoch: copy the model's buffers; for swa, estimate BatchNorm's on these images."""
        for mine, buffer in zip(self.model.buffers(), model.buffers(), strict=True):
            mine.copy_(buffer)
        norms = [layer for layer in self.model.modules() if isinstance(layer, _BatchNorm) and layer.track_running_stats]
        if self.kind == "ema" or not norms:
            return
        before = [norm.momentum for norm in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.train()
        for number, x in enumerate(images):
            for norm in norms:  # the mean over all batches; None would ask the device for their number
                norm.momentum = 1 / (number + 1)
            self.model(x)
        self.model.eval()
        for norm, momentum in zip(norms, before, strict=True):
            norm.momentum = momentum
        distributed.copy_from_first(self.model.buffers())
