"""A folder of photos as a stranger has it, from `moat train` to the page."""

import json
from pathlib import Path

import pytest

import moatlab
from moatlab.models.weights import read_weights
from photos_for_tests import CLASSES, write_photos


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return write_photos(tmp_path_factory.mktemp("photos") / "photos", 65)


def test_a_folder_of_photos_of_mixed_sizes_is_trained_on_evaluated_and_reported(moat, alone, photos):
    ended = moat("train", "moat:2", "--data", photos, "--width", 8, "--epochs", 1, "--out", "run", "--threads", 1)
    assert ended.code == 0
    said = " ".join(ended.err.split())
    assert said.count("warning: ") == 3  # the others: few steps, and not a whole cycle
    assert said.count("photos: fewer than 10 images of 'owl' (5)") == 1
    assert "photos at 224x224, preact_resnet18" in said
    assert "batch 8" in said
    assert "6 of its images are set apart for testing; images resized (shorter side 224, centre crop 224x224)" in said
    description = read_weights("run")[1]
    assert description["arguments"]["stem"] == "7x7s4"
    assert (description["image_size"], description["class_names"]) == (224, [*CLASSES])
    assert "image_size = 224" in (alone / "run" / "recipe.toml").read_text()
    assert moat("eval", "run", "--attacks", "fgsm", "--n", 6).code == 0
    card = json.loads((alone / "run" / "eval.json").read_text())
    assert card["data"]["transform"] == "shorter side 224, centre crop 224x224"
    assert card["data"]["sha256"] == moatlab.load_images(str(photos), image_size=224).sha256
    ended = moat("report", "run")
    assert (ended.code, (alone / "run" / "report.html").exists()) == (0, True)
    assert moat("verify", "run").code == 2  # no examples were saved


def test_a_model_is_evaluated_on_other_folders_at_the_size_it_was_trained_on(moat, alone, photos):
    options = ("--width", 8, "--image-size", 16, "--max-steps", 1, "--threads", 1)
    assert moat("train", "fgsm", "--data", photos, *options, "--out", "run").code == 0
    assert "stem" not in read_weights("run")[1]["arguments"]  # 3x3
    photos.rename(alone / "moved")
    try:
        assert "give its path with --data" in moat("eval", "run", "--attacks", "fgsm").err
        assert moat("eval", "run", "--attacks", "fgsm", "--data", "moved").code == 0
    finally:
        (alone / "moved").rename(photos)
    card = json.loads((alone / "run" / "eval.json").read_text())
    assert card["data"]["transform"] == "shorter side 16, centre crop 16x16"


def test_a_resumed_run_on_photos_keeps_its_size(moat, photos):
    options = ("--width", 8, "--image-size", 16, "--epochs", 1, "--threads", 1, "--out", "run")
    assert moat("train", "fgsm", "--data", photos, *options, "--max-steps", 1).code == 0
    assert moat("train", "--resume", "--out", "run", "--threads", 1).code == 0
    assert "image_size = 16" in Path("run/recipe.toml").read_text()
