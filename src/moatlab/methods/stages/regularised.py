"""Loss stages: a regularizer added to the cross-entropy keeps the loss close to linear inside the ball."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from moatlab.methods.cost import Cost
from moatlab.methods.entry import Argument, StageEntry

if TYPE_CHECKING:
    from torch import Tensor

    from moatlab.methods.context import Context


def gradalign(context: Context, x: Tensor, y: Tensor, weight: float) -> Tensor:
    """FGSM training plus weight (1 - mean cos(g1, g2)).

    g1 is the input gradient at x (a constant, also used for the FGSM batch), g2 the one at x + U(-eps, eps), which is
    differentiated. Examples where either vanishes are left out of the mean. All in train mode and in the order of the
    authors' code, whose running statistics end with the noisy images.
    """
    import torch
    from torch.nn.functional import cross_entropy

    threat = context.threat
    with context.attacking("train") as probe:
        g1, _logits = probe.gradient(x, y)
    adversarial = threat.project(x + threat.eps * threat.steepest(g1), x)
    loss = cross_entropy(context.forward(adversarial), y)
    noisy = (x + context.noise(x)).requires_grad_()
    noisy_loss = cross_entropy(context.model(noisy), y, reduction="sum")
    (g2,) = torch.autograd.grad(noisy_loss, noisy, create_graph=True)
    return loss + weight * misalignment(g1, g2, context.mean_count)


def has_gradients(g1: Tensor, g2: Tensor) -> Tensor:
    """Examples where neither gradient vanishes. One vanishes if its square underflows: there the derivative of a norm
    overflows."""
    import torch

    smallest = torch.finfo(g1.dtype).tiny ** 0.5
    sizes = [gradient.detach().abs().flatten(1).amax(1) for gradient in (g1, g2)]
    both: Tensor = (sizes[0] > smallest) & (sizes[1] > smallest)
    return both


def misalignment(g1: Tensor, g2: Tensor, usual: Callable[[Tensor], Tensor] = lambda count: count) -> Tensor:
    """The mean of 1 - cos(g1, g2) over the examples where neither gradient vanishes (0 if there are none). `usual` maps
    the number of examples to the divisor: where losses are averaged over processes, its mean over them.
    """
    import torch

    g1, g2 = g1.flatten(1), g2.flatten(1)
    size1, size2 = g1.abs().amax(1, keepdim=True), g2.detach().abs().amax(1, keepdim=True)
    counts = has_gradients(g1, g2)[:, None]
    g1 = torch.where(counts, g1 / size1, 1.0)  # scaled, so that no square underflows
    g2 = torch.where(counts, g2, 1.0) / torch.where(counts, size2, 1.0)
    cosine = torch.nn.functional.cosine_similarity(g1, g2, dim=1)
    total = torch.where(counts.squeeze(1), 1 - cosine, 0.0).sum()
    misaligned: Tensor = total / torch.where(counts.any(), usual(counts.sum()), 1)
    return misaligned


def lambda_at(eps: float) -> float:
    """exp(255 eps ln(10)/8 + ln 0.02), the authors' choice: 0.2 at 8/255, 2 at 16/255."""
    return round(0.02 * 10 ** (255 * eps / 8), 4)


STAGES = {
    "gradalign": StageEntry(
        gradalign,
        lambda _: Cost(3, 2, 1, 1),
        "Andriushchenko and Flammarion, 2020",
        Argument("LAMBDA", whole=False, low=0, default=0.2, at_eps=lambda_at),
        kind="loss",
    )
}
