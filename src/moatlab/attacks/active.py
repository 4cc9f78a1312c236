"""The active set. An example may be tried in several ways side by side, and leaves when one of them succeeds."""

from __future__ import annotations

import torch
from torch import Tensor


def side_by_side(tries: int, *states: Tensor) -> tuple[Tensor, ...]:
    """The number of each row's example, and the states of all examples: once for each try, block after block."""
    rows = torch.arange(len(states[0]), device=states[0].device).repeat(tries)
    return rows, *(torch.cat([state] * tries) if tries > 1 else state for state in states)


def fallen(wrong: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """For each of `count` examples that fell the position of its first row that did; and the rows of those that stand.

    What falls is the example: with it go its other tries.
    """
    first = torch.full((count,), len(wrong), device=wrong.device)
    first.scatter_reduce_(0, rows[wrong], wrong.nonzero().squeeze(1), "amin")
    return first[first < len(wrong)], first[rows] == len(wrong)
