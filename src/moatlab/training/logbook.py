"""What a run reports on its way: rows on the terminal, lines in metrics.jsonl and events.jsonl, TensorBoard."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from moatlab.runtime import console, distributed
from moatlab.runtime.files import append_line
from moatlab.training.checkpoint import Progress
from moatlab.training.recipe import Recipe
from moatlab.training.run_folder import RunFolder
from moatlab.training.setup import Session

FEW_STEPS = 100  # of a whole run
ROW = "{:>5} {:<11} {:>7} {:>6} {:>6} {:>6} {:>6} {:>6} {:>7} {:>8}"
SCALARS = ("lr", "loss", "clean", "fgsm", "pgd7", "alignment", "passes", "train_seconds", "monitor_seconds")


class Logbook:
    def __init__(self, folder: RunFolder, progress: Progress) -> None:
        self.folder, self.progress = folder, progress
        self.board: Any = None  # TensorBoard's writer, once there is an epoch to write

    def epoch(self, line: dict[str, Any], examples: Sequence[Tensor] = ()) -> None:
        """The one line of an epoch. What follows relies on it: if it can't be written, this raises.

        `examples` are some images, and as many adversarial ones, for TensorBoard.
        """
        if distributed.is_first():
            append_line(self.folder.metrics, line)
        self.progress.history.append(line)
        percent = [f"{100 * line[name]:.1f}" for name in ("clean", "fgsm", "pgd7")]
        numbers = [f"{line['lr']:.4f}", f"{line['loss']:.3f}", *percent, f"{line['alignment']:.2f}"]
        work = [f"{line['passes']:g}", f"{line['train_seconds']:.1f}"]
        console.note(ROW.format(line["epoch"], line["stage"], *numbers, *work))
        if find_spec("tensorboard") and distributed.is_first():
            self._to_board(lambda: self._show(line, examples))

    def _show(self, line: dict[str, Any], examples: Sequence[Tensor]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        number = line["epoch"]
        self.board = self.board or SummaryWriter(str(self.folder.path), purge_step=number)
        for name in SCALARS:
            self.board.add_scalar(name, line[name], number)
        self.board.add_text("stage", line["stage"], number)
        for name, images in zip(("images/plain", "images/pgd7"), examples, strict=False):
            self.board.add_images(name, images, number)
        self.board.flush()

    def end(self, recipe: Recipe, measured: dict[str, float]) -> None:
        """The recipe beside what it led to, as TensorBoard's hyperparameters."""
        if self.board:
            fields = {name: value for name, value in recipe if isinstance(value, str | int | float)}
            results = {f"test/{name}": value for name, value in measured.items()}
            self._to_board(lambda: self.board.add_hparams(fields, results, run_name="."))

    def event(self, name: str, message: str, **facts: Any) -> None:
        """Something that a person should know of, and find again later."""
        progress = self.progress
        line = {"event": name, "step": progress.step, "epochs": progress.epochs_logged, "message": message, **facts}
        console.warn(message)
        if distributed.is_first():
            append_line(self.folder.events, line)
        progress.events.append(line)
        if self.board:
            self._to_board(lambda: self.board.add_text("events", message, progress.epochs_logged))

    def _to_board(self, write: Callable[[], Any]) -> None:
        """TensorBoard is a convenience: where it can't write, the run continues without it."""
        try:
            write()
        except OSError as error:
            self.board = None
            console.warn(f"TensorBoard's events can't be written ({error.strerror or error}); continuing without them")

    def close(self) -> None:
        if self.board:
            self._to_board(self.board.close)


def announce(session: Session) -> None:
    recipe, method, epochs = session.recipe, session.method, session.recipe.epochs
    cycle = f" = {method}" if str(method) != recipe.method else ""
    passes = method.cost(epochs).passes
    console.note(f"{recipe.method}{cycle}: {passes:g} passes over {len(session.batches.y):,} training images")
    console.note(recipe.setting)
    if session.images.note:
        console.note(f"{session.images.name}: {session.images.note}")
    steps, size, images = session.steps_per_epoch, recipe.batch_size, len(session.batches.y)
    if steps * epochs < FEW_STEPS:
        smaller = f"a smaller --batch-size than {size}, or " if steps < 10 and size > 8 else ""
        console.warn(
            f"{steps * epochs} steps in all, {steps} an epoch, are few: {smaller}more --epochs would train further"
        )
    elif steps * size < 0.9 * images:
        console.warn(f"an epoch has {steps} batches of {size} and leaves {images - steps * size} images out")
    console.note(f"after each epoch, on {len(session.watched_y):,} {recipe.watched}: accuracy in %, plain and attacked")
    if not method.ends_cycle(epochs - 1):
        last, better = method.stage_at(epochs - 1, epochs), method.epochs_to_end_of_cycle(epochs)
        console.warn(f"{epochs} epochs end at the stage {last}; --epochs {better} would end at the cycle's last stage")
    console.note(ROW.format("epoch", "stage", "lr", "loss", "clean", "fgsm", "pgd7", "align", "passes", "train s"))
