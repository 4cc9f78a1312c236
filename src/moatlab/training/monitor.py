"""Watches a run for catastrophic overfitting: accuracy on plain, FGSM and PGD-7 examples after each epoch."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from moatlab.attacks import Probe, pgd
from moatlab.attacks.losses import is_wrong
from moatlab.attacks.norms import Norm, Threat
from moatlab.attacks.probe import evaluating
from moatlab.data.images import as_floats
from moatlab.methods.stages.regularised import misalignment
from moatlab.runtime import distributed
from moatlab.runtime.device import full_precision
from moatlab.runtime.randomness import generator

BATCH = 250  # images that share their draws, and go through the model at once if they are small
SMALL_IMAGE = 3 * 32 * 32
SHOWN = 8  # images that may be kept to be looked at
PASSES = 9.5  # 11 forwards and 8 input-backwards for an image


def measure(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    eps: float | str,
    norm: Norm = "linf",
    seed: int,
    tick: Callable[[int], None] = lambda _: None,
    keep: list[Tensor] | None = None,
    shared: bool = False,
) -> dict[str, float]:
    """Accuracies as fractions, in eval mode: `clean`; `fgsm`, one step of eps from x; `pgd7`, seven steps of eps/4
    from one random start, the last iterate. x is bytes (N, H, W, C), or floats (N, C, H, W) in [0, 1]. The starts
    depend on the seed and the image only, so that two epochs, and two methods, are compared on the same ones. `tick`
    is called with the number of images done, and may raise. `keep` gets the first images, then their PGD-7 examples.

    `alignment` is the mean cosine of the loss's gradients at x and at that start (Andriushchenko and Flammarion, 2020):
    where it is near 0 the loss is bent within the ball, and one step along the gradient at x says nothing. Both
    gradients are needed anyway.

    `shared`: connected processes, which all call this with all of the images, share the work; each gets the result.
    """
    threat = Threat.of(eps, norm)
    eps = threat.eps
    probe = Probe(model, batch_size=max(min(BATCH, BATCH * SMALL_IMAGE // x[0].numel()), 2))
    right = torch.zeros(3, dtype=torch.int64, device=y.device)
    misaligned = torch.zeros((), device=y.device)
    with evaluating(model), full_precision():
        blocks = range(0, len(y), BATCH)
        for begin in blocks[distributed.share(len(blocks))] if shared else blocks:
            images, labels = as_floats(x[begin : begin + BATCH]), y[begin : begin + BATCH]
            images = images.contiguous(memory_format=torch.channels_last)  # draws follow the memory
            draws = generator(seed, "monitor", begin // BATCH, device=y.device)
            start = threat.project(images + threat.noise(images, draws), images)
            gradient, _logits = probe.gradient(images, labels)
            gradient_at_start, _logits = probe.gradient(start, labels)
            misaligned += len(labels) * misalignment(gradient, gradient_at_start)
            stepped = threat.project(images + eps * threat.steepest(gradient), images)
            first = start + eps / 4 * threat.steepest(gradient_at_start)
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
