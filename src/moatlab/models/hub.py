"""Models of other libraries: folders in the layouts of model hubs, and pretrained models of timm and torchvision."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from moatlab.models.preprocessing import MODES, Preprocessed, Preprocessing, as_numbers
from moatlab.models.weights import read_weights, set_weights
from moatlab.runtime.errors import UserError, first_line, users_code

CONFIG, PROCESSOR = "config.json", "preprocessor_config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
WANTED = ["*.json", "model*.safetensors", "pytorch_model*.bin"]


def download(name: str) -> Path:
    """The folder of `USER/NAME`, or `USER/NAME@REVISION`, in the cache of huggingface_hub."""
    hub = needed("huggingface_hub", f"hf_hub:{name}", "hub")
    errors = importlib.import_module("huggingface_hub.errors")
    repository, _, revision = name.partition("@")
    try:
        with quiet():
            return Path(hub.snapshot_download(repository, revision=revision or None, allow_patterns=WANTED))
    except errors.HFValidationError:
        raise UserError(f"hf_hub:{name} is no name of a model; write hf_hub:USER/NAME") from None
    except errors.LocalEntryNotFoundError as error:
        offline = "a local folder with the same files works without a network"
        raise UserError(f"hf_hub:{name}: the hub can't be reached ({first_line(error)}); {offline}") from None
    except errors.HfHubHTTPError as error:
        raise UserError(f"hf_hub:{name} can't be downloaded ({first_line(error)})") from None
    except OSError as error:
        raise UserError(f"hf_hub:{name}: the hub can't be reached ({first_line(error)})") from None


def needed(package: str, source: object, extra: str | None = None) -> Any:
    """The package, imported; a UserError names what to install."""
    try:
        return importlib.import_module(package)
    except (ImportError, RuntimeError) as error:  # a torchvision built for another torch raises a RuntimeError
        reason = f"which can't be imported ({first_line(error)})"
        how = f'"moatlab[{extra}]"' if extra else package.partition(".")[0]
        raise UserError(f"{source} needs the package {package}, {reason}: pip install {how}") from None


def read_config(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        raise UserError(f"{path} is missing or not readable as JSON") from None
    if not isinstance(fields, dict):
        raise UserError(f"{path} is not a configuration: it holds no names and values")
    return fields


def load_folder(folder: Path) -> tuple[Preprocessed, tuple[str, ...]]:
    """The model of a folder with a `config.json` of timm or transformers, and the names of its classes."""
    config = read_config(folder / CONFIG)
    if isinstance(config.get("architecture"), str):
        return _load_timm_folder(folder, config)
    if isinstance(config.get("model_type"), str):
        return _load_transformers(folder, config)
    raise UserError(f"{folder / CONFIG} names neither an architecture of timm nor a model_type of transformers")


def _load_timm_folder(folder: Path, config: dict[str, Any]) -> tuple[Preprocessed, tuple[str, ...]]:
    """timm's layout; in older ones `config.json` itself is the `pretrained_cfg`."""
    timm, name = needed("timm", folder), config["architecture"]
    own = config.get("pretrained_cfg", config)
    arguments = config.get("model_args") or {}
    classes = config.get("num_classes", own.get("num_classes"))
    weights = next((folder / one for one in WEIGHTS if (folder / one).exists()), folder / WEIGHTS[0])
    tensors, _ = read_weights(weights)
    with users_code(f"timm can't build {name!r}, which {folder / CONFIG} names"):
        model = timm.create_model(_plain(name, folder), pretrained=False, num_classes=classes, **arguments)
    set_weights(model, tensors, weights)
    names = config.get("label_names") or own.get("label_names") or ()
    return Preprocessed(model, timm_steps(own, folder)), tuple(map(str, names))


def timm_steps(config: dict[str, Any], source: object) -> Preprocessing:
    """Resize, crop, mean and std of timm's `pretrained_cfg`, as its `create_transform` uses them."""
    with users_code(f"{source} has an unreadable pretrained_cfg"):
        channels, height, width = config["input_size"]
        share, how = config.get("crop_pct") or 0.875, config.get("crop_mode") or "center"
        if how not in ("center", "squash") or (how == "center" and height != width):
            raise UserError(f"{source} has the crop_mode {how} at {width}x{height}; load it in a factory of your own")
        size = int(height / share), int(width / share)
        return Preprocessing(
            mean=as_numbers(config["mean"], channels),
            std=as_numbers(config["std"], channels),
            crop=(height, width),
            resize=size[0] if how == "center" else size,
            mode=MODES[config.get("interpolation") or "bicubic"],
            half_up=True,
        )


def load_timm(name: str) -> Preprocessed:
    source = f"timm:{name}"
    timm = needed("timm", source)
    with users_code(f"{source} can't be loaded"), quiet():
        model = timm.create_model(_plain(name, source), pretrained=True)
    return Preprocessed(model, timm_steps(dict(model.pretrained_cfg), source))


def load_torchvision(name: str) -> tuple[Preprocessed, tuple[str, ...]]:
    """A model of torchvision with its default weights, and the names of its classes."""
    source = f"torchvision:{name}"
    models: Any = needed("torchvision.models", source)
    with users_code(f"{source} can't be loaded"), quiet():
        weights = models.get_model_weights(_plain(name, source)).DEFAULT
        model, transform = models.get_model(name, weights=weights), weights.transforms()
    with users_code(f"{source} has an unknown kind of preprocessing"):
        crop, resize = transform.crop_size[0], transform.resize_size[0]
        steps = Preprocessing(
            mean=as_numbers(transform.mean),
            std=as_numbers(transform.std),
            crop=(crop, crop),
            resize=resize,
            mode=MODES[transform.interpolation.value],
            half_up=True,
        )
    return Preprocessed(model, steps), tuple(map(str, weights.meta.get("categories", ())))


def _plain(name: str, source: object) -> str:
    """A name that means a model of the library itself, never another place such as timm's `hf-hub:`."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise UserError(f"{source} is no name of a model")
    return name


def _load_transformers(folder: Path, config: dict[str, Any]) -> tuple[Preprocessed, tuple[str, ...]]:
    """An image classifier of transformers. No code from the folder is run, and no weight may be missing."""
    transformers, kind = needed("transformers", folder), config["model_type"]
    read_config(folder / PROCESSOR)
    for pickled in folder.glob("pytorch_model*.bin"):
        read_weights(pickled)  # refuses one that could run code or exhaust the memory
    local = {"local_files_only": True, "trust_remote_code": False}
    with quiet(), users_code(f"transformers can't load the {kind!r} image classifier in {folder}"):
        load = transformers.AutoModelForImageClassification.from_pretrained
        model, info = load(folder, output_loading_info=True, **local)
        processor = transformers.AutoImageProcessor.from_pretrained(folder, **local)
    for name in sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]])):
        raise UserError(f"the weights in {folder} don't fit its {kind} image classifier: {name} is missing or differs")
    steps = transformers_steps(processor, folder)
    check_steps(steps, processor, folder)
    names = [name for _, name in sorted((int(key), name) for key, name in model.config.id2label.items())]
    given = all(name != f"LABEL_{number}" for number, name in enumerate(names))
    return Preprocessed(model.float(), steps), tuple(map(str, names)) if given else ()


def transformers_steps(processor: Any, source: object) -> Preprocessing:
    """The steps of an image processor, from its attributes."""

    def get(name: str) -> Any:
        return getattr(processor, name, None)

    def sides(size: Any) -> int | tuple[int, int] | None:
        size = dict(size or {})
        if size.get("shortest_edge"):
            return int(size["shortest_edge"])
        return (int(size["height"]), int(size["width"])) if size.get("height") else None

    with users_code(f"{source}: the sizes in {PROCESSOR} can't be read"):
        resize = sides(get("size")) if get("do_resize") else None
        crop = sides(get("crop_size")) if get("do_center_crop") else None
        if isinstance(resize, int) and get("crop_pct"):  # ConvNext: below 384 resized and cropped, else only resized
            crop = (resize, resize)
            resize = int(resize / get("crop_pct")) if resize < 384 else crop
        crop = (crop, crop) if isinstance(crop, int) else crop
        if crop is None and isinstance(resize, tuple):
            crop = resize
        factor = 255 * get("rescale_factor") if get("do_rescale") else 255.0
        mean, std = (get("image_mean"), get("image_std")) if get("do_normalize") else (0, 1)
        return Preprocessing(
            mean=tuple(value / factor for value in as_numbers(mean)),
            std=tuple(value / factor for value in as_numbers(std)),
            crop=crop,
            resize=resize,
            mode=MODES[int(get("resample") if resize else 2)],
            bgr=bool(get("do_flip_channel_order")),
        )


def check_steps(steps: Preprocessing, processor: Any, source: object) -> None:
    """Compare the first layer with the image processor itself, on smooth images, which Pillow rounds but never clips.
    There is no list of supported processors: one that does anything else is refused."""
    layer = Preprocessed(nn.Identity(), steps)
    for height, width in ((60, 60), (90, 72), (500, 640)):
        y, x, c = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j, 0:3]
        image = (128 + 60 * np.sin(5 * x + 3 * y + 2 * c)).astype(np.uint8)
        with users_code(f"the image processor of {source} failed on an image"), quiet():
            theirs = torch.as_tensor(np.array(processor(Image.fromarray(image), return_tensors="np")["pixel_values"]))
        ours = layer(torch.from_numpy(image).permute(2, 0, 1)[None] / 255)
        if ours.shape != theirs.shape or (ours - theirs).abs().max() > 2.5 / 255 / min(steps.std):
            own = "does more than resize, crop and normalise"
            raise UserError(f"{source}: its {type(processor).__name__} {own}; load it in a factory of your own instead")


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and messages of transformers and huggingface_hub, if they are imported; restored afterwards."""
    with ExitStack() as after:
        hub = sys.modules.get("huggingface_hub.utils")
        if hub and not hub.are_progress_bars_disabled():
            hub.disable_progress_bars()
            after.callback(hub.enable_progress_bars)
        if logging := sys.modules.get("transformers.utils.logging"):
            level = logging.get_verbosity()
            logging.set_verbosity_error()
            after.callback(logging.set_verbosity, level)
            if logging.is_progress_bar_enabled():
                logging.disable_progress_bar()
                after.callback(logging.enable_progress_bar)
        yield
