"""TensorBoard, Weights & Biases and MLflow. Each library is imported when a run starts."""

import os
import time
from abc import abstractmethod
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from moatlab.runtime.console import is_heard
from moatlab.runtime.errors import UserError, did_you_mean
from moatlab.runtime.files import RunFile, read_json, write_json
from moatlab.training.recipe import Recipe
from moatlab.training.run_folder import RunRecord
from moatlab.training.trackers import NAMES, Line, Tracker, numbers

PROJECT = "moatlab"  # unless WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME names another
UPLOADED = (RunFile.RECIPE, RunFile.METRICS, RunFile.EVENTS, RunFile.RECORD)  # to MLflow, whose metrics are numbers


def tested(record: RunRecord) -> dict[str, float]:
    """The accuracies on the test images; empty if the run is not finished."""
    return {f"test/{name}": value for name, value in (record.final or {}).items() if name != "images"}


class TensorBoard(Tracker):
    """Event files in the run's folder, from the first epoch on."""

    board: Any = None

    def start(self, folder: Path, recipe: Recipe, history: list[Line]) -> None:
        self.folder, self.recipe = folder, recipe
        self.missing = [] if any(folder.glob("events.out.tfevents.*")) else history

    def epoch(self, line: Line, images: dict[str, Tensor]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        lines = [*self.missing, line]
        self.missing = []
        self.board = self.board or SummaryWriter(str(self.folder), purge_step=lines[0]["epoch"])
        for one in lines:
            for name, value in numbers(one).items():
                self.board.add_scalar(name, value, one["epoch"])
            self.board.add_text("stage", one["stage"], one["epoch"])
        for name, batch in images.items():
            self.board.add_images(f"images/{name}", batch, line["epoch"])
        self.board.flush()

    def event(self, line: Line) -> None:
        if self.board:
            self.board.add_text("events", line["message"], line["epochs"])

    def end(self, record: RunRecord) -> None:
        if self.board and record.final:
            fields = {name: value for name, value in self.recipe if isinstance(value, str | int | float)}
            self.board.add_hparams(fields, tested(record), run_name=".")
        if self.board:
            self.board.close()


class Service(Tracker):
    """A tracker with runs of its own. The folder remembers which one is its, and how many epochs that has: a resumed
    run continues it, and each epoch is sent once."""

    name: str

    @abstractmethod
    def open(self, folder: Path, recipe: Recipe, known: str | None) -> str:
        """Continue the service's run `known`, or start one; return its id."""

    @abstractmethod
    def log(self, line: Line) -> None: ...

    def start(self, folder: Path, recipe: Recipe, history: list[Line]) -> None:
        self.folder, self.memory = folder, folder / f"tracker-{self.name}.json"
        known: dict[str, Any] = {}
        if self.memory.exists():
            try:
                known = read_json(self.memory)
            except UserError:
                known = {}
        self.run = self.open(folder, recipe, known.get("run"))
        self.sent = int(known["epochs"]) if self.run == known.get("run") else 0
        write_json(self.memory, {"run": self.run, "epochs": self.sent})
        for line in history:
            self.epoch(line, {})

    def epoch(self, line: Line, images: dict[str, Tensor]) -> None:  # noqa: ARG002
        if line["epoch"] > self.sent:
            self.log(line)
            self.sent = line["epoch"]
            write_json(self.memory, {"run": self.run, "epochs": self.sent})


class WandB(Service):
    """Weights & Biases, as `wandb login` or WANDB_MODE=offline has set it up; its files are in the run's folder."""

    name = "wandb"

    def open(self, folder: Path, recipe: Recipe, known: str | None) -> str:
        import wandb

        settings = wandb.Settings(console="off", silent=not is_heard(), login_timeout=30)
        self.board = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            dir=str(folder),
            id=known,
            resume="allow",
            reinit="create_new",  # a run of the caller's stays as it is
            settings=settings,
        )
        self.board.config.update(recipe.model_dump(), allow_val_change=True)
        return str(self.board.id)

    def log(self, line: Line) -> None:
        self.board.log(numbers(line) | {"stage": line["stage"], "monitor": line["monitor"]}, step=line["epoch"])

    def end(self, record: RunRecord) -> None:
        self.board.summary.update(tested(record) | {"status": record.status, "outcome": record.outcome})
        self.board.finish(exit_code=int(record.status == "failed"))


class MLflow(Service):
    """MLflow, at MLFLOW_TRACKING_URI or where `mlflow.set_tracking_uri` has set it."""

    name = "mlflow"

    def open(self, folder: Path, recipe: Recipe, known: str | None) -> str:
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        self.client = MlflowClient()
        if known:
            try:
                self.client.update_run(known, status="RUNNING")
                return known
            except MlflowException:  # it is not in this store: a new one gets all epochs
                pass
        title = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self.client.get_experiment_by_name(title)
        experiment = found.experiment_id if found else self.client.create_experiment(title)
        run = str(self.client.create_run(experiment, run_name=folder.name).info.run_id)
        self.client.log_batch(run, params=[Param(name, str(value)) for name, value in recipe if value is not None])
        return run

    def log(self, line: Line) -> None:
        self.log_numbers(numbers(line), line["epoch"])

    def log_numbers(self, values: dict[str, float], epoch: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self.client.log_batch(self.run, metrics=[Metric(name, value, now, epoch) for name, value in values.items()])

    def end(self, record: RunRecord) -> None:
        self.log_numbers(tested(record), self.sent)
        if record.outcome:
            self.client.set_tag(self.run, "outcome", record.outcome)
        for path in [self.folder / name for name in UPLOADED]:
            if path.exists():
                self.client.log_artifact(self.run, str(path))
        ended = {"finished": "FINISHED", "failed": "FAILED"}.get(record.status, "KILLED")
        self.client.set_terminated(self.run, ended)


def choose_trackers(given: Iterable[str | Tracker] | None) -> list[Tracker]:
    """Trackers by name, or the user's own. None: TensorBoard, if it is installed."""
    kinds: dict[str, type[Tracker]] = dict(zip(NAMES, (TensorBoard, WandB, MLflow), strict=True))
    if given is None:
        given = ["tensorboard"] if find_spec("tensorboard") else []
    elif isinstance(given, str | Tracker):
        given = [given]
    chosen = []
    for one in given:
        if isinstance(one, str) and one not in kinds:
            raise UserError(f"there is no tracker '{one}'{did_you_mean(one, NAMES)}; use {', '.join(NAMES)}")
        if isinstance(one, str) and find_spec(one) is None:
            raise UserError(f'the tracker {one} is not installed: pip install "moatlab[{one}]"')
        if not isinstance(one, str | Tracker):
            kind = getattr(one, "__name__", type(one).__name__)
            raise UserError(f"{kind} is no tracker; pass a name or an object of a subclass of Tracker")
        chosen.append(kinds[one]() if isinstance(one, str) else one)
    return chosen
