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
from moatlab.attacks.first_order import uniform_in_ball
from moatlab.attacks.norms import Norm, project, steepest
from moatlab.attacks.probe import evaluating
from moatlab.methods.cost import Cost
from moatlab.methods.language import STAGES, Argument, Stage, StageKind, parse_method
from moatlab.runtime import distributed
from moatlab.runtime.errors import UserError


@dataclass(frozen=True)
class Context:
    """What a stage may use beside its batch.

    Where several processes train together (`shared`), a batch is this process's part of the whole one. Draws are made
    for the whole batch, and each takes its part of them, so that many processes draw what one would.
    """

    model: nn.Module  # the plain model, for attacks
    forward: Callable[[Tensor], Tensor]  # the model or its distributed wrapper, for the trained loss
    eps: float
    generator: torch.Generator  # this step's draws
    classes: int
    bn_in_attack: str = "train"
    norm: Norm = "linf"
    shared: bool = False

    @contextmanager
    def attacking(self) -> Iterator[Probe]:
        """A probe in the BatchNorm mode of the recipe; afterwards the model is in the mode it was in."""
        if self.bn_in_attack == "eval":
            with evaluating(self.model):
                yield Probe(self.model)
        else:
            yield Probe(self.model)

    def noise(self, x: Tensor, radius: float) -> Tensor:
        """Uniform in the ball of that radius, for each image of x."""
        whole, mine = x, slice(None)
        if self.shared and distributed.count() > 1:
            layout = torch.contiguous_format if x.is_contiguous() else torch.channels_last
            shape = (len(x) * distributed.count(), *x.shape[1:])
            whole = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)
            mine = distributed.share(len(whole))
        return uniform_in_ball(whole, radius, self.norm, self.generator)[mine]

    def project(self, z: Tensor, x: Tensor) -> Tensor:
        """z pulled back into the ball around x, and into [0, 1]."""
        return project(z, x, self.eps, self.norm)

    def steepest(self, gradient: Tensor) -> Tensor:
        """The step of length one that the gradient calls for: its sign, or in L2 its unit vector."""
        return steepest(gradient, self.norm)


Batch = tuple[Tensor, Tensor]
BatchStage = Callable[[Context, Tensor, Tensor, Any], Batch]
LossStage = Callable[[Context, Tensor, Tensor, Any], Tensor]


def standard(_context: Context, x: Tensor, y: Tensor, _: None) -> Batch:
    return x, y


def mixup(context: Context, x: Tensor, y: Tensor, _: None) -> Batch:
    """lambda x + (1 - lambda) x', labels alike, one lambda ~ U(0, 1) a batch, x' a shuffle of x. Zhang et al., 2018."""
    weight, other_x, other_y = _mixing(context, x, y)
    return torch.lerp(other_x, x, weight), _soft_labels(context, y, other_y, weight)


def cutmix(context: Context, x: Tensor, y: Tensor, _: None) -> Batch:
    """A box of x' pasted into x: lambda ~ U(0, 1), sides sqrt(1 - lambda), labels by true area. Yun et al., 2019."""
    weight, other_x, other_y = _mixing(context, x, y)
    side = torch.sqrt(1 - weight)
    inside = []
    for size in x.shape[2:]:
        centre = torch.rand((), generator=context.generator, device=x.device) * size
        position = torch.arange(size, device=x.device) + 0.5  # pixel centres; the box is clipped at the border
        inside.append((position - centre).abs() < side * size / 2)
    box = inside[0][:, None] & inside[1][None, :]
    return torch.where(box, other_x, x), _soft_labels(context, y, other_y, 1 - box.float().mean())


def _mixing(context: Context, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """lambda, and what x and y are mixed with: a shuffle of the whole batch, other processes' parts included."""
    weight = torch.rand((), generator=context.generator, device=x.device)
    whole_x, whole_y = (distributed.gathered(x), distributed.gathered(y)) if context.shared else (x, y)
    order = torch.randperm(len(whole_y), generator=context.generator, device=x.device)
    if context.shared:
        order = order[distributed.share(len(order))]
    return weight, whole_x[order], whole_y[order]


def _soft_labels(context: Context, y: Tensor, other_y: Tensor, weight: Tensor) -> Tensor:
    labels, others = (F.one_hot(numbers, context.classes).float() for numbers in (y, other_y))
    return torch.lerp(others, labels, weight)


def fgsm_batch(context: Context, x: Tensor, y: Tensor, _: None) -> Batch:
    """One step of eps from x itself. Goodfellow et al., 2015: the training that collapses."""
    with context.attacking() as probe:
        return fgsm(probe, x, y, eps=context.eps, norm=context.norm), y


def fast(context: Context, x: Tensor, y: Tensor, _: None) -> Batch:
    """A random start in the ball, one step of 1.25 eps, projected. Wong, Rice and Kolter, 2020."""
    return _steps(context, x, y, 1, 1.25 * context.eps)


def nfgsm(context: Context, x: Tensor, y: Tensor, _: None) -> Batch:
    """Noise U(-2 eps, 2 eps), one step of eps, both clipped to [0, 1] but NOT to the ball. De Jorge et al., 2022.

    In L2 the noise is uniform in the ball of radius 2 eps.
    """
    noisy = (x + context.noise(x, 2 * context.eps)).clamp_(0, 1)
    with context.attacking() as probe:
        gradient, _logits = probe.gradient(noisy, y)
    return (noisy + context.eps * context.steepest(gradient)).clamp_(0, 1), y


def multi_step(context: Context, x: Tensor, y: Tensor, steps: int) -> Batch:
    """A random start and K projected steps of max(eps/4, eps/K). Madry et al., 2018; the step size is Wang et al.'s."""
    return _steps(context, x, y, steps, max(context.eps / 4, context.eps / steps))


def _steps(context: Context, x: Tensor, y: Tensor, steps: int, step_size: float) -> Batch:
    start = x + context.noise(x, context.eps)
    with context.attacking() as probe:
        found = pgd(probe, x, y, eps=context.eps, step_size=step_size, steps=steps, norm=context.norm, start=start)
    return found, y


def kim(context: Context, x: Tensor, y: Tensor, checkpoints: int) -> Batch:
    """The shortest stretch k/C of the single-step perturbation that fools the model. Kim, Lee and Lee, 2021.

    Examples wrong at the random start train on the plain x; those that no stretch fools on the whole perturbation.
    Always in eval mode. Each stretch is tried on the whole batch, so that the cost does not depend on the data.
    """
    with evaluating(context.model):
        probe = Probe(context.model)
        start = context.project(x + context.noise(x, context.eps), x)
        gradient, logits = probe.gradient(start, y)
        delta = context.project(start + 1.25 * context.eps * context.steepest(gradient), x) - x
        stretch = x.new_ones(len(x), 1, 1, 1)
        for k in range(checkpoints - 1, 0, -1):  # downwards, so that the smallest fooling k is written last
            shorter = context.project(x + k / checkpoints * delta, x)
            stretch[probe.logits(shorter).argmax(1) != y] = k / checkpoints
        stretch[logits.argmax(1) != y] = 0
    return context.project(x + stretch * delta, x), y


def gradalign(context: Context, x: Tensor, y: Tensor, weight: float) -> Tensor:
    """FGSM training plus weight (1 - mean cos(g1, g2)). Andriushchenko and Flammarion, 2020.

    g1 is the input gradient at x (it makes the FGSM batch, and is a constant here), g2 the one at x + U(-eps, eps),
    kept in the graph. Examples where either vanishes are left out of the mean.
    """
    with context.attacking() as probe:
        g1, _logits = probe.gradient(x, y)
        noisy = (x + context.noise(x, context.eps)).requires_grad_()
        noisy_loss = F.cross_entropy(context.model(noisy), y, reduction="sum")
        (g2,) = torch.autograd.grad(noisy_loss, noisy, create_graph=True)
    adversarial = context.project(x + context.eps * context.steepest(g1), x)
    loss = F.cross_entropy(context.forward(adversarial), y)
    return loss + weight * (misalignment(g1, g2, distributed.mean) if context.shared else misalignment(g1, g2))


def misalignment(g1: Tensor, g2: Tensor, usual: Callable[[Tensor], Tensor] = lambda count: count) -> Tensor:
    """The mean of 1 - cos(g1, g2) over the examples where neither norm is zero (0 where there are none).

    Zero, or so small that its square is none in float32: there the derivative of a norm overflows. `usual` makes of
    their number the one to divide by: where losses are averaged over processes, the mean number.
    """
    g1, g2 = g1.flatten(1), g2.flatten(1)
    size1, size2 = g1.abs().amax(1, keepdim=True), g2.detach().abs().amax(1, keepdim=True)
    smallest = torch.finfo(g1.dtype).tiny ** 0.5
    counts = (size1 > smallest) & (size2 > smallest)
    g1 = torch.where(counts, g1 / size1, 1.0)  # scaled, so that no square vanishes on the way
    g2 = torch.where(counts, g2, 1.0) / torch.where(counts, size2, 1.0)
    cosine = F.cosine_similarity(g1, g2, dim=1)
    total = torch.where(counts.squeeze(1), 1 - cosine, 0.0).sum()
    misaligned: Tensor = total / torch.where(counts.any(), usual(counts.sum()), 1)
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


def make_batch(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    stage: str | Stage,
    *,
    eps: float,
    classes: int | None = None,
    norm: Norm = "linf",
    bn_in_attack: str = "train",
    generator: torch.Generator | None = None,
) -> Batch:
    """The images and targets that a batch stage trains on, for a loop of your own; the model is left as it was.

        stage = moatlab.parse_method("moat:2").stage_at(epoch, epochs)
        x, target = moatlab.make_batch(model, x, y, stage, eps=8 / 255, classes=10)
        loss = F.cross_entropy(model(x), target)

    x is in [0, 1]. `classes` is needed by stages that mix labels. Draws come from `generator`, on the device of x, or
    else are seeded by PyTorch's global one.
    """
    stages = parse_method(stage).stages if isinstance(stage, str) else (stage,)
    if len(stages) > 1 or len(stages[0].values) > 1:
        raise UserError(f"'{stage}' is not one stage; take parse_method('{stage}').stage_at(epoch, epochs)")
    (only,) = stages
    if only.name not in BATCH_STAGES:
        raise UserError(f"'{only}' has a loss of its own, and makes no batch; in a loop of yours take another stage")
    if classes is None and only.name in ("mixup", "cutmix"):
        raise UserError(f"'{only}' mixes labels; say how many classes there are, as in classes=10")
    if generator is None:
        seed = int(torch.randint(2**62, ()))
        generator = torch.Generator(device=x.device).manual_seed(seed)
    context = Context(model, model, eps, generator, classes or 0, bn_in_attack, norm)
    return BATCH_STAGES[only.name](context, x.detach(), y, only.value)


def add_stage(
    name: str, stage: BatchStage, *, forwards: int = 0, input_backwards: int = 0, argument: Argument | None = None
) -> None:
    """A batch stage of your own, by name in the method language: `"mine | fast | pgd:2"`.

    `stage(context, x, y, value)` returns images and targets. `forwards` and `input_backwards` are what it asks of the
    model in a step; the trained pass comes on top, and a run checks the sum. `argument` says what may follow a colon.
    """
    if not name.isidentifier() or name in ("moat", "imoat") or (name in STAGES and BATCH_STAGES.get(name) is not stage):
        raise UserError(f"a stage can't be called '{name}': that is taken, or no plain name")
    STAGES[name] = StageKind(lambda _: Cost(forwards + 1, input_backwards, 1), argument)
    BATCH_STAGES[name] = stage
