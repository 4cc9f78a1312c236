"""The active set: images still robust. An image may have several rows (restarts or targets), tried side by side."""

import torch
from torch import Tensor


def side_by_side(tries: int, *states: Tensor) -> tuple[Tensor, ...]:
    """The image index of each row, and each state repeated `tries` times along the first dimension."""
    rows = torch.arange(len(states[0]), device=states[0].device).repeat(tries)
    return rows, *(torch.cat([state] * tries) if tries > 1 else state for state in states)


def keep_broken(found: Tensor, z: Tensor, wrong: Tensor, rows: Tensor) -> Tensor:
    """Write the first wrong row of each broken image into `found`; return the mask of the rows of all other images."""
    first = torch.full((len(found),), len(wrong), device=wrong.device)
    first.scatter_reduce_(0, rows[wrong], wrong.nonzero().squeeze(1), "amin")
    hits = first[first < len(wrong)]
    found[rows[hits]] = z[hits]
    return first[rows] == len(wrong)
