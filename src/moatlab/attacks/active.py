"""The active set. An example may be tried in several ways side by side, and leaves when one of them succeeds."""

import torch
from torch import Tensor


def side_by_side(tries: int, *states: Tensor) -> tuple[Tensor, ...]:
    """The number of each row's example, and the states of all examples: once for each try, block after block."""
    rows = torch.arange(len(states[0]), device=states[0].device).repeat(tries)
    return rows, *(torch.cat([state] * tries) if tries > 1 else state for state in states)


def first_broken(wrong: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """For each of `count` examples that is broken the position of its first row that is; and the rows of the others.

    A broken example leaves with all of its tries.
    """
    first = torch.full((count,), len(wrong), device=wrong.device)
    first.scatter_reduce_(0, rows[wrong], wrong.nonzero().squeeze(1), "amin")
    return first[first < len(wrong)], first[rows] == len(wrong)
