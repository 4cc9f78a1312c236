"""The stage that chooses its number of steps."""

import pytest
import torch
import torch.nn.functional as F

from moatlab.attacks.norms import Threat
from moatlab.methods.batches import prepare_loss
from moatlab.methods.context import Context, When
from moatlab.methods.language import parse_method
from moatlab.methods.meter import Meter
from moatlab.training.api import train_recipe
from moatlab.training.making import make_recipe
from moatlab.training.run_folder import RunFolder

SHAPE, CLASSES, THREAT = (6, 3, 5, 5), 4, Threat("linf", 0.1)


def network():
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(3, 8, 3), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(72, CLASSES)
    return torch.nn.Sequential(*layers).double()


def context(model, memory, position=1):
    draws = torch.Generator().manual_seed(7)
    return Context(model, model, THREAT, draws, CLASSES, when=When(position), memory=memory)


def batch():
    torch.manual_seed(1)
    return torch.rand(SHAPE).double(), torch.arange(SHAPE[0]) % CLASSES


def loss_of(spec, given):
    return prepare_loss(parse_method(spec).stages[0], given, *batch())()


@pytest.mark.parametrize(("wanted", "saved", "same_as"), [(1, 0, "fast"), (8, 6, "pgd:8"), (8, 1, "pgd:3")])
def test_its_batch_is_that_of_fast_or_of_pgd_with_the_steps_that_are_left(wanted, saved, same_as):
    model = network()
    memory = {"auto steps": torch.tensor(wanted), "auto saved": torch.tensor(saved)}
    ours, theirs = loss_of("auto:2", context(model, memory)), loss_of(same_as, context(model, {}))
    assert torch.equal(ours, theirs)
    gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in (ours, theirs)]
    assert all(torch.allclose(one, other, atol=1e-12) for one, other in zip(*gradients, strict=True))


def test_it_remembers_the_mean_cosine_of_the_gradients_before_and_after_the_step():
    model, (x, y) = network(), batch()
    given = context(model, {})
    loss = loss_of("auto:2", given)
    ((leaf, action),) = given.watched
    loss.backward(inputs=[*model.parameters(), leaf])
    action(leaf.grad)
    start = THREAT.project(x + THREAT.noise(x, torch.Generator().manual_seed(7)), x).requires_grad_()
    (before,) = torch.autograd.grad(F.cross_entropy(model(start), y, reduction="sum"), start)
    end = THREAT.project(start.detach() + 1.25 * 0.1 * before.sign(), x).requires_grad_()
    (after,) = torch.autograd.grad(F.cross_entropy(model(end), y, reduction="sum"), end)
    cosine = F.cosine_similarity(before.flatten(1), after.flatten(1)).mean()
    assert given.memory["auto agreement"].item() == pytest.approx(0.9 + 0.1 * cosine.item(), abs=1e-12)


def test_it_takes_more_steps_where_the_loss_bends_and_never_more_than_its_budget_on_average():
    model, memory, meter, taken = network(), {}, Meter(), 0
    with meter.counting(model):
        for step in range(120):
            if step % 20 == 0:  # linear, then bent, in turns
                memory["auto agreement"] = torch.tensor([0.9 if step % 60 < 40 else 0.1], dtype=torch.float64)
            loss_of("auto:3", context(model, memory, step)).backward()
            cost = meter.take()
            steps = cost.forwards // SHAPE[0] - 1
            assert cost.kinds == (6 * (steps + 1), 6 * steps, 6, 0)
            assert steps == 1 or step % 60 >= 40
            taken += steps
            assert taken <= 3 * (step + 1)
    assert taken == 3 * 120 - int(memory["auto saved"])
    assert int(memory["auto saved"]) == 0  # 40 saved twice, and more wanted


@pytest.mark.parametrize("method", ["auto:2,trust=1", "auto:2,trust=-1", "mixup | auto:3,trust=0.9 | pgd:1"])
def test_a_run_repeats_and_resumes_to_the_same_bits_within_its_plan(method, tiny, tmp_path):
    fields = {"data": str(tiny), "width": 8, "batch_size": 8, "holdout": 16, "lr": 0.05, "precision": "fp32"}
    recipe = make_recipe(method, preset="laptop", epochs=6, **fields)
    whole = train_recipe(recipe, tmp_path / "whole")
    assert all(whole.counted[kind] <= whole.planned[kind] for kind in whole.planned)
    assert whole.counted["weight_backwards"] == whole.planned["weight_backwards"] == 6
    for stop in (3, 29, None):
        train_recipe(recipe, tmp_path / "pieces", resume=True, max_steps=stop)
    files = [RunFolder(tmp_path / name).model.read_bytes() for name in ("whole", "pieces")]
    assert files[0] == files[1]
    if method.endswith("=-1"):  # always trusted: a single step
        assert whole.counted["passes"] == 12
        assert "12 passes of 18 planned" in whole.text(tmp_path)
