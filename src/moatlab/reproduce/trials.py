"""The trials of `moat tune`: what is drawn next, by Optuna, and what was measured. A folder holds everything:

tune.journal                 Optuna's storage: the choices drawn so far and how good they were
trials/007/trial.json        the recipe's fields of trial 7
trials/007/rung1_s0/         its result.json at the second rung with seed 0
trials/007/run_8-epochs_s0/  the run

Every access to the storage is made under one lock, and each trial draws with (seed, number): a search that was killed
and resumed makes the same trials as one that was not.
"""

import math
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from moatlab.reproduce.space import Choice, Range, Space
from moatlab.runtime.errors import UserError, users_code
from moatlab.runtime.files import is_locked, locked, make_folder, read_json, write_json
from moatlab.runtime.randomness import key

KEPT = 0.4  # of the trials of a rung enter the next one


class Measured(BaseModel):
    """A trained trial on held-out images, or why it failed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: float | None = None  # what is maximised
    robust: float = 0.0  # right under both attacks
    clean: float = 0.0
    epochs: int = 0
    passes: float = 0.0
    flops: float = 0.0
    seconds: float = 0.0
    outcome: str | None = None
    failure: str | None = None


@dataclass(frozen=True)
class Unit:
    """A trial, trained with a seed for the budget of a rung."""

    trial: int
    rung: int
    seed: int


@dataclass(frozen=True)
class Trials:
    out: Path
    space: Space
    count: int
    rungs: int
    seeds: int  # at the last rung
    seed: int
    study: str = "moat tune"  # its name in the storage
    storage: str | None = None  # None: a journal in the folder
    fields: dict[int, dict[str, Any]] = field(default_factory=dict)  # of each trial drawn so far

    @property
    def sizes(self) -> list[int]:
        """Trials at each rung."""
        return [max(math.ceil(self.count * KEPT**rung), 1) for rung in range(self.rungs)]

    def folder(self, unit: Unit) -> Path:
        return self.out / "trials" / f"{unit.trial:03}" / f"rung{unit.rung}_s{unit.seed}"

    def run_folder(self, unit: Unit, epochs: int) -> Path:
        """Rungs where a trial has the same epochs (at least a whole cycle) share a run."""
        return self.out / "trials" / f"{unit.trial:03}" / f"run_{epochs}-epochs_s{unit.seed}"

    def result(self, unit: Unit) -> Measured | None:
        path = self.folder(unit) / "result.json"
        if not path.exists():
            return None
        return Measured(**{name: value for name, value in read_json(path).items() if name in Measured.model_fields})

    def write(self, unit: Unit, measured: Measured) -> None:
        make_folder(self.folder(unit))
        write_json(self.folder(unit) / "result.json", measured.model_dump())

    def units(self, rung: int) -> list[Unit] | None:
        """Of a rung; None while the one before it is not complete."""
        seeds = range(self.seeds if rung == self.rungs - 1 else 1)
        trials: list[int] = list(range(self.count))
        if rung:
            before = self.units(rung - 1)
            if before is None or any(self.result(unit) is None for unit in before):
                return None
            ranked = [trial for value, trial in self.ranking(rung - 1) if value is not None]
            trials = sorted(ranked[: self.sizes[rung]])
        return [Unit(trial, rung, seed) for trial in trials for seed in seeds]

    def ranking(self, rung: int) -> list[tuple[float | None, int]]:
        """The mean value over seeds and the number of each trial of a rung, the best first, failed ones last."""
        values: dict[int, list[float | None]] = {}
        for unit in self.units(rung) or []:
            found = self.result(unit)
            values.setdefault(unit.trial, []).append(found.value if found else None)
        means = [(None if None in some else math.fsum(map(float, some)) / len(some), n) for n, some in values.items()]  # type: ignore[arg-type]
        return sorted(means, key=lambda one: (-math.inf if one[0] is None else one[0], -one[1]), reverse=True)

    @contextmanager
    def claimed(self) -> Iterator[Unit | bool]:
        """The next unit to train, locked for this process; True if others still train what must come first, False if
        nothing is left."""
        with ExitStack() as inside:
            with self.alone():
                self._tell()
                claim = self._claim(inside)
            yield claim

    def _claim(self, inside: ExitStack) -> Unit | bool:
        for rung in range(self.rungs):
            waiting = False
            for unit in self.units(rung) or []:
                if self.result(unit) is None:
                    if _entered(inside, self.folder(unit)):
                        self.read_fields(unit.trial)
                        return unit
                    waiting = True
            if waiting:
                return True
        return False

    def read_fields(self, trial: int) -> dict[str, Any]:
        """The recipe's fields of a trial, drawn if it is new."""
        path = self.out / "trials" / f"{trial:03}" / "trial.json"
        if trial not in self.fields:
            if not path.exists():
                self._draw(path, trial)
            self.fields[trial] = read_json(path)["fields"]
        return self.fields[trial]

    @contextmanager
    def alone(self, what: str = "trials") -> Iterator[None]:
        """Wait until no other process holds this lock."""
        with ExitStack() as inside:
            while not _entered(inside, self.out / what):
                time.sleep(0.05)
            yield

    def _draw(self, path: Path, trial: int) -> None:
        with self._study(trial) as study:
            import optuna

            for unfinished in study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
                if not self._is_drawn(unfinished.number):  # killed between drawing and writing its file
                    study.tell(unfinished.number, state=optuna.trial.TrialState.FAIL)
            asked = study.ask()

            def suggest(name: str, choice: Choice) -> Any:
                if isinstance(choice, Range):
                    whole = isinstance(choice.low, int) and isinstance(choice.high, int)
                    suggested = asked.suggest_int if whole else asked.suggest_float
                    return suggested(name, choice.low, choice.high, log=choice.log)
                return asked.suggest_categorical(name, choice)

            fields = self.space.draw(suggest)
            write_json(path, {"fields": fields, "number": asked.number})

    def _is_drawn(self, number: int) -> bool:
        files = self.out.glob("trials/*/trial.json")
        return any(read_json(file)["number"] == number for file in files)

    def _tell(self) -> None:
        """Report to Optuna what was measured at the first rung since the last time."""
        files = sorted(self.out.glob("trials/*/trial.json"))
        if not files:
            return
        with self._study(0) as study:
            import optuna

            states = [one.state for one in study.get_trials(deepcopy=False)]
            for file in files:
                number = read_json(file)["number"]
                found = self.result(Unit(int(file.parent.name), 0, 0))
                if found and states[number] == optuna.trial.TrialState.RUNNING:
                    failed = optuna.trial.TrialState.FAIL if found.value is None else None
                    study.tell(number, found.value, state=failed)

    @contextmanager
    def _study(self, trial: int) -> Iterator[Any]:
        """Optuna's study with the sampler of a trial. Its log level is restored."""
        try:
            import optuna
        except ImportError:
            raise UserError('moat tune needs Optuna; install it with: pip install "moatlab[tune]"') from None
        level = optuna.logging.get_verbosity()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optuna.logging.set_verbosity(optuna.logging.ERROR)
            try:
                sampler = optuna.samplers.TPESampler(
                    seed=key(self.seed, "trial", trial) % 2**32, n_startup_trials=max(self.count // 3, 5)
                )
                with users_code(f"--storage {self.storage} can't be used"):
                    study = optuna.create_study(
                        storage=self._storage(),
                        sampler=sampler,
                        study_name=self.study,
                        direction="maximize",
                        load_if_exists=True,
                    )
                yield study
            finally:
                optuna.logging.set_verbosity(level)

    def _storage(self) -> Any:
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        if self.storage:
            return self.storage
        path = self.out / "tune.journal"
        path.with_name(f"{path.name}.lock").unlink(missing_ok=True)  # of a process that was killed: we hold the lock
        return JournalStorage(JournalFileBackend(str(path)))

    def importances(self) -> dict[str, float]:
        """How much of the first rung's values each choice explains; empty if there are too few trials."""
        with self.alone(), self._study(0) as study:
            import optuna

            done = [trial for trial in study.get_trials(deepcopy=False) if trial.value is not None]
            if len(done) < 4 or len({trial.value for trial in done}) < 2:
                return {}
            evaluator = optuna.importance.PedAnovaImportanceEvaluator()
            return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))


def _entered(inside: ExitStack, folder: Path) -> bool:
    """Whether the lock of a folder was free and is held now."""
    try:
        inside.enter_context(locked(folder))
    except UserError:
        if not is_locked(folder):
            raise  # a link, for example
        return False
    return True
