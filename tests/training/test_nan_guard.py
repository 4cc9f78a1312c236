"""Losses, gradients and weights that are not finite: reported, kept out, or skipped."""

import json
from dataclasses import replace
from itertools import chain

import pytest
import torch
from torch import nn

import moatlab
from moatlab.methods.stages import STAGES
from moatlab.runtime.device import same_bits
from moatlab.runtime.errors import RunFailed
from moatlab.runtime.files import read_json
from moatlab.training import nan_guard
from moatlab.training.api import train_recipe as train
from moatlab.training.making import make_recipe
from moatlab.training.nan_guard import all_finite
from moatlab.training.run_folder import RunFolder


@pytest.fixture
def small(tiny):
    """5 steps an epoch."""

    def recipe(method="standard", **options):
        fields = {
            "precision": "fp32",
            "data": str(tiny),
            "width": 8,
            "epochs": 2,
            "batch_size": 16,
            "holdout": 0,
            "lr": 0.05,
        }
        return make_recipe(method, preset="laptop", **(fields | options))

    return recipe


@pytest.fixture
def poisoned(monkeypatch):
    """`poisoned(3, 7)`: the images of these steps (from 1) are NaN, so BatchNorm's statistics would be too."""

    def poison(*steps):
        count = [0]

        def standard(_context, x, y, _):
            count[0] += 1
            return (x * torch.nan if count[0] in steps else x), y

        monkeypatch.setitem(STAGES, "standard", replace(STAGES["standard"], code=standard))

    return poison


def state(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def test_a_bad_step_stops_the_run_with_its_step_stage_rate_and_images(small, poisoned, tmp_path):
    poisoned(3)
    with pytest.raises(
        RunFailed, match=r"step 3 \(epoch 1, stage standard, lr 0\.02\), images \d+, \d+, \d+ and 13 more"
    ):
        train(small(), tmp_path / "run")
    (event,) = RunFolder(tmp_path / "run").read_events()
    assert (event["event"], event["at_step"], event["stage"], event["lr"]) == (
        "nan",
        3,
        "standard",
        pytest.approx(0.02),
    )
    assert len(set(event["images"])) == 16
    assert read_json(tmp_path / "run" / "run.json")["status"] == "failed"
    assert state(tmp_path / "run")["progress"]["step"] == 0


def test_a_skipped_step_is_as_if_it_had_not_been_for_weights_momentum_and_statistics(small, poisoned, tmp_path):
    recipe = small(on_nan="skip", lr=0.1, schedule="stepwise")
    poisoned()
    train(recipe, tmp_path / "before", max_steps=2)
    poisoned(3)
    train(recipe, tmp_path / "run", max_steps=3)
    before, after = state(tmp_path / "before"), state(tmp_path / "run")
    assert all(torch.equal(a, b) for a, b in zip(before["model"].values(), after["model"].values(), strict=True))
    old, new = (chain(*content["optimizer"]) for content in (before, after))
    assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))
    assert after["progress"]["step"] == 3


def test_skipping_is_counted_told_and_left_out_of_the_mean_loss(small, poisoned, tmp_path):
    poisoned(2, 4, 8)
    record = train(small(on_nan="skip"), tmp_path / "run")
    assert (record.status, record.skipped_steps) == ("finished", 3)
    assert record.counted == record.planned
    assert [event["at_step"] for event in RunFolder(tmp_path / "run").read_events()] == [2, 4, 8]
    assert all(0 < line["loss"] < 10 for line in RunFolder(tmp_path / "run").read_metrics())


def test_a_run_that_skips_and_is_resumed_ends_with_the_same_bits(small, poisoned, tmp_path):
    recipe = small(on_nan="skip")
    poisoned(2, 4, 8)
    train(recipe, tmp_path / "whole")
    poisoned(2)
    train(recipe, tmp_path / "run", max_steps=3)
    poisoned(1, 5)
    record = train(recipe, tmp_path / "run", resume=True)
    assert record.skipped_steps == 3
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "whole")]
    assert models[0] == models[1]
    lines = [[line["loss"] for line in RunFolder(tmp_path / name).read_metrics()] for name in ("run", "whole")]
    assert lines[0] == lines[1]


def test_an_epoch_of_which_every_step_is_skipped_ends_the_run(small, poisoned, tmp_path):
    poisoned(*range(1, 6))
    with pytest.raises(RunFailed, match="every step of epoch 1 was skipped"):
        train(small(on_nan="skip"), tmp_path / "run")


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_where_asking_costs_time_it_is_asked_now_and_then_and_weights_are_kept_meanwhile(
    small, poisoned, tmp_path, monkeypatch, on_nan
):
    """As on a GPU: the answer is read every third step only."""
    monkeypatch.setattr(nan_guard.NanGuard, "is_time_to_look", lambda _self, step: (step + 1) % 3 == 0)
    looks = []
    real = nan_guard.NanGuard.look
    monkeypatch.setattr(nan_guard.NanGuard, "look", lambda self: looks.append(self.progress.step) or real(self))
    poisoned(1)
    recipe = small(on_nan=on_nan, epochs=1)
    if on_nan == "stop":
        with pytest.raises(RunFailed, match="at step 1 "):
            train(recipe, tmp_path / "run")
        assert looks == [3]
    else:
        assert train(recipe, tmp_path / "run").skipped_steps == 1
        assert [event["at_step"] for event in RunFolder(tmp_path / "run").read_events()] == [1]
    assert all(tensor.isfinite().all() for tensor in state(tmp_path / "run")["model"].values())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_number_that_is_not_finite_is_found_among_many(value):
    tensors = [torch.zeros(3), torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last), torch.tensor(7)]
    assert all_finite(tensors)
    tensors[1][2, 1, 1, 0] = value
    assert not all_finite(tensors)
    assert all_finite([])
    assert all_finite([torch.full((1000,), 1e30), torch.zeros(0)])


def test_a_model_that_fails_in_the_middle_of_a_run_is_told_in_a_sentence(small, tmp_path, monkeypatch):
    def fails(context, x, y, _):
        if context.generator.initial_seed() % 7 == 3:
            raise KeyError("a table\nof many lines")
        return x, y

    monkeypatch.setitem(STAGES, "standard", replace(STAGES["standard"], code=fails))
    with pytest.raises(RunFailed, match=r"step \d+ \(epoch .*failed \(KeyError: 'a table"):
        train(small(epochs=20), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"


def test_deterministic_kernels_are_asked_for_inside_and_not_afterwards(small, tmp_path, monkeypatch):
    modes = []

    def standard(_context, x, y, _):
        modes.append(torch.get_deterministic_debug_mode())
        return x, y

    monkeypatch.setitem(STAGES, "standard", replace(STAGES["standard"], code=standard))
    before = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    train(small(), tmp_path / "default", max_steps=1)
    train(small(deterministic=True), tmp_path / "strict", max_steps=1)
    assert modes == [1, 2]  # PyTorch's numbers: an operation without a deterministic kernel is warned of, or refused
    assert (torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory) == before


def test_deterministic_kernels_do_not_change_the_bits_of_our_own_model():
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3)),
        torch.rand(4, 3, 9, 9),
    )
    gradients = []
    for strict in (None, True):
        model.zero_grad()
        if strict:
            with same_bits(strict=True):
                model(x).square().sum().backward()
        else:
            model(x).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


class Assigned(nn.Module):
    """Keeps a statistic as `self.mean = ...`, which puts another tensor in the buffer's place at every step."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        x = x.mean((2, 3))
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.linear(x - self.mean)


def test_a_statistic_that_a_model_assigns_anew_is_put_back_too(poisoned, tmp_path):
    torch.manual_seed(0)
    x = torch.randint(256, (88, 8, 8, 3), dtype=torch.uint8)
    y = torch.arange(88) % 4
    data = (x[:80], y[:80]), (x[80:], y[80:])
    options = {"method": "standard", "eps": "8/255", "epochs": 2, "batch_size": 16, "lr": 0.05}
    poisoned(3)
    run = moatlab.train(Assigned(), data, **options, on_nan="skip", out=tmp_path / "run")
    assert run.model.mean.isfinite().all()
    assert state(tmp_path / "run")["progress"]["skipped"] == 1
