"""Each example runs as its first lines say, on fewer images."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moatlab.models.yours import build_by_factory

EXAMPLES = Path(__file__).parent.parent / "examples"
FEW = ("--epochs", "3", "--images", "256")


@pytest.mark.parametrize("name", ["plain_loop", "lightning_module", "hugging_face_trainer"])
def test_a_batch_stage_drops_into_a_loop(name, alone):
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *FEW], cwd=alone, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    accuracy = ast.literal_eval(result.stdout.splitlines()[-1])
    assert set(accuracy) == {"clean", "fgsm", "pgd50"}
    assert 0 <= accuracy["pgd50"] <= accuracy["clean"] <= 1
    if name == "plain_loop":  # the others leave the printing to their frameworks
        stages = [line.split()[2] for line in result.stdout.splitlines() if line.startswith("epoch ")]
        assert stages == ["mixup", "fast", "pgd:2"]


def test_a_stage_of_the_users_own_trains_at_its_declared_cost(alone):
    command = [sys.executable, str(EXAMPLES / "own_stage.py"), "--epochs", "3", "--max-steps", "41"]
    result = subprocess.run(command, cwd=alone, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "'passes': 1.10" in result.stdout  # an epoch of noise, two steps of fast


@pytest.mark.parametrize("name", ["vit", "resnet"])
def test_the_networks_to_fine_tune_take_images_of_16x16_and_have_a_linear_head(name, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    model = build_by_factory(f"finetune_networks:{name}", classes=7)
    assert model(torch.rand(2, 3, 16, 16)).shape == (2, 7)
    assert [*model.modules()][-1].out_features == 7
