"""Ctrl-C, SIGTERM (from clusters) and SIGHUP (a closed terminal) as a request to stop between two steps."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from moatlab.runtime import distributed
from moatlab.runtime.errors import Interrupted

SIGNALS = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]


@dataclass
class Caught:
    """The signal that this process received, if any."""

    number: int | None = None

    def raise_if_any(self) -> None:
        if self.number is not None:
            raise Interrupted(f"interrupted by {signal.Signals(self.number).name}", self.number)


@contextmanager
def signals_caught() -> Iterator[Caught]:
    """Record signals for the caller to act on. A second one raises KeyboardInterrupt, but not under torchrun, which
    forwards what the terminal has sent already. SIGHUP stays ignored under nohup."""
    caught = Caught()

    def handle(number: int, _frame: FrameType | None) -> None:
        if caught.number is not None and distributed.launched() == 1:
            raise KeyboardInterrupt
        caught.number = number

    if threading.current_thread() is not threading.main_thread():
        yield caught  # only the main thread may set handlers
        return
    ignored = [number for number in SIGNALS[2:] if signal.getsignal(number) is signal.SIG_IGN]
    caught_here = [number for number in SIGNALS if number not in ignored]
    before = {number: signal.signal(number, handle) for number in caught_here}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
