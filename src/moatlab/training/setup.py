"""Builds what a recipe describes: model, optimizer, batches. Mistakes are found here, before a file is written."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from moatlab.attacks.probe import evaluating
from moatlab.data.batches import Batches
from moatlab.data.images import Images, as_floats
from moatlab.methods.context import Context, When
from moatlab.methods.cost import Cost
from moatlab.methods.language import Stage, parse_method
from moatlab.models.flops import stem_for
from moatlab.models.operations import counting_flops
from moatlab.models.outputs import check_logits
from moatlab.models.preact_resnet import Activation
from moatlab.models.pretrained import load_pretrained
from moatlab.models.registry import BUILT_IN, build_model
from moatlab.runtime import distributed
from moatlab.runtime.console import warn
from moatlab.runtime.device import Autocast, choose_precision, full_precision, same_bits
from moatlab.runtime.errors import UserError, adding_to_errors, users_code
from moatlab.runtime.randomness import generator, key
from moatlab.training.averaging import ESTIMATED, Average
from moatlab.training.optimizer import OPTIMIZERS
from moatlab.training.recipe import TRAIN_SAMPLE, Recipe
from moatlab.training.schedules import SCHEDULES, cycled_momentum, ramp


class Session:
    """What a recipe describes, on its device. `model` is the user's own; without it, the model is built."""

    def __init__(
        self,
        recipe: Recipe,
        device: torch.device,
        images: Images,
        model: nn.Module | None = None,
        *,
        resuming: bool = False,
    ) -> None:
        self.recipe, self.device, self.images = recipe, device, images
        self.method, self.then = recipe.parsed_method, parse_method(recipe.then)  # `then` follows a collapse
        self.batches, self.watched_x, self.watched_y = split(images, recipe, device)
        self.steps_per_epoch = self.batches.steps_per_epoch
        self.total_steps = recipe.epochs * self.steps_per_epoch
        self.batch = recipe.batch_size // distributed.count()  # images of this process in a step
        self.memory: dict[str, Tensor] = {}  # of stages, from step to step
        check_stages(recipe, images)
        self.identity = f"{recipe.sha256} {images.sha256}"  # checkpoints belong to one recipe and its data
        classes, arguments = len(images.classes), model_arguments(recipe, images)
        torch.manual_seed(key(recipe.seed, "initial weights"))
        self.model = model or build_model(recipe.model, classes=classes, arguments=arguments)
        if recipe.init and not resuming:
            load_pretrained(self.model, recipe.init)
        with users_code(f"--model {recipe.model} can't be moved to {device}"):
            self.model.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model.train()
        self.precision = choose_precision(recipe.precision, device)
        # The model in the precision of training, and `forward`: the same with gradients averaged over all processes.
        self.trained_model = self.model if self.precision == "fp32" else Autocast(self.model, self.precision)
        two = as_floats(self.watched_x[:1]).expand(2, -1, -1, -1)
        flops = check_model(self.trained_model, recipe, two, classes, by_name=model is None)
        self.image_flops = flops  # of one forward
        kind, decay = recipe.average, recipe.average_decay
        self.average = None if kind == "none" else Average(self.model, kind, decay, self.total_steps)
        self.forward = distributed.sharing_gradients(self.trained_model, device)
        settings = {"lr": recipe.lr, "momentum": recipe.momentum, "weight_decay": recipe.weight_decay}
        self.optimizer = OPTIMIZERS[recipe.optimizer](self.model.parameters(), **settings)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.precision == "fp16")
        self.description = {  # for the model's file: enough to rebuild the model and to know its threat
            "model": recipe.model,
            "arguments": arguments,
            "classes": classes,
            "class_names": list(images.classes),
            "image_shape": list(images.train_x.shape[1:]),
            "eps": recipe.eps,
            "norm": recipe.norm,
            "method": str(self.method),
            "data": images.name,
            "data_sha256": images.sha256,
            **({"image_size": images.image_size} if images.image_size else {}),
        }

    @contextmanager
    def arithmetic(self) -> Iterator[None]:
        """Inside: float32 without TF32 for fp32 runs; deterministic kernels on a CPU, or if the recipe asks."""
        strict = self.recipe.deterministic
        full = full_precision() if self.precision == "fp32" else nullcontext()
        with full, same_bits(strict=strict) if strict or self.device.type == "cpu" else nullcontext():
            yield

    @property
    def setting(self) -> str:
        """The recipe's, with the precision that `auto` chose."""
        return self.recipe.setting + (f", {self.precision}" if self.recipe.precision == "auto" else "")

    def stage_at(self, step: int, replaced: bool = False) -> Stage:
        """The stage of a step, by the recipe's method or, if `replaced` after a collapse, by `then`."""
        method = self.then if replaced else self.method
        return method.stage_at(step // self.steps_per_epoch, self.recipe.epochs)

    def is_watched(self, epoch: int, replaced: bool = False) -> bool:
        """Whether the monitor measures after this epoch: every `monitor_every` ones, rounded up to whole cycles, whose
        ends are comparable; and after the last."""
        recipe, method = self.recipe, self.then if replaced else self.method
        if recipe.monitor_every == 1 or epoch + 1 == recipe.epochs:
            return True
        length = len(method.slots)
        return (epoch + 1) % (-(-recipe.monitor_every // length) * length) == 0

    def has_same_past(self, before: Recipe, steps: int) -> bool:
        """Whether these first steps have the learning rates and stages that they had with the recipe `before`."""
        then = copy.copy(self)
        then.recipe = before
        return all(
            then.learning_rate(step) == self.learning_rate(step)
            and all(then.stage_at(step, replaced) == self.stage_at(step, replaced) for replaced in (False, True))
            for step in range(steps)
        )

    def where(self, step: int, replaced: bool = False) -> str:
        """A step, as named in messages."""
        epoch, stage = step // self.steps_per_epoch + 1, self.stage_at(step, replaced)
        return f"step {step + 1} (epoch {epoch}, stage {stage}, lr {self.learning_rate(step):.3g})"

    def learning_rate(self, step: int) -> float:
        recipe = self.recipe
        schedule = SCHEDULES[recipe.schedule]
        rate = schedule(step, epochs=recipe.epochs, steps_per_epoch=self.steps_per_epoch, peak=recipe.lr)
        return ramp(step, recipe.warmup * self.steps_per_epoch) * rate

    def momentum(self, step: int) -> float:
        highest = self.recipe.momentum
        return cycled_momentum(step, steps=self.total_steps, highest=highest) if self.recipe.cycle_momentum else highest

    def dropout(self, step: int) -> None:
        """Set the rate of dropout, which decreases linearly to zero (Vivek and Babu, 2020)."""
        rate = self.recipe.dropout * (1 - step / self.total_steps)
        for layer in self.model.modules() if self.recipe.dropout else ():
            if isinstance(layer, Activation):
                layer.dropout = rate

    def batch_step(self, step: int, replaced: bool = False) -> int:
        """The step whose batch is trained on: a replay stage has each batch several times in a row."""
        return step if replaced else step // self.method.replays

    def context(self, step: int, replaced: bool = False) -> Context:
        """What a stage needs apart from the batch."""
        recipe, position = self.recipe, step % self.steps_per_epoch
        threat = recipe.threat
        if recipe.eps_warmup:
            threat = threat.scaled(ramp(step, recipe.eps_warmup * self.steps_per_epoch))
        return Context(
            self.trained_model,
            self.forward,
            threat,
            generator(recipe.seed, "stage", step, device=self.device),
            len(self.images.classes),
            recipe.bn_in_attack,
            shared=True,
            when=When(position, step // self.steps_per_epoch, recipe.epochs),
            memory=self.memory,
            numbers=self.batches.numbers(self.batch_step(step, replaced), self.device),
            images=len(self.batches.y),
            label_smoothing=recipe.label_smoothing,
        )

    def work(self, step: int, replaced: bool = False) -> Cost:
        """The planned cost of a step, in images of this process."""
        stage, position = self.stage_at(step, replaced), step % self.steps_per_epoch
        return stage.work(position, self.batch, len(self.images.classes), awp=self.recipe.awp > 0)

    @property
    def planned(self) -> Cost:
        """The planned cost of the run, in images of this process."""
        return self.recipe.planned_work(self.steps_per_epoch, self.batch, len(self.images.classes))

    @property
    def epoch_images(self) -> int:
        """Images of this process that an epoch trains on: the unit of passes."""
        return self.batch * self.steps_per_epoch

    def images_to_estimate(self, epoch: int) -> Iterator[Tensor]:
        """Batches of this epoch, for the statistics of an average."""
        first = epoch * self.steps_per_epoch
        return (self.batches.at(first + k)[0] for k in range(min(self.steps_per_epoch, ESTIMATED)))


def check_stages(recipe: Recipe, images: Images) -> None:
    """Refuse stages that keep something of each image where images are shared out or not in memory."""
    for stage in recipe.parsed_method.stages:
        if stage.entry.keeps and distributed.count() > 1:
            raise UserError(f"{stage} keeps a perturbation of each image; it can't run with several processes")
        if stage.entry.keeps and not isinstance(images.train_x, Tensor):
            raise UserError(f"{stage} keeps a perturbation of each image in memory; use --no-stream")


def split(images: Images, recipe: Recipe, device: torch.device) -> tuple[Batches, Tensor, Tensor]:
    """The training batches, and the images to watch: the last training images, held out; or a fixed sample of those
    trained on; or the test images, for display."""
    size, count, processes = recipe.batch_size, len(images.train_y) - recipe.holdout, distributed.count()
    if count < size:
        training = f"{len(images.train_y)} training images of {recipe.data}, {recipe.holdout} of them held out"
        raise UserError(f"--batch-size {size} is too large for the {training}")
    if size % processes:
        raise UserError(f"--batch-size {size} can't be split over {processes} processes; use a multiple of {processes}")
    x, y = images.train_x, images.train_y.to(device)
    # A GPU holds all images if there is room beside the model; if not, batches are copied one by one.
    if isinstance(x, Tensor) and (device.type != "cuda" or x.numel() < torch.cuda.mem_get_info(device)[0] / 2):
        x = x.to(device)
    trained = x[:count] if isinstance(x, Tensor) else x.part(range(count))
    batches = Batches(trained, y[:count], size, recipe.augment, recipe.seed)
    if recipe.monitor == "test":
        first = slice(recipe.monitor_images)
        return batches, images.test_x[first].to(device), images.test_y[first].to(device)
    watched = torch.arange(count, len(y))[: recipe.monitor_images]
    if recipe.monitor == "train":
        watched = torch.randperm(count, generator=generator(0, "watched training images"))
        watched = watched[: min(recipe.monitor_images or TRAIN_SAMPLE, TRAIN_SAMPLE)]
    watched_x = x[watched.to(x.device)] if isinstance(x, Tensor) else x.part(watched.tolist()).in_memory()
    return batches, watched_x.to(device), y[watched.to(device)]


def model_arguments(recipe: Recipe, images: Images) -> dict[str, Any]:
    """Arguments of a built-in model; a user's factory gets none."""
    if recipe.model not in BUILT_IN:
        return {}
    std = recipe.std or images.std
    if len(std) != len(images.std):
        raise UserError(f"--std has {len(std)} numbers; the images of {recipe.data} have {len(images.std)} channels")
    variant: dict[str, Any] = {}
    if recipe.model != "resnet18":
        variant = {"shortcut": recipe.shortcut, "final_norm": recipe.final_norm}
    if recipe.activation != "relu":  # the default of a model, also in files without it
        variant["activation"] = recipe.activation
    stem = stem_for(min(images.train_x.shape[1:3])) if recipe.stem == "auto" else recipe.stem
    if stem != "3x3":  # likewise
        variant["stem"] = stem
    return {"width": recipe.width, **variant, "mean": list(images.mean), "std": list(std)}


def check_model(model: nn.Module, recipe: Recipe, images: Tensor, classes: int, *, by_name: bool) -> int:
    """Refuse a model that does not fit its data: try two images in eval and in train mode. Return the floating-point
    operations of a forward on one image."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"--model {recipe.model} has no parameters to train")
    images_of = f"images of shape {tuple(images.shape[1:])}"
    tried = users_code(f"--model {recipe.model} can't take {images_of}")
    with tried, torch.no_grad(), evaluating(model), counting_flops(model) as flops:
        output = model(images)
    size = recipe.batch_size // distributed.count()
    twin = copy.deepcopy(model)  # because BatchNorm's statistics would change
    buffers = dict(twin.named_buffers())
    with users_code(f"--model {recipe.model} can't train on batches of {size} {images_of}"), torch.enable_grad():
        output_in_training = twin(images[:size])
    assigned = [name for name, buffer in twin.named_buffers() if buffer is not buffers.get(name)]
    if assigned and (recipe.average != "none" or recipe.awp):
        option, name = "--average" if recipe.average != "none" else "--awp", assigned[0].removeprefix("model.")
        raise UserError(f"--model {recipe.model} replaces its buffer {name}; {option} needs it changed in place")
    if isinstance(output, Tensor) and (output >= 0).all() and ((output.sum(-1) - 1).abs() < 1e-3).all():
        warn(f"--model {recipe.model} seems to return probabilities; it should return logits, without a softmax")
    with adding_to_errors(f" (--model {recipe.model})" if by_name else ""):
        check_logits(output, 2, 0, classes - 1)
    if (shape := tuple(output.shape)) != (2, classes):
        raise UserError(f"--model {recipe.model} returns {shape} for two images; {classes} classes need {(2, classes)}")
    if distributed.count() > 1:  # they synchronise the gradients of all parameters
        trained = {name: parameter for name, parameter in twin.named_parameters() if parameter.requires_grad}
        found = torch.autograd.grad(output_in_training.sum(), list(trained.values()), allow_unused=True)
        if idle := [name for name, gradient in zip(trained, found, strict=True) if gradient is None]:
            unused = f"--model {recipe.model}: its output does not depend on {idle[0].removeprefix('model.')}"
            raise UserError(f"{unused}; call requires_grad_(False) on it to train with several processes")
    return sum(flops) // len(images)
