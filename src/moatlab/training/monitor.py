"""Accuracy on clean, FGSM and PGD-7 examples after each epoch, to detect catastrophic overfitting."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moatlab.attacks import Probe, pgd
from moatlab.attacks.alignment import has_gradients, misalignment
from moatlab.attacks.losses import is_wrong
from moatlab.attacks.norms import Norm, Threat
from moatlab.attacks.probe import evaluating
from moatlab.data.given import images_and_labels
from moatlab.data.images import as_floats
from moatlab.models.outputs import giving_logits
from moatlab.runtime import distributed
from moatlab.runtime.device import device_of, full_precision
from moatlab.runtime.randomness import generator

BATCH = 250  # images that share a generator and a forward; fewer if they are larger than SMALL_IMAGE
SMALL_IMAGE = 3 * 32 * 32
SHOWN = 8  # images kept for display
PASSES = 9.5  # per image: 11 forwards and 8 input backwards
CALLS = 11  # of the model
MEASURED = ("clean", "fgsm", "pgd7", "alignment", "zero_gradients")


def measure(
    model: nn.Module,
    x: Any,
    y: Any = None,
    *,
    eps: float | str,
    norm: Norm = "linf",
    seed: int = 0,
    tick: Callable[[float], None] = lambda _: None,
    keep: list[Tensor] | None = None,
    shared: bool = False,
) -> dict[str, float]:
    """Accuracies as fractions, in eval mode: `clean`; `fgsm`, one step of eps from x; `pgd7`, the last iterate of seven
    steps of eps/4 from a random start. `x`, `y`: images as bytes (N, H, W, C) or floats (N, C, H, W) in [0, 1], and
    labels; or a `Dataset` or `DataLoader` of both in their place. The starts depend on the seed and the image only, so
    that epochs and methods are compared on the same ones.

    `alignment` is the mean cosine of the loss's gradients at x and at that start (Andriushchenko and Flammarion, 2020).
    Near 0 the loss is nonlinear within the ball, and a single step along the gradient at x fails. Images where either
    gradient is zero are left out and counted: `zero_gradients` is their share. If all are, the alignment is 0.

    `tick` is called after each call of the model, with the number of images done, and may raise. `keep` gets the first
    images, then their PGD-7 examples. `shared`: all processes call this with all images, share the work, and get the
    same result.
    """
    threat = Threat.to_train(eps, norm)
    x, y = images_and_labels(x, y)
    device = device_of(model, x)
    y = y.to(device)
    eps = threat.eps
    batch = max(min(BATCH, BATCH * SMALL_IMAGE // x[0].numel()), 2)
    probe = Probe(model, batch_size=batch)
    probe.tick = lambda: tick(probe.forwards / CALLS)
    right = torch.zeros(3, dtype=torch.int64, device=y.device)
    misaligned, with_gradients = (torch.zeros((), device=y.device) for _ in range(2))
    with giving_logits(model, y), evaluating(model), full_precision():
        blocks = range(0, len(y), batch)
        for begin in blocks[distributed.share(len(blocks))] if shared else blocks:
            images, labels = as_floats(x[begin : begin + batch].to(device)), y[begin : begin + batch]
            images = images.contiguous(memory_format=torch.channels_last)  # noise is drawn in memory order
            draws = generator(seed, "monitor", begin // batch, device=y.device)
            start = threat.project(images + threat.noise(images, draws), images)
            gradient, _logits = probe.gradient(images, labels)
            gradient_at_start, _logits = probe.gradient(start, labels)
            count = has_gradients(gradient, gradient_at_start).sum()
            misaligned += count * misalignment(gradient, gradient_at_start)
            with_gradients += count
            stepped = threat.project(images + eps * threat.steepest(gradient), images)
            first = start + eps / 4 * threat.steepest(gradient_at_start)
            iterated = pgd(probe, images, labels, eps=eps, step_size=eps / 4, steps=6, norm=norm, start=first)
            for kind, examples in enumerate((images, stepped, iterated)):
                right[kind] += (~is_wrong(probe.logits(examples), labels)).sum()
            if keep is not None and not keep:
                keep += [images[:SHOWN].cpu(), iterated[:SHOWN].cpu()]
    if shared:
        right, misaligned, with_gradients = map(distributed.summed, (right, misaligned, with_gradients))
    clean, single, multi = (count / len(y) for count in right.tolist())
    counted = with_gradients.item()
    alignment = 1 - misaligned.item() / counted if counted else 0.0
    accuracies = {"clean": clean, "fgsm": single, "pgd7": multi}
    return accuracies | {"alignment": alignment, "zero_gradients": 1 - counted / len(y)}
