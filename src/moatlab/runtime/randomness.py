"""Every random draw is a pure function of (seed, purpose, counters), so a run resumes bit for bit at any step."""

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
    """A new generator. (PyTorch's CPU generator uses only the low 32 bits of its seed, which a hash fills as well.)"""
    import torch

    return torch.Generator(device=device).manual_seed(key(seed, purpose, *counters))
