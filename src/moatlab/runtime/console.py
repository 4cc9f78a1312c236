"""What a person sees while something runs: notes, warnings and one progress bar, all on stderr.

On a terminal the bar is drawn by rich; elsewhere (a log file, CI) it becomes a plain line now and then.
"""

from __future__ import annotations

import time
from contextlib import suppress
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from moatlab.runtime import distributed

PLAIN_LINE_SECONDS = 15.0

console = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True, quiet=not distributed.is_first())


def note(message: str, style: str | None = None) -> None:
    with suppress(OSError):  # stderr may be a file on a full disk, or a terminal that is gone: no reason to stop
        # A terminal gets lines that end between words; a file gets them whole.
        console.print(message, style=style, markup=False, soft_wrap=not console.is_terminal)


def warn(message: str) -> None:
    note(f"warning: {message}", style="yellow")


def duration(seconds: float) -> str:
    """A length of time as a person says it: `42 s`, `7 min`, `3.2 h`, `5.1 days`."""
    seconds = max(seconds, 0.0)
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


class Bar:
    """A progress bar over `total` units of work. `with Bar("get cifar10", total) as bar: bar.update(done, "…")`."""

    def __init__(self, title: str, total: float) -> None:
        self.title, self.total = title, total
        self._next_line = 0.0
        self._progress: Progress | None = None

    def __enter__(self) -> Bar:
        if console.is_terminal:
            columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=20),
                       TextColumn("{task.percentage:3.0f}% {task.fields[text]}", markup=False))  # fmt: skip
            self._progress = Progress(*columns, console=console, transient=True, refresh_per_second=4)
            self._task = self._progress.add_task(self.title, total=self.total, text="")
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress:
            self._progress.stop()

    def update(self, done: float, text: str = "", *, title: str | None = None) -> None:
        """Cheap enough for every step: the terminal is drawn four times a second, a plain line every 15 s."""
        self.title = title or self.title
        if self._progress:
            self._progress.update(self._task, completed=done, description=self.title, text=text)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + PLAIN_LINE_SECONDS
            note(f"{self.title}  {100 * done / self.total:.0f}%  {text}")


class Pace:
    """Time left by work done, not by steps: an epoch of mixup and one of eight attack steps differ ninefold."""

    def __init__(self, total: float, done: float) -> None:
        self.total = total
        self._marks = [(time.perf_counter(), done)]

    def eta(self, done: float) -> str:
        """How long the rest takes at the speed so far, the first step (which warms up) left out once there are more."""
        now = time.perf_counter()
        begun, done_then = self._marks[-1]
        if len(self._marks) == 1:
            self._marks.append((now, done))
        if done <= done_then:
            return "unknown"
        return duration((self.total - done) * (now - begun) / (done - done_then))
