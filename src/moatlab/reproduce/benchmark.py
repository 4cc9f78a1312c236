"""How near this machine runs to its limit: a matrix product, our steps, and epochs against their passes."""

import copy
import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from moatlab.attacks.probe import Probe
from moatlab.data.images import Images
from moatlab.data.loading import load_images
from moatlab.methods.language import parse_method
from moatlab.models.registry import BUILT_IN, build_model
from moatlab.runtime.console import Bar
from moatlab.runtime.device import DTYPES, Autocast, Machine, choose_precision, full_precision
from moatlab.runtime.environment import describe_environment
from moatlab.runtime.errors import users_code
from moatlab.runtime.files import SCHEMA
from moatlab.training.optimizer import Sgd
from moatlab.training.recipe import Recipe, make_recipe
from moatlab.training.trainer import Trainer, rehearsal

SIZE, PRODUCTS = 2048, 20  # the limit is the best of so many products of two matrices of this size
ROUNDS = 5
STEPS = 13  # of each stage: a third of an epoch of mini
FEW_STEPS = 3  # that the time of a sweep is estimated from, after a first one that warms up
CLASSES = 10
METHODS = ("fgsm", "fast", "pgd:7", "moat:2", "imoat:2,5,8")
EPOCHS = 9  # after which each of them has been through its stages
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
    with Machine(device, threads).in_use() as chosen, Bar("bench", 2.0) as bar:
        arguments = {"width": width} if model in BUILT_IN else {}
        net = build_model(model, classes=CLASSES, arguments=arguments).to(chosen)
        setting = {"model": model, **arguments, "batch_size": batch_size, "image_size": image_size}
        with full_precision() if choose_precision("auto", chosen) == "fp32" else nullcontext():
            steps = measure_steps(net, batch_size, image_size, chosen, bar)
        epochs = measure_epochs(chosen, bar)
        environment = describe_environment() | {"device": str(chosen)}
        return {"schema": SCHEMA, "setting": setting, **steps, "epochs": epochs, "environment": environment}


# --- steps


def measure_steps(model: nn.Module, batch_size: int, image_size: int, device: torch.device, bar: Bar) -> dict[str, Any]:
    """The limit and our three steps, in turns, so that all of them meet the same machine."""
    memory, gigaflops, shape = {"start_gib": peak_memory(device)}, {}, (3, image_size, image_size)
    with users_code(f"the model can't train on {batch_size} images of shape {shape} in {CLASSES} classes"):
        x = torch.rand(batch_size, *shape, device=device).contiguous(memory_format=torch.channels_last)
        y = torch.randint(CLASSES, (batch_size,), device=device)
        steps = three_steps(model, x, y)
        for name, step in steps.items():  # each needs more memory than the one before
            gigaflops[name] = count_gigaflops(step)
            memory[f"{name}_gib"] = peak_memory(device)
    limits = machine_limits(device)
    seconds, products = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for turn in range(ROUNDS):
        for name, (work, product) in limits.items():
            products[name] += [work / timed(product, device) for _ in range(PRODUCTS // ROUNDS)]
        for number, (name, step) in enumerate(steps.items()):
            bar.update((turn + number / len(steps)) / ROUNDS, title=name.replace("_", " "))
            seconds[name].append(timed(step, device))
    limit = {f"{name}_gflops": max(speeds) for name, speeds in products.items()}
    limit |= {"median_gemm_gflops": statistics.median(products["gemm"]), "threads": torch.get_num_threads()}
    rows = {}
    for name, taken in seconds.items():
        speed = gigaflops[name] / statistics.median(taken)
        rows[name] = {
            "images_per_second": batch_size / statistics.median(taken),
            "gflops": speed,
            "share_of_limit": speed / limit["gemm_gflops"],
            "gflop_per_image": gigaflops[name] / batch_size,
            "seconds": taken,
        }
    return {"limit": limit, **rows, "memory": memory}


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
        "inference": full_precision()(lambda: Probe(still, inference_mode=True).logits(x)),
        "attack_step": lambda: Probe(trained).gradient(x, y),
        "training_step": train,
    }


def count_gigaflops(step: Step) -> float:
    """What the convolutions and matrix products of a step add up to, with PyTorch's own formulas."""
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
    product: Step = full_precision()(lambda: torch.mm(left, right))
    limits = {"gemm": (2 * SIZE**3 / 1e9, product)}
    if device.type == "cuda":
        dtype = DTYPES[choose_precision("auto", device)]
        images, kernel = (
            torch.rand(256, 256, side, side, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)
            for side in (32, 3)
        )
        limits["convolution"] = (2 * images.numel() * 256 * 9 / 1e9, lambda: torch.conv2d(images, kernel, padding=1))
    return limits


# --- epochs


def measure_epochs(device: torch.device, bar: Bar) -> dict[str, Any]:
    """An epoch of each method on mini against the sum of its passes: real steps of a run (data, draws, counting and
    all) and the passes that they are made of, in turns. What an epoch saves at its end is added to it."""
    cycles = {name: [str(parse_method(name).stage_at(epoch, EPOCHS)) for epoch in range(EPOCHS)] for name in METHODS}
    stages = list(dict.fromkeys(stage for cycle in cycles.values() for stage in cycle))
    seconds: dict[str, tuple[float, float]] = {}  # of an epoch, and of its passes
    recipe = make_recipe(" | ".join(stages), epochs=len(stages))
    with rehearsal(recipe, Machine(str(device), torch.get_num_threads()), load_images("mini")) as trainer:
        per_epoch = trainer.session.steps_per_epoch
        pure = three_steps(copy.deepcopy(trainer.session.model), *trainer.session.batches.at(0))
        for epoch, name in enumerate(stages):
            attacks = int(trainer.session.stage_at(epoch * per_epoch).step_cost.input_backwards)
            calls = [*[pure["attack_step"]] * attacks, pure["training_step"]]
            ours, theirs = [], []
            for step in range(STEPS):
                bar.update(1 + (epoch + step / STEPS) / len(stages), title=f"epoch of {name}")
                ours.append(real_step(trainer, epoch * per_epoch + step))
                theirs.append(sum(timed(call, device) for call in calls))
            saving = timed(lambda: trainer.save("running"), device)
            seconds[name] = per_epoch * statistics.median(ours) + saving, per_epoch * statistics.median(theirs)
    result = {}
    for method, cycle in cycles.items():
        whole, passes = (statistics.fmean(seconds[stage][side] for stage in cycle) for side in (0, 1))
        result[method] = {"seconds": whole, "passes_seconds": passes, "overhead": whole / passes - 1}
    return result


def real_step(trainer: Trainer, step: int) -> float:
    """The seconds of one step of training, at this step of the run."""
    trainer.progress.step = step
    return timed(trainer.step, trainer.session.device)


def seconds_per_pass(recipe: Recipe, machine: Machine, images: Images) -> tuple[float, bool]:
    """The time of one pass over the training set, from the fastest of a few steps of fgsm (two passes each); and
    whether there is a GPU."""
    with rehearsal(recipe.model_copy(update={"method": "fgsm"}), machine, images) as trainer:
        taken = [real_step(trainer, step) for step in range(FEW_STEPS + 1)]
        return min(taken[1:]) / 2 * trainer.session.steps_per_epoch, trainer.session.device.type != "cpu"


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
