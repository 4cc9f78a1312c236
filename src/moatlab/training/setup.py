"""From a recipe to what is trained. Whatever can be wrong is found here, before a run writes its first file."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moatlab.attacks.probe import evaluating
from moatlab.data import Images, load_images
from moatlab.data.batches import Batches, as_floats
from moatlab.methods.language import Method, parse_method
from moatlab.methods.stages import Context
from moatlab.models import BUILT_IN, build_model, users_code
from moatlab.models.weights import read_weights, set_weights
from moatlab.runtime import distributed
from moatlab.runtime.console import warn
from moatlab.runtime.device import Autocast, choose_precision
from moatlab.runtime.errors import UserError
from moatlab.runtime.randomness import generator, key
from moatlab.training.optimizer import Sgd
from moatlab.training.recipe import Recipe, is_device

TRAIN_SAMPLE = 1000  # training images watched where none are held out


@dataclass(frozen=True)
class Session:
    """All that a recipe stands for, on its device."""

    recipe: Recipe
    method: Method
    then: Method  # what takes its place after a collapse, if the recipe says so
    device: torch.device
    images: Images
    batches: Batches
    watched_x: Tensor  # the images whose accuracies are measured after each epoch
    watched_y: Tensor
    model: nn.Module
    precision: str
    trained_model: nn.Module  # the same, in the precision that it is trained in
    forward: nn.Module  # and that again, with gradients averaged over all processes; the trained loss goes through it
    optimizer: Sgd
    scaler: torch.amp.GradScaler  # keeps gradients in the range of fp16; does nothing otherwise
    description: dict[str, Any]  # goes into the model's file: enough to rebuild the model and to know its threat model

    @property
    def steps_per_epoch(self) -> int:
        return self.batches.steps_per_epoch

    @property
    def identity(self) -> str:
        """Names the run that a checkpoint is of: all of its recipe, and its data."""
        return f"{self.recipe.sha256} {self.images.sha256}"

    @property
    def total_steps(self) -> int:
        return self.recipe.epochs * self.steps_per_epoch


def prepare(
    recipe: Recipe,
    data_dir: str | Path | None,
    *,
    continuing: bool,
    stream: bool | None = None,
    images: Images | None = None,
    model: nn.Module | None = None,
) -> Session:
    """`images` and `model` are the user's own, where the recipe only names them."""
    device = choose_device(recipe.device)
    images = images or load_images(recipe.data, data_dir, stream=stream)
    batches, watched_x, watched_y = split(images, recipe, device)
    classes = len(images.classes)
    arguments = model_arguments(recipe, images)
    torch.manual_seed(key(recipe.seed, "initial weights"))
    if model is None:
        model = build_model(recipe.model, classes=classes, arguments=arguments)
    if recipe.init and not continuing:
        set_weights(model, read_weights(recipe.init)[0], recipe.init)
    with users_code(f"--model {recipe.model} can't be moved to {device}"):
        model.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.train()
    precision = choose_precision(recipe.precision, device)
    trained_model = model if precision == "fp32" else Autocast(model, precision)
    check_model(trained_model, recipe, as_floats(watched_x[:1]).expand(2, -1, -1, -1), classes)
    optimizer = Sgd(model.parameters(), lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    description = {
        "model": recipe.model, "arguments": arguments, "classes": classes, "class_names": list(images.classes),
        "image_shape": list(images.train_x.shape[1:]), "eps": recipe.eps, "norm": recipe.norm,
        "method": str(recipe.parsed_method), "data": images.name, "data_sha256": images.sha256,
    }  # fmt: skip
    return Session(
        recipe,
        recipe.parsed_method,
        parse_method(recipe.then),
        device,
        images,
        batches,
        watched_x,
        watched_y,
        model,
        precision,
        trained_model,
        distributed.sharing_gradients(trained_model, device),
        optimizer,
        scaler,
        description,
    )


def context_of(session: Session, step: int) -> Context:
    """What a stage is given beside the batch of a step."""
    recipe = session.recipe
    draws = generator(recipe.seed, "stage", step, device=session.device)
    return Context(
        session.trained_model, session.forward, recipe.eps_value, draws, len(session.images.classes),
        recipe.bn_in_attack, recipe.norm, shared=True,
    )  # fmt: skip


def choose_device(name: str) -> torch.device:
    if not is_device(name):
        raise UserError(f"--device {name}: should be auto, cpu, cuda, cuda:1 or mps")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and distributed.launched() > 1:
        if name != "cuda":
            raise UserError(f"--device {name}: several processes take a GPU each; use --device cuda")
        name = f"cuda:{distributed.number_on_this_machine()}"
    device = torch.device(name)
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if (device.index or 0) >= counts[device.type]:
        raise UserError(
            f"--device {name}: this machine, or this build of PyTorch, has no such device; use --device cpu"
        )
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def split(images: Images, recipe: Recipe, device: torch.device) -> tuple[Batches, Tensor, Tensor]:
    """The batches to train on, and the images to watch: the last training images, held out; or a fixed sample of
    those trained on; or the test images, for display."""
    count = len(images.train_y) - recipe.holdout
    if count < recipe.batch_size:
        raise UserError(
            f"--batch-size {recipe.batch_size} is larger than the data: {recipe.data} has {len(images.train_y)} "
            f"training images, of which {recipe.holdout} are held out"
        )
    if recipe.batch_size % distributed.count():
        raise UserError(
            f"--batch-size {recipe.batch_size} can't be shared equally by {distributed.count()} processes; "
            f"choose a multiple of {distributed.count()}"
        )
    y = images.train_y.to(device)
    x = images.train_x
    if isinstance(x, Tensor) and fits(x, device):
        x = x.to(device)
    trained = x[:count] if isinstance(x, Tensor) else x.part(range(count))
    batches = Batches(trained, y[:count], recipe.batch_size, recipe.augment, recipe.seed)
    if recipe.monitor == "test":
        return batches, images.test_x.to(device), images.test_y.to(device)
    watched = torch.arange(count, len(y))
    if recipe.monitor == "train":
        watched = torch.randperm(count, generator=generator(0, "watched training images"))[:TRAIN_SAMPLE]
    watched_x = x[watched.to(x.device)] if isinstance(x, Tensor) else x.part(watched.tolist()).in_memory()
    return batches, watched_x.to(device), y[watched.to(device)]


def fits(images: Tensor, device: torch.device) -> bool:
    """Whether a GPU has room for all images beside the model; where it has not, batches go there one by one."""
    return device.type != "cuda" or images.numel() < torch.cuda.mem_get_info(device)[0] / 2


def model_arguments(recipe: Recipe, images: Images) -> dict[str, Any]:
    """What a built-in model is made from; a user's factory makes its own choices."""
    if recipe.model not in BUILT_IN:
        return {}
    std = recipe.std or images.std
    if len(std) != len(images.std):
        raise UserError(f"--std has {len(std)} numbers; the images of {recipe.data} have {len(images.std)} channels")
    variant = {} if recipe.model == "resnet18" else {"shortcut": recipe.shortcut, "final_norm": recipe.final_norm}
    return {"width": recipe.width, **variant, "mean": list(images.mean), "std": list(std)}


def check_model(model: nn.Module, recipe: Recipe, images: Tensor, classes: int) -> None:
    """Two images go through in either mode, so that a model that does not fit its data is refused at once."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"--model {recipe.model} has no parameters to train")
    images_of = f"images of shape {tuple(images.shape[1:])}"
    with users_code(f"--model {recipe.model} can't take {images_of}"), torch.no_grad(), evaluating(model):
        output = model(images)
    size = recipe.batch_size // distributed.count()
    in_batches = f"{images_of} in batches of {size}"
    twin = copy.deepcopy(model)  # because BatchNorm would learn from it
    with users_code(f"--model {recipe.model} can't train on {in_batches}"), torch.enable_grad():
        answer = twin(images[:size])
    if isinstance(output, Tensor) and (output >= 0).all() and ((output.sum(-1) - 1).abs() < 1e-3).all():
        warn(f"--model {recipe.model} seems to return probabilities; it should return logits, without a softmax")
    shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if shape != (2, classes):
        raise UserError(f"--model {recipe.model} returns {shape} for two images; {classes} classes need {(2, classes)}")
    if distributed.count() > 1:  # who would wait for the gradients of all parameters
        trained = {name: parameter for name, parameter in twin.named_parameters() if parameter.requires_grad}
        found = torch.autograd.grad(answer.sum(), list(trained.values()), allow_unused=True)
        if idle := [name for name, gradient in zip(trained, found, strict=True) if gradient is None]:
            raise UserError(
                f"--model {recipe.model}: its answer does not depend on {idle[0]}, and several processes can't train "
                "that; call requires_grad_(False) on it"
            )
