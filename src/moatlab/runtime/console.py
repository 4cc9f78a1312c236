"""Console output on stderr: notes, warnings and a progress bar.

On a terminal the bar is drawn by rich, in a notebook by the browser; in a log file it is a plain line every 15 s.
Called from Python, moatlab prints only if `verbose=True`, or if stderr is a terminal or a notebook.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from html import escape
from importlib import import_module
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from moatlab.runtime import distributed
from moatlab.runtime.errors import in_callers_words

PLAIN_LINE_SECONDS, NOTEBOOK_SECONDS = 15.0, 0.25  # between two updates
NOTEBOOK_COLUMNS = 90

console = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True, quiet=not distributed.is_first())
_verbose: ContextVar[bool | None] = ContextVar("verbose", default=None)


@contextmanager
def verbosity(verbose: bool | None) -> Iterator[None]:
    """Print inside, or not. None: as in the enclosing block; outside of any, on a terminal or in a notebook."""
    token = _verbose.set(_verbose.get() if verbose is None else verbose)
    try:
        yield
    finally:
        _verbose.reset(token)


def is_heard() -> bool:
    verbose = _verbose.get()
    return console.is_terminal or console.is_jupyter if verbose is None else verbose


def note(message: str, style: str | None = None) -> None:
    with suppress(OSError):  # a full disk or a closed terminal is no reason to stop
        if is_heard():  # lines are wrapped on a terminal and in a notebook only
            wrap, width = console.is_terminal or console.is_jupyter, NOTEBOOK_COLUMNS if console.is_jupyter else None
            console.print(in_callers_words(message), style=style, markup=False, soft_wrap=not wrap, width=width)


def warn(message: str) -> None:
    note(f"warning: {message}", style="yellow")


def counted(number: float, noun: str) -> str:
    """`1 epoch`, `1,000 test images`, `2.5 passes`"""
    shown = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{shown} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def duration(seconds: float) -> str:
    """`42 s`, `7 min`, `3.2 h`, `5.1 days`"""
    seconds = max(seconds, 0.0)
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def rounded(count: float) -> str:
    """`42`, `73.5`, `1,600`"""
    return f"{count:,.1f}".removesuffix(".0")


class Bar:
    """Progress over `total` units of work, with an ETA: `with Bar("get cifar10", total) as bar: bar.update(5)`.

    Units are work, not steps: an epoch of PGD-8 takes nine times as long as one of mixup.
    """

    def __init__(self, title: str, total: float, done: float = 0.0) -> None:
        self.title, self.total = title, total
        self._marks = [(time.perf_counter(), done)]  # the speed is measured from the last one
        self._next_line = 0.0
        self._progress: Progress | None = None
        self._in_notebook: Any = None  # the handle of an output

    def __enter__(self) -> Self:
        if console.is_jupyter and is_heard():  # rich would need ipywidgets
            display = import_module("IPython.display").display
            self._in_notebook = display(_notebook_bar(self.title, 0.0), raw=True, display_id=True)
        elif console.is_terminal and is_heard():
            title, rest = "{task.description}", "{task.percentage:3.0f}% {task.fields[text]}"
            columns = TextColumn(title, markup=False), BarColumn(bar_width=20), TextColumn(rest, markup=False)
            self._progress = Progress(*columns, console=console, transient=True, refresh_per_second=4)
            self._task = self._progress.add_task(self.title, total=self.total, text="")
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress:
            self._progress.stop()
        if self._in_notebook:
            self._in_notebook.update({"text/html": "", "text/plain": ""}, raw=True)

    def update(self, done: float, text: str = "", *, title: str | None = None, total: float | None = None) -> None:
        """Cheap enough for every step: a terminal is redrawn four times a second."""
        self.title, self.total = title or self.title, total or self.total
        text = f"{text}  ETA {self.eta(done)}" if text else f"ETA {self.eta(done)}"
        if self._progress:
            self._progress.update(self._task, completed=done, total=self.total, description=self.title, text=text)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + (NOTEBOOK_SECONDS if self._in_notebook else PLAIN_LINE_SECONDS)
            line = f"{self.title}  {100 * done / self.total:.0f}%  {text}"
            if self._in_notebook:
                self._in_notebook.update(_notebook_bar(line, done / self.total), raw=True)
            else:
                note(line)

    def eta(self, done: float) -> str:
        """The time left at the speed so far, without the first step (warm-up) as soon as there are more."""
        now = time.perf_counter()
        begun, done_then = self._marks[-1]
        if len(self._marks) == 1:
            self._marks.append((now, done))
        if done <= done_then or math.isinf(self.total):
            return "unknown"
        return duration((self.total - done) * (now - begun) / (done - done_then))


def _notebook_bar(line: str, share: float) -> dict[str, str]:
    drawn = f'<progress value="{share:.4f}" style="width:12em;vertical-align:middle"></progress>'
    return {"text/html": f"<div>{drawn} {escape(line)}</div>", "text/plain": line}
