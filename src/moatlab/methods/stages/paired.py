"""Stages that train on the clean and the adversarial image together.

trades, mart   several steps in eval mode; the outputs are tied by KL(p(x) || p(x'))
nuat, gat      one step of eps in eval mode, from x + eps/2 times random signs; a difference of the outputs is added to
               the trained loss, and every other batch to that of the attack
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from moatlab.methods.cost import Cost
from moatlab.methods.entry import STEPS, Argument, StageEntry, always, weight

if TYPE_CHECKING:
    from torch import Tensor

    from moatlab.attacks import Probe
    from moatlab.methods.context import Context
    from moatlab.methods.entry import Batch

    Guide = Callable[[Tensor, Tensor], Tensor]  # of two batches of logits
STEP = 0.226  # eps per step: 0.007 of 0.031 in TRADES's code


def kl(logits: Tensor, clean: Tensor) -> Tensor:
    """KL(p_clean || p) of each image, from logits; both may be differentiated."""
    from torch.nn.functional import kl_div

    return kl_div(logits.log_softmax(1), clean.log_softmax(1), reduction="none", log_target=True).sum(1)


def ascend(context: Context, probe: Probe, x: Tensor, *against: Tensor, steps: int, **loss: object) -> Tensor:
    """From x + 0.001 N(0, 1), not projected, K projected steps of max(0.226, 1/K) eps."""
    point = x + 0.001 * context.normal(x)
    for _ in range(steps):
        gradient, _logits = probe.gradient(point, *against, **loss)  # type: ignore[arg-type]
        point = context.step(point, gradient, x, max(STEP, 1 / steps) * context.eps)
    return point


def trades(context: Context, x: Tensor, y: Tensor, steps: int, **_: float) -> Batch:
    """The attack, in eval mode: K steps on KL(p(x) || p(x'))."""
    with context.attacking("eval") as probe:
        clean = probe.logits(x)
        return ascend(context, probe, x, clean, steps=steps, loss=kl), y


def trades_loss(context: Context, x: Tensor, adversarial: Tensor, y: Tensor, *, beta: float) -> Tensor:
    """CE(x, y) + beta mean KL(p(x) || p(x')), p(x) differentiated too."""
    logits = context.model(x)
    return context.cross_entropy(logits, y) + beta * kl(context.forward(adversarial), logits).mean()


def mart(context: Context, x: Tensor, y: Tensor, steps: int, **_: float) -> Batch:
    """The attack, in eval mode: K steps on the cross-entropy, from the start of TRADES."""
    with context.attacking("eval") as probe:
        return ascend(context, probe, x, y, steps=steps), y


def mart_loss(context: Context, x: Tensor, adversarial: Tensor, y: Tensor, *, lambda_: float) -> Tensor:
    """CE(x', y) - mean log(1.0001 - max_{j != y} p_j(x')) + lambda mean KL(p(x) || p(x')) (1.0000001 - p_y(x)),
    everything differentiated."""
    import torch

    logits: Tensor = context.model(x)
    attacked = context.forward(adversarial)
    runner_up = attacked.softmax(1).scatter(1, y[:, None], -1.0).amax(1)
    doubt = 1.0000001 - logits.softmax(1).gather(1, y[:, None]).squeeze(1)
    margin = -torch.log(1.0001 - runner_up + 1e-12).mean()
    return context.cross_entropy(attacked, y) + margin + lambda_ * (kl(attacked, logits) * doubt).mean()


def nuat(context: Context, x: Tensor, y: Tensor, _: None, *, lambda_: float) -> Tensor:
    """CE(x) + w |f(x) - f(x')|_*/B, with the nuclear norm of the batch's matrix. w grows by epoch from 0 to lambda over
    all but the last tenth of the run, times sqrt(B/64): the norm of B rows grows with sqrt(B)."""
    import torch

    when = context.when
    grown = min(when.epoch / max(0.9 * when.epochs, 1), 1.0)
    weight = lambda_ * grown * (len(x) / 64) ** 0.5
    return guided(context, x, y, weight, lambda one, other: torch.linalg.matrix_norm(one - other, "nuc") / len(one))


def gat(context: Context, x: Tensor, y: Tensor, _: None, *, lambda_: float) -> Tensor:
    """CE(x) + w mean |p(x) - p(x')|^2; w = lambda, and 4 lambda after 85 % of the epochs."""
    weight = lambda_ * (4 if context.when.epoch > 0.85 * context.when.epochs else 1)
    return guided(context, x, y, weight, lambda a, b: (a.softmax(1) - b.softmax(1)).square().sum(1).mean())


def guided(context: Context, x: Tensor, y: Tensor, weight: float, guide: Guide) -> Tensor:
    from torch.nn.functional import cross_entropy

    clean = context.model(x)
    constant = clean.detach()
    start = (x + context.eps / 2 * (context.uniform(x) - 0.5).sign()).clamp_(0, 1)

    def attacked(logits: Tensor) -> Tensor:
        alternate = weight and context.when.position % 2
        return cross_entropy(logits, y) + (weight * guide(constant, logits) if alternate else 0)

    with context.attacking("eval") as probe:
        gradient, _logits = probe.gradient(start, loss=attacked)
    adversarial = context.step(start, gradient, x, context.eps)
    loss = context.cross_entropy(clean, y)
    logits = context.forward(adversarial)
    return loss + (weight * guide(clean, logits) if weight else 0 * logits.sum())


STAGES = {
    "trades": StageEntry(
        trades,
        lambda steps: Cost(steps + 3, steps, 2),
        "Zhang et al., 2019, TRADES",
        "beta moves between clean and robust; trades:10 is the authors'",
        STEPS,
        named={"beta": Argument("BETA", default=6.0)},
        loss=trades_loss,
    ),
    "mart": StageEntry(
        mart,
        lambda steps: Cost(steps + 2, steps, 2),
        "Wang et al., 2020",
        "weights images by doubt; mart:10 is the authors'",
        STEPS,
        named=weight(5.0),
        loss=mart_loss,
    ),
    "nuat": StageEntry(
        nuat,
        always(3, 1, 2),
        "Sriramanan et al., 2021",
        "lambda=4 if averaged",
        kind="loss",
        named=weight(4.5),
        linf_only=True,
    ),
    "gat": StageEntry(
        gat,
        always(3, 1, 2),
        "Sriramanan et al., 2020",
        "for clean accuracy",
        kind="loss",
        named=weight(10.0),
        linf_only=True,
    ),
}
