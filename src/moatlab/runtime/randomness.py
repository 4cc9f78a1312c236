"""Every random draw is a pure function of (seed, purpose, counters): nothing to save, nothing to restore.

A checkpoint therefore holds no generator state, and a run resumes bit for bit at any step.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def key(seed: int, purpose: str, *counters: int) -> int:
    """64 bits of a cryptographic hash, so that neighbouring seeds and steps share nothing."""
    text = "/".join([str(seed), purpose, *map(str, counters)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def generator(seed: int, purpose: str, *counters: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator on `device` for this purpose and these counters.

    (PyTorch's CPU generator uses the low 32 bits of its seed; a hash spreads over those just as well.)
    """
    import torch

    return torch.Generator(device=device).manual_seed(key(seed, purpose, *counters))
