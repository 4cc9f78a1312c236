"""Ctrl-C, SIGTERM (from clusters) and SIGHUP (a closed terminal) as a request to stop between two steps."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from moatlab.runtime import console, distributed
from moatlab.runtime.errors import Interrupted

SIGNALS = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]


@dataclass
class Caught:
    """The signal that this process received, if any."""

    number: int | None = None

    def raise_if_any(self) -> None:
        if self.number is not None:
            raise Interrupted(f"interrupted by {signal.Signals(self.number).name}", self.number)


def acknowledge() -> None:
    """Answer at once, before the step or batch in progress has ended; os.write is safe in a signal handler."""
    if console.is_heard() and distributed.is_first():
        begin = "\r\x1b[K" if console.console.is_terminal else ""  # over the progress bar, which is drawn again below
        again = "" if distributed.launched() > 1 else "; a second signal stops without saving"
        with suppress(OSError, ValueError):
            os.write(sys.stderr.fileno(), f"{begin}interrupted: saving after this step{again}\n".encode())


@contextmanager
def signals_caught() -> Iterator[Caught]:
    """Record signals for the caller to act on. A second one raises KeyboardInterrupt, but not under torchrun, which
    forwards what the terminal has sent already. SIGHUP stays ignored under nohup."""
    caught = Caught()

    def handle(number: int, _frame: FrameType | None) -> None:
        if caught.number is not None and distributed.launched() == 1:
            raise KeyboardInterrupt
        caught.number = number
        acknowledge()

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
