"""Your model, your data, your threat model, your loop."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import moatlab
from images_for_tests import tiny_images
from moatlab.attacks.norms import Threat, distance
from moatlab.data.batches import Batches
from moatlab.data.loading import load_images
from moatlab.evaluation.target import model_sha256
from moatlab.methods.batches import prepare_loss
from moatlab.methods.context import Context
from moatlab.methods.language import parse_method
from moatlab.methods.stages import STAGES
from moatlab.models.registry import BUILT_IN, build_model
from moatlab.models.weights import read_weights
from moatlab.runtime.device import choose_device
from moatlab.runtime.errors import UserError
from moatlab.training.making import make_recipe
from moatlab.training.recipe import load_recipe

# --- models


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_model_trains_a_few_steps(name):
    x = torch.randint(256, (24, 16, 16, 3), dtype=torch.uint8)
    y = torch.arange(24) % 3
    run = moatlab.train(name, ((x, y), (x, y)), method="moat:2", epochs=3, batch_size=8, width=8, augment=False)
    assert run.record.status == "finished"
    assert run.record.counted == run.record.planned
    assert run.model(torch.rand(2, 3, 16, 16)).shape == (2, 3)


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_model_is_left_as_found_by_attacks(name):
    torch.manual_seed(0)
    model = build_model(name, classes=4, arguments={"width": 8}).eval()
    next(model.parameters()).requires_grad_(False)
    before, wanting = model_sha256(model, {}), [parameter.requires_grad for parameter in model.parameters()]
    moatlab.evaluate(model, torch.rand(6, 3, 16, 16), torch.arange(6) % 4, attacks=["pgd7", "mim50"], eps=4 / 255)
    assert model_sha256(model, {}) == before
    assert [parameter.requires_grad for parameter in model.parameters()] == wanting
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_wide_resnets_have_the_parameters_that_their_paper_counts():
    counts = {name: sum(p.numel() for p in BUILT_IN[name](classes=10).parameters()) for name in BUILT_IN}
    assert round(counts["wide_resnet28_10"] / 1e6, 1) == 36.5
    assert round(counts["wide_resnet34_10"] / 1e6, 1) == 46.2
    assert round(counts["resnet18"] / 1e6, 2) == 11.17
    assert counts["preact_resnet34"] > counts["preact_resnet18"]
    assert make_recipe("fgsm", preset="paper", model="wide_resnet28_10").width == 160


class TinyViT(nn.Module):
    """Patches, attention, dropout; no BatchNorm, no convolution."""

    def __init__(self, num_classes):
        super().__init__()
        self.patches = nn.Linear(4 * 4 * 3, 16)
        self.places = nn.Parameter(torch.zeros(4, 16))
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.head = nn.Linear(16, num_classes)

    def forward(self, x):
        patches = x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        return self.head(self.layer(self.patches(patches) + self.places).mean(1))


def test_a_vision_transformer_with_dropout_resumes_bit_for_bit(alone):
    data = tiny_images(alone / "data")
    options = {"method": "moat:2", "epochs": 3, "batch_size": 16, "preset": "mini", "holdout": 0}

    def begun():
        torch.manual_seed(0)
        return TinyViT(2)

    whole = moatlab.train(begun(), data, out="whole", **options)
    moatlab.train(begun(), data, out="pieces", max_steps=7, **options)
    pieces = moatlab.train(begun(), data, out="pieces", resume=True, **options)
    for one, other in zip(whole.model.parameters(), pieces.model.parameters(), strict=True):
        assert torch.equal(one, other)


# --- data


def write_folder(folder, count, size, mode, seed=0):
    draws = np.random.default_rng(seed)
    for part in ("train", "test"):
        for label, name in enumerate(("a", "b")):
            (folder / part / name).mkdir(parents=True)
            for number in range(count if part == "train" else 8):
                shape = (*size, 3) if mode == "RGB" else size
                pixels = draws.integers(100 * label, 100 * label + 155, shape, np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{number}.png", compress_level=0)
    return folder


def test_greyscale_images_of_28x28_train_and_are_evaluated_with_one_channel(moat, alone):
    write_folder(alone / "grey", 24, (28, 28), "L")
    images = load_images("grey")
    assert images.train_x.shape == (48, 28, 28, 1)
    assert len(images.mean) == 1
    options = ("--data", "grey", "--width", 8, "--epochs", 1, "--batch-size", 16, "--out", "run")
    assert moat("train", "fast", *options).code == 0
    assert moat("eval", "run", "--attacks", "pgd7", "--n", 8).code == 0
    assert (alone / "run" / "report.html").exists()


def test_one_image_in_colour_makes_three_channels_of_all(alone):
    write_folder(alone / "mixed", 4, (8, 8), "L")
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(alone / "mixed" / "test" / "a" / "0.png")
    assert load_images("mixed").train_x.shape == (8, 8, 8, 3)


def test_images_that_stay_on_the_disk_are_the_same_batches_with_the_same_checksum(alone):
    write_folder(alone / "colour", 20, (8, 8), "RGB")
    memory, disk = load_images("colour", stream=False), load_images("colour", stream=True)
    assert (memory.sha256, memory.mean, memory.std) == (disk.sha256, disk.mean, disk.std)
    batches = [Batches(images.train_x, images.train_y, 8, True, 0) for images in (memory, disk)]
    for step in (0, 1, 2, 7, 3):  # and back, as after a resume
        one, other = (side.at(step) for side in batches)
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def test_a_streamed_run_has_the_bits_of_one_in_memory(moat, alone):
    write_folder(alone / "colour", 20, (8, 8), "RGB")
    options = ("--data", "colour", "--width", 8, "--epochs", 3, "--batch-size", 16, "--holdout", 8)
    assert moat("train", "moat:2", *options, "--out", "memory").code == 0
    assert moat("train", "moat:2", *options, "--out", "disk", "--stream", "--max-steps", 3).code == 0
    assert moat("train", "moat:2", *options, "--out", "disk", "--stream", "--resume").code == 0
    one, other = read_weights("memory")[0], read_weights("disk")[0]
    assert all(torch.equal(one[name], other[name]) for name in one)


STREAMED = """
import resource, sys, moatlab
moatlab.train("preact_resnet18", sys.argv[1], method="standard", epochs=1, batch_size=50, width=8, augment=False,
              max_steps=15, stream=True, out=sys.argv[2], preset="mini", holdout=100, threads=1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_ten_thousand_images_of_64x64_are_trained_on_in_memory_that_stays_flat(alone):
    """Against a folder of 500: in memory, the others would take 115 MB more."""
    few, many = write_folder(alone / "few", 250, (64, 64), "RGB"), alone / "many"
    for part in ("train", "test"):
        for name in ("a", "b"):
            (many / part / name).mkdir(parents=True)
            pictures = sorted((few / part / name).iterdir())
            for number in range(5_000 if part == "train" else 8):
                (many / part / name / f"{number}.png").hardlink_to(pictures[number % len(pictures)])

    def peak(folder):
        command = [sys.executable, "-c", STREAMED, str(folder), str(alone / f"run-{folder.name}")]
        return int(subprocess.run(command, cwd=alone, capture_output=True, text=True, check=True).stdout) / 1024

    assert peak(many) < peak(few) + 60


def test_arrays_in_an_npz_file_are_a_data_set(moat, alone):
    draws = np.random.default_rng(0)
    arrays = {f"{kind}_{part}": None for kind in "xy" for part in ("train", "test")}
    for part, count in (("train", 32), ("test", 8)):
        arrays[f"x_{part}"] = draws.integers(0, 256, (count, 8, 8), np.uint8)
        arrays[f"y_{part}"] = np.arange(count) % 2
    np.savez(alone / "own.npz", **arrays, classes=np.array(["cat", "dog"]))
    images = load_images("own.npz")
    assert (images.train_x.shape, images.classes) == ((32, 8, 8, 1), ("cat", "dog"))
    options = ("--data", "own.npz", "--width", 8, "--epochs", 1, "--batch-size", 16, "--out", "run")
    assert moat("train", "fast", *options).code == 0
    del arrays["y_test"]
    np.savez(alone / "own.npz", **arrays)
    assert "has no array 'y_test'" in moat("train", "fast", *options[:-1], "other").err
    (alone / "own.npz").write_bytes(b"PK\3\4 not really")
    ending = moat("train", "fast", *options[:-1], "other")
    assert ending.code == 2
    assert "cannot be read as arrays" in ending.err


def test_floats_that_were_bytes_are_those_bytes_and_images_of_another_kind_are_refused():
    pixels = torch.randint(256, (12, 6, 6, 3), dtype=torch.uint8)
    y = torch.arange(12) % 3
    images = moatlab.as_images((pixels.permute(0, 3, 1, 2) / 255, y), (pixels, y))
    assert torch.equal(images.test_x, pixels)
    assert sorted(images.train_x.flatten(1).tolist()) == sorted(pixels.flatten(1).tolist())
    for bad in (torch.randn(12, 3, 6, 6), pixels.int(), pixels[0]):
        with pytest.raises(UserError):
            moatlab.as_images((bad, y), (pixels, y))
    for bad in (y[:5], y.float(), y - 1, np.array(["cat"] * 12)):
        with pytest.raises(UserError):
            moatlab.as_images((pixels, bad), (pixels, y))
        with pytest.raises(UserError):
            moatlab.as_images((pixels, bad))
    with pytest.raises(UserError):
        moatlab.as_images((pixels.float() / 255, y))  # channels last, as floats
    assert torch.equal(moatlab.as_images((pixels, y), (pixels.numpy()[:, ::-1], y)).test_x, pixels.flip(1))


def test_arrays_that_are_sorted_by_class_have_all_classes_in_what_is_held_out():
    pixels, y = torch.randint(256, (90, 6, 6, 3), dtype=torch.uint8), torch.arange(90) // 30
    pixels[:, 0, 0, 0] = y
    images = moatlab.as_images((pixels, y), (pixels, y))
    assert set(images.train_y[-30:].tolist()) == {0, 1, 2}
    assert torch.equal(images.train_x[:, 0, 0, 0].long(), images.train_y)
    assert torch.equal(images.test_y, y)  # the numbers of verdicts are the user's own


@pytest.mark.usefixtures("alone")
def test_a_pair_of_tensors_trains_a_model_of_the_users_own():
    x = torch.randint(256, (40, 8, 8, 3), dtype=torch.uint8)
    y = torch.arange(40) % 2
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    run = moatlab.train(model, (x, y), method="imoat:1,2,3", epochs=3, batch_size=12)
    assert run.model is model
    assert run.folder == Path("runs/imoat-1-2-3_arrays_s0")
    assert run.record.data["test"] == 4
    assert run.record.counted == run.record.planned
    assert json.loads((run.folder / "run.json").read_text())["status"] == "finished"
    again = moatlab.train(nn.Sequential(nn.Flatten(), nn.Linear(192, 2)), (x, y), method="imoat:1,2,3", epochs=3,
                          batch_size=12, resume=True)  # fmt: skip
    assert torch.equal(again.model[1].weight, model[1].weight)
    for bad in ((x,), (x, y, y)):
        with pytest.raises(UserError, match="pair"):
            moatlab.train(model, bad)
    other = (x.flip(0), y)
    second = moatlab.train(model, other, method="imoat:1,2,3", epochs=3, batch_size=12)
    assert second.folder == Path("runs/imoat-1-2-3_arrays_s0_2")
    goes_on = moatlab.train(model, other, method="imoat:1,2,3", epochs=3, batch_size=12, resume=True)
    assert goes_on.folder == second.folder  # the last of that name
    with pytest.raises(UserError, match="finished run on other images"):
        moatlab.train(model, (x, y), method="imoat:1,2,3", epochs=3, batch_size=12, resume=True)
    with pytest.raises(UserError, match="data is a dict"):
        moatlab.train(model, {"x": x, "y": y})
    with pytest.raises(UserError, match="begin at 0"):
        moatlab.train(model, (x, y + 1))
    recipe = make_recipe("fgsm", epochs=1)
    for arguments, options in (((), {}), (("run",), {"method": "pgd:7"}), (("run",), {"epochs": 2})):
        with pytest.raises(UserError, match="folder"):
            moatlab.train(recipe, *arguments, **options)
    assert not Path("run").exists()
    assert not Path("mini").exists()


# --- threat models


def test_draws_in_the_l2_ball_fill_it_evenly():
    x = torch.zeros(4000, 1, 1, 3)
    noise = Threat("l2", 0.5).noise(x, torch.Generator().manual_seed(0))
    lengths = distance(noise, "l2")
    assert float(lengths.max()) <= 0.5 + 1e-6
    assert abs(float((lengths < 0.25).float().mean()) - 1 / 8) < 0.02  # of a ball in three dimensions
    assert float(noise.flatten(1).mean(0).abs().max()) < 0.02


@pytest.mark.parametrize("stage", ["fgsm", "fast", "pgd:3", "kim", "gradalign:0.5"])
def test_stages_stay_inside_the_l2_ball(stage):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 5))
    x, y, seen = torch.rand(7, 3, 4, 4), torch.arange(7) % 5, []

    def forward(images):
        seen.append(images.detach())
        return model(images)

    (only,) = parse_method(stage).stages
    context = Context(model, forward, Threat("l2", 0.3), torch.Generator().manual_seed(1), 5)
    prepare_loss(only, context, x, y)()
    (made,) = seen
    assert float(distance(made - x, "l2").max()) <= 0.3 + 1e-5
    assert float(made.min()) >= 0
    assert float(made.max()) <= 1


def test_l2_training_raises_l2_robustness_over_standard_training_on_mini(moat):
    accuracy = {}
    for method in ("standard", "fast"):
        options = ("--norm", "l2", "--width", 8, "--epochs", 3, "--holdout", 50, "--monitor-every", 3)
        record = json.loads(moat("train", method, *options, "--out", method, "--json").out)
        assert "eps 128/255 (L2)" in record["setting"]
        accuracy[method] = record["final"]["pgd7"]  # in L2, on 1,000 test images
    assert accuracy["fast"] > accuracy["standard"] + 0.05
    card = json.loads(moat("eval", "fast", "--attacks", "fgsm", "--n", 8, "--json").out)
    assert (card["settings"]["norm"], card["settings"]["eps"]) == ("l2", "128/255")


# --- loops


def test_a_batch_for_a_loop_of_the_users_own_leaves_the_model_as_it_was():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5))
    x, y = torch.rand(6, 3, 8, 8), torch.arange(6) % 5
    for stage in ("mixup", "fast", "pgd:2"):
        made, target = moatlab.make_batch(model, x, y, stage, eps=8 / 255, classes=5)
        assert made.shape == x.shape
        assert not made.requires_grad
        assert (target.dim() == 2) == (stage == "mixup")
        assert model.training
        assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    draws = [torch.Generator().manual_seed(3) for _ in range(2)]
    one, other = (moatlab.make_batch(model, x, y, "fast", eps=0.1, bn_in_attack="eval", generator=g)[0] for g in draws)
    assert torch.equal(one, other)
    for bad in ("moat:2", "gradalign", "nothing", "pgd:2>3", "mixup"):
        with pytest.raises(UserError):
            moatlab.make_batch(model, x, y, bad, eps=0.1)


def test_a_stages_name_must_be_free_and_plain():
    def stage(_context, x, y, _value):
        return x, y

    for name in ("fgsm", "moat", "two words", ""):
        with pytest.raises(UserError, match="can't name a stage"):
            moatlab.add_stage(name, stage)
    try:
        moatlab.add_stage("blank", stage)
        moatlab.add_stage("blank", stage)  # as when a module is loaded again
        assert str(moatlab.parse_method("blank | pgd:2")) == "blank | pgd:2"
    finally:
        del STAGES["blank"]


def test_a_gpu_without_a_number_is_given_one_and_several_processes_take_their_own(monkeypatch):
    """The logic only; there need be no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert [str(choose_device(name)) for name in ("auto", "cuda", "cuda:1")] == ["cuda:2", "cuda:2", "cuda:1"]
    with pytest.raises(UserError, match="no such device"):
        choose_device("cuda:4")
    monkeypatch.setattr("moatlab.runtime.distributed.launched", lambda: 4)
    monkeypatch.setattr("moatlab.runtime.distributed.number_on_this_machine", lambda: 3)
    assert str(choose_device("auto")) == "cuda:3"


@pytest.mark.usefixtures("alone")
def test_a_radius_is_a_number_or_a_text_and_attacks_a_list_or_a_text():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 4))
    x, y = torch.randint(256, (40, 4, 4, 3), dtype=torch.uint8), torch.arange(40) % 4
    run = moatlab.train(model, (x, y), method="fgsm", eps=8 / 255, epochs=1, batch_size=12, out="run")
    assert run.record.status == "finished"
    assert load_recipe(Path("run/recipe.toml")).threat.eps == 8 / 255
    results = [
        moatlab.evaluate(model, x, y, attacks=attacks, eps=eps)
        for attacks, eps in ((["fgsm", "pgd7"], 8 / 255), ("fgsm, pgd7", "8/255"))
    ]
    assert results[0].broken_by == results[1].broken_by
    with pytest.raises(UserError, match="8/255"):
        moatlab.train(model, (x, y), method="fgsm", eps=8)
    with pytest.raises(UserError, match="a function; it must be a torch"):
        moatlab.train(lambda: model, (x, y))
    with pytest.raises(UserError, match="did you mean epochs"):
        moatlab.train(model, (x, y), epoch=3)
    with pytest.raises(UserError, match="range from 0 to 255"):
        moatlab.train(model, (x.permute(0, 3, 1, 2).float(), y))


def test_a_model_that_was_deleted_comes_back_from_the_checkpoint(moat, alone, tiny):
    options = ("--width", 8, "--batch-size", 16, "--epochs", 1, "--holdout", 0)
    command = ("train", "fgsm", "--data", tiny, *options, "--out", "run")
    assert moat(*command).code == 0
    before = (alone / "run" / "model.safetensors").read_bytes()
    (alone / "run" / "model.safetensors").unlink()
    ended = moat("eval", "run")
    assert ended.code == 2
    assert "start the run again with --resume" in ended.err
    assert moat("train", "--resume", "--out", "run").code == 0
    assert (alone / "run" / "model.safetensors").read_bytes() == before
    assert "--holdout" in moat("eval", "run", "--which", "best").err
