"""What a result was made with: the versions and the hardware that decide its last bits."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path


def describe_environment() -> dict[str, str | int]:
    import torch

    cuda = torch.cuda.is_available()
    return {
        "moatlab": version("moatlab"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": version("numpy"),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpus": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda or "none" if cuda else "none",
        "gpu": torch.cuda.get_device_name() if cuda else "none",
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
