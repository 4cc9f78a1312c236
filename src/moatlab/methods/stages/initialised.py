"""Single-step stages whose start is better than noise, and whose loss ties the outputs at start and end.

The forward at the start is trained too, so it runs in train mode whatever `bn_in_attack` is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moatlab.methods.cost import Cost
from moatlab.methods.entry import StageEntry, always, weight

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from moatlab.methods.context import Context

REFRESH = 20  # steps between two class-wise perturbations of LIET
TRUE, DECAY, RESET = 0.6, 0.3, 0.36  # of FGSM-PGI: label of the true class, of momentum, share of a run between resets


def liet(context: Context, x: Tensor, y: Tensor, _: None, *, lambda_: float) -> Tensor:
    """CE(x') + lambda (t+1)/T JS(p_start, p'). The start is x +- LI_y, LI_c = eps sign grad CE(grey image, c), with 10
    to 50 % of the pixels replaced by noise; one step of eps. Labels: 0.4 on the true class, 0.6 spread at random, drawn
    again at each use. Above 8/255 the noise is U(+-2 eps), and x' is clipped to [0, 1] only."""
    import torch
    from torch.nn.functional import cross_entropy

    eps, large = context.eps, context.eps > 8 / 255 + 1e-9
    if context.when.position % REFRESH == 0 or "liet" not in context.memory:
        grey, labels = torch.full_like(x[:1], 0.5), torch.arange(context.classes, device=x.device)
        with context.attacking("eval") as probe:
            images = grey.expand(context.classes, -1, -1, -1)
            target = random_labels(context, labels, x.dtype, shared=False)
            gradient, _logits = probe.gradient(images, target)
        context.memory["liet"] = eps * context.threat.steepest(gradient)
    share, sign = 0.1 + 0.4 * context.number(), torch.where(context.number() < 0.5, -1.0, 1.0)
    noise = context.noise(x, 2 * eps if large else eps)
    delta = torch.where(context.uniform(x) < share, noise, context.memory["liet"][y])
    start = (x + sign * delta).clamp_(0, 1).requires_grad_()
    at_start: Tensor = context.model(start)
    attacked = cross_entropy(at_start, random_labels(context, y, at_start.dtype), reduction="sum")
    (gradient,) = torch.autograd.grad(attacked, start, retain_graph=True)
    moved = start.detach() + eps * context.threat.steepest(gradient)
    logits = context.forward(moved.clamp(0, 1) if large else context.threat.project(moved, x))
    p, q = at_start.softmax(1), logits.softmax(1)
    middle = ((p + q) / 2).clamp(min=1e-12).log()
    divergence = (p * (at_start.log_softmax(1) - middle) + q * (logits.log_softmax(1) - middle)).sum(1).mean()
    weight = lambda_ * (context.when.epoch + 1) / context.when.epochs
    return cross_entropy(logits, random_labels(context, y, logits.dtype)) + weight * divergence / 2


def random_labels(context: Context, y: Tensor, dtype: torch.dtype, shared: bool = True) -> Tensor:
    """0.4 on the true class, and 0.6 spread over the others by uniform draws."""
    import torch

    empty = torch.empty(len(y), context.classes, dtype=dtype, device=y.device)
    drawn = context.uniform(empty) if shared else empty.uniform_(generator=context.generator)
    others = drawn.scatter(1, y[:, None], 0.0)
    return (0.6 * others / others.sum(1, keepdim=True)).scatter(1, y[:, None], 0.4)


def pgi(context: Context, x: Tensor, y: Tensor, _: None, *, lambda_: float) -> Tensor:
    """CE(x + delta') + lambda MSE(f(x + delta'), f(x + delta)), labels 0.6 on the true class. delta and a momentum m
    are kept for each image: m <- 0.3 m + g/|g|_1 (over the batch), delta' = delta + eps sign g, kept: delta + eps sign
    m; first eps times random signs and 0, again every 0.36 of the run. delta is not moved with crops and flips."""
    import torch
    from torch.nn.functional import cross_entropy, mse_loss

    memory, when, threat, numbers = context.memory, context.when, context.threat, context.numbers
    assert numbers is not None
    since = when.epoch // max(round(RESET * when.epochs), 1)
    if "pgi" not in memory or int(memory["pgi since"]) != since:
        kept = torch.empty(context.images, *x.shape[1:], dtype=x.dtype, device=x.device)
        memory["pgi"] = context.eps * kept.uniform_(-1, 1, generator=context.generator).sign_()
        memory["pgi momentum"], memory["pgi since"] = torch.zeros_like(kept), torch.tensor(since)
    delta, momentum = memory["pgi"][numbers], memory["pgi momentum"][numbers]
    rest = torch.full((len(y), context.classes), (1 - TRUE) / (context.classes - 1), dtype=x.dtype, device=y.device)
    start = (x + delta).requires_grad_()
    at_start = context.model(start)
    target = rest.scatter(1, y[:, None], TRUE).to(at_start)
    attacked = cross_entropy(at_start, target, reduction="sum")
    gradient = torch.autograd.grad(attacked, start, retain_graph=True)[0].nan_to_num(0, 0, 0)
    momentum = DECAY * momentum + gradient / gradient.abs().sum().clamp(min=1e-30)
    logits = context.forward(context.step(start.detach(), gradient, x, context.eps))
    memory["pgi"][numbers] = threat.project(start.detach() + context.eps * threat.steepest(momentum), x) - x
    memory["pgi momentum"][numbers] = momentum
    return cross_entropy(logits, target) + lambda_ * mse_loss(logits, at_start)


def refreshing(position: int, classes: int) -> Cost:
    """Of LIET's class-wise perturbations, in images."""
    return Cost(classes, classes) if position % REFRESH == 0 else Cost()


TIED = always(2, 1, 2)
START = "single step from a class-wise start; labels of its own"
LAST = "single step from the last one; keeps two floats per pixel of the data"
LIET, PGI = weight(100.0), weight(10.0)
STAGES = {
    "liet": StageEntry(
        liet, TIED, "LIET, ICCV 2025", START, None, "loss", named=LIET, linf_only=True, extra=refreshing
    ),
    "pgi": StageEntry(pgi, TIED, "Jia et al., 2022", LAST, None, "loss", named=PGI, linf_only=True, keeps=True),
}
