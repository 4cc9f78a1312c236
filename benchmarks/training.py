"""Training speed of moatlab and of other code, on the same model, batches and steps.

    public loop    a loop like fast_adversarial and most public code: contiguous tensors, attacks with
                   `loss.backward()` (which also computes weight gradients and discards them), plain SGD, loss and
                   accuracy fetched at each step. It uses our batches, so loading costs it as little.
    torchattacks   the same loop with examples from torchattacks' PGD and FFGSM
    ART            the fast trainer of the adversarial-robustness-toolbox, through its `fit`, a batch at a time; its
                   learning rate schedule is zero for a single batch, but it does all the work

Ours is the step of `moat train`, with batches, draws and counting. Each runs in its own process; they take turns.
Medians of steps are compared, and on mini the sums over whole runs. Only ours keeps freed memory
(`environment.keep_freed_memory`), as the command does; with `--keep-for-all` the peers do too.

    make bench-setup && python benchmarks/training.py [--part paper mini] [--rounds 3] [--keep-for-all]
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sides import ask, has_cifar10, installed, record, start, tell
from torch import Tensor, nn

import moatlab
from moatlab.methods.language import Stage
from moatlab.models.convolution import Conv2d
from moatlab.runtime import distributed
from moatlab.runtime.environment import keep_freed_memory
from moatlab.training.making import make_recipe
from moatlab.training.recipe import Recipe
from moatlab.training.run_folder import RunFolder
from moatlab.training.schedules import SCHEDULES
from moatlab.training.setup import Session
from moatlab.training.trainer import Trainer

# Method -> stages to time, one step each. K = 5 is the mean of 2, 5 and 8; cost is linear in K.
METHODS = {"fgsm": ["fgsm"], "pgd:7": ["pgd:7"], "imoat:2,5,8": ["mixup", "fast", "pgd:5"], "fast": ["fast"]}
STAGES = ["fgsm", "pgd:7", "mixup", "fast", "pgd:5"]
PEERS = {
    "public loop": ["fgsm", "pgd:7", "imoat:2,5,8"],
    "torchattacks": ["pgd:7", "fast"],
    "art": ["fast"],
}
BOUNDS = {
    ("public loop", "fgsm"): 1.6, ("public loop", "pgd:7"): 1.9, ("public loop", "imoat:2,5,8"): 1.7,
    ("torchattacks", "pgd:7"): 1.3, ("torchattacks", "fast"): 1.3, ("art", "fast"): 3.0,
}  # fmt: skip


def side(name: str, recipe: Recipe, keep: bool, pipe: Connection) -> None:
    """The process of one library: answers step numbers with seconds and mean loss, "test" with accuracies."""
    torch.set_num_threads(distributed.threads())
    if keep or name == "ours":
        keep_freed_memory()
    session = Session(recipe, torch.device("cpu"), moatlab.load_images(recipe.data))
    with tempfile.TemporaryDirectory() as folder:
        take = our_steps(session, Path(folder)) if name == "ours" else PLAIN[name](session)
        while (request := pipe.recv()) is not None:
            if request == "test":
                images = session.images
                pipe.send(moatlab.measure(session.model, images.test_x, images.test_y, eps=recipe.threat.eps, seed=0))
                continue
            begun = time.perf_counter()
            loss = take(request)
            pipe.send((time.perf_counter() - begun, loss))


Steps = Callable[[list[int]], float]


def our_steps(session: Session, folder: Path) -> Steps:
    run = Trainer(session, RunFolder(folder))

    def take(steps: list[int]) -> float:
        run.loss_sum.zero_()
        with run.meter.counting(session.model):
            for run.progress.step in steps:
                run.step()
        return run.loss_sum.item() / len(steps)

    return take


def plain_steps(session: Session, *, by_torchattacks: bool = False) -> Steps:
    recipe, model = session.recipe, plain(session.model)
    sgd = torch.optim.SGD(model.parameters(), lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay)

    def take(steps: list[int]) -> float:
        loss_sum = right = count = 0.0
        for step in steps:
            stage = session.method.stage_at(step // session.steps_per_epoch, recipe.epochs)
            x, y = session.batches.at(step)
            x, target = x.contiguous(), y
            if stage.name == "mixup":
                x, target = mix(x, y, len(session.images.classes))
            elif by_torchattacks:
                x = torchattacks_examples(model, x, y, stage, recipe.threat.eps)
            else:
                x = public_examples(model, x, y, stage, recipe.threat.eps)
            sgd.param_groups[0]["lr"] = SCHEDULES[recipe.schedule](
                step, epochs=recipe.epochs, steps_per_epoch=session.steps_per_epoch, peak=recipe.lr
            )
            output = model(x)
            loss = F.cross_entropy(output, target)
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            loss_sum += loss.item() * len(y)
            right += (output.max(1)[1] == y).sum().item()
            count += len(y)
        return loss_sum / count

    return take


def plain(model: nn.Module) -> nn.Module:
    """The model as in most public code: contiguous, with PyTorch's own convolutions."""
    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    for module in model.modules():
        if isinstance(module, Conv2d):
            module.by_patches = False
    return model


def public_examples(model: nn.Module, x: Tensor, y: Tensor, stage: Stage, eps: float) -> Tensor:
    """FGSM, Fast or PGD on a perturbation tensor, with a full backward pass per step."""
    steps = int(stage.value or 1)
    size = {"fgsm": eps, "fast": 1.25 * eps}.get(stage.name) or max(eps / 4, eps / steps)
    delta = torch.zeros_like(x)
    if stage.name != "fgsm":
        delta.uniform_(-eps, eps)
        delta = (x + delta).clamp(0, 1) - x
    for _ in range(steps):
        delta.requires_grad_(True)
        F.cross_entropy(model(x + delta), y).backward()
        assert delta.grad is not None
        moved = (delta.detach() + size * delta.grad.sign()).clamp(-eps, eps)
        delta = (x + moved).clamp(0, 1) - x
    return x + delta


def torchattacks_examples(model: nn.Module, x: Tensor, y: Tensor, stage: Stage, eps: float) -> Tensor:
    import torchattacks

    if stage.name == "fast":
        attack = torchattacks.FFGSM(model, eps=eps, alpha=1.25 * eps)
    else:
        steps = int(stage.value)
        attack = torchattacks.PGD(model, eps=eps, alpha=max(eps / 4, eps / steps), steps=steps, random_start=True)
    attack.set_model_training_mode(model_training=True, batchnorm_training=True, dropout_training=True)
    return attack(x, y)  # type: ignore[no-any-return]


def mix(x: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    weight, order = torch.rand(()).item(), torch.randperm(len(y))
    labels = F.one_hot(y, classes).float()
    return weight * x + (1 - weight) * x[order], weight * labels + (1 - weight) * labels[order]


def art_steps(session: Session) -> Steps:
    """ART's trainer has its own draws, gradient clipping and learning rate. By default it leaves the model in eval mode
    for its updates; `training_mode=True` keeps it in train mode, as the others do."""
    from art.defences.trainer import AdversarialTrainerFBFPyTorch
    from art.estimators.classification import PyTorchClassifier

    model = plain(session.model)
    classes = len(session.images.classes)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    shape = tuple(session.batches.at(0)[0].shape[1:])
    classifier = PyTorchClassifier(
        model=model, loss=nn.CrossEntropyLoss(), optimizer=sgd, input_shape=shape, nb_classes=classes,
        clip_values=(0.0, 1.0), preprocessing=None, device_type="cpu",
    )  # fmt: skip
    classifier.loss_gradient = functools.partial(classifier.loss_gradient, training_mode=True)
    trainer = AdversarialTrainerFBFPyTorch(classifier, eps=session.recipe.threat.eps)

    def take(steps: list[int]) -> float:
        batches = [session.batches.at(step) for step in steps]
        x = torch.cat([x for x, _ in batches]).contiguous().numpy()
        y = torch.cat([y for _, y in batches]).numpy()
        trainer.fit(x, np.eye(classes, dtype=np.float32)[y], batch_size=session.recipe.batch_size, nb_epochs=1)
        return float("nan")  # ART logs its losses and returns none

    return take


PLAIN: dict[str, Callable[[Session], Steps]] = {
    "public loop": plain_steps,
    "torchattacks": functools.partial(plain_steps, by_torchattacks=True),
    "art": art_steps,
}


def paper_part(options: argparse.Namespace) -> dict[str, Any]:
    """Time steps at the paper's size, in turns."""
    recipe = make_recipe(" | ".join(STAGES), data="cifar10", epochs=len(STAGES), seed=0)
    peers = [name for name in PEERS if name == "public loop" or installed(name)]
    pipes = {name: start(side, name, recipe, options.keep_for_all) for name in ["ours", *peers]}
    per_epoch = 50_000 // recipe.batch_size
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in pipes}
    first_loss: dict[str, float] = {}
    for round_ in range(-1, options.rounds):  # the first round warms up, on fgsm and fast only
        for method, stages in METHODS.items():
            steps = [STAGES.index(stage) * per_epoch + round_ + 1 for stage in stages]
            sides = [name for name in pipes if name == "ours" or method in PEERS[name]]
            for name in sides if round_ >= 0 or method in ("fgsm", "fast") else []:
                taken, loss = ask(pipes[name], steps)
                if round_ >= 0:
                    seconds[name].setdefault(method, []).append(taken)
                elif method == "fgsm":
                    first_loss[name] = loss  # should be equal: same weights, same images
                tell(f"  round {round_ + 1} of {options.rounds}: {method}, {name}: {taken:.1f} s, loss {loss:.3f}")
    for pipe in pipes.values():
        pipe.send(None)
    rows = []
    for peer in peers:
        for method in PEERS[peer]:
            images = recipe.batch_size * len(METHODS[method])
            speed = {name: images / statistics.median(seconds[name][method]) for name in ("ours", peer)}
            rows.append({
                "method": method, "peer": peer, "ratio": speed["ours"] / speed[peer], "bound": BOUNDS[peer, method],
                "images_per_second": speed, "seconds": {name: seconds[name][method] for name in ("ours", peer)},
                "passes": speed["ours"] / speed[peer] >= BOUNDS[peer, method],
            })  # fmt: skip
            print(f"{method:<12} {speed['ours']:6.1f} images/s, {rows[-1]['ratio']:.2f} times {peer} "
                  f"({speed[peer]:.1f}; bound {BOUNDS[peer, method]})", flush=True)  # fmt: skip
    return {"rows": rows, "loss_of_the_first_fgsm_step": first_loss, "setting": recipe.setting}


def mini_part(options: argparse.Namespace) -> dict[str, Any]:
    """Whole moat:2 runs on mini, alternating epoch by epoch; then both models are tested."""
    recipe = make_recipe("moat:2", seed=0)
    pipes = {name: start(side, name, recipe, options.keep_for_all) for name in ("ours", "public loop")}
    per_epoch = (len(moatlab.load_images("mini").train_y) - recipe.holdout) // recipe.batch_size
    seconds: dict[str, list[float]] = {name: [] for name in pipes}
    for epoch in range(recipe.epochs):
        steps = list(range(epoch * per_epoch, (epoch + 1) * per_epoch))
        for name, pipe in pipes.items():
            taken, loss = ask(pipe, steps)
            seconds[name].append(taken)
            tell(f"  epoch {epoch + 1} of {recipe.epochs}, {name}: {taken:.1f} s, loss {loss:.3f}")
    accuracy = {name: ask(pipe, "test") for name, pipe in pipes.items()}
    for pipe in pipes.values():
        pipe.send(None)
    ratio = sum(seconds["public loop"]) / sum(seconds["ours"])
    print(f"mini moat:2   {ratio:.2f} times the public loop ({sum(seconds['ours']):.0f} s against "
          f"{sum(seconds['public loop']):.0f} s); " + "; ".join(
              f"{name} {100 * row['clean']:.1f} % clean, {100 * row['pgd7']:.1f} % pgd7"
              for name, row in accuracy.items()), flush=True)  # fmt: skip
    return {"ratio": ratio, "seconds": seconds, "accuracy": accuracy, "setting": recipe.setting}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", nargs="*", choices=["paper", "mini"], default=["paper", "mini"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep-for-all", action="store_true", help="keep freed memory for the peers too")
    options = parser.parse_args()
    kept = " (freed memory kept for all)" if options.keep_for_all else ""
    if "paper" in options.part and has_cifar10():
        record(f"training{kept}", paper_part(options))
    if "mini" in options.part:
        record(f"training on mini{kept}", mini_part(options))


if __name__ == "__main__":
    main()
