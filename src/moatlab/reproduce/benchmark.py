"""How near this machine runs to its limit: a matrix product, our steps, and epochs against their passes."""

from __future__ import annotations

import copy
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from moatlab.attacks.probe import Probe
from moatlab.models import BUILT_IN, build_model, users_code
from moatlab.runtime.console import Bar, Pace
from moatlab.runtime.device import DTYPES, Autocast, choose_precision, full_precision, left_as_found
from moatlab.runtime.environment import describe_environment, keep_freed_memory
from moatlab.runtime.files import SCHEMA
from moatlab.training.optimizer import Sgd
from moatlab.training.recipe import make_recipe
from moatlab.training.run_folder import RunFolder
from moatlab.training.setup import choose_device, prepare
from moatlab.training.trainer import Run

SIZE, PRODUCTS = 2048, 20  # the limit is the best of so many products of two matrices of this size
ROUNDS = 5
STEPS = 13  # of each stage: a third of an epoch of mini
CLASSES = 10
METHODS = {
    "fgsm": ["fgsm"],
    "fast": ["fast"],
    "pgd:7": ["pgd:7"],
    "moat:2": ["mixup", "fast", "pgd:2"],
    "imoat:2,5,8": ["mixup", "fast", "pgd:2", "mixup", "fast", "pgd:5", "mixup", "fast", "pgd:8"],
}
STAGES = list(dict.fromkeys(stage for stages in METHODS.values() for stage in stages))
Step = Callable[[], object]


def bench(
    *,
    model: str = "preact_resnet18",
    width: int = 64,
    batch_size: int = 128,
    image_size: int = 32,
    threads: int | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Measure and return what `moat bench --json` prints. Our steps run on random images of three channels."""
    keep_freed_memory()
    chosen = choose_device(device)
    in_full = full_precision() if choose_precision("auto", chosen) == "fp32" else nullcontext()
    with left_as_found(chosen, threads), Bar("bench", 2.0) as bar, in_full:
        arguments = {"width": width} if model in BUILT_IN else {}
        net = build_model(model, classes=CLASSES, arguments=arguments).to(chosen)
        setting = {"model": model, **arguments, "batch_size": batch_size, "image_size": image_size}
        progress = Progress(bar)
        steps = measure_steps(net, batch_size, image_size, chosen, progress)
        epochs = measure_epochs(chosen, progress)
        environment = describe_environment() | {"device": str(chosen)}
        return {"schema": SCHEMA, "setting": setting, **steps, "epochs": epochs, "environment": environment}


class Progress:
    """The bar, half of it for the steps and half for the epochs, which take about as long."""

    def __init__(self, bar: Bar) -> None:
        self.bar, self.pace = bar, Pace(bar.total, 0.0)

    def __call__(self, title: str, done: float) -> None:
        self.bar.update(done, f"ETA {self.pace.eta(done)}", title=title)


# --- steps


def measure_steps(
    model: nn.Module, batch_size: int, image_size: int, device: torch.device, progress: Progress
) -> dict[str, Any]:
    """The limit and our three steps, in turns, so that all of them meet the same machine."""
    memory = {"start_gib": peak_memory(device)}
    gigaflops = {}
    shape = (3, image_size, image_size)
    with users_code(f"the model can't train on {batch_size} images of shape {shape} in {CLASSES} classes"):
        x = torch.rand(batch_size, *shape, device=device).contiguous(memory_format=torch.channels_last)
        y = torch.randint(CLASSES, (batch_size,), device=device)
        steps = three_steps(model, x, y)
        for name, step in steps.items():  # each needs more memory than the one before
            gigaflops[name] = count_gigaflops(step)
            memory[f"{name}_gib"] = peak_memory(device)
    limits = machine_limits(device)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    products: dict[str, list[float]] = {name: [] for name in limits}
    for round_ in range(ROUNDS):
        for name, (work, product) in limits.items():
            products[name] += [work / timed(product, device) for _ in range(PRODUCTS // ROUNDS)]
        for number, (name, step) in enumerate(steps.items()):
            progress(name.replace("_", " "), (round_ + number / len(steps)) / ROUNDS)
            seconds[name].append(timed(step, device))
    limit = {f"{name}_gflops": max(speeds) for name, speeds in products.items()}
    result: dict[str, Any] = {
        "limit": limit | {"median_gemm_gflops": statistics.median(products["gemm"]), "threads": torch.get_num_threads()}
    }
    for name in steps:
        median = statistics.median(seconds[name])
        speed = gigaflops[name] / median
        result[name] = {
            "images_per_second": batch_size / median, "gflops": speed, "share_of_limit": speed / limit["gemm_gflops"],
            "gflop_per_image": gigaflops[name] / batch_size, "seconds": seconds[name],
        }  # fmt: skip
    return result | {"memory": memory}


def three_steps(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Step]:
    """Inference in plain float32, in inference mode; the attack and the training step as training does them."""
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    still = copy.deepcopy(model).eval()
    precision = choose_precision("auto", x.device)
    trained = model.train() if precision == "fp32" else Autocast(model.train(), precision)
    sgd = Sgd(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)

    def train() -> None:
        sgd.zero_grad()
        F.cross_entropy(trained(x), y).backward()  # type: ignore[no-untyped-call]
        sgd.step()

    return {
        "inference": in_full_precision(lambda: Probe(still, inference_mode=True).logits(x)),
        "attack_step": lambda: Probe(trained).gradient(x, y),
        "training_step": train,
    }


def in_full_precision(step: Step) -> Step:
    def run() -> None:
        with full_precision():
            step()

    return run


def count_gigaflops(step: Step) -> float:
    """What the convolutions and matrix products of a step add up to, by PyTorch's own formulas."""
    counter = Flops()  # type: ignore[no-untyped-call]
    with counter:
        step()
    return counter.total / 1e9


class Flops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation. PyTorch's FlopCounterMode would do, but fails where an input alone is differentiated."""

    total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = flop_registry.get(func.overloadpacket)
        if formula is None:
            with self:  # in inference mode an operation may come whole, with others inside
                output = func.decompose(*args, **kwargs)
            return func(*args, **kwargs) if output is NotImplemented else output
        output = func(*args, **kwargs)
        self.total += formula(*args, **kwargs, out_val=output)
        return output


def machine_limits(device: torch.device) -> dict[str, tuple[float, Step]]:
    """GFLOP and the call: a float32 matrix product; on a GPU also a convolution in the precision of training."""
    left, right = torch.rand(2, SIZE, SIZE, device=device)
    limits = {"gemm": (2 * SIZE**3 / 1e9, in_full_precision(lambda: torch.mm(left, right)))}
    if device.type == "cuda":
        dtype = DTYPES[choose_precision("auto", device)]
        images = torch.rand(256, 256, 32, 32, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)
        kernel = torch.rand(256, 256, 3, 3, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)
        limits["convolution"] = (2 * images.numel() * 256 * 9 / 1e9, lambda: torch.conv2d(images, kernel, padding=1))
    return limits


# --- epochs


def measure_epochs(device: torch.device, progress: Progress) -> dict[str, Any]:
    """An epoch of each method on mini against the sum of its passes: real steps of a run (data, draws, counting and
    all) and the passes that they are made of, in turns. What an epoch saves at its end is added to it."""
    recipe = make_recipe(" | ".join(STAGES), epochs=len(STAGES), device=str(device), threads=torch.get_num_threads())
    real: dict[str, float] = {}
    passes: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        session = prepare(recipe, None, continuing=False)
        x, y = session.batches.at(0)
        pure = three_steps(copy.deepcopy(session.model), x, y)
        run = Run(session, RunFolder(Path(folder)))
        with run.meter.counting(session.model):
            for epoch, name in enumerate(STAGES):
                attacks = session.method.stage_at(epoch, recipe.epochs).step_cost.input_backwards
                ours, theirs = [], []
                for step in range(STEPS):
                    progress(f"epoch of {name}", 1 + (epoch + step / STEPS) / len(STAGES))
                    run.progress.step = epoch * session.steps_per_epoch + step
                    ours.append(timed(run.step, device))
                    theirs.append(timed(partial(all_passes, pure, attacks), device))
                saving = timed(lambda: run.save("running"), device)
                real[name] = session.steps_per_epoch * statistics.median(ours) + saving
                passes[name] = session.steps_per_epoch * statistics.median(theirs)
    result = {}
    for method, stages in METHODS.items():
        whole, sum_of_passes = (sum(table[stage] for stage in stages) / len(stages) for table in (real, passes))
        result[method] = {"seconds": whole, "passes_seconds": sum_of_passes, "overhead": whole / sum_of_passes - 1}
    return result


def all_passes(steps: dict[str, Step], attacks: int) -> None:
    for _ in range(attacks):
        steps["attack_step"]()
    steps["training_step"]()


# --- seconds and bytes


def timed(step: Step, device: torch.device) -> float:
    begun = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter() - begun


def peak_memory(device: torch.device) -> float:
    """The most that was in use so far, in GiB: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** (30 if sys.platform == "darwin" else 20)
