"""From a recipe to what is trained. Whatever can be wrong is found here, before a run writes its first file."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from moatlab.attacks.probe import evaluating
from moatlab.data.batches import Batches
from moatlab.data.images import Images, as_floats
from moatlab.methods.context import Context
from moatlab.methods.language import Stage, parse_method
from moatlab.models.registry import BUILT_IN, build_model
from moatlab.models.weights import read_weights, set_weights
from moatlab.runtime import distributed
from moatlab.runtime.console import warn
from moatlab.runtime.device import Autocast, choose_precision, full_precision, same_bits
from moatlab.runtime.errors import UserError, users_code
from moatlab.runtime.randomness import generator, key
from moatlab.training.optimizer import Sgd
from moatlab.training.recipe import Recipe
from moatlab.training.schedules import SCHEDULES

TRAIN_SAMPLE = 1000  # training images watched where none are held out


class Session:
    """All that a recipe describes, on its device. `model` is the user's own, where the recipe only names it."""

    def __init__(
        self,
        recipe: Recipe,
        device: torch.device,
        images: Images,
        model: nn.Module | None = None,
        *,
        resuming: bool = False,
    ) -> None:
        self.recipe, self.device = recipe, device
        self.method, self.then = recipe.parsed_method, parse_method(recipe.then)  # `then` follows a collapse
        self.images = images
        self.batches, self.watched_x, self.watched_y = split(images, recipe, device)
        self.steps_per_epoch = self.batches.steps_per_epoch
        self.total_steps = recipe.epochs * self.steps_per_epoch
        self.identity = f"{recipe.sha256} {self.images.sha256}"  # of the run that a checkpoint is of
        classes, arguments = len(self.images.classes), model_arguments(recipe, self.images)
        torch.manual_seed(key(recipe.seed, "initial weights"))
        self.model = model or build_model(recipe.model, classes=classes, arguments=arguments)
        if recipe.init and not resuming:
            set_weights(self.model, read_weights(recipe.init)[0], recipe.init)
        with users_code(f"--model {recipe.model} can't be moved to {device}"):
            self.model.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model.train()
        self.precision = choose_precision(recipe.precision, device)
        # The same model in the precision that it is trained in; and that with gradients averaged over all processes.
        self.trained_model = self.model if self.precision == "fp32" else Autocast(self.model, self.precision)
        check_model(self.trained_model, recipe, as_floats(self.watched_x[:1]).expand(2, -1, -1, -1), classes)
        self.forward = distributed.sharing_gradients(self.trained_model, device)
        self.optimizer = Sgd(
            self.model.parameters(), lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay
        )
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.precision == "fp16")
        self.description = {  # goes into the model's file: enough to rebuild the model and to know its threat
            "model": recipe.model,
            "arguments": arguments,
            "classes": classes,
            "class_names": list(self.images.classes),
            "image_shape": list(self.images.train_x.shape[1:]),
            "eps": recipe.eps,
            "norm": recipe.norm,
            "method": str(self.method),
            "data": self.images.name,
            "data_sha256": self.images.sha256,
        }

    @contextmanager
    def arithmetic(self) -> Iterator[None]:
        """Plain float32 inside, unless the run is trained in fewer bits; kernels that give the same bits every time."""
        strict = self.recipe.deterministic
        repeatable = strict or self.device.type == "cpu"
        plain = full_precision() if self.precision == "fp32" else nullcontext()
        with plain, same_bits(strict=strict) if repeatable else nullcontext():
            yield

    def stage_at(self, step: int, replaced: bool = False) -> Stage:
        """The stage of a step, of the recipe's method or of the one that took its place after a collapse."""
        method = self.then if replaced else self.method
        return method.stage_at(step // self.steps_per_epoch, self.recipe.epochs)

    def where(self, step: int, replaced: bool = False) -> str:
        """A step for a person."""
        epoch, stage = step // self.steps_per_epoch + 1, self.stage_at(step, replaced)
        return f"step {step + 1} (epoch {epoch}, stage {stage}, lr {self.learning_rate(step):.3g})"

    def learning_rate(self, step: int) -> float:
        recipe = self.recipe
        schedule = SCHEDULES[recipe.schedule]
        return schedule(step, epochs=recipe.epochs, steps_per_epoch=self.steps_per_epoch, peak=recipe.lr)

    def context(self, step: int) -> Context:
        """What a stage is given beside the batch of a step."""
        recipe, classes = self.recipe, len(self.images.classes)
        draws = generator(recipe.seed, "stage", step, device=self.device)
        return Context(
            self.trained_model, self.forward, recipe.threat, draws, classes, recipe.bn_in_attack, shared=True
        )


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
