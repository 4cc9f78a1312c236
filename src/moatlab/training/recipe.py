"""A recipe is everything that defines the mathematics of a run. On one machine, equal recipes give equal bits.

It is made in layers: a preset, then a file, then explicit options; later layers win. Threads and device belong to the
machine and are in the run's record.
"""

import hashlib
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    StringConstraints,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from moatlab.attacks.norms import NORM_NAMES, Threat
from moatlab.data.sizes import Sizes
from moatlab.methods.cost import Cost
from moatlab.methods.language import Method, parse_method
from moatlab.models.flops import built_in_flops
from moatlab.runtime.console import counted
from moatlab.runtime.errors import UserError, did_you_mean
from moatlab.runtime.files import SCHEMA, read_whole
from moatlab.training.schedules import can_cycle

Deviation = Annotated[float, Field(gt=1e-6, allow_inf_nan=False)]
Epochs = Annotated[float, Field(ge=0, allow_inf_nan=False)]
# Left out of files at their defaults, so that recipes without them keep their checksums.
LEFT_OUT = (
    "image_size",
    "stem",
    "optimizer",
    "warmup",
    "eps_warmup",
    "cycle_momentum",
    "monitor_every",
    "monitor_images",
    "activation",
    "dropout",
    "average",
    "average_decay",
    "label_smoothing",
    "awp",
    "check_every",
)
TRAIN_SAMPLE = 1000  # training images watched if none are held out


class Recipe(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str = Field(description="training method, for example moat:2")
    data: str = Field(description="mini, cifar10, cifar100, a folder of CLASS/IMAGE, or an .npz file")
    image_size: int | None = Field(
        None, description="side of a folder's images, resized and cropped  [default: from their sizes]", ge=8, le=4096
    )
    model: str = Field(description="preact_resnet18, another built-in network, or package.module:factory")
    # Below one vector of channels, oneDNN's kernels are slow and unsafe (see PreActBlock).
    width: int = Field(description="channels of the first block (64 in the paper)", ge=8, le=1024)
    stem: Literal["auto", "3x3", "4x4s2", "7x7s4"] = Field(
        "auto", description="first convolution of a built-in model; auto: by image size"
    )
    shortcut: Literal["activated", "raw"] = Field(description="a block's shortcut convolution sees relu(bn1(x)), or x")
    final_norm: bool = Field(description="a last BatchNorm and ReLU before the classifier")
    activation: Literal["relu", "silu"] = Field("relu", description="non-linearity of a built-in model")
    dropout: float = Field(0.0, description="dropout after each non-linearity, falling to 0 over the run", ge=0, lt=1)
    std: tuple[Deviation, ...] | None = Field(
        None, min_length=1, description="divisors of the channels, with commas between them  [default: the data's]"
    )
    init: str | None = Field(None, description="pretrained weights: run, file, hub folder or timm:NAME")
    optimizer: Literal["sgd", "adamw"] = Field("sgd", description="optimizer; adamw for transformers")
    schedule: Literal["cyclic", "stepwise", "cosine"] = Field(description="learning rate schedule")
    warmup: Epochs = Field(0.0, description="epochs over which the learning rate grows to its schedule")
    epochs: int = Field(description="passes over the training images", ge=1, le=100_000)
    eps: Annotated[str, StringConstraints(strip_whitespace=True)] = Field(
        description="radius of the ball, for pixels in [0,1], for example 8/255"
    )
    eps_warmup: Epochs = Field(0.0, description="epochs over which the radius in training grows to eps")
    norm: Literal["linf", "l2"] = Field("linf", description="norm of the ball")
    lr: float = Field(description="highest learning rate  [default: preset's, adamw: 0.001]", gt=0, allow_inf_nan=False)
    momentum: float = Field(description="momentum of SGD, first beta of AdamW", ge=0, lt=1)
    cycle_momentum: bool = Field(
        False, description="momentum falls by 0.1 to the peak of a cyclic rate and rises again"
    )
    weight_decay: float = Field(description="weight decay, on all parameters", ge=0, allow_inf_nan=False)
    average: Literal["none", "ema", "swa"] = Field("none", description="average of the weights, kept beside them")
    average_decay: float | None = Field(
        None, description="decay of the average per step  [default: ema 0.995, swa 0.999]", gt=0, lt=1
    )
    label_smoothing: float = Field(0.0, description="share of a label spread over all classes", ge=0, lt=1)
    awp: float = Field(0.0, description="adversarial weight perturbation of this relative size", ge=0, lt=1)
    batch_size: int = Field(description="images in a step; a last partial batch is dropped", ge=1)
    augment: bool = Field(description="random crops (4 px zero padding) and horizontal flips")
    bn_in_attack: Literal["train", "eval"] = Field(description="BatchNorm in attacks: batch or running statistics")
    holdout: int = Field(description="training images held out to watch the run", ge=0)
    monitor: Literal["holdout", "train", "test"] = Field(description="images watched after each epoch")
    monitor_every: int = Field(1, description="watch every N epochs, at ends of cycles; the last always", ge=1)
    monitor_images: int | None = Field(None, description="watch the first N of these images  [default: all]", ge=1)
    seed: int = Field(description="decides every random draw", ge=0, lt=2**63)
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field("auto", description="auto: bf16 on hardware for it")
    on_collapse: Literal["warn", "stop", "rollback", "heal"] = Field(
        "warn", description="warn, stop or roll back to the last good epoch, or heal with --then"
    )
    check_every: int | None = Field(None, description="steps between PGD checks that --on-collapse heal acts on", ge=1)
    then: str = Field("pgd:2", description="method after a rollback, or multi-step stage that heals")
    on_nan: Literal["stop", "skip"] = Field("stop", description="action at a NaN or infinite loss or gradient")
    deterministic: bool = Field(False, description="reproducible bits on a GPU too, with slower kernels")

    @field_validator("method", "then")
    @classmethod
    def _method_can_be_parsed(cls, spec: str) -> str:
        return parse_method(spec).spec

    @model_validator(mode="after")
    def _eps_is_a_radius(self) -> Self:
        Threat.of(self.eps, self.norm)
        return self

    @model_validator(mode="after")
    def _warmups_end(self) -> Self:
        for name in ("warmup", "eps_warmup"):
            if getattr(self, name) > self.epochs:
                longer = f"{option_name(name)} {getattr(self, name):g} is longer than the run"
                raise UserError(f"{longer}, which has {counted(self.epochs, 'epoch')}")
        return self

    @model_validator(mode="after")
    def _stages_fit(self) -> Self:
        method = self.parsed_method
        if self.epochs % method.replays:
            replays = f"{method} trains {method.replays} times in a row on each batch"
            raise UserError(f"{replays}; --epochs {self.epochs} must be a multiple of that")
        for stage in method.stages if self.awp else ():
            if stage.entry.kind != "batch":
                known = "batch stages (fgsm, fast, pgd:K, ...), trades and mart"
                raise UserError(f"--awp can't be used with {stage}: it works with {known}")
        for stage in method.stages if self.norm != "linf" else ():
            if stage.entry.linf_only:
                raise UserError(f"{stage} is defined for --norm linf only")
        if self.dropout and self.names_code:
            raise UserError("--dropout is for the built-in models; put dropout into your own")
        if self.average_decay is not None and self.average == "none":
            raise UserError("--average-decay needs --average ema or swa")
        return self

    @model_validator(mode="after")
    def _momentum_can_cycle(self) -> Self:
        if self.cycle_momentum and not can_cycle(self.schedule, self.optimizer, self.momentum):
            needs = "a cyclic learning rate, SGD and a momentum of at least 0.1"
            raise UserError(f"--cycle-momentum needs {needs}; use --no-cycle-momentum")
        return self

    @model_serializer(mode="wrap")
    def _without_some_defaults(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        unset = [name for name in LEFT_OUT if fields.get(name) == Recipe.model_fields[name].default]
        return {name: fields[name] for name in fields if name not in unset}

    @field_validator("std", mode="before")
    @classmethod
    def _std_from_text(cls, value: Any) -> Any:
        return value.split(",") if isinstance(value, str) else value

    @property
    def parsed_method(self) -> Method:
        return parse_method(self.method)

    @property
    def threat(self) -> Threat:
        return Threat.of(self.eps, self.norm)

    @property
    def setting(self) -> str:
        """The conditions of a result in one line, BatchNorm's mode included, because results can depend on it."""
        data = self.data + (f" at {self.image_size}x{self.image_size}" if self.image_size else "")
        width, epochs = "" if self.names_code else f" width {self.width}", counted(self.epochs, "epoch")
        return (
            f"{data}, {self.model}{width}, eps {self.threat.text} ({NORM_NAMES[self.norm]}), {epochs}, "
            f"{self.schedule} lr {self.lr:g}, batch {self.batch_size}, BatchNorm in attacks: {self.bn_in_attack} mode, "
            f"{'augmented' if self.augment else 'no augmentation'}, seed {self.seed}"
            + (f", {self.optimizer}" if self.optimizer != "sgd" else "")
            + (", cycled momentum" if self.cycle_momentum else "")
            + (f", {counted(self.warmup, 'epoch')} of warm-up" if self.warmup else "")
            + (f", {counted(self.eps_warmup, 'epoch')} of eps warm-up" if self.eps_warmup else "")
            + (f", {self.activation}" if self.activation != "relu" else "")
            + (f", dropout {self.dropout:g}" if self.dropout else "")
            + (f", averaged ({self.average})" if self.average != "none" else "")
            + (f", label smoothing {self.label_smoothing:g}" if self.label_smoothing else "")
            + (f", weight perturbation {self.awp:g}" if self.awp else "")
            + (f", starting from {Path(self.init).name}" if self.init else "")
            + (f", {self.precision}" if self.precision not in ("auto", "fp32") else "")
            + (f", on collapse {self.on_collapse}" if self.on_collapse != "warn" else "")
            + (f" ({self.then})" if self.on_collapse in ("rollback", "heal") else "")
        )

    @property
    def watched(self) -> str:
        """The images measured after each epoch, as named in messages."""
        return {"holdout": "held-out images", "train": "training images", "test": "test images"}[self.monitor]

    @property
    def names_code(self) -> bool:
        """Whether the model is a user's own, which is built by importing its code."""
        return ":" in self.model

    def planned_flops(self, sizes: Sizes) -> float | None:
        """Of the whole run; None for a user's own model, whose code would have to be imported."""
        shape = (sizes.channels, sizes.height, sizes.width)
        forward = built_in_flops(self.model, width=self.width, stem=self.stem, shape=shape, classes=sizes.classes)
        steps = (sizes.train - self.holdout) // self.batch_size
        return None if forward is None else self.planned_work(steps, self.batch_size, sizes.classes).flops(forward)

    def planned_work(self, steps: int, batch: int, classes: int) -> Cost:
        """The cost of the run in images, for `steps` steps per epoch of batches of `batch` images."""
        return self.parsed_method.work(self.epochs, steps, batch, classes, awp=self.awp > 0)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.to_toml().encode()).hexdigest()

    def to_toml(self) -> str:
        return tomli_w.dumps({"schema": SCHEMA, **self.model_dump(mode="json", exclude_none=True)})


NEEDED = {name for name, field in Recipe.model_fields.items() if field.is_required()}


def validated(fields: dict[str, Any]) -> Recipe:
    try:
        return Recipe(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0]) if first["loc"] else "recipe"
        if first["type"] == "extra_forbidden":
            hint = did_you_mean(field, Recipe.model_fields) or f"; its fields are {', '.join(Recipe.model_fields)}"
            raise UserError(f"a recipe has no field '{field}'{hint}") from None
        if first["type"] == "missing":
            raise UserError(f"the recipe has no '{field}'") from None
        message = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
        raise UserError(f"{option_name(field)} {first['input']}: {message}") from None


def option_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def read_recipe_file(path: Path) -> dict[str, Any]:
    """The fields of a recipe file: `recipe.toml` of a run, or one with fewer fields, written by hand."""
    try:
        fields = tomllib.loads(read_whole(path).decode())
    except OSError as error:
        raise UserError(f"the recipe {path} can't be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # bad syntax, a wrong encoding, an endless number
        raise UserError(f"the recipe {path} is not valid TOML: {error}") from None
    schema = fields.pop("schema", SCHEMA)
    if schema != SCHEMA:
        raise UserError(f"the recipe {path} has schema {schema}; this version of moatlab reads {SCHEMA}")
    if unknown := sorted(fields.keys() - Recipe.model_fields.keys()):
        raise UserError(f"the recipe {path} has an unknown key '{unknown[0]}'")
    return fields


def load_recipe(path: Path) -> Recipe:
    """The complete recipe in the folder of a run."""
    fields = read_recipe_file(path)
    try:
        return validated(fields)
    except UserError as error:
        raise UserError(f"{path} is damaged: {error}") from None


def slug(text: str) -> str:
    """Text as part of a folder's name: `imoat:2,5,8` -> `imoat-2-5-8`."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.") or "run"
