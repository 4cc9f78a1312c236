import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from moatlab.data.decoding import decode, read_header, square
from moatlab.data.folder import channel_statistics, histogram
from moatlab.data.loading import load_images
from moatlab.data.sizes import find_sizes
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


def test_of_a_folder_of_classes_alone_a_tenth_of_each_class_is_set_apart_for_testing(pets):
    for number in range(5, 40):
        write_image(pets / "train" / "cat" / f"{number}.png", (number, 0, 255))
    images = load_images(str(pets / "train"))
    assert (len(images.train_y), images.test_y.bincount().tolist()) == (40, [4, 1])
    assert images.note == "5 of its images are set apart for testing"
    labelled = [
        {(label, red) for label, red in zip(y.tolist(), x[:, 0, 0, 0].tolist(), strict=True)}
        for x, y in ((images.train_x, images.train_y), (images.test_x, images.test_y))
    ]
    assert labelled[0].isdisjoint(labelled[1])
    assert len(labelled[0] | labelled[1]) == 45
    assert load_images(str(pets / "train")).sha256 == images.sha256


def test_the_only_image_of_a_class_stays_in_training(pets):
    write_image(pets / "train" / "emu" / "0.png")
    images = load_images(str(pets / "train"))
    assert images.train_y.bincount().tolist() == [4, 4, 1]
    assert images.test_y.bincount().tolist() == [1, 1]


def test_the_first_and_the_last_images_have_all_classes_in_proportion(tmp_path):
    for number in range(120):
        write_image(tmp_path / ("common" if number % 4 else "rare") / f"{number}.png", (number, 0, 0))
    labels = load_images(str(tmp_path)).train_y
    for part in (labels[:12], labels[-12:], labels[48:60]):
        assert 2 <= (part == 1).sum() <= 4


def test_an_image_that_is_added_moves_at_most_one_other_between_training_and_testing(tmp_path):
    def tested():
        return {tuple(image[0, 0].tolist()) for image in load_images(str(tmp_path)).test_x}

    for number in range(100):
        write_image(tmp_path / "ab"[number % 2] / f"{number}.png", (number, 0, 0))
    before = tested()
    write_image(tmp_path / "a" / "new.png", (200, 0, 0))
    assert len(tested() - before) <= 1
    assert len(before - tested()) <= 1


def test_few_missing_and_empty_classes_are_one_warning(pets):
    for number in range(5, 12):
        write_image(pets / "train" / "cat" / f"{number}.png")
    write_image(pets / "train" / "emu" / "0.png")
    (pets / "train" / "yak").mkdir()
    images = load_images(str(pets))
    assert images.classes == ("cat", "dog", "emu")
    assert images.warning == (
        "fewer than 10 images of 'dog' (5), 'emu' (1); no test images of 'emu'; no images in, so left out: 'yak'"
    )


def test_photos_in_folders_below_a_class_are_read_and_hidden_folders_are_not(pets):
    write_image(pets / "train" / "cat" / "2024" / "may" / "0.png", (77, 0, 255))
    write_image(pets / "train" / "cat" / ".thumbnails" / "1.png", (78, 0, 255))
    red = load_images(str(pets)).train_x[:, 0, 0, 0].tolist()
    assert 77 in red
    assert 78 not in red


def test_val_counts_as_test_unless_there_is_a_test_folder(pets):
    (pets / "test").rename(pets / "val")
    assert len(load_images(str(pets)).test_y) == 4
    write_image(pets / "test" / "cat" / "0.png")
    images = load_images(str(pets))
    assert len(images.test_y) == 1
    assert images.note == "test is used and val is ignored"


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


@pytest.mark.parametrize(
    ("sizes", "side"),
    [([(300, 260)], 224), ([(60, 80), (70, 200), (90, 70)], 64), ([(30, 40), (20, 21)], 20), ([(512, 512)], 224)],
)
def test_images_of_mixed_or_large_sizes_become_squares(tmp_path, sizes, side):
    for number, size in enumerate(sizes * 4):
        write_image(tmp_path / "ab"[number % 2] / f"{number}.png", (number, 0, 0), size)
    images = load_images(str(tmp_path))
    assert images.train_x.shape[1:] == images.test_x.shape[1:] == (side, side, 3)
    assert images.transform == f"shorter side {side}, centre crop {side}x{side}"
    assert f"images resized (shorter side {side}" in images.note
    found = find_sizes(str(tmp_path))
    assert (found.train, found.test, found.classes) == (len(images.train_y), len(images.test_y), 2)
    assert (found.height, found.width, found.image_size) == (side, side, side)


def test_a_given_size_is_used_and_streamed_images_are_the_same(pets):
    write_image(pets / "train" / "dog" / "2.png", size=(30, 17))
    memory, disk = (load_images(str(pets), image_size=12, stream=stream) for stream in (False, True))
    assert memory.train_x.shape == (10, 12, 12, 3)
    assert memory.sha256 == disk.sha256
    with pytest.raises(UserError, match="image_size=12 is for folders of images"):
        load_images("mini", image_size=12)


def test_images_of_one_small_size_stay_as_they_are(pets):
    images = load_images(str(pets))
    assert (images.train_x.shape[1:], images.image_size, images.transform) == ((6, 8, 3), None, None)


def test_the_shorter_side_is_resized_and_the_centre_is_cropped():
    image = Image.fromarray(np.arange(20 * 31 * 3, dtype=np.uint8).reshape(20, 31, 3))
    resized = image.resize((12, 8), Image.Resampling.BILINEAR)
    assert np.array_equal(np.array(square(image, 8)), np.array(resized)[:, 2:10])


def test_a_photo_taken_sideways_is_turned(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    picture = Image.new("RGB", (30, 20), (255, 0, 0))
    picture.paste((0, 0, 255), (0, 0, 15, 20))  # the left half, which is the top of the upright photo
    picture.save(tmp_path / "x.png", exif=exif)
    assert read_header(tmp_path / "x.png") == (20, 30, False)
    pixels = decode(tmp_path / "x.png", "RGB")
    assert pixels.shape == (30, 20, 3)
    assert pixels[0, 0].tolist() == [0, 0, 255]
    assert pixels[29, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize(("mode", "channels"), [("L", 3), ("CMYK", 3)])
def test_grey_and_cmyk_photos_become_rgb(pets, mode, channels):
    Image.new(mode, (8, 6)).save(pets / "train" / "cat" / "odd.jpg")
    assert load_images(str(pets)).train_x.shape[3] == channels


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
    refused(tmp_path, r"images of only one class \(cat\); a classifier needs at least two")


def test_class_folders_without_any_image_are_refused(pets):
    for path in (*(pets / "train").rglob("*.png"),):
        path.unlink()
    refused(pets, r"the class folders in .*train have no images \(\.bmp")


def test_test_folders_without_any_image_are_refused(pets):
    for path in (*(pets / "test").rglob("*.png"),):
        path.unlink()
    refused(pets, "test has no images")


def test_a_test_class_that_was_never_trained_is_refused(pets):
    write_image(pets / "test" / "emu" / "0.png")
    refused(pets, "has a class 'emu' that .*train does not have")
