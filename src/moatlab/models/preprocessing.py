"""How a model's own configuration prepares images: resize, crop, channel order, mean and std, as its first layer."""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from moatlab.models.preact_resnet import Normalize
from moatlab.runtime.errors import UserError

# Names of timm and torchvision, numbers of Pillow and transformers. What F.interpolate lacks (lanczos, box, hamming and
# timm's random choice) is replaced by what is nearest.
MODES = {
    **{"nearest": "nearest-exact", 0: "nearest-exact", "nearest-exact": "nearest-exact"},
    **{"bilinear": "bilinear", 2: "bilinear", "random": "bilinear", "box": "bilinear", 4: "bilinear"},
    **{"bicubic": "bicubic", 3: "bicubic", "lanczos": "bicubic", 1: "bicubic", "hamming": "bilinear", 5: "bilinear"},
}


@dataclass(frozen=True)
class Preprocessing:
    """Applied to images in [0, 1]; those that already have the size `crop` are neither resized nor cropped."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: tuple[int, int] | None = None  # height and width of the model's input
    resize: int | tuple[int, int] | None = None  # the shorter side, or height and width
    mode: str = "bilinear"
    half_up: bool = False  # the corner of the crop is rounded by round(), as in torchvision; else down
    bgr: bool = False

    def __str__(self) -> str:
        steps = []
        if self.resize is not None:
            side = f"shorter side to {self.resize}" if isinstance(self.resize, int) else f"to {_size(self.resize)}"
            steps.append(f"resized ({side}, {self.mode})")
        if self.crop is not None and self.crop != self.resize:
            steps.append(f"cropped to the central {_size(self.crop)}")
        if self.bgr:
            steps.append("in BGR order")
        if any(self.mean) or any(value != 1 for value in self.std):
            mean, std = (" ".join(f"{value:.4g}" for value in values) for values in (self.mean, self.std))
            steps.append(f"normalised with mean {mean}, std {std}")
        return ", ".join(steps) or "not changed"

    @property
    def image_size(self) -> int | None:
        """The side at which photos are best read from a folder: the model then only crops."""
        if isinstance(self.resize, tuple):
            return self.resize[0] if self.resize[0] == self.resize[1] else None
        return self.resize


def _size(size: tuple[int, int]) -> str:
    return f"{size[1]}x{size[0]}"


class Preprocessed(nn.Module):
    """A model with its preprocessing as the first layer, so that eps is in pixels of the images as given. Returns
    logits also for a model that returns an object. Values are neither rounded nor clipped: both would hide gradients.
    """

    def __init__(self, model: nn.Module, steps: Preprocessing) -> None:
        super().__init__()
        self.steps, self.normalize, self.model = steps, Normalize(steps.mean, steps.std), model
        self.training = model.training

    def forward(self, x: Tensor) -> Tensor:
        output = self.model(self.normalize(prepared(x, self.steps)))
        logits: Tensor = getattr(output, "logits", output)
        return logits


def prepared(x: Tensor, steps: Preprocessing) -> Tensor:
    """Images resized and cropped, with the model's channels; not normalised yet."""
    if steps.crop is None or x.shape[-2:] != steps.crop:
        x = _cropped(_resized(x, steps), steps)
    if x.shape[1] == 1 < len(steps.mean):
        x = x.expand(-1, len(steps.mean), -1, -1)  # a grey image
    return x.flip(1) if steps.bgr else x


def _resized(x: Tensor, steps: Preprocessing) -> Tensor:
    size = steps.resize
    if size is None:
        return x
    if isinstance(size, int):
        shorter = min(x.shape[-2:])
        height, width = (size * side // shorter for side in x.shape[-2:])
        size = height, width
    if size == tuple(x.shape[-2:]):
        return x
    if steps.mode == "nearest-exact":
        return F.interpolate(x, size, mode=steps.mode)
    return F.interpolate(x, size, mode=steps.mode, antialias=True, align_corners=False)


def _cropped(x: Tensor, steps: Preprocessing) -> Tensor:
    if steps.crop is None:
        return x
    (height, width), (there_h, there_w) = steps.crop, x.shape[-2:]
    if height > there_h or width > there_w:
        raise UserError(f"the model needs images of {width}x{height} pixels, and these have {there_w}x{there_h}")
    spare = there_h - height, there_w - width
    top, left = (round(one / 2) if steps.half_up else one // 2 for one in spare)
    return x[..., top : top + height, left : left + width]


def as_numbers(values: Any, channels: int = 3) -> tuple[float, ...]:
    """A list from a configuration; one number is for all channels."""
    return (float(values),) * channels if isinstance(values, int | float) else tuple(map(float, values))
