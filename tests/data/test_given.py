"""What callers may pass as images, labels, radius and model: the same at all public functions that take them."""

from textwrap import dedent
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import moatlab
from moatlab.data.given import images_and_labels
from moatlab.runtime.errors import UserError
from moatlab.runtime.files import RunFile
from moatlab.training.recipe import load_recipe

CLASSES = 4
PIXELS = torch.randint(256, (24, 6, 6, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
FLOATS = PIXELS.permute(0, 3, 1, 2) / 255
Y = torch.arange(24) % CLASSES


def network(classes=CLASSES, channels=3):
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(36 * channels, classes))


class AsObject(nn.Module):
    """Logits inside an object, as Hugging Face's models return them."""

    def __init__(self, num_classes=CLASSES):
        super().__init__()
        self.inner = network(num_classes)

    def forward(self, x):
        return SimpleNamespace(logits=self.inner(x), loss=None)


class Items(torch.utils.data.Dataset):
    """Pairs (image, label), each image made by `convert` from (H, W, C) bytes."""

    def __init__(self, convert):
        self.convert = convert

    def __len__(self):
        return len(Y)

    def __getitem__(self, number):
        return self.convert(PIXELS[number]), int(Y[number])


class Endless(IterableDataset):
    def __iter__(self):
        return iter(zip(FLOATS, Y, strict=True))


# The four doors: each takes a model, images, labels (or None) and a radius.


def train(model, x, y=None, eps="8/255"):
    data = x if y is None else (x, y)
    return moatlab.train(model, data, method="fast", eps=eps, epochs=1, batch_size=8, augment=False)


def evaluate(model, x, y=None, eps="8/255"):
    return moatlab.evaluate(model, x, y, attacks=["fgsm"], eps=eps)


def measure(model, x, y=None, eps="8/255"):
    return moatlab.measure(model, x, y, eps=eps)


def make_batch(model, x, y=None, eps="8/255"):
    return moatlab.make_batch(model, x, y, "fgsm", eps=eps)


DOORS = (train, evaluate, measure, make_batch)


def gap():
    """Floats in [0, 1], but for one pixel."""
    x = FLOATS.clone()
    x[3, 0, 0, 0] = -2.1
    return x


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"x": gap()}, "images range from -2.1 to 1, not in [0, 1]; normalise inside the model instead"),
        ({"x": FLOATS * 255}, "images range from 0 to 255, not in [0, 1]; divide them by 255"),
        ({"x": FLOATS * torch.nan}, "images range from nan to nan, not in [0, 1]; normalise inside the model instead"),
        (
            {"x": PIXELS / 255},
            "images have shape (24, 6, 6, 3), with the channels in the wrong place; use x.permute(0, 3, 1, 2)",
        ),
        (
            {"x": (FLOATS * 255).byte().numpy()},
            "images have shape (24, 3, 6, 6), with the channels in the wrong place; use x.transpose(0, 2, 3, 1)",
        ),
        (
            {"x": PIXELS.int()},
            "images are torch.int32 of shape (24, 6, 6, 3); they must be bytes (N, H, W) or (N, H, W, C), or floats "
            "(N, C, H, W) in [0, 1]",
        ),
        (
            {"x": FLOATS[0]},
            "images are torch.float32 of shape (3, 6, 6); they must be bytes (N, H, W) or (N, H, W, C), or floats "
            "(N, C, H, W) in [0, 1]",
        ),
        ({"x": "photos", "y": Y}, "images cannot be converted to a tensor; they must be numbers"),
        ({"x": FLOATS[:0], "y": Y[:0]}, "there are 0 images and 0 labels; give one label per image"),
        ({"y": Y[:5]}, "there are 24 images and 5 labels; give one label per image"),
        ({"y": Y.float()}, "labels are torch.float32 of shape (24,); they must be integers (N,)"),
        (
            {"y": nn.functional.one_hot(Y).numpy()},
            "labels are torch.int64 of shape (24, 4); they must be integers (N,)",
        ),
        ({"y": Y - 1}, "labels range from -1 to 2; they must begin at 0"),
        ({"y": ["cat"] * 24}, "labels cannot be converted to a tensor; they must be numbers"),
        ({"y": Y * 2}, "labels range from 0 to 6, but the model has 4 classes"),
        ({"eps": 8}, "eps=8: the radius must be a number between 0 and 1; did you mean 8/255?"),
        ({"eps": "wide"}, "eps wide: the radius must be a number between 0 and 1, such as 8/255"),
        ({"model": AsObject(1).inner}, "the model has one output only; attacks need logits of at least 2 classes"),
        ({"model": nn.Linear(6, 6)}, "logits of 2 images have shape (2, 3, 6, 6); it must be (images, classes)"),
        (
            {"x": TensorDataset(FLOATS), "y": None},
            "an item of the Dataset is a tuple; it must be (image, label)",
        ),
        (
            {"x": DataLoader(FLOATS), "y": None},
            "a batch of the DataLoader is a Tensor; it must be (images, labels)",
        ),
        (
            {"x": Items(lambda pixels: pixels[: 4 + int(pixels[0, 0, 0]) % 2].numpy()), "y": None},
            "images have the shapes (4, 6, 3) and (5, 6, 3); resize all to one size",
        ),
    ],
)
def test_the_same_mistake_gives_the_same_sentence_at_all_four_doors(given, sentence):
    for door in DOORS:
        model = given.get("model", network())
        x, y = (FLOATS[:2], Y[:2]) if "model" in given and door is not train else (FLOATS, Y)
        with pytest.raises(UserError) as error:
            door(model, given.get("x", x), given.get("y", y), given.get("eps", "8/255"))
        assert str(error.value) == sentence, door.__name__


@pytest.mark.usefixtures("alone")
def test_a_model_that_is_no_module_is_refused_at_all_four_doors():
    for door in DOORS:
        with pytest.raises(UserError, match=r"the model is a function; it must be a torch\.nn\.Module"):
            door(lambda x: x, FLOATS, Y)
    for door in DOORS[1:]:
        with pytest.raises(UserError, match="labels are missing; pass images and labels, or a Dataset or DataLoader"):
            door(network(), FLOATS)


SOURCES = {
    "tensors": (FLOATS, Y),
    "bytes": (PIXELS, Y),
    "arrays": (FLOATS.numpy(), Y.numpy()),
    "float64 arrays": (PIXELS.permute(0, 3, 1, 2).numpy() / 255, Y.numpy().astype(np.uint8)),
    "lists": (PIXELS.tolist(), Y.tolist()),
    "labels as Keras loads them": (PIXELS.numpy(), Y.numpy()[:, None]),
    "a Dataset of tensors": (TensorDataset(FLOATS, Y), None),
    "a Dataset of arrays": (Items(lambda pixels: pixels.numpy()), None),
    "a Dataset of pictures": (Items(lambda pixels: Image.fromarray(pixels.numpy())), None),
    "a Dataset without a length": (Endless(), None),
    "a DataLoader": (DataLoader(TensorDataset(FLOATS, Y), batch_size=7), None),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("source", SOURCES)
def test_whatever_holds_the_same_images_gives_the_same_result_at_all_four_doors(source):
    model = network()
    x, y = SOURCES[source]
    assert evaluate(model, x, y).broken_by == evaluate(model, FLOATS, Y).broken_by
    assert measure(model, x, y) == measure(model, FLOATS, Y)
    made, expected = (make_batch(model, *given)[0] for given in ((x, y), (FLOATS, Y)))
    assert torch.equal(made, expected)
    trained = [train(network(), *given).model[1].weight for given in ((x, y), (PIXELS, Y))]
    assert torch.equal(*trained)


@pytest.mark.usefixtures("alone")
def test_train_takes_a_pair_of_any_two_sources():
    dataset, loader = TensorDataset(FLOATS, Y), DataLoader(TensorDataset(FLOATS[:8], Y[:8]), batch_size=3)
    some = (PIXELS[:8], Y[:8])
    pairs = ((dataset, loader), ((FLOATS, Y), loader), [dataset, [*some]], ((PIXELS, Y), some))
    runs = [train(network(), pair) for pair in pairs]
    assert {run.record.data["test"] for run in runs} == {8}
    assert len({run.record.data["sha256"] for run in runs}) == 1
    with pytest.raises(UserError, match="there are 8 test images and 3 test labels"):
        train(network(), ((PIXELS, Y), (PIXELS[:8], Y[:3])))


def test_a_loader_is_read_once_and_may_shuffle():
    loader = DataLoader(TensorDataset(FLOATS, Y), batch_size=5, shuffle=True)
    x, y = images_and_labels(loader)
    assert sorted(x.flatten(1).tolist()) == sorted(FLOATS.flatten(1).tolist())
    assert y.bincount().tolist() == Y.bincount().tolist()
    read = iter([(FLOATS, Y)])
    assert len(images_and_labels(DataLoader(Once(read), batch_size=None))[0]) == 24


class Once(IterableDataset):
    def __init__(self, read):
        self.read = read

    def __iter__(self):
        yield next(self.read)


def test_pictures_of_all_modes_become_bytes_and_deep_ones_are_refused():
    for mode, channels in (("L", 1), ("1", 1), ("P", 3), ("RGBA", 3), ("CMYK", 3)):
        x, _y = images_and_labels(Items(lambda pixels, mode=mode: Image.fromarray(pixels.numpy()).convert(mode)))
        assert x.shape == (24, 6, 6, channels)
        assert x.dtype == torch.uint8
    with pytest.raises(UserError, match="more than 8 bits per channel"):
        images_and_labels(Items(lambda pixels: Image.fromarray(pixels[..., 0].numpy()).convert("I")))


@pytest.mark.usefixtures("alone", "aloud")
def test_floats_that_were_never_bytes_are_rounded_by_train_with_a_note_and_used_as_given_elsewhere(capsys):
    x = torch.rand(24, 3, 6, 6, generator=torch.Generator().manual_seed(2))
    run = train(network(), ((x, Y), (x, Y)))
    assert "images are rounded to multiples of 1/255" in capsys.readouterr().err
    whole = (x * 255).round().byte().permute(0, 2, 3, 1)
    assert run.record.data["sha256"] == moatlab.as_images((whole, Y), (whole, Y)).sha256
    train(network(), (FLOATS.half(), Y))
    assert "rounded" not in capsys.readouterr().err
    made, _ = moatlab.make_batch(network(), x, Y, "standard", eps=0.1)
    assert torch.equal(made, x)


@pytest.mark.usefixtures("alone")
def test_half_precision_is_refused_where_images_are_used_as_given():
    for door in DOORS[1:]:
        with pytest.raises(UserError, match=r"images are torch.float16, where small steps vanish; use x\.float\(\)"):
            door(network(), FLOATS.half(), Y)


@pytest.mark.usefixtures("alone")
def test_an_object_with_logits_is_unwrapped_at_all_four_doors_and_the_model_left_as_it_was():
    plain, model = network(), AsObject()
    assert evaluate(model, FLOATS, Y).broken_by == evaluate(plain, FLOATS, Y).broken_by
    assert measure(model, FLOATS, Y) == measure(plain, FLOATS, Y)
    assert torch.equal(make_batch(model, FLOATS, Y)[0], make_batch(plain, FLOATS, Y)[0])
    run = train(model, FLOATS, Y)
    assert torch.equal(run.model.inner[1].weight, train(plain, FLOATS, Y).model[1].weight)
    assert not isinstance(model(FLOATS), torch.Tensor)
    assert not model._forward_hooks


def test_a_factory_whose_model_returns_an_object_is_trained_and_evaluated_by_the_command_line(moat, alone, tiny):
    code = """
        from types import SimpleNamespace
        from torch import nn

        class Net(nn.Sequential):
            def forward(self, x):
                return SimpleNamespace(logits=super().forward(x))

        def build(classes):
            return Net(nn.Flatten(), nn.Linear(192, classes))
    """
    (alone / "objects.py").write_text(dedent(code))
    options = ("--data", tiny, "--model", "objects:build", "--max-steps", 2, "--batch-size", 16, "--out", "run")
    assert moat("train", "fast", *options).code == 0
    ended = moat("eval", "run", "--attacks", "fgsm", "--n", 4, "--trust-model-code")
    assert ended.code == 0, ended.err


@pytest.mark.usefixtures("aloud")
def test_autoattack_with_three_classes_is_replaced_by_its_parts_that_work(capsys):
    result = moatlab.evaluate(network(3), FLOATS[:4], Y[:4] % 3, eps="1/255")
    assert list(result.accuracy) == ["clean", "apgd-ce", "fab-t", "square"]
    assert "AutoAttack needs four classes; using its parts apgd-ce, fab-t, square instead" in capsys.readouterr().err
    with pytest.raises(UserError, match="apgd-t needs at least 4 classes, this model has 3"):
        moatlab.evaluate(network(3), FLOATS[:4], Y[:4] % 3, attacks="apgd-t")


@pytest.mark.usefixtures("alone")
def test_a_radius_is_a_number_or_a_text_at_all_four_doors_and_is_written_as_a_fraction():
    runs = [train(network(), FLOATS, Y, eps=eps) for eps in (8 / 255, "8/255")]
    assert {load_recipe(run.folder / RunFile.RECIPE).eps for run in runs} == {"8/255"}
    assert {evaluate(network(), FLOATS, Y, eps=eps).settings.eps for eps in (8 / 255, "8/255")} == {"8/255"}
    assert measure(network(), FLOATS, Y, eps=8 / 255) == measure(network(), FLOATS, Y)
    assert torch.equal(make_batch(network(), FLOATS, Y, eps=8 / 255)[0], make_batch(network(), FLOATS, Y)[0])


def test_measure_has_a_default_seed_and_make_batch_needs_a_stage_and_enough_classes():
    assert moatlab.measure(network(), FLOATS, Y, eps=0.1) == moatlab.measure(network(), FLOATS, Y, eps=0.1, seed=0)
    with pytest.raises(UserError, match='name a stage, as in stage="fast"'):
        moatlab.make_batch(network(), FLOATS, Y, eps=0.1)
    with pytest.raises(UserError, match="labels range from 0 to 3, but the model has 3 classes"):
        moatlab.make_batch(network(), FLOATS, Y, stage="mixup", eps=0.1, classes=3)


def test_a_run_from_a_python_object_is_loaded_into_a_module_and_all_messages_say_so(moat, alone):
    run = train(network(), FLOATS, Y)
    loaded = moatlab.load(run.folder, model=network())
    assert torch.equal(loaded[1].weight, run.model[1].weight)
    assert not loaded.training
    way = r"or pass a module for the weights: moatlab\.load\(run, model=my_module\)$"
    for trusted in (False, True):
        with pytest.raises(UserError, match=way):
            moatlab.load(run.folder, trust_model_code=trusted)
    with pytest.raises(UserError, match="don't fit the model"):
        moatlab.load(run.folder, model=network(3))
    np.savez(alone / "own.npz", x_train=PIXELS, y_train=Y, x_test=PIXELS, y_test=Y)
    code = "from torch import nn\n\n\ndef build(classes):\n"
    (alone / "mine.py").write_text(f"{code}    return nn.Sequential(nn.Flatten(), nn.Linear(108, classes))\n")
    command = ("eval", run.folder, "--data", "own.npz", "--attacks", "fgsm", "--n", 4)
    for more in ((), ("--trust-model-code",)):
        assert "or name a function that builds the model with --model" in moat(*command, *more).err
    assert moat(*command, "--model", "mine:build").code == 0


class ClassLabel:
    names: ClassVar = ["dark", "bright", "grey"]


class Split:
    """A split of Hugging Face `datasets`, as far as it is used here: features by name, and rows with Pillow images."""

    def __init__(self, features, rows):
        self.features, self.rows = features, rows

    def __iter__(self):
        return iter(self.rows)

    def __len__(self):
        return len(self.rows)


def photo_split(count=12, **more):
    photo, label = type("Image", (), {})(), ClassLabel()
    shades = [Image.fromarray(np.full((4, 4, 3), 20 * number, np.uint8)) for number in range(count)]
    rows = [{"img": shade, "label": number % 3, "id": "x"} for number, shade in enumerate(shades)]
    return Split({"img": photo, "label": label, "id": None, **more}, rows)


def test_a_split_of_hugging_face_datasets_is_taken_as_images_with_a_stand_in_for_the_package():
    x, y = images_and_labels(photo_split())
    assert x.shape == (12, 4, 4, 3)
    assert x[:, 0, 0, 0].tolist() == [20 * number for number in range(12)]
    assert y.tolist() == [number % 3 for number in range(12)]
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 3))
    result = moatlab.evaluate(model, photo_split(), attacks="fgsm")
    assert result.broken_by == moatlab.evaluate(model, x, y, attacks="fgsm").broken_by
    images = moatlab.as_images(photo_split(), photo_split(3))
    assert images.classes == ("dark", "bright", "grey")
    assert torch.equal(images.test_x, x[:3])


def test_a_split_with_several_labels_uses_the_one_called_label_or_is_refused():
    assert images_and_labels(photo_split(coarse=ClassLabel()))[1][1] == 1
    two = photo_split(coarse=ClassLabel())
    two.features["fine"] = two.features.pop("label")
    with pytest.raises(UserError, match=r"several columns of labels \(coarse, fine\); keep one"):
        images_and_labels(two)
    with pytest.raises(UserError, match=r"no column of images \(label, text\)"):
        images_and_labels(Split({"label": ClassLabel(), "text": None}, []))
