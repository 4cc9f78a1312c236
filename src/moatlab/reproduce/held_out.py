"""What `moat tune` maximises: images that are right under two attacks."""

from typing import Any

import torch
from torch import Tensor, nn

from moatlab.attacks import Probe, cw, strong_pgd
from moatlab.attacks.losses import is_wrong
from moatlab.attacks.norms import Threat
from moatlab.attacks.probe import evaluating
from moatlab.data.images import as_floats
from moatlab.runtime.device import device_of, full_precision
from moatlab.runtime.randomness import generator

STEPS, STEP = 10, 1 / 4  # of both attacks, in units of eps
BATCH = 250


def right_under_both(model: nn.Module, x: Tensor, y: Tensor, threat: Threat) -> tuple[float, float]:
    """Clean accuracy, and the share of images that are right under PGD-10 on the cross-entropy and on the margin: label
    smoothing, for example, hides an image from the first only."""
    clean = robust = 0
    probe = Probe(model, batch_size=BATCH, memory_format=torch.channels_last)
    with evaluating(model), full_precision():
        for number, begin in enumerate(range(0, len(y), BATCH)):
            images, labels = as_floats(x[begin : begin + BATCH]).to(device_of(model, x)), y[begin : begin + BATCH]
            right = ~is_wrong(probe.logits(images), labels)
            clean += int(right.sum())
            draws = generator(0, "tune", number, device=images.device)
            start = images + threat.noise(images, draws)
            for attack in (strong_pgd, cw):
                images, labels, start = images[right], labels[right], start[right]
                if not len(labels):
                    break
                how: dict[str, Any] = {"eps": threat.eps, "norm": threat.norm, "steps": STEPS, "start": start}
                found = attack(probe, images, labels, step_size=STEP * threat.eps, **how)
                right = ~is_wrong(probe.logits(found), labels)
            robust += int(right.sum()) if len(labels) else 0
    return clean / len(y), robust / len(y)
