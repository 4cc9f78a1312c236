"""Losses that attacks maximise: from logits and labels, one number per image."""

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="none")


def margin(logits: Tensor, y: Tensor) -> Tensor:
    """max_{j != y} z_j - z_y: above 0 exactly where the model is wrong. Carlini and Wagner, 2017, without kappa."""
    others = logits.scatter(1, y[:, None], -torch.inf).max(1).values  # a mask of 0 fails where all others are negative
    return others - _at(logits, y)


def dlr(logits: Tensor, y: Tensor) -> Tensor:
    """-(z_y - max_{j != y} z_j) / (z_(1) - z_(3)), z_(k) the k-th largest logit. Croce and Hein, 2020."""
    ranked = logits.sort(1, descending=True).values
    return margin(logits, y) / (ranked[:, 0] - ranked[:, 2] + 1e-12)


def targeted_dlr(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """-(z_y - z_t) / (z_(1) - (z_(3) + z_(4)) / 2). Croce and Hein, 2020."""
    ranked = logits.sort(1, descending=True).values
    return logit_gap(logits, y, target) / (ranked[:, 0] - 0.5 * (ranked[:, 2] + ranked[:, 3]) + 1e-12)


def logit_gap(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """z_t - z_y."""
    return _at(logits, target) - _at(logits, y)


def is_wrong(logits: Tensor, y: Tensor) -> Tensor:
    """Whether the prediction is not y. Logits with NaN are wrong."""
    return (logits.argmax(1) != y) | logits.isnan().any(1)


def _at(logits: Tensor, classes: Tensor) -> Tensor:
    return logits.gather(1, classes[:, None]).squeeze(1)
