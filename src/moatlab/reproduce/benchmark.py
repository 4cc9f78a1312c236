"""`moat bench`: single steps compared with a matrix product, and epochs compared with the sum of their passes."""

import copy
import resource
import statistics
import sys
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
from moatlab.training.estimate import FEW_STEPS, real_step, timed
from moatlab.training.making import make_recipe
from moatlab.training.optimizer import Sgd
from moatlab.training.recipe import Recipe
from moatlab.training.trainer import rehearsal

SIZE, PRODUCTS = 2048, 20  # the limit is the fastest of 20 products of two 2048 x 2048 matrices
ROUNDS = 5
STEPS = 13  # timed per stage: a third of an epoch of mini
CLASSES = 10
METHODS = ("fgsm", "fast", "pgd:7", "moat:2", "imoat:2,5,8")
EPOCHS = 9  # enough for each method to run all its stages
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
    """Run the benchmark and return what `moat bench --json` prints. Steps use random images with three channels."""
    with Machine(device, threads).in_use() as chosen, Bar("bench", 2.0) as bar:
        arguments = {"width": width} if model in BUILT_IN else {}
        net = build_model(model, classes=CLASSES, arguments=arguments).to(chosen)
        setting = {"model": model, **arguments, "batch_size": batch_size, "image_size": image_size}
        with full_precision() if choose_precision("auto", chosen) == "fp32" else nullcontext():
            steps = measure_steps(net, batch_size, image_size, chosen, bar)
        epochs = measure_epochs(chosen, bar)
        environment = describe_environment() | {"device": str(chosen)}
        return {"schema": SCHEMA, "setting": setting, **steps, "epochs": epochs, "environment": environment}


def measure_steps(model: nn.Module, batch_size: int, image_size: int, device: torch.device, bar: Bar) -> dict[str, Any]:
    """Time the limit and the three steps in turns, so that all of them run under the same load."""
    memory, gigaflops, shape = {"start_gib": peak_memory(device)}, {}, (3, image_size, image_size)
    with users_code(f"the model can't be trained on {batch_size} images of shape {shape} with {CLASSES} classes"):
        x = torch.rand(batch_size, *shape, device=device).contiguous(memory_format=torch.channels_last)
        y = torch.randint(CLASSES, (batch_size,), device=device)
        steps = three_steps(model, x, y)
        for name, step in steps.items():  # in order of memory: the peak can only grow
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
    """Inference in float32 and inference mode; the attack step and the training step as in training."""
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
    """GFLOP of the convolutions and matrix products of a step, from PyTorch's own formulas."""
    with Flops() as counter:  # type: ignore[no-untyped-call]
        step()
    return float(counter.total) / 1e9


class Flops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count operations as they are dispatched. PyTorch's FlopCounterMode fails if only an input is differentiated."""

    total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if formula := flop_registry.get(func.overloadpacket):
            output = func(*args, **kwargs)
            self.total += formula(*args, **kwargs, out_val=output)
            return output
        with self:  # in inference mode an operation may be composed of others
            output = func.decompose(*args, **kwargs)
        return func(*args, **kwargs) if output is NotImplemented else output


def machine_limits(device: torch.device) -> dict[str, tuple[float, Step]]:
    """GFLOP and call of a float32 matrix product and, on a GPU, of a convolution in the precision of training."""
    left, right = torch.rand(2, SIZE, SIZE, device=device)
    product: Step = full_precision()(lambda: torch.mm(left, right))
    limits = {"gemm": (2 * SIZE**3 / 1e9, product)}
    if device.type == "cuda":
        dtype = DTYPES[choose_precision("auto", device)]
        images, kernel = (torch.rand(256, 256, side, side, device=device, dtype=dtype) for side in (32, 3))
        images, kernel = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (images, kernel))
        limits["convolution"] = (2 * images.numel() * 256 * 9 / 1e9, lambda: torch.conv2d(images, kernel, padding=1))
    return limits


def measure_epochs(device: torch.device, bar: Bar) -> dict[str, Any]:
    """Time of an epoch of each method on mini, and of its passes alone. Real training steps (with data, draws and
    counting) and bare passes are timed in turns; an epoch includes its checkpoint."""
    cycles = {name: [str(parse_method(name).stage_at(epoch, EPOCHS)) for epoch in range(EPOCHS)] for name in METHODS}
    stages = list(dict.fromkeys(stage for cycle in cycles.values() for stage in cycle))
    seconds: dict[str, tuple[float, float]] = {}  # an epoch, and its passes
    recipe = make_recipe(" | ".join(stages), epochs=len(stages), precision="auto")  # as in three_steps
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


def seconds_per_pass(recipe: Recipe, machine: Machine, images: Images) -> tuple[float, bool]:
    """Time of a pass over the training set, from the fastest of a few fgsm steps (two passes each); and whether the
    device is a GPU."""
    with rehearsal(recipe.model_copy(update={"method": "fgsm"}), machine, images) as trainer:
        taken = [real_step(trainer, step) for step in range(FEW_STEPS + 1)]
        return min(taken[1:]) / 2 * trainer.session.steps_per_epoch, trainer.session.device.type != "cpu"


def peak_memory(device: torch.device) -> float:
    """Peak memory so far in GiB, of the GPU or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** (30 if sys.platform == "darwin" else 20)
