"""Watches a run for catastrophic overfitting: accuracy on plain, FGSM and PGD-7 examples after each epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from moatlab.attacks import Probe, pgd
from moatlab.attacks.first_order import uniform_in_ball
from moatlab.attacks.losses import is_wrong
from moatlab.attacks.norms import Norm, project, steepest
from moatlab.attacks.probe import evaluating
from moatlab.data.batches import as_floats
from moatlab.methods.stages import misalignment
from moatlab.runtime import distributed
from moatlab.runtime.device import full_precision
from moatlab.runtime.randomness import generator

BATCH = 250  # images that share their draws, and go through the model at once if they are small
SMALL_IMAGE = 3 * 32 * 32
SHOWN = 8  # images that may be kept to be looked at
PASSES = 9.5  # 11 forwards and 8 input-backwards for an image
LOW = 0.05  # pgd7 accuracy that is none
GAP = 0.10  # of fgsm over pgd7 accuracy
ALIGNED = 0.4  # on mini, runs that hold stay above 0.8 after their first epoch, and those that have collapsed below 0.3


def measure(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    eps: float,
    norm: Norm = "linf",
    seed: int,
    tick: Callable[[int], None] = lambda _: None,
    keep: list[Tensor] | None = None,
    shared: bool = False,
) -> dict[str, float]:
    """Accuracies as fractions, in eval mode: `clean`; `fgsm`, one step of eps from x; `pgd7`, seven steps of eps/4
    from one random start, the last iterate. The starts depend on the seed and the image only, so that two epochs,
    and two methods, are compared on the same ones. `tick` hears of the images done, and may raise. `keep` gets
    the first images, and then what PGD-7 made of them.

    `alignment` is the mean cosine of the loss's gradients at x and at that start (Andriushchenko and Flammarion, 2020):
    where it is near 0 the loss is bent within the ball, and one step along the gradient at x says nothing. Both
    gradients are needed anyway.

    `shared`: connected processes, which all call this with all of the images, share the work; each gets the result.
    """
    probe = Probe(model, batch_size=max(min(BATCH, BATCH * SMALL_IMAGE // x[0].numel()), 2))
    right = torch.zeros(3, dtype=torch.int64, device=y.device)
    misaligned = torch.zeros((), device=y.device)
    with evaluating(model), full_precision():
        blocks = range(0, len(y), BATCH)
        for begin in blocks[distributed.share(len(blocks))] if shared else blocks:
            images, labels = as_floats(x[begin : begin + BATCH]), y[begin : begin + BATCH]
            draws = generator(seed, "monitor", begin // BATCH, device=y.device)
            start = project(images + uniform_in_ball(images, eps, norm, draws), images, eps, norm)
            gradient, _logits = probe.gradient(images, labels)
            gradient_at_start, _logits = probe.gradient(start, labels)
            misaligned += len(labels) * misalignment(gradient, gradient_at_start)
            stepped = project(images + eps * steepest(gradient, norm), images, eps, norm)
            first = start + eps / 4 * steepest(gradient_at_start, norm)
            iterated = pgd(probe, images, labels, eps=eps, step_size=eps / 4, steps=6, norm=norm, start=first)
            for kind, examples in enumerate((images, stepped, iterated)):
                right[kind] += (~is_wrong(probe.logits(examples), labels)).sum()
            if keep is not None and not keep:
                keep += [images[:SHOWN].cpu(), iterated[:SHOWN].cpu()]
            tick(begin + len(labels))
    if shared:
        right, misaligned = distributed.summed(right), distributed.summed(misaligned)
    clean, single, multi = (count / len(y) for count in right.tolist())
    alignment = 1 - misaligned.item() / len(y)
    return {"clean": clean, "fgsm": single, "pgd7": multi, "alignment": alignment}


def collapsed_at(checks: Sequence[tuple[int, float]]) -> int | None:
    """The epoch (counted from 1) from which a run has collapsed, or None. `checks`: epoch and pgd7 accuracy of the
    comparable ones.

    Collapsed at e >= 2: from e on, at every comparable check to the end, pgd7 accuracy stays below
    max(5 %, a third of its best). Comparable are all epochs of a one-stage method, and the ends of the last stage of
    a cycle (within a cycle pgd7 falls at each stage of benign examples, and comes back).
    """
    if not checks:
        return None
    floor = max(LOW, max(value for _, value in checks) / 3)
    collapse = None
    for epoch, value in checks:
        if value >= floor:
            collapse = None
        elif collapse is None and epoch >= 2:
            collapse = epoch
    return collapse


def judge(checks: Sequence[Mapping[str, float]]) -> Literal["good", "low", "collapsed"]:
    """What the last of the comparable checks so far says, while the end is not known.

    Low: pgd7 is below half of its best so far, or below 5 % after it was not. That alone may be a bad epoch. It is
    catastrophic overfitting where the loss is bent as well, so that single steps no longer lead to where it is high:
    fgsm accuracy more than 10 points above pgd7, or gradients at x and at a random start of little alignment.
    """
    now, best = checks[-1], max(check["pgd7"] for check in checks)
    if best < LOW or now["pgd7"] >= max(LOW, best / 2):
        return "good"
    bent = now["fgsm"] - now["pgd7"] > GAP or now["alignment"] < ALIGNED
    return "collapsed" if bent else "low"
