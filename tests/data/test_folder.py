import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from moatlab.data.folder import channel_statistics, histogram
from moatlab.data.loading import load_images
from moatlab.runtime.console import verbosity
from moatlab.runtime.errors import UserError


def write_image(path, color=(0, 0, 0), size=(8, 6)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)
    return path


@pytest.fixture
def pets(tmp_path):
    """Two classes of 8x6 images, five for training and two for testing of each; red counts the images."""
    for label, name in enumerate(["cat", "dog"]):
        for number in range(5):
            write_image(tmp_path / "pets" / "train" / name / f"{number}.png", (10 * label + number, 0, 255))
        for number in range(2):
            write_image(tmp_path / "pets" / "test" / name / f"{number}.png", (100 + 10 * label + number, 0, 255))
    return tmp_path / "pets"


def test_a_folder_of_images_is_a_data_set(pets):
    images = load_images(str(pets))
    assert (images.name, images.source, images.note) == ("pets", "folder pets", None)
    assert images.classes == ("cat", "dog")
    assert images.train_x.shape == (10, 6, 8, 3)
    assert images.train_x.dtype == torch.uint8
    assert images.train_x.is_contiguous()
    assert sorted(images.test_x[:, 0, 0, 0].tolist()) == [100, 101, 110, 111]


def test_the_first_test_images_which_a_short_evaluation_takes_are_of_all_classes(pets):
    """On the disk they are sorted: of the first half only one class would be seen."""
    for label, name in enumerate(["cat", "dog"]):
        for number in range(2, 10):
            write_image(pets / "test" / name / f"{number}.png", (100 + 10 * label + number, 0, 255))
    images = load_images(str(pets))
    assert set(images.test_y[:10].tolist()) == {0, 1}
    assert torch.equal(images.test_y, images.test_x[:, 0, 0, 0].long() // 10 - 10)


def test_of_a_folder_of_classes_alone_a_tenth_is_set_apart_for_testing(pets, capsys):
    for number in range(5, 20):
        write_image(pets / "train" / "cat" / f"{number}.png", (number, 0, 255))
    with verbosity(True):
        images = load_images(str(pets / "train"))
    assert len(images.train_y) + len(images.test_y) == 25
    assert f"{len(images.test_y)} of its images are set apart" in images.note
    assert (
        len({*images.train_x[:, 0, 0, 0].tolist(), *images.test_x[:, 0, 0, 0].tolist()}) == 20
    )  # 10 to 14 are of both
    assert images.classes == ("cat", "dog")
    assert load_images(str(pets / "train")).sha256 == images.sha256
    assert "has no test image of class" in capsys.readouterr().err


def test_images_that_are_added_to_a_folder_of_classes_move_none_from_training_to_testing(tmp_path):
    def split():
        images = load_images(str(tmp_path))
        return [{tuple(image[0, 0].tolist()) for image in part} for part in (images.train_x, images.test_x)]

    for number in range(300):
        write_image(tmp_path / "ab"[number % 2] / f"{number}.png", (number % 200, number // 200, 0))
    trained, tested = split()
    assert len(trained) + len(tested) == 300
    assert 15 < len(tested) < 45
    (tmp_path / "a" / "0.png").unlink()
    for number in range(300, 320):
        write_image(tmp_path / "a" / f"{number}.png", (number % 200, number // 200, 0))
    trained_later, tested_later = split()
    assert trained.isdisjoint(tested_later)
    assert tested.isdisjoint(trained_later)
    assert tested_later > tested


def test_a_class_without_test_images_is_reported(pets, capsys):
    with verbosity(True):
        load_images(str(pets))
    assert capsys.readouterr().err == ""
    for path in (pets / "test" / "dog").iterdir():
        path.unlink()
    (pets / "test" / "dog").rmdir()
    with verbosity(True):
        assert load_images(str(pets)).test_y.tolist() == [0, 0]
    assert "has no test image of class 'dog'" in capsys.readouterr().err


def test_training_images_are_shuffled_the_same_way_each_time_and_keep_their_labels(pets):
    images = load_images(str(pets))
    red = images.train_x[:, 0, 0, 0]
    assert sorted(red.tolist()) == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
    assert red.tolist() != sorted(red.tolist())
    assert torch.equal(images.train_y, red.long() // 10)
    assert load_images(str(pets)).sha256 == images.sha256


def test_statistics_are_those_of_the_training_images_and_a_constant_channel_does_not_divide_by_zero(pets):
    images = load_images(str(pets))
    assert images.mean == (round(7 / 255, 4), 0.0, 1.0)
    assert images.std == (round(27**0.5 / 255, 4), 1e-4, 1e-4)


@settings(max_examples=30, deadline=None)
@given(hnp.arrays(np.uint8, hnp.array_shapes(min_dims=3, max_dims=3, max_side=5).map(lambda shape: (*shape, 3))))
def test_channel_statistics_agree_with_numpy(x):
    mean, std = channel_statistics(histogram(x))
    pixels = x.reshape(-1, 3) / 255
    np.testing.assert_allclose(mean, pixels.mean(axis=0), atol=5.1e-5)
    np.testing.assert_allclose(std, np.maximum(pixels.std(axis=0), 1e-4), atol=5.1e-5)


@pytest.mark.parametrize("name", ["x.PNG", "x.jpg", "x.JPEG", "x.bmp", "x.webp"])
def test_the_usual_formats_are_read_in_any_case(pets, name):
    write_image(pets / "train" / "cat" / name)
    assert len(load_images(str(pets)).train_x) == 11


def test_other_files_and_hidden_ones_are_passed_over(pets):
    (pets / "train" / "cat" / "notes.txt").write_text("not an image")
    (pets / "train" / "cat" / "._0.png").write_bytes(b"left by another system")
    (pets / "train" / ".cache").mkdir()
    (pets / "train" / "README").write_text("not a class")
    assert len(load_images(str(pets)).train_x) == 10


def test_grey_palette_and_transparent_images_become_rgb(pets):
    for mode in ("L", "P", "RGBA", "1"):
        Image.new(mode, (8, 6)).save(pets / "train" / "cat" / f"mode {mode}.png")
    assert load_images(str(pets)).train_x.shape == (14, 6, 8, 3)


def test_the_test_set_need_not_show_every_class(pets):
    write_image(pets / "train" / "emu" / "0.png")
    images = load_images(str(pets))
    assert images.classes == ("cat", "dog", "emu")
    assert sorted(images.test_y.tolist()) == [0, 0, 1, 1]


def refused(folder, message):
    with pytest.raises(UserError, match=message):
        load_images(str(folder))


def test_an_image_of_another_size_is_named(pets):
    write_image(pets / "train" / "dog" / "2.png", size=(8, 7))
    write_image(pets / "train" / "dog" / "3.png", size=(9, 9))
    refused(pets, r"dog/2\.png has 8x7 pixels, but .*cat/0\.png has 8x6; resize all images to one size")


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_an_image_cut_anywhere_in_its_data_is_named(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("cut")
    noise = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    for name in ("train/a/0.png", "train/b/0.png", "test/a/0.png"):
        (folder / name).parent.mkdir(parents=True)
        Image.fromarray(noise).save(folder / name)
    path = folder / "train/b/0.png"
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 40))])
    refused(folder, r"train/b/0\.png cannot be read as an image")


def test_a_file_that_is_no_image_is_named(pets):
    (pets / "test" / "dog" / "1.png").write_text("not an image")
    refused(pets, r"test/dog/1\.png cannot be read as an image; replace or remove it")


def test_sixteen_bits_per_channel_are_refused_instead_of_clipped(pets):
    Image.fromarray(np.full((6, 8), 40_000, np.uint16)).save(pets / "train" / "cat" / "0.png")
    refused(pets, r"cat/0\.png has more than 8 bits per channel")


def test_a_folder_with_one_of_train_and_test_is_refused(pets):
    (pets / "test").rename(pets / "validation")
    refused(pets, "pets/test does not exist")


def test_a_folder_without_classes_is_refused(tmp_path):
    (tmp_path / "train").mkdir()
    refused(tmp_path, "train is empty; add one folder of images for each class")


def test_a_single_class_is_refused(tmp_path):
    write_image(tmp_path / "train" / "cat" / "0.png")
    refused(tmp_path, r"only one class \(cat\); a classifier needs at least two")


@pytest.mark.parametrize("part", ["train", "test"])
def test_a_class_without_images_is_refused(pets, part):
    for path in (pets / part / "dog").iterdir():
        path.unlink()
    refused(pets, rf"{part}/dog has no images")


def test_a_test_class_that_was_never_trained_is_refused(pets):
    write_image(pets / "test" / "emu" / "0.png")
    refused(pets, "has a class 'emu' that .*train does not have")
