"""The versions and the hardware that decide the last bits of a result."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def describe_environment(device: torch.device | None = None) -> dict[str, str | int]:
    """`device`: the GPU to name; by default the current one."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "moatlab": version("moatlab"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": version("numpy"),
        "platform": platform.platform(),
        "cpu": f"{_cpu_name()} ({torch.backends.cpu.get_cpu_capability()})",  # the kernels in use
        "cpus": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda or "none" if cuda else "none",
        "gpu": torch.cuda.get_device_name(device if device and device.type == "cuda" else None) if cuda else "none",
    }


def cache_dir() -> Path:
    """The folder for downloaded data sets and trusted models: $XDG_CACHE_HOME/moatlab, by default ~/.cache/moatlab."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moatlab"


def is_device(name: str) -> bool:
    """Whether a text names a device; `choose_device` checks that this machine has it."""
    return re.fullmatch(r"auto|cpu|mps|cuda(:\d{1,3})?", name) is not None


def commit() -> str | None:
    """The commit of moatlab, if it runs from a clone."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next tensors. Without glibc this does nothing.

    By default it returns every block over 32 MB to the system and gets it back page by page, zeroed: at the paper's
    size a tenth to a fifth of each step on the CPU.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    m_trim_threshold, m_mmap_max = -1, -4  # from malloc.h
    mallopt(m_mmap_max, 0)
    mallopt(m_trim_threshold, -1)


def _cpu_name() -> str:
    try:
        found = re.search(r"^model name\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return platform.processor() or platform.machine()
    return found[1].strip() if found else platform.machine()
