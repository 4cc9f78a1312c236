"""Stages that get more out of a backward pass: replayed batches, and updates of the first layer's input."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moatlab.methods.cost import Cost
from moatlab.methods.entry import Argument, StageEntry, always

if TYPE_CHECKING:
    from torch import Tensor

    from moatlab.methods.context import Context


def free(context: Context, x: Tensor, y: Tensor, _: int) -> Tensor:
    """CE(x + delta). The same backward pass gives the weights' gradient and delta <- clip(delta + eps sign g). Each
    batch is trained on M times in a row; delta starts at 0 and is carried over batches. An epoch is one pass over as
    many images as the training set has, so that T epochs see each image T/M times."""
    import torch

    from moatlab.runtime import distributed

    gathered = distributed.gathered if context.shared else lambda part: part
    if "free" not in context.memory:
        context.memory["free"] = torch.zeros_like(gathered(x))
    whole = context.memory["free"]
    delta = whole[distributed.share(len(whole))] if context.shared else whole
    leaf = (x + delta).clamp_(0, 1).requires_grad_()

    def move(gradient: Tensor) -> None:
        context.memory["free"] = gathered(context.threat.clip(delta + context.eps * context.threat.steepest(gradient)))

    context.after_backward(leaf, move)
    return context.cross_entropy(context.forward(leaf), y)


def yopo(context: Context, x: Tensor, y: Tensor, times: int, *, n: int) -> Tensor:
    """M times: a forward and backward at x + delta give weight gradients and p, the gradient at the first layer's
    output; then n steps of eps/4 on <first layer(x + delta), p>. Weight gradients are averaged over the M times; the
    first layer also gets those of <first layer, p> at the final delta. The loss returned has this average as gradient.
    """
    import torch
    from torch.nn.functional import cross_entropy

    from moatlab.models.cutting import first_layer, first_output
    from moatlab.runtime import distributed

    weights = [parameter for parameter in context.model.parameters() if parameter.requires_grad]
    total = [torch.zeros_like(weight) for weight in weights]
    value, point = x.new_zeros(()), context.threat.project(x + context.noise(x), x)
    for _ in range(times):
        point.requires_grad_()  # so that the first layer's output has a gradient, even of frozen weights
        with first_output(context.model) as seen:
            loss = cross_entropy(context.model(point), y, label_smoothing=context.label_smoothing) / times
        *found, slope = torch.autograd.grad(loss, [*weights, seen[0]], allow_unused=True)
        for _ in range(n):
            (gradient,) = torch.autograd.grad((first_layer(context.model, point) * slope).sum(), point)
            point = context.step(point.detach(), gradient, x, context.eps / 4).requires_grad_()
        again = torch.autograd.grad((first_layer(context.model, point) * slope).sum(), weights, allow_unused=True)
        for whole, *parts in zip(total, found, again, strict=True):
            whole += sum(part for part in parts if part is not None)
        value, point = value + loss.detach(), point.detach()
    means = [distributed.mean(one) if context.shared else one for one in total]
    surrogate = sum((weight * mean).sum() for weight, mean in zip(weights, means, strict=True))
    return value + surrogate - surrogate.detach()  # type: ignore[union-attr]


MANY = "M passes for M n attack steps; yopo:5 is the authors'"
INNER = {"n": Argument("N", whole=True, low=1, high=100, default=3)}
TIMES = Argument("M", whole=True, low=1, high=100)
STAGES = {
    "free": StageEntry(
        free, always(1, 0, 1), "Shafahi et al., 2019", "T epochs see each image T/M times", TIMES, kind="replay"
    ),
    "yopo": StageEntry(yopo, lambda m: Cost(m, 0, m), "Zhang et al., 2019, YOPO", MANY, TIMES, "loss", named=INNER),
}
