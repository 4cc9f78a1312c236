"""AdamW, cosine rates, warm-ups, and runs that start from pretrained weights."""

import copy
import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moatlab
from moatlab.methods import batches
from moatlab.models.preact_resnet import PreActResNet18
from moatlab.runtime.errors import UserError
from moatlab.training import trainer
from moatlab.training.api import train_recipe as train
from moatlab.training.making import ADAMW_LR, make_recipe
from moatlab.training.optimizer import AdamW
from moatlab.training.recipe import load_recipe
from moatlab.training.schedules import cosine, ramp
from moatlab.training.setup import Session

ADAMW = {"lr": 1e-3, "weight_decay": 0.05}


@pytest.fixture(autouse=True)
def _apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def small(tiny):
    def recipe(method="moat:2", **options):
        fields = {"precision": "fp32", "data": str(tiny), "width": 8, "epochs": 3, "batch_size": 8, "holdout": 16}
        return make_recipe(method, preset="laptop", **(fields | options))

    return recipe


def bits(folder):
    return (folder / "model.safetensors").read_bytes()


# --- AdamW


@pytest.mark.parametrize("beta", [0.9, 0.0])
def test_our_adamw_is_pytorchs_bit_for_bit(beta):
    torch.manual_seed(0)
    ours = PreActResNet18(classes=10, width=8).to(memory_format=torch.channels_last)
    theirs = copy.deepcopy(ours)
    for model in (ours, theirs):
        model.bn.weight.requires_grad_(False)  # a user may freeze some
    optimizers = (
        AdamW(ours.parameters(), momentum=beta, **ADAMW),
        torch.optim.AdamW(theirs.parameters(), betas=(beta, 0.999), fused=True, **ADAMW),
    )
    for step in range(4):
        x = torch.rand(8, 3, 16, 16)
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            F.cross_entropy(optimizer.zero_grad() or model(x), torch.arange(8)).backward()
            optimizer.found_inf = torch.tensor(float(step == 1))  # the second step must do nothing
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_adamw_without_a_fused_kernel_skips_infinite_gradients_itself(monkeypatch):
    monkeypatch.setattr("moatlab.training.optimizer.FUSED", ())
    torch.manual_seed(0)
    ours = nn.Linear(5, 3)
    theirs = copy.deepcopy(ours)
    optimizer, plain = AdamW(ours.parameters(), momentum=0.9, **ADAMW), torch.optim.AdamW(theirs.parameters(), **ADAMW)
    for infinite in (False, True, False):
        x = torch.rand(8, 5)
        for model in (ours, theirs):
            model.zero_grad()
            model(x).square().mean().backward()
        optimizer.found_inf = torch.tensor(float(infinite))
        optimizer.step()
        if not infinite:
            plain.step()
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-6, atol=1e-7)


def test_an_adamw_run_with_warm_ups_resumes_bit_for_bit(small, tmp_path):
    recipe = small(optimizer="adamw", schedule="cosine", warmup=0.5, eps_warmup=2, on_nan="skip")
    train(recipe, tmp_path / "whole")
    for stop in (5, 13, None):
        train(recipe, tmp_path / "pieces", resume=stop != 5, max_steps=stop)
    assert bits(tmp_path / "whole") == bits(tmp_path / "pieces")
    tensors = torch.load(tmp_path / "pieces" / "checkpoint.pt", weights_only=True)["optimizer"]
    assert {len(of_one) for of_one in tensors} == {3}
    assert {int(steps) for _, _, steps in tensors} == {24}


def test_a_reset_leaves_adamw_as_it_began(small):
    session = Session(recipe := small(optimizer="adamw"), torch.device("cpu"), moatlab.load_images(small().data))
    assert recipe.optimizer == "adamw"
    for parameter in session.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    session.optimizer.step()
    assert all(tensor.any() for tensors in session.optimizer.state.values() for tensor in tensors)
    session.optimizer.reset()
    assert not any(tensor.any() for tensors in session.optimizer.state.values() for tensor in tensors)


def test_fp16_scales_the_gradients_of_adamw_back(small):
    recipe = small(optimizer="adamw", precision="fp16")
    session = Session(recipe, torch.device("cpu"), moatlab.load_images(recipe.data))
    for infinite in (True, False):
        for parameter in session.model.parameters():
            parameter.grad = torch.full_like(parameter, torch.inf if infinite else 3.0 * session.scaler.get_scale())
        session.scaler.scale(torch.zeros(()))  # as the loss of a step would be
        session.scaler.step(session.optimizer)
        session.scaler.update()
        mean, _, steps = session.optimizer.state[parameter]
        torch.testing.assert_close(mean, torch.full_like(mean, 0.0 if infinite else 0.3))
        assert steps == (0 if infinite else 1)


def test_adamw_does_not_import_the_compiler(small):
    code = (
        "import sys; from moatlab.training.recipe import Recipe; from moatlab.training.api import train_recipe; "
        "train_recipe(Recipe.model_validate_json(sys.argv[1]), 'run', max_steps=2); "
        "assert 'torch._dynamo' not in sys.modules"
    )
    recipe = small("standard", optimizer="adamw").model_dump_json()
    subprocess.run([sys.executable, "-c", code, recipe], check=True)


# --- schedules and warm-ups


def test_the_cosine_rate_goes_from_its_peak_to_nearly_zero():
    rates = [cosine(step, epochs=4, steps_per_epoch=25, peak=0.2) for step in range(101)]
    assert rates[0] == 0.2
    assert rates[50] == pytest.approx(0.1)
    assert rates[25] == pytest.approx(0.1 * (1 + math.sqrt(0.5)))
    assert rates[100] == pytest.approx(0, abs=1e-12)
    assert rates == sorted(rates, reverse=True)


def test_a_warm_up_is_linear_and_no_warm_up_changes_nothing():
    assert [ramp(step, 4.0) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert [ramp(step, 0.0) for step in range(3)] == [1, 1, 1]
    assert ramp(0, 0.3) == 1


def test_a_warm_up_multiplies_the_schedule(small):
    recipe = small(schedule="cosine", warmup=1.5, lr=0.1)
    session = Session(recipe, torch.device("cpu"), moatlab.load_images(recipe.data))
    for step in range(session.total_steps):
        plain = cosine(step, epochs=3, steps_per_epoch=8, peak=0.1)
        assert session.learning_rate(step) == pytest.approx(plain * min(1, (step + 1) / 12))


def test_the_radius_grows_in_training_and_is_whole_in_the_monitor(small, tmp_path, monkeypatch):
    trained, measured = [], []
    prepare_loss, measure = batches.prepare_loss, trainer.measure

    def noting(stage, context, x, y):
        trained.append(context.eps)
        return prepare_loss(stage, context, x, y)

    def measuring(*arguments, **options):
        measured.append(options["eps"])
        return measure(*arguments, **options)

    monkeypatch.setattr(trainer, "prepare_loss", noting)
    monkeypatch.setattr(trainer, "measure", measuring)
    train(small("fgsm", eps="8/255", eps_warmup=2, epochs=3), tmp_path / "run")
    assert trained == pytest.approx([8 / 255 * min(1, (step + 1) / 16) for step in range(24)])
    assert trained[16:] == [8 / 255] * 8
    assert set(measured) == {"8/255"}


@pytest.mark.parametrize("name", ["warmup", "eps_warmup"])
def test_a_warm_up_longer_than_the_run_is_refused(small, name):
    with pytest.raises(UserError, match="longer than the run, which has 3 epochs"):
        small(**{name: 3.5})


# --- recipes


def test_new_fields_with_their_defaults_are_in_no_file_and_change_no_checksum(tmp_path):
    plain = make_recipe("moat:2")
    assert not {"optimizer", "warmup", "eps_warmup"} & plain.model_dump().keys()
    assert plain.sha256 == make_recipe("moat:2", optimizer="sgd", warmup=0, eps_warmup=0).sha256
    tuned = make_recipe("moat:2", optimizer="adamw", warmup=1, eps_warmup=2.5)
    (tmp_path / "recipe.toml").write_text(tuned.to_toml())
    assert load_recipe(tmp_path / "recipe.toml") == tuned
    assert "adamw" in tuned.setting
    assert "2.5 epochs of eps warm-up" in tuned.setting


def test_adamw_has_a_learning_rate_of_its_own_unless_one_is_given(tmp_path):
    assert make_recipe("moat:2", optimizer="adamw").lr == ADAMW_LR == 1e-3
    assert make_recipe("moat:2", optimizer="adamw", lr=0.01).lr == 0.01
    (tmp_path / "recipe.toml").write_text(make_recipe("moat:2", lr=0.3).to_toml())
    assert make_recipe(file=tmp_path / "recipe.toml").lr == 0.3
    assert make_recipe(file=tmp_path / "recipe.toml", optimizer="adamw").lr == ADAMW_LR
