"""How cost scales: epoch time with K, memory with K and data set size, evaluation time with robust images.

    python benchmarks/scaling.py        (a few minutes; writes docs/results/speed.json and scaling.png)

Epoch times come from steps of `moat train pgd:K` on mini, all K in turns. Evaluation is Auto-PGD and 500 queries of
Square on images that stay robust, so that none leaves the active set. Lines are fitted by least squares.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from sides import RESULTS, ask, record, start, tell

import moatlab
from moatlab.attacks import Probe
from moatlab.attacks.auto_pgd import apgd
from moatlab.attacks.probe import evaluating
from moatlab.attacks.square_attack import square
from moatlab.data.batches import Batches
from moatlab.data.images import as_floats
from moatlab.reproduce.benchmark import peak_memory
from moatlab.runtime.environment import keep_freed_memory
from moatlab.training.making import make_recipe
from moatlab.training.run_folder import RunFolder
from moatlab.training.setup import Session
from moatlab.training.trainer import Trainer

KS = range(1, 9)
CPU = torch.device("cpu")
FIXTURE = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "mini_moat2.safetensors"
Numbers = Sequence[float]


def fit(x: Numbers, y: Numbers) -> dict[str, float]:
    slope, intercept = np.polyfit(x, y, 1)
    rest = np.asarray(y) - (intercept + slope * np.asarray(x))
    return {"slope": slope, "intercept": intercept, "r2": 1 - float(rest.var() / np.var(y))}


def epochs_against_k(repeats: int = 15) -> dict[str, Any]:
    """Time steps of pgd:1 ... pgd:8 in turns, and an attack step, which the slope should equal."""
    keep_freed_memory()
    recipe = make_recipe(" | ".join(f"pgd:{k}" for k in KS), epochs=len(KS))
    session = Session(recipe, CPU, moatlab.load_images(recipe.data))
    x, y = session.batches.at(0)
    seconds: dict[int, list[float]] = {k: [] for k in KS}
    attack: list[float] = []
    memory = {}
    with tempfile.TemporaryDirectory() as folder:
        run = Trainer(session, RunFolder(Path(folder)))
        for k in KS:  # memory first, in order of K: the peak can only grow
            timed_step(run, k, 0)
            memory[k] = peak_memory(CPU)
        for repeat in range(repeats):
            tell(f"  K, round {repeat + 1} of {repeats}")
            for k in KS:
                seconds[k].append(timed_step(run, k, repeat))
                attack.append(timed(lambda: Probe(session.model).gradient(x, y)))
    epoch = [session.steps_per_epoch * statistics.median(seconds[k]) for k in KS]
    line = fit(list(KS), epoch)
    attack_epoch = session.steps_per_epoch * statistics.median(attack)
    print(f"epoch time in K: {line['slope']:.2f} s for each step, R^2 {line['r2']:.4f}; an attack step alone takes "
          f"{attack_epoch:.2f} s an epoch; memory {memory[1]:.3f} GiB at K = 1, {memory[8]:.3f} at K = 8")  # fmt: skip
    return {"k": list(KS), "epoch_seconds": epoch, "fit": line, "attack_step_epoch_seconds": attack_epoch,
            "peak_gib": list(memory.values())}  # fmt: skip


def timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def timed_step(run: Trainer, k: int, number: int) -> float:
    run.progress.step = (k - 1) * run.session.steps_per_epoch + number
    with run.meter.counting(run.session.model):
        return timed(run.step)


def memory_side(name: str, pipe: Connection) -> None:
    """Peak memory of a few steps on random images; `name` is their number."""
    keep_freed_memory()
    session = Session(make_recipe("pgd:2"), CPU, moatlab.load_images("mini"))
    pipe.recv()
    before = peak_memory(CPU)
    images = torch.randint(256, (int(name), 32, 32, 3), dtype=torch.uint8)
    labels = torch.randint(10, (int(name),))
    batches = Batches(images, labels, session.recipe.batch_size, True, 0)
    with tempfile.TemporaryDirectory() as folder:
        session.batches = batches
        run = Trainer(session, RunFolder(Path(folder)))
        for step in range(4):
            timed_step(run, 1, step)
    pipe.send({"data_gib": images.numel() / 2**30, "before_gib": before, "peak_gib": peak_memory(CPU)})


def memory_against_data() -> list[dict[str, Any]]:
    rows = []
    for count in (5_000, 50_000, 200_000):
        pipe = start(memory_side, str(count))
        rows.append({"images": count, **ask(pipe, True)})
        beyond = rows[-1]["peak_gib"] - rows[-1]["data_gib"]
        print(f"memory with {count:,} images of 32x32: {rows[-1]['peak_gib']:.2f} GiB, {beyond:.2f} beyond the data")
    return rows


def evaluation_against_images(repeats: int = 3) -> dict[str, Any]:
    """Time on n images that stay robust."""
    keep_freed_memory()
    model, data, eps = moatlab.load(FIXTURE), moatlab.load_images("mini"), 16 / 255
    x, y = as_floats(data.test_x), data.test_y
    verdicts = moatlab.evaluate(model, x[:1000], y[:1000], attacks=["pgd50", "apgd-t"], eps=eps).robust
    robust = (verdicts["pgd50"] & verdicts["apgd-t"]).nonzero().squeeze(1)
    counts = [count for count in (8, 16, 32, 64, 128, 256, 512) if count <= 4 * len(robust)]
    rows = robust.repeat(4)  # few images are robust; a repeated image costs as much as another one
    attacks: dict[str, Callable[[Probe, int], object]] = {
        "apgd-ce": lambda probe, n: apgd(probe, x[rows[:n]], y[rows[:n]], eps=eps),
        "square": lambda probe, n: square(probe, x[rows[:n]], y[rows[:n]], eps=eps, queries=range(500)),
    }
    result: dict[str, Any] = {"standing": counts}
    with evaluating(model):
        model.to(memory_format=torch.channels_last)
        for name, attack in attacks.items():
            seconds: dict[int, list[float]] = {n: [] for n in counts}
            for repeat in range(repeats):
                tell(f"  {name}, round {repeat + 1} of {repeats}")
                for n in counts:
                    probe = Probe(model, batch_size=256, memory_format=torch.channels_last, inference_mode=True)
                    seconds[n].append(timed(partial(attack, probe, n)))
            median = [statistics.median(seconds[n]) for n in counts]
            line = fit(counts, median)
            result[name] = {"seconds": median, "fit": line}
            each = f"{1000 * line['slope']:.1f} ms each plus {line['intercept']:.2f} s"
            print(f"{name} against robust images: {each}, R^2 {line['r2']:.4f}")
    return result


def draw(epochs: dict[str, Any], evaluation: dict[str, Any]) -> None:
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    line = epochs["fit"]
    left.plot(epochs["k"], epochs["epoch_seconds"], "o", color="#0072B2")
    ends = np.array([0, max(epochs["k"])])
    label = f"{line['intercept']:.2f} + {line['slope']:.2f} K   (R² = {line['r2']:.4f})"
    left.plot(ends, line["intercept"] + line["slope"] * ends, color="#0072B2", linewidth=1, label=label)
    left.set_xlabel("K, steps of the attack")
    left.set_ylabel("seconds for an epoch of pgd:K on mini")
    for name, colour in (("apgd-ce", "#D55E00"), ("square", "#009E73")):
        line = evaluation[name]["fit"]
        right.plot(evaluation["standing"], evaluation[name]["seconds"], "o", color=colour)
        ends = np.array([0, max(evaluation["standing"])])
        what = {"apgd-ce": "Auto-PGD", "square": "Square, 500 queries"}[name]
        label = f"{what} (R² = {line['r2']:.4f})"
        right.plot(ends, line["intercept"] + line["slope"] * ends, color=colour, linewidth=1, label=label)
    right.set_xlabel("images that stay robust")
    right.set_ylabel("seconds")
    for axes in (left, right):
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(RESULTS.with_name("scaling.png"), dpi=150)


def main() -> None:
    memory = memory_against_data()
    epochs, evaluation = epochs_against_k(), evaluation_against_images()
    record("scaling", {"epochs": epochs, "memory": memory, "evaluation": evaluation})
    draw(epochs, evaluation)


if __name__ == "__main__":
    main()
