import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moatlab.data.batches import PADDING, Batches, crop_and_flip, shifts
from moatlab.data.images import as_floats


def numbered(count=50, side=6):
    """Images that can be told apart by their first byte."""
    x = torch.randint(1, 256, (count, side, side, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    x[:, 0, 0, 0] = torch.arange(count)
    return x, torch.arange(count)


@given(seed=st.integers(0, 2**40), steps=st.permutations(range(12)))
def test_a_batch_depends_on_seed_and_step_and_on_nothing_that_was_asked_before(seed, steps):
    x, y = numbered()
    batches = [Batches(x, y, 16, augment=True, seed=seed) for _ in range(2)]
    in_order = [batches[0].at(step) for step in range(12)]
    for step in steps:
        images, labels = batches[1].at(step)
        assert torch.equal(images, in_order[step][0])
        assert torch.equal(labels, in_order[step][1])


def test_an_epoch_shows_no_image_twice_and_drops_the_last_partial_batch():
    batches = Batches(*numbered(), 16, augment=False, seed=0)
    assert batches.steps_per_epoch == 3
    orders = []
    for epoch in range(2):
        seen = torch.cat([batches.at(epoch * 3 + position)[1] for position in range(3)])
        assert len(set(seen.tolist())) == 48
        orders.append(seen.tolist())
    assert orders[0] != orders[1]


def test_without_augmentation_a_batch_is_the_pixels_over_255_with_their_labels():
    x, y = numbered()
    images, labels = Batches(x, y, 16, augment=False, seed=3).at(7)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert images.dtype == torch.float32
    for image, label in zip(images, labels, strict=True):
        assert torch.equal(image, x[label].permute(2, 0, 1) / 255)


@given(seed=st.integers(0, 10**6), height=st.integers(1, 9), width=st.integers(1, 9))
def test_crops_and_flips_equal_a_loop_over_images(seed, height, width):
    images = torch.randint(1, 256, (8, height, width, 3), dtype=torch.uint8)
    result = crop_and_flip(images, *shifts(len(images), torch.Generator().manual_seed(seed)))
    draws = torch.Generator().manual_seed(seed)
    top, left = torch.randint(2 * PADDING + 1, (2, 8, 1), generator=draws)
    mirrored = torch.randint(2, (8, 1), generator=draws)
    for index in range(8):
        canvas = torch.zeros(height + 2 * PADDING, width + 2 * PADDING, 3, dtype=torch.uint8)
        canvas[PADDING : PADDING + height, PADDING : PADDING + width] = images[index]
        expected = canvas[top[index] : top[index] + height, left[index] : left[index] + width]
        assert torch.equal(result[index], expected.flip(1) if mirrored[index] else expected)


def test_shifts_and_mirrors_come_evenly():
    images = torch.arange(1, 10, dtype=torch.uint8).view(1, 3, 3, 1).expand(20_000, 3, 3, 3)
    result = crop_and_flip(images, *shifts(len(images), torch.Generator().manual_seed(0)))
    unmoved = (result == images).all(3).all(2).all(1).float().mean()
    assert unmoved.item() == pytest.approx(1 / (9 * 9 * 2), abs=0.002)


def test_floats_keep_the_memory_order_of_the_bytes():
    images = torch.randint(0, 256, (4, 5, 6, 3), dtype=torch.uint8)
    floats = as_floats(images)
    assert floats.shape == (4, 3, 5, 6)
    assert floats.is_contiguous(memory_format=torch.channels_last)
    assert floats.max() <= 1


def test_the_numbers_of_a_batch_are_not_fetched_from_the_device_that_trains():
    """Images that lie in the memory of the CPU are chosen there: asking an accelerator would wait for its last step."""
    x, y = numbered()
    there, here = (Batches(x, labels, 16, augment=False, seed=0) for labels in (y.to("meta"), y))
    images, labels = there.at(1)  # on a device that can't be asked
    assert images.device.type == labels.device.type == "meta"
    assert there.numbers(1).tolist() == here.at(1)[1].tolist()


LEFT_OPEN = """
import multiprocessing, sys, torch
from pathlib import Path
from moatlab.data.batches import Batches
from moatlab.data.loading import load_images
images = load_images(sys.argv[1], stream=True)
batches = Batches(images.train_x, images.train_y, 8, True, 0)
batches.at(0)
Batches(images.train_x, images.train_y, 8, True, 0).at(0)
assert len(multiprocessing.active_children()) == len(batches.ahead[0].batches._workers)  # the others have ended
print("done")
"""


def test_a_process_ends_although_it_did_not_close_its_decoding_workers(tiny):
    ended = subprocess.run(
        [sys.executable, "-c", LEFT_OPEN, str(tiny)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")
