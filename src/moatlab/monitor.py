"""Watches a run for catastrophic overfitting: accuracy on plain, FGSM and PGD-7 examples after each epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from moatlab.attacks import Probe, fgsm, pgd
from moatlab.attacks.first_order import uniform
from moatlab.attacks.probe import evaluating
from moatlab.data.batches import as_floats
from moatlab.methods import Method
from moatlab.precision import full_precision
from moatlab.randomness import generator

BATCH = 250
PASSES = 9.5  # 11 forwards and 8 input-backwards for an image


def measure(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    eps: float,
    seed: int,
    tick: Callable[[int], None] = lambda _: None,
) -> dict[str, float]:
    """Accuracies as fractions, in eval mode: `clean`; `fgsm`, one step of eps from x; `pgd7`, seven steps of eps/4
    from one random start, the last iterate. The starts depend on the seed and the image only, so that two epochs,
    and two methods, are compared on the same ones. `tick` hears of the images done, and may raise.
    """
    probe = Probe(model)
    right = torch.zeros(3, dtype=torch.int64, device=y.device)
    with evaluating(model), full_precision():
        for block, begin in enumerate(range(0, len(y), BATCH)):
            images, labels = as_floats(x[begin : begin + BATCH]), y[begin : begin + BATCH]
            draws = generator(seed, "monitor", block, device=y.device)
            stepped = fgsm(probe, images, labels, eps=eps)
            start = images + uniform(images, eps, draws)
            iterated = pgd(probe, images, labels, eps=eps, step_size=eps / 4, steps=7, start=start)
            for kind, examples in enumerate((images, stepped, iterated)):
                right[kind] += (probe.logits(examples).argmax(1) == labels).sum()
            tick(begin + len(labels))
    clean, single, multi = (count / len(y) for count in right.tolist())
    return {"clean": clean, "fgsm": single, "pgd7": multi}


def collapsed_at(pgd7: Sequence[float], method: Method) -> int | None:
    """The epoch (counted from 1) from which a run has collapsed, or None.

    Collapsed at e >= 2: from e on, at every comparable check to the end, pgd7 accuracy stays below
    max(5 %, a third of its best). Comparable are all epochs of a one-stage method, and the ends of the last stage of
    a cycle (within a cycle pgd7 falls at each stage of benign examples, and comes back).
    """
    checks = [(epoch + 1, value) for epoch, value in enumerate(pgd7) if method.ends_cycle(epoch)]
    if not checks:
        return None
    floor = max(0.05, max(value for _, value in checks) / 3)
    collapse = None
    for epoch, value in checks:
        if value >= floor:
            collapse = None
        elif collapse is None and epoch >= 2:
            collapse = epoch
    return collapse
