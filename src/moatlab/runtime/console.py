"""What a person sees while something runs: notes, warnings and one progress bar, all on stderr.

On a terminal the bar is drawn by rich; elsewhere (a log file, CI) it becomes a plain line now and then. A library is a
guest: called from Python it prints only if it is asked to, or where stderr is a terminal or a notebook.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from moatlab.runtime import distributed

PLAIN_LINE_SECONDS = 15.0

console = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True, quiet=not distributed.is_first())
_asked: ContextVar[bool | None] = ContextVar("verbose", default=None)


@contextmanager
def verbosity(verbose: bool | None) -> Iterator[None]:
    """Print inside, or not. None: as the caller's caller said; if nobody did, where a person watches."""
    token = _asked.set(_asked.get() if verbose is None else verbose)
    try:
        yield
    finally:
        _asked.reset(token)


def is_heard() -> bool:
    asked = _asked.get()
    return console.is_terminal or console.is_jupyter if asked is None else asked


def note(message: str, style: str | None = None) -> None:
    with suppress(OSError):  # stderr may be a file on a full disk, or a terminal that is gone: no reason to stop
        if is_heard():  # a terminal gets lines that end between words; a file gets them whole
            console.print(message, style=style, markup=False, soft_wrap=not console.is_terminal)


def warn(message: str) -> None:
    note(f"warning: {message}", style="yellow")


def duration(seconds: float) -> str:
    """A length of time for a person: `42 s`, `7 min`, `3.2 h`, `5.1 days`."""
    seconds = max(seconds, 0.0)
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


class Bar:
    """Progress over `total` units of work, and the time left: `with Bar("get cifar10", total) as bar: bar.update(5)`.

    Time goes by work, not by steps: an epoch of mixup and one of eight attack steps differ ninefold.
    """

    def __init__(self, title: str, total: float, done: float = 0.0) -> None:
        self.title, self.total = title, total
        self._marks = [(time.perf_counter(), done)]  # what the pace is measured from
        self._next_line = 0.0
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        if console.is_terminal and is_heard():
            title, rest = "{task.description}", "{task.percentage:3.0f}% {task.fields[text]}"
            columns = TextColumn(title, markup=False), BarColumn(bar_width=20), TextColumn(rest, markup=False)
            self._progress = Progress(*columns, console=console, transient=True, refresh_per_second=4)
            self._task = self._progress.add_task(self.title, total=self.total, text="")
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress:
            self._progress.stop()

    def update(self, done: float, text: str = "", *, title: str | None = None, total: float | None = None) -> None:
        """Cheap enough for every step: the terminal is drawn four times a second, a plain line every 15 s."""
        self.title, self.total = title or self.title, total or self.total
        text = f"{text}  ETA {self.eta(done)}" if text else f"ETA {self.eta(done)}"
        if self._progress:
            self._progress.update(self._task, completed=done, total=self.total, description=self.title, text=text)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + PLAIN_LINE_SECONDS
            note(f"{self.title}  {100 * done / self.total:.0f}%  {text}")

    def eta(self, done: float) -> str:
        """How long the rest takes at the pace so far, the first step (which warms up) left out once there are more."""
        now = time.perf_counter()
        begun, done_then = self._marks[-1]
        if len(self._marks) == 1:
            self._marks.append((now, done))
        if done <= done_then or math.isinf(self.total):
            return "unknown"
        return duration((self.total - done) * (now - begun) / (done - done_then))
