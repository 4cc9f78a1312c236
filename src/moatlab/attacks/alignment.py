"""The alignment of two gradients of each image (Andriushchenko and Flammarion, 2020)."""

from collections.abc import Callable

import torch
from torch import Tensor


def has_gradients(g1: Tensor, g2: Tensor) -> Tensor:
    """Examples where neither gradient vanishes. One vanishes if its square underflows: there the derivative of a norm
    overflows."""
    smallest = torch.finfo(g1.dtype).tiny ** 0.5
    sizes = [gradient.detach().abs().flatten(1).amax(1) for gradient in (g1, g2)]
    both: Tensor = (sizes[0] > smallest) & (sizes[1] > smallest)
    return both


def misalignment(g1: Tensor, g2: Tensor, usual: Callable[[Tensor], Tensor] = lambda count: count) -> Tensor:
    """The mean of 1 - cos(g1, g2) over the examples where neither gradient vanishes (0 if there are none). `usual` maps
    the number of examples to the divisor: where losses are averaged over processes, its mean over them.
    """
    g1, g2 = g1.flatten(1), g2.flatten(1)
    size1, size2 = g1.abs().amax(1, keepdim=True), g2.detach().abs().amax(1, keepdim=True)
    counts = has_gradients(g1, g2)[:, None]
    g1 = torch.where(counts, g1 / size1, 1.0)  # scaled, so that no square underflows
    g2 = torch.where(counts, g2, 1.0) / torch.where(counts, size2, 1.0)
    cosine = torch.nn.functional.cosine_similarity(g1, g2, dim=1)
    total = torch.where(counts.squeeze(1), 1 - cosine, 0.0).sum()
    misaligned: Tensor = total / torch.where(counts.any(), usual(counts.sum()), 1)
    return misaligned
