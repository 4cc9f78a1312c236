"""Stages that attack the batch. Those with one gradient step are cheap and may overfit catastrophically."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from moatlab.methods.cost import Cost
from moatlab.methods.entry import STEPS, Argument, StageEntry, always

if TYPE_CHECKING:
    from torch import Tensor

    from moatlab.methods.context import Context
    from moatlab.methods.entry import Batch


def fgsm(context: Context, x: Tensor, y: Tensor, _: None) -> Batch:
    """One step of eps from x. This training collapses."""
    return context.climb(x, x, y, steps=1, step_size=context.eps), y


def fast(context: Context, x: Tensor, y: Tensor, _: None) -> Batch:
    """A random start in the ball, one step of 1.25 eps, projected."""
    return context.climb(x + context.noise(x), x, y, steps=1, step_size=1.25 * context.eps), y


def nfgsm(context: Context, x: Tensor, y: Tensor, _: None) -> Batch:
    """Noise U(-2 eps, 2 eps) (in L2: in the ball of radius 2 eps), one step of eps, clipped to [0, 1] but NOT to the
    ball."""
    noisy = (x + context.noise(x, 2 * context.eps)).clamp_(0, 1)
    with context.attacking() as probe:
        gradient, _logits = probe.gradient(noisy, y)
    return (noisy + context.eps * context.threat.steepest(gradient)).clamp_(0, 1), y


def kim(context: Context, x: Tensor, y: Tensor, checkpoints: int) -> Batch:
    """The single-step perturbation, scaled by the smallest k/C that fools the model.

    Examples misclassified at the random start train on x; those that no scale fools, on the whole perturbation. Always
    in eval mode. Each scale is tried on the whole batch, so that the cost does not depend on the data.
    """
    threat = context.threat
    with context.attacking("eval") as probe:
        start = threat.project(x + context.noise(x), x)
        gradient, logits = probe.gradient(start, y)
        delta = threat.project(start + 1.25 * threat.eps * threat.steepest(gradient), x) - x
        scale = x.new_ones(len(x), 1, 1, 1)
        for k in range(checkpoints - 1, 0, -1):  # downwards: the smallest fooling k is written last
            shorter = threat.project(x + k / checkpoints * delta, x)
            scale[probe.logits(shorter).argmax(1) != y] = k / checkpoints
        scale[logits.argmax(1) != y] = 0
    return threat.project(x + scale * delta, x), y


def pgd(context: Context, x: Tensor, y: Tensor, steps: int, *, step: float | None = None) -> Batch:
    """A random start and K projected steps of `step` eps, by default max(1/4, 1/K), as Wang et al. (2021) have it."""
    step_size = (step or max(1 / 4, 1 / steps)) * context.eps
    return context.climb(x + context.noise(x), x, y, steps=steps, step_size=step_size), y


def zerograd(context: Context, x: Tensor, y: Tensor, _: None, *, q: float) -> Batch:
    """A random start, one step of 2 eps, projected. Entries of the gradient below its q-quantile in absolute value
    (of each image) are set to zero: those pixels keep their start."""
    start = context.threat.project(x + context.noise(x), x)
    with context.attacking() as probe:
        gradient, _logits = probe.gradient(start, y)
    size = gradient.abs().flatten(1)
    small = size < size.quantile(q, dim=1, keepdim=True)
    return context.step(start, gradient.masked_fill(small.view_as(gradient), 0), x, 2 * context.eps), y


def auto(context: Context, x: Tensor, y: Tensor, budget: int, *, trust: float) -> Tensor:
    """`fast` while the loss is nearly linear along its step: mean cos(g, g') >= trust, with g the gradient at the start
    and g' that at the trained point, which the trained backward pass gives too. Else `pgd` with up to 8 steps, paid
    with what was saved: on average at most K steps. The running mean of the cosine is read every 20 steps.
    """
    import torch

    from moatlab.attacks.alignment import misalignment

    memory, threat = context.memory, context.threat
    agreement = memory.setdefault("auto agreement", x.new_ones(1))
    wanted = memory.setdefault("auto steps", torch.tensor(1))  # without dimensions: kept on the CPU
    saved = memory.setdefault("auto saved", torch.tensor(0))
    if context.when.position % LOOK == 0:
        memory["auto steps"] = wanted = torch.tensor(1 if agreement.item() >= trust else MOST)
    steps = min(int(wanted), int(saved) + budget)
    memory["auto saved"] = saved + budget - steps
    start, size = threat.project(x + context.noise(x), x), context.eps * (1.25 if steps == 1 else max(1 / 4, 1 / steps))
    with context.attacking() as probe:
        first, _logits = probe.gradient(start, y)
    leaf = context.step(start, first, x, size)
    leaf = context.climb(leaf, x, y, steps=steps - 1, step_size=size).detach().requires_grad_()

    def agree(gradient: Tensor) -> None:
        now = (1 - misalignment(first, gradient.nan_to_num(0, 0, 0))).to(agreement)
        now = context.mean_count(torch.where(gradient.isfinite().all(), now, agreement))  # fp16 may overflow
        memory["auto agreement"] = agreement.lerp(now, 1 - REMEMBERED)

    context.after_backward(leaf, agree)
    return context.cross_entropy(context.forward(leaf), y)


LOOK, MOST, REMEMBERED = 20, 8, 0.9  # of auto: steps between decisions, steps of an attack, decay of the mean
CHECKPOINTS = Argument("C", whole=True, low=1, high=100, default=3)
BUDGET = Argument("K", whole=True, low=1, high=100, default=2)
TRUST = {"trust": Argument("TRUST", low=-1, high=1, default=0.5)}
QUANTILE = {"q": Argument("Q", high=1, default=0.35)}
STEP = {"step": Argument("STEP", low=1e-3, high=2)}
SINGLE = always(2, 1, 1)
REFERENCE, BEND = "the multi-step reference; step= is in units of eps", "one step, or more where the loss bends"
MULTI: Callable[[int], Cost] = lambda steps: Cost(steps + 1, steps, 1)  # noqa: E731
STAGES = {
    "fgsm": StageEntry(fgsm, SINGLE, "Goodfellow et al., 2015", "to show catastrophic overfitting"),
    "fast": StageEntry(fast, SINGLE, "Wong, Rice and Kolter, 2020", "the classic single step; may collapse"),
    "nfgsm": StageEntry(nfgsm, SINGLE, "de Jorge et al., 2022", "a simple and strong single step"),
    "zerograd": StageEntry(zerograd, SINGLE, "Golgooni et al., 2021", "q=0.45 for CIFAR-100", named=QUANTILE),
    "kim": StageEntry(kim, lambda c: Cost(c + 1, 1, 1), "Kim, Lee and Lee, 2021", "for clean accuracy", CHECKPOINTS),
    "pgd": StageEntry(pgd, MULTI, "Madry et al., 2018", REFERENCE, STEPS, named=STEP),
    "auto": StageEntry(auto, MULTI, "this project, after SORA", BEND, BUDGET, "loss", named=TRUST, at_most=True),
}
