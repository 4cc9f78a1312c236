"""What a stage does to a batch.

A *batch stage* makes (x, target) from (x, y), to be trained with cross-entropy; the target may be soft. It fits into
anybody's loop. A *loss stage* returns the loss itself. `methods` knows their names, arguments and costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moatlab.attacks import Probe, fgsm, pgd
from moatlab.attacks.first_order import uniform
from moatlab.attacks.geometry import ball
from moatlab.attacks.probe import evaluating
from moatlab.methods import Stage


@dataclass(frozen=True)
class Context:
    """What a stage may use beside its batch."""

    model: nn.Module  # the plain model, for attacks
    forward: Callable[[Tensor], Tensor]  # the model or its distributed wrapper, for the trained loss
    eps: float
    generator: torch.Generator  # this step's draws
    classes: int
    bn_in_attack: str = "train"

    @contextmanager
    def attacking(self) -> Iterator[Probe]:
        """A probe in the BatchNorm mode of the recipe; afterwards the model is in the mode it was in."""
        if self.bn_in_attack == "eval":
            with evaluating(self.model):
                yield Probe(self.model)
        else:
            yield Probe(self.model)


Batch = tuple[Tensor, Tensor]
BatchStage = Callable[[Context, Tensor, Tensor, Any], Batch]
LossStage = Callable[[Context, Tensor, Tensor, Any], Tensor]


def standard(_context: Context, x: Tensor, y: Tensor, _: None) -> Batch:
    return x, y


def mixup(context: Context, x: Tensor, y: Tensor, _: None) -> Batch:
    """lambda x + (1 - lambda) x', labels alike, one lambda ~ U(0, 1) a batch, x' a shuffle of x. Zhang et al., 2018."""
    weight, order = _mixing(context, x)
    return torch.lerp(x[order], x, weight), _soft_labels(context, y, order, weight)


def cutmix(context: Context, x: Tensor, y: Tensor, _: None) -> Batch:
    """A box of x' pasted into x: lambda ~ U(0, 1), sides sqrt(1 - lambda), labels by true area. Yun et al., 2019."""
    weight, order = _mixing(context, x)
    side = torch.sqrt(1 - weight)
    inside = []
    for size in x.shape[2:]:
        centre = torch.rand((), generator=context.generator, device=x.device) * size
        position = torch.arange(size, device=x.device) + 0.5  # pixel centres; the box is clipped at the border
        inside.append((position - centre).abs() < side * size / 2)
    box = inside[0][:, None] & inside[1][None, :]
    return torch.where(box, x[order], x), _soft_labels(context, y, order, 1 - box.float().mean())


def _mixing(context: Context, x: Tensor) -> tuple[Tensor, Tensor]:
    weight = torch.rand((), generator=context.generator, device=x.device)
    return weight, torch.randperm(len(x), generator=context.generator, device=x.device)


def _soft_labels(context: Context, y: Tensor, order: Tensor, weight: Tensor) -> Tensor:
    labels = F.one_hot(y, context.classes).float()
    return torch.lerp(labels[order], labels, weight)


def fgsm_batch(context: Context, x: Tensor, y: Tensor, _: None) -> Batch:
    """One step of eps from x itself. Goodfellow et al., 2015: the training that collapses."""
    with context.attacking() as probe:
        return fgsm(probe, x, y, eps=context.eps), y


def fast(context: Context, x: Tensor, y: Tensor, _: None) -> Batch:
    """A random start in the ball, one step of 1.25 eps, projected. Wong, Rice and Kolter, 2020."""
    eps = context.eps
    start = x + uniform(x, eps, context.generator)
    with context.attacking() as probe:
        return pgd(probe, x, y, eps=eps, step_size=1.25 * eps, steps=1, start=start), y


def nfgsm(context: Context, x: Tensor, y: Tensor, _: None) -> Batch:
    """Noise U(-2 eps, 2 eps), one step of eps, both clipped to [0, 1] but NOT to the ball. De Jorge et al., 2022."""
    noisy = (x + uniform(x, 2 * context.eps, context.generator)).clamp_(0, 1)
    with context.attacking() as probe:
        gradient, _logits = probe.gradient(noisy, y)
    return (noisy + context.eps * gradient.sign()).clamp_(0, 1), y


def multi_step(context: Context, x: Tensor, y: Tensor, steps: int) -> Batch:
    """A random start and K projected steps of max(eps/4, eps/K). Madry et al., 2018; the step size is Wang et al.'s."""
    eps = context.eps
    start = x + uniform(x, eps, context.generator)
    with context.attacking() as probe:
        return pgd(probe, x, y, eps=eps, step_size=max(eps / 4, eps / steps), steps=steps, start=start), y


def kim(context: Context, x: Tensor, y: Tensor, checkpoints: int) -> Batch:
    """The shortest stretch k/C of the single-step perturbation that fools the model. Kim, Lee and Lee, 2021.

    Examples wrong at the random start train on the plain x; those that no stretch fools on the whole perturbation.
    Always in eval mode. Each stretch is tried on the whole batch, so that the cost does not depend on the data.
    """
    low, high = ball(x, context.eps)
    with evaluating(context.model):
        probe = Probe(context.model)
        start = torch.clamp(x + uniform(x, context.eps, context.generator), low, high)
        gradient, logits = probe.gradient(start, y)
        delta = torch.clamp(start + 1.25 * context.eps * gradient.sign(), low, high) - x
        stretch = x.new_ones(len(x), 1, 1, 1)
        for k in range(checkpoints - 1, 0, -1):  # downwards, so that the smallest fooling k is written last
            shorter = torch.clamp(x + k / checkpoints * delta, low, high)
            stretch[probe.logits(shorter).argmax(1) != y] = k / checkpoints
        stretch[logits.argmax(1) != y] = 0
    return torch.clamp(x + stretch * delta, low, high), y


def gradalign(context: Context, x: Tensor, y: Tensor, weight: float) -> Tensor:
    """FGSM training plus weight (1 - mean cos(g1, g2)). Andriushchenko and Flammarion, 2020.

    g1 is the input gradient at x (it makes the FGSM batch, and is a constant here), g2 the one at x + U(-eps, eps),
    kept in the graph. Examples where either vanishes are left out of the mean.
    """
    low, high = ball(x, context.eps)
    with context.attacking() as probe:
        g1, _logits = probe.gradient(x, y)
        noisy = (x + uniform(x, context.eps, context.generator)).requires_grad_()
        noisy_loss = F.cross_entropy(context.model(noisy), y, reduction="sum")
        (g2,) = torch.autograd.grad(noisy_loss, noisy, create_graph=True)
    adversarial = torch.clamp(x + context.eps * g1.sign(), low, high)
    loss = F.cross_entropy(context.forward(adversarial), y)
    return loss + weight * misalignment(g1, g2)


def misalignment(g1: Tensor, g2: Tensor) -> Tensor:
    """The mean of 1 - cos(g1, g2) over the examples where neither norm is zero (0 where there are none).

    Zero, or so small that its square is none in float32: there the derivative of a norm overflows.
    """
    g1, g2 = g1.flatten(1), g2.flatten(1)
    size1, size2 = g1.abs().amax(1, keepdim=True), g2.detach().abs().amax(1, keepdim=True)
    smallest = torch.finfo(g1.dtype).tiny ** 0.5
    counts = (size1 > smallest) & (size2 > smallest)
    g1 = torch.where(counts, g1 / size1, 1.0)  # scaled, so that no square vanishes on the way
    g2 = torch.where(counts, g2, 1.0) / torch.where(counts, size2, 1.0)
    cosine = F.cosine_similarity(g1, g2, dim=1)
    misaligned: Tensor = torch.where(counts.squeeze(1), 1 - cosine, 0.0).sum() / counts.sum().clamp(min=1)
    return misaligned


BATCH_STAGES: dict[str, BatchStage] = {
    "standard": standard,
    "mixup": mixup,
    "cutmix": cutmix,
    "fgsm": fgsm_batch,
    "fast": fast,
    "nfgsm": nfgsm,
    "pgd": multi_step,
    "kim": kim,
}
LOSS_STAGES: dict[str, LossStage] = {"gradalign": gradalign}


def stage_loss(stage: Stage, context: Context, x: Tensor, y: Tensor) -> Tensor:
    """The loss that a stage trains on a batch."""
    if stage.name in LOSS_STAGES:
        return LOSS_STAGES[stage.name](context, x, y, stage.value)
    x, target = BATCH_STAGES[stage.name](context, x, y, stage.value)
    return F.cross_entropy(context.forward(x), target)
