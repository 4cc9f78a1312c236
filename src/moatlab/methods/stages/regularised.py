"""Loss stages: a regularizer added to the cross-entropy keeps the loss close to linear inside the ball."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moatlab.methods.entry import Argument, StageEntry, always, geometric, weight

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

    from moatlab.attacks.alignment import misalignment

    threat = context.threat
    with context.attacking("train") as probe:
        g1, _logits = probe.gradient(x, y)
    adversarial = threat.project(x + threat.eps * threat.steepest(g1), x)
    loss = context.cross_entropy(context.forward(adversarial), y)
    noisy = (x + context.noise(x)).requires_grad_()
    noisy_loss = cross_entropy(context.model(noisy), y, reduction="sum")
    (g2,) = torch.autograd.grad(noisy_loss, noisy, create_graph=True)
    return loss + weight * misalignment(g1, g2, context.mean_count)


def elle(context: Context, x: Tensor, y: Tensor, _: None, *, lambda_: float) -> Tensor:
    """FGSM training plus lambda mean (L(x_c) - (1 - a) L(x_a) - a L(x_b))^2, the squared error of linear interpolation:
    x_a, x_b ~ x + U(-eps, eps), not clipped, x_c = (1 - a) x_a + a x_b, a ~ U(0, 1) per image; one call on 3B images.
    """
    import torch
    from torch.nn.functional import cross_entropy

    adversarial = context.climb(x, x, y, steps=1, step_size=context.eps)
    loss = context.cross_entropy(context.forward(adversarial), y)
    first, second = x + context.noise(x), x + context.noise(x)
    share = context.uniform(x[:, 0, 0, 0])
    points = torch.cat([first, second, first.lerp(second, share.view(-1, 1, 1, 1))])
    at_first, at_second, between = cross_entropy(context.model(points), y.repeat(3), reduction="none").chunk(3)
    return loss + lambda_ * (between - at_first.lerp(at_second, share.to(between))).square().mean()


def aaer(context: Context, x: Tensor, y: Tensor, _: None, *, over: str, lambda_: float | None) -> Tensor:
    """The batch of `fast` or `nfgsm`, plus lambda n/B max(mean |D|^2 over the n abnormal examples - the same over the
    others, 0). D: logits at the adversarial point minus logits at the start (constant). Abnormal: the step lowered the
    loss. Always in train mode. The authors' second term has no gradient in their code and is left out.
    """
    import torch
    from torch.nn.functional import cross_entropy

    eps, threat = context.eps, context.threat
    start = (x + context.noise(x, 2 * eps)).clamp_(0, 1) if over == "nfgsm" else threat.project(x + context.noise(x), x)
    with context.attacking("train") as probe:
        gradient, before = probe.gradient(start, y)
    moved = start + (eps if over == "nfgsm" else 1.25 * eps) * threat.steepest(gradient)
    logits = context.forward(moved.clamp(0, 1) if over == "nfgsm" else threat.project(moved, x))
    losses = [cross_entropy(one, y, reduction="none") for one in (before, logits.detach())]
    abnormal = losses[0] > losses[1]
    count, change = abnormal.sum(), (logits - before).square().sum(1)
    among = torch.where(abnormal, change, 0.0).sum() / count.clamp(min=1)
    others = (torch.where(abnormal, 0.0, change).sum() / (len(x) - count).clamp(min=1)).detach()
    mixed = (count > 0) & (count < len(x))
    penalty = torch.where(mixed, abnormal.to(x).mean() * (among - others).clamp(min=0), 0.0)
    radius = eps if threat.norm == "linf" else 8 / 255
    authors = geometric(0.15, 1.5) if over == "nfgsm" else geometric(1.5, 3.25)
    return context.cross_entropy(logits, y) + (authors(radius) if lambda_ is None else lambda_) * penalty


AUTHORS, DOUBLE = "Andriushchenko and Flammarion, 2020", "against collapse; needs a double backward"
ALIGN = Argument("LAMBDA", default=0.2, at_eps=geometric(0.2, 2.0))
ELLE = weight(1000.0, geometric(1000, 5000))
AAER = {"over": Argument("OVER", default="fast", choices=("fast", "nfgsm")), "lambda": Argument("LAMBDA")}
STAGES = {
    "gradalign": StageEntry(gradalign, always(3, 2, 1, 1), AUTHORS, DOUBLE, ALIGN, "loss"),
    "elle": StageEntry(
        elle, always(5, 1, 4), "Abad Rocamora et al., 2024", "against collapse", kind="loss", named=ELLE
    ),
    "aaer": StageEntry(
        aaer, always(2, 1, 1), "Lin, Yu and Liu, 2023", "against collapse, at no extra pass", kind="loss", named=AAER
    ),
}
