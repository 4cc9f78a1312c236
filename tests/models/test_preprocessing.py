"""A model's own preprocessing as its first layer, against Pillow and against the image processors of transformers."""

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import nn

from moatlab.models.hub import check_steps, timm_steps, transformers_steps
from moatlab.models.preprocessing import Preprocessed, Preprocessing
from moatlab.runtime.errors import UserError


def smooth(height, width):
    """Bytes (H, W, 3) without values near 0 and 255, which Pillow would clip after a bicubic overshoot."""
    y, x, c = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j, 0:3]
    return (128 + 60 * np.sin(7 * x * y + 3 * y + 2 * c)).astype(np.uint8)


def as_batch(image):
    return torch.from_numpy(image).permute(2, 0, 1)[None] / 255


@pytest.mark.parametrize(("mode", "pillow"), [("bilinear", 2), ("bicubic", 3), ("nearest-exact", 0)])
@pytest.mark.parametrize(("height", "width"), [(32, 32), (100, 80), (300, 500)])
def test_resize_and_crop_give_the_pixels_of_pillow(mode, pillow, height, width):
    image, shorter = smooth(height, width), min(height, width)
    size = 73 * width // shorter, 73 * height // shorter
    left, top = round((size[0] - 64) / 2), round((size[1] - 64) / 2)
    expected = Image.fromarray(image).resize(size, pillow).crop((left, top, left + 64, top + 64))
    steps = Preprocessing(mean=(0, 0, 0), std=(1, 1, 1), crop=(64, 64), resize=73, mode=mode, half_up=True)
    found = Preprocessed(nn.Identity(), steps)(as_batch(image))
    assert (255 * found - 255 * as_batch(np.array(expected))).abs().max() < 2.5  # Pillow rounds twice


def test_images_of_the_models_own_size_are_only_normalised():
    steps = Preprocessing(mean=(0.5, 0.4, 0.3), std=(0.5, 0.25, 0.2), crop=(8, 8), resize=10)
    x = torch.rand(2, 3, 8, 8)
    expected = (x - torch.tensor(steps.mean).view(3, 1, 1)) / torch.tensor(steps.std).view(3, 1, 1)
    assert torch.allclose(Preprocessed(nn.Identity(), steps)(x), expected, atol=1e-6)


def test_channels_are_reversed_and_grey_images_repeated():
    steps = Preprocessing(mean=(0, 0, 0), std=(1, 1, 1), bgr=True)
    x = torch.rand(2, 3, 8, 8)
    assert torch.equal(Preprocessed(nn.Identity(), steps)(x), x[:, [2, 1, 0]])
    assert torch.equal(Preprocessed(nn.Identity(), steps)(x[:, :1]), x[:, [0, 0, 0]])


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_the_layer_is_differentiable_everywhere_also_at_black_and_white_pixels(mode):
    steps = Preprocessing(mean=(0.5,), std=(0.2,), crop=(6, 6), resize=7, mode=mode)
    layer = Preprocessed(nn.Identity(), steps).double()
    white = torch.ones(1, 1, 5, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, (white,))
    (gradient,) = torch.autograd.grad(layer(white.float()).sum(), white)
    assert (gradient != 0).all()


def processor(name, **options):
    return getattr(transformers, name)(**options)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("ViTImageProcessorPil", {"size": {"height": 48, "width": 48}}),
        ("ViTImageProcessorPil", {"do_normalize": False, "resample": 3}),
        ("ConvNextImageProcessorPil", {"size": {"shortest_edge": 224}, "crop_pct": 0.875}),
        ("ConvNextImageProcessorPil", {"size": {"shortest_edge": 384}}),
        ("BitImageProcessorPil", {"size": {"shortest_edge": 60}, "crop_size": {"height": 41, "width": 41}}),
        ("CLIPImageProcessorPil", {}),
        ("MobileViTImageProcessorPil", {"size": {"shortest_edge": 288}}),
        ("PoolFormerImageProcessorPil", {}),
        ("MobileNetV2ImageProcessorPil", {}),
        ("BeitImageProcessorPil", {}),
    ],
)
def test_the_layer_gives_the_pixel_values_of_the_image_processor(kind, options):
    theirs = processor(kind, **options)
    steps = transformers_steps(theirs, "x")
    check_steps(steps, theirs, "x")
    image = smooth(120, 170)
    expected = torch.as_tensor(theirs(Image.fromarray(image), return_tensors="np")["pixel_values"])
    found = Preprocessed(nn.Identity(), steps)(as_batch(image))
    assert (found - expected).abs().max() < 2.5 / 255 / min(steps.std)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("EfficientNetImageProcessorPil", {"rescale_offset": True}),
        ("PoolFormerImageProcessorPil", {"size": {"shortest_edge": 400}}),
        ("ViTImageProcessorPil", {"do_pad": True, "pad_size": {"height": 300, "width": 300}}),
    ],
)
def test_an_image_processor_that_does_more_is_refused_instead_of_guessed(kind, options):
    theirs = processor(kind, **options)
    with pytest.raises(UserError, match=r"does more than resize, crop and normalise|failed on an image|can't be read"):
        check_steps(transformers_steps(theirs, "x"), theirs, "x")


def test_the_steps_of_timm_are_read_from_its_pretrained_cfg():
    config = {
        "input_size": [3, 224, 224],
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "mean": [0.5] * 3,
        "std": [1] * 3,
    }
    steps = timm_steps(config, "x")
    assert (steps.resize, steps.crop, steps.mode, steps.half_up) == (248, (224, 224), "bicubic", True)
    assert timm_steps({**config, "crop_mode": "squash"}, "x").resize == (248, 248)
    assert steps.image_size == 248
    assert str(steps) == (
        "resized (shorter side to 248, bicubic), cropped to the central 224x224, "
        "normalised with mean 0.5 0.5 0.5, std 1 1 1"
    )
    for wrong in ({"crop_mode": "border"}, {"input_size": [3, 224, 192]}, {"mean": None}, {"interpolation": "other"}):
        with pytest.raises(UserError, match=r"crop_mode|unreadable"):
            timm_steps({**config, **wrong}, "x")


def test_images_too_small_to_be_cropped_are_refused():
    with pytest.raises(UserError, match="needs images of 9x9 pixels, and these have 8x8"):
        Preprocessed(nn.Identity(), Preprocessing(mean=(0,), std=(1,), crop=(9, 9)))(torch.rand(1, 1, 8, 8))
