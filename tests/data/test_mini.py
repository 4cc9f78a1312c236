import hashlib
import subprocess
import sys

import pytest
import torch

from moatlab.data.images import checksum
from moatlab.data.loading import KNOWN_SIZES, MINI_FOLDER, available, get_images_folder, load_images
from moatlab.runtime.errors import UserError


@pytest.fixture(autouse=True)
def _no_user_data(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MOAT_DATA", raising=False)


def test_mini_comes_with_the_package_and_has_the_promised_shape():
    mini = load_images("mini")
    assert mini.train_x.shape == (5_500, 16, 16, 3)
    assert mini.test_x.shape == (1_000, 16, 16, 3)
    assert mini.train_x.dtype == torch.uint8
    assert mini.train_x.is_contiguous()
    assert mini.train_y.dtype == mini.test_y.dtype == torch.int64
    assert (len(mini.train_y), len(mini.test_y), len(mini.classes)) == KNOWN_SIZES["mini"]
    assert (mini.name, mini.source, mini.note) == ("mini", "embedded", None)


def test_mini_begins_as_cifar10_does():
    mini = load_images("mini")
    assert [mini.classes[y] for y in mini.train_y[:4]] == ["frog", "truck", "truck", "deer"]
    assert [mini.classes[y] for y in mini.test_y[:4]] == ["cat", "ship", "ship", "airplane"]


def test_the_channel_means_of_mini_are_close_to_those_of_cifar10():
    mini = load_images("mini")
    means = mini.train_x.double().mean(dim=(0, 1, 2)) / 255
    torch.testing.assert_close(means, torch.tensor(mini.mean, dtype=torch.float64), atol=3e-3, rtol=0)


@pytest.mark.parametrize("name", ["train.bin", "test.bin"])
def test_the_files_of_mini_are_the_pinned_ones(name):
    found = hashlib.sha256((MINI_FOLDER / name).read_bytes()).hexdigest()
    assert f"{found}  {name}" in (MINI_FOLDER / "SHA256SUMS").read_text().splitlines()
    assert found in (MINI_FOLDER / "PROVENANCE.md").read_text()


def test_the_checksum_of_a_data_set_is_the_same_each_time_and_sees_a_single_pixel():
    first, second = load_images("mini"), load_images("mini")
    assert first.sha256 == second.sha256
    second.test_x[-1, -1, -1, -1] ^= 1
    assert checksum(second.train_x, second.train_y, second.test_x, second.test_y) != first.sha256


def test_the_list_says_what_is_here_and_what_would_be_fetched():
    places = {name: where for name, _, where in available()}
    assert places == {"mini": "embedded", "cifar10": None, "cifar100": None}


def test_get_of_mini_is_its_embedded_folder():
    assert get_images_folder("mini") == MINI_FOLDER


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(
        UserError, match=r"^no data set, folder or .npz file named 'nosuch'; known data sets: mini, cifar10, cifar100$"
    ):
        load_images("nosuch")


@pytest.mark.parametrize("function", [load_images, get_images_folder])
def test_a_slip_of_the_pen_gets_a_suggestion(function):
    with pytest.raises(UserError, match=r"did you mean cifar10\?"):
        function("cifar-10")


def test_importing_the_package_does_not_import_torch():
    code = "import sys, moatlab.data.loading; assert moatlab.data.loading.KNOWN_SIZES; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
