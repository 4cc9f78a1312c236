import io
import os
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moatlab.data.cifar import read_pickle, read_records, to_records
from moatlab.data.known import SPECS
from moatlab.data.loading import load_images
from moatlab.runtime.console import verbosity
from moatlab.runtime.errors import UserError

MINI, CIFAR10, CIFAR100 = SPECS["mini"], SPECS["cifar10"], SPECS["cifar100"]


@pytest.fixture(autouse=True)
def _no_user_data(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MOAT_DATA", raising=False)


def some_images(count, seed=0, classes=10):
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (count, 32, 32, 3), np.uint8), random.integers(0, classes, count)


def write_cifar10(folder, batches=range(1, 6), count=3):
    """A tiny CIFAR-10 in the binary layout; returns the images of its training batches."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for number in batches:
        x, y = some_images(count, seed=number)
        (folder / f"data_batch_{number}.bin").write_bytes(to_records(x, y).tobytes())
        written.append(x)
    x, y = some_images(2, seed=9)
    (folder / "test_batch.bin").write_bytes(to_records(x, y).tobytes())
    return np.concatenate(written)


def write_cifar100(folder, names=True):
    folder.mkdir(parents=True)
    for stem, count in (("train", 4), ("test", 2)):
        x, y = some_images(count, seed=count, classes=100)
        fine = to_records(x, y)
        coarse = np.full((count, 1), 19, np.uint8)
        (folder / f"{stem}.bin").write_bytes(np.concatenate([coarse, fine], axis=1).tobytes())
    if names:
        (folder / "fine_label_names.txt").write_text("".join(f"name_{number}\n" for number in range(100)))


# --- binary layout


@settings(max_examples=30, deadline=None)
@given(data=st.data(), count=st.integers(1, 5))
def test_any_records_come_back_from_the_binary_layout(tmp_path_factory, data, count):
    x = data.draw(hnp.arrays(np.uint8, (count, 16, 16, 3)))
    y = data.draw(hnp.arrays(np.int64, count, elements=st.integers(0, 9)))
    path = tmp_path_factory.mktemp("records") / "train.bin"
    path.write_bytes(to_records(x, y).tobytes())
    read_x, read_y = read_records(path, MINI)
    np.testing.assert_array_equal(read_x, x)
    np.testing.assert_array_equal(read_y, y)
    assert read_y.dtype == np.int64


def test_a_record_is_its_label_and_then_the_red_green_and_blue_planes():
    x = np.zeros((1, 32, 32, 3), np.uint8)
    x[0, 0, 1] = (10, 20, 30)
    (record,) = to_records(x, np.array([7]))
    assert record.shape == (3073,)
    assert record[[0, 2, 2 + 1024, 2 + 2048]].tolist() == [7, 10, 20, 30]


@settings(max_examples=50, deadline=None)
@given(size=st.integers(0, 3 * 769).filter(lambda size: size == 0 or size % 769))
def test_any_cut_that_is_not_a_whole_number_of_records_is_refused(tmp_path_factory, size):
    path = tmp_path_factory.mktemp("cut") / "train.bin"
    path.write_bytes(bytes(size))
    with pytest.raises(UserError, match=rf"train\.bin is damaged: its {size:,} bytes"):
        read_records(path, MINI)


def test_a_label_out_of_range_is_named_with_its_file_and_record(tmp_path):
    x, y = some_images(3)
    y[2] = 10
    (tmp_path / "test_batch.bin").write_bytes(to_records(x, y).tobytes())
    with pytest.raises(UserError, match=r"test_batch\.bin is damaged: record 2 has label 10, .* 10 classes"):
        read_records(tmp_path / "test_batch.bin", CIFAR10)


# --- where files are looked for


@pytest.mark.parametrize("inside", [".", "cifar-10-batches-bin"])
def test_the_data_folder_may_be_the_extracted_one_or_hold_it(tmp_path, inside):
    train_x = write_cifar10(tmp_path / "d" / inside)
    images = load_images("cifar10", tmp_path / "d")
    np.testing.assert_array_equal(images.train_x, train_x)
    assert images.source == f"folder {(tmp_path / 'd' / inside).resolve().name}"


def test_the_environment_names_the_data_folder_and_the_argument_wins(tmp_path, monkeypatch):
    write_cifar10(tmp_path / "environment", count=1)
    write_cifar10(tmp_path / "argument", count=2)
    monkeypatch.setenv("MOAT_DATA", str(tmp_path / "environment"))
    assert len(load_images("cifar10").train_x) == 5
    assert len(load_images("cifar10", tmp_path / "argument").train_x) == 10


def test_the_cache_serves_when_the_data_folder_has_nothing(tmp_path):
    (tmp_path / "empty").mkdir()
    write_cifar10(tmp_path / "cache" / "moatlab" / "cifar-10-batches-bin")
    assert load_images("cifar10", tmp_path / "empty").source == "cache"


def test_a_data_folder_that_does_not_exist_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="gone does not exist; correct data_dir"):
        load_images("cifar10", tmp_path / "gone")
    monkeypatch.setenv("MOAT_DATA", str(tmp_path / "gone"))
    with pytest.raises(UserError, match="gone does not exist; correct MOAT_DATA"):
        load_images("cifar10")


# --- incomplete sets


def test_missing_training_batches_are_left_out_with_a_warning_and_a_note(tmp_path, capsys):
    train_x = write_cifar10(tmp_path, batches=(1, 4))
    with verbosity(True):
        images = load_images("cifar10", tmp_path)
    np.testing.assert_array_equal(images.train_x, train_x)
    assert images.note == "6 instead of 50,000 training images and 2 instead of 10,000 test images"
    assert images.note in capsys.readouterr().err.replace("\n", " ")


def test_a_missing_test_file_is_refused(tmp_path):
    write_cifar10(tmp_path)
    (tmp_path / "test_batch.bin").unlink()
    with pytest.raises(UserError, match=r"has no test_batch\.bin"):
        load_images("cifar10", tmp_path)


def test_a_set_without_training_files_is_refused(tmp_path):
    write_cifar10(tmp_path, batches=[1])
    (tmp_path / "data_batch_1.bin").unlink()
    with pytest.raises(UserError, match=r"has no data_batch_1\.bin"):
        load_images("cifar10", tmp_path)


def test_an_empty_file_is_refused(tmp_path):
    write_cifar10(tmp_path)
    (tmp_path / "data_batch_3.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"data_batch_3\.bin is damaged"):
        load_images("cifar10", tmp_path)


# --- CIFAR-100


def test_cifar100_uses_fine_labels_and_the_names_that_come_with_it(tmp_path):
    write_cifar100(tmp_path / "cifar-100-binary")
    images = load_images("cifar100", tmp_path)
    _, y = some_images(4, seed=4, classes=100)
    assert images.train_y.tolist() == y.tolist()
    assert images.classes[42] == "name_42"
    assert images.mean == CIFAR100.mean


def test_cifar100_without_its_names_numbers_the_classes(tmp_path):
    write_cifar100(tmp_path / "cifar-100-binary", names=False)
    assert load_images("cifar100", tmp_path).classes[:2] == ("class 0", "class 1")


# --- pickled layout


class Python2Pickler(pickle._Pickler):
    """Writes bytes and text as Python 2 wrote its `str`, which is how the official files are."""

    def save_python2_string(self, value):
        raw = value if isinstance(value, bytes) else value.encode("latin1")
        self.write(pickle.BINSTRING + len(raw).to_bytes(4, "little") + raw)

    dispatch = {**pickle._Pickler.dispatch, bytes: save_python2_string, str: save_python2_string}  # noqa: RUF012


def python2_pickle(content):
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(content)
    return file.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def pickled_batch(count, labels_key=b"labels", seed=0, classes=10):
    x, y = some_images(count, seed, classes)
    return x, {b"data": to_records(x, y)[:, 1:].copy(), labels_key: y.tolist()}


WAYS_TO_PICKLE = [python2_pickle, lambda batch: pickle.dumps(batch, 2), lambda batch: pickle.dumps(batch, 4)]


@pytest.mark.parametrize("dumps", WAYS_TO_PICKLE, ids=["python 2", "protocol 2", "protocol 4"])
def test_the_pickled_layout_is_read_however_it_was_pickled(tmp_path, dumps):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    x, batch = pickled_batch(3)
    for name in ("data_batch_1", "test_batch"):
        (folder / name).write_bytes(dumps(batch))
    images = load_images("cifar10", tmp_path)
    np.testing.assert_array_equal(images.train_x, x)
    assert images.train_y.tolist() == batch[b"labels"]


def test_the_pickled_cifar100_is_read_with_its_fine_labels(tmp_path):
    (tmp_path / "cifar-100-python").mkdir()
    _, batch = pickled_batch(3, b"fine_labels", classes=100)
    for name in ("train", "test"):
        (tmp_path / "cifar-100-python" / name).write_bytes(python2_pickle({**batch, b"coarse_labels": [0, 0, 0]}))
    assert load_images("cifar100", tmp_path).test_y.tolist() == batch[b"fine_labels"]


class Malicious:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_malicious_pickle_is_refused_and_runs_nothing(tmp_path, protocol):
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({b"data": Malicious(f"touch {tmp_path}/executed")}, protocol))
    with pytest.raises(UserError, match=r"data_batch_1 was refused: its pickle imports \w+\.system"):
        read_pickle(path, CIFAR10)
    assert not (tmp_path / "executed").exists()


@settings(max_examples=50, deadline=None)
@given(share=st.floats(0, 1, exclude_max=True))
def test_any_cut_of_a_pickle_is_refused(tmp_path_factory, share):
    path = tmp_path_factory.mktemp("cut") / "data_batch_1"
    whole = python2_pickle(pickled_batch(2)[1])
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(UserError, match="data_batch_1 is damaged or not CIFAR"):
        read_pickle(path, CIFAR10)


def test_a_pickle_cannot_talk_numpy_into_following_pixels_as_pointers(tmp_path):
    path = tmp_path / "data_batch_1"
    x, batch = pickled_batch(2)
    honest = pickle.dumps(batch, 2)
    flags = b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00t"  # the end of a dtype's state; the 0 is its flags
    assert honest.count(flags) == 1
    path.write_bytes(honest.replace(flags, flags.replace(b"K\x00", b"K\x3f")))
    np.testing.assert_array_equal(read_pickle(path, CIFAR10)[0], x)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "not CIFAR with 'data' and 'labels'"),
        ({b"labels": [1]}, "not CIFAR with 'data' and 'labels'"),
        ({b"data": np.zeros((1, 3072)), b"labels": [1]}, "not CIFAR with 'data' and 'labels'"),
        (
            {b"data": np.zeros((1, 3072), np.uint8), b"labels": [1, 2]},
            "not CIFAR with 'data' and 'labels'",
        ),
        (
            {b"data": np.zeros((1, 768), np.uint8), b"labels": [1]},
            "not CIFAR with 'data' and 'labels'",
        ),
        (
            {b"data": np.zeros((0, 3072), np.uint8), b"labels": []},
            "not CIFAR with 'data' and 'labels'",
        ),
        (
            {b"data": np.zeros((1, 3072), np.uint8), b"labels": ["cat"]},
            "not CIFAR with 'data' and 'labels'",
        ),
        ({b"data": np.zeros((1, 3072), np.uint8), b"labels": [-1]}, "record 0 has label -1"),
        ({b"data": np.zeros((1, 3072), np.uint8), b"labels": [2**70]}, "record 0 has label"),
    ],
)
def test_a_pickle_that_is_not_cifar_is_refused(tmp_path, content, message):
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps(content))
    with pytest.raises(UserError, match=message):
        read_pickle(path, CIFAR10)
