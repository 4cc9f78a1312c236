"""The exceptions that end a command. Each carries one sentence.

Sentences name options as the command line does. Shown to a caller from Python, they name the arguments instead:
`--batch-size 8` is `batch_size=8`, `--resume` is `resume=True`, `--device=cpu` is `device="cpu"`.
"""

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

FLAGS = ("resume", "trust-model-code", "deterministic", "save-adversarial", "audit", "yes", "stream")
_OPTION = re.compile(r"(?<![\w./-])--([a-z][a-z-]*)(?:=([\w./:-]*\w)| (?=-?\d))?")
_in_options: ContextVar[bool] = ContextVar("options", default=False)


@contextmanager
def naming_options() -> Iterator[None]:
    """Inside, messages name options of the command line."""
    token = _in_options.set(True)
    try:
        yield
    finally:
        _in_options.reset(token)


def in_callers_words(message: str) -> str:
    """The message with options or, for a caller from Python, with arguments."""
    return message if _in_options.get() else _OPTION.sub(_as_argument, message)


def _as_argument(option: re.Match[str]) -> str:
    name, value = option[1].replace("-", "_"), option[2]
    if value:
        return f'{name}="{value}"'
    return f"{name}=True" if option[1] in FLAGS else name + "=" * option[0].endswith(" ")


class _Worded:
    def __str__(self) -> str:
        return in_callers_words(super().__str__())


class UserError(_Worded, Exception):
    """The user's mistake: exit code 2, nothing was started."""


class Damaged(UserError):
    """A file is missing, damaged or was changed."""


class RunFailed(_Worded, Exception):
    """A run could not continue (NaN, disk): exit code 1, the last checkpoint is kept."""


class NotWritten(RunFailed):
    """A file could not be written, as on a full or read-only disk. Its earlier version is kept."""


class Interrupted(_Worded, KeyboardInterrupt):
    """A signal stopped the run: exit code 128 + signal, a checkpoint was written."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


def needs_trust(model: str, origin: object, instead: str = "") -> UserError:
    """The error for a file that names code to run, which only the user can allow."""
    how = f"if you trust it, add --trust-model-code{instead}"
    return UserError(f"{origin} names the model {model}, which means importing and running that code; {how}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean fgsm?)` for a misspelt name; empty if no known name is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


@contextmanager
def users_code(trouble: str, kind: type[Exception] = UserError) -> Iterator[None]:
    """For a block that runs the user's code: any error of it becomes one sentence."""
    try:
        yield
    except (UserError, RunFailed):
        raise
    except Exception as error:
        raise kind(f"{trouble} ({type(error).__name__}: {first_line(error)})") from error


@contextmanager
def adding_to_errors(words: str) -> Iterator[None]:
    """Words are added to the messages of errors inside, such as another way."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{error}{words}") from error


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
