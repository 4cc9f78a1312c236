"""Numbers that are too high are caught: planted models, each with the flag that it must raise."""

import pytest
import torch
from pyautoattack import AutoAttack
from torch import nn

import moatlab
from moatlab import evaluate
from moatlab.evaluation.red_flags import MEANING, Measured, judge
from models_for_tests import FIXTURES, Returns, images, network


def names(result):
    return {flag.name for flag in result.flags}


def fixture_images(count):
    data = moatlab.load_images("mini")
    return data.test_x[:count], data.test_y[:count]


def reference_accuracy(model, x, y, eps):
    z, _ = AutoAttack(model.requires_grad_(False), eps=eps, norm="Linf", seed=0).run_standard_evaluation(x, y)
    with torch.no_grad():
        return (model(z).argmax(1) == y).float().mean().item()


@pytest.mark.parametrize(
    ("plant", "flag"),
    [
        (lambda model: lambda x: 1e4 * model(x), "zero-gradients"),
        (lambda model: lambda x: model(torch.round(x * 7) / 7), "square-beats-gradients"),
    ],
    ids=["logits times 10,000", "input rounded to 8 levels"],
)
def test_a_planted_model_is_flagged_and_looks_no_more_robust_than_to_the_reference(plant, flag):
    inner = network(classes=10)
    x, y = images(16, inner)
    model = Returns(plant(inner)).eval()
    result = evaluate(model, x, y, attacks=["aa"], eps=0.12)
    assert flag in names(result)
    assert result.accuracy["aa"] <= reference_accuracy(model, x, y, 0.12) + 0.002


def test_a_collapsed_model_is_flagged_and_a_robust_one_is_not():
    x, y = fixture_images(200)
    collapsed = evaluate(
        moatlab.load(FIXTURES / "mini_fgsm.safetensors"), x, y, attacks=["fgsm", "pgd50"], eps=16 / 255
    )
    assert "catastrophic-overfitting" in names(collapsed)
    robust = evaluate(moatlab.load(FIXTURES / "mini_moat2.safetensors"), x, y, attacks=["fgsm", "pgd50"], eps=16 / 255)
    assert not robust.flags
    sampled = evaluate(moatlab.load(FIXTURES / "mini_fgsm.safetensors"), x, y, attacks=["apgd-ce"], eps=16 / 255)
    assert "catastrophic-overfitting" in names(sampled)  # seen on a few images, whatever attacks were asked for


def test_probabilities_and_randomness_are_flagged():
    model = network()
    x, y = images(8, model)
    assert "probabilities" in names(evaluate(nn.Sequential(model, nn.Softmax(1)), x, y, attacks=["fgsm"], eps=0.01))

    class Noisy(nn.Module):
        def forward(self, z):
            return model(z + 0.1 * torch.randn_like(z))

    state = torch.get_rng_state()
    noisy = [evaluate(Noisy(), x, y, attacks=["pgd50"], eps=0.01) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), state)
    assert "randomised" in names(noisy[0])
    assert noisy[0].broken_by == noisy[1].broken_by


MEASURED = Measured(
    randomised=False,
    probabilities=False,
    labels=[10] * 10,
    sample=200,
    clean=0.8,
    zero_gradients=0.0,
    fgsm=0.5,
    pgd20={"at half of eps": 0.6, "at eps": 0.45, "at twice eps": 0.2},
    pgd20_at_half=0.0,
)


def accuracy(**shares):
    """Verdicts on 100 images of attacks with these accuracies."""
    return {name: [None] * round(100 * share) + [name] * round(100 - 100 * share) for name, share in shares.items()}


def audit(broken, left):
    return {"audit": ["cw50"] * broken + [None] * (left - broken) + ["before"] * (100 - left)}


SQUARE_IN_AA = {"aa": ["square", *["apgd-ce"] * 49, *[None] * 30, *["clean"] * 20]}
SQUARE_BESIDE_PGD = {"square": ["square", *[None] * 99], "pgd50": [None, *["pgd50"] * 79, *["clean"] * 20]}


@pytest.mark.parametrize(
    ("flag", "measured", "verdicts"),
    [
        (None, {}, accuracy(fgsm=0.5, pgd50=0.4) | audit(0, 40)),
        ("pgd-weaker-than-fgsm", {}, accuracy(fgsm=0.5, pgd50=0.6)),
        ("pgd-weaker-than-fgsm", {"fgsm": 0.4}, {}),
        (None, {}, accuracy(pgd50=0.6)),  # FGSM was asked of the sample only, which are other images
        (None, {}, accuracy(fgsm=0.5, cw50=0.6)),  # another loss than FGSM's
        ("fgsm-above-clean", {}, accuracy(fgsm=0.85)),
        ("no-better-than-guessing", {"labels": [75, 25]}, {}),
        ("zero-gradients", {"zero_gradients": 0.3}, {}),
        ("rises-with-eps", {"pgd20": {"at half of eps": 0.4, "at eps": 0.45, "at twice eps": 0.2}}, {}),
        ("not-zero-at-half", {"pgd20_at_half": 0.1}, {}),
        ("catastrophic-overfitting", {}, accuracy(fgsm=0.7, pgd50=0.1)),
        ("audit-broke-more", {}, accuracy(fgsm=0.5, pgd50=0.4) | audit(1, 40)),
        ("square-beats-gradients", {}, SQUARE_IN_AA),
        ("square-beats-gradients", {}, SQUARE_BESIDE_PGD),
    ],
)
def test_each_flag_is_raised_by_its_numbers_and_by_no_others(flag, measured, verdicts):
    raised = judge(MEASURED.model_copy(update=measured), accuracy(clean=0.8) | verdicts)
    assert [one.name for one in raised] == ([flag] if flag else [])
    assert all(one.meaning == MEANING[one.name] for one in raised)


@pytest.mark.parametrize(("count", "raised"), [(5, False), (49, False), (50, True)])
def test_a_few_images_raise_no_flag_of_guessing(count, raised):
    right = count // 5
    measured = MEASURED.model_copy(update={"labels": [count - count // 2, count // 2], "sample": count})
    flags = judge(measured, {"clean": [None] * right + ["clean"] * (count - right)})
    assert ("no-better-than-guessing" in [flag.name for flag in flags]) == raised


def test_images_that_are_sorted_by_class_raise_no_flag_of_guessing():
    """The flags look at the first images, which are of one class then; how frequent a class is, all images say."""
    model = network()
    x, _ = images(400, model)
    y, order = model(x).argmax(1).sort()
    assert len(y[:200].unique()) < len(y.unique())
    assert "no-better-than-guessing" not in names(evaluate(model, x[order], y, attacks=["fgsm"], eps=0.001))


def test_the_audit_attacks_robust_images_once_more():
    model = network()
    x, y = images(24, model)
    result = evaluate(model, x, y, attacks=["fgsm"], eps=0.06, audit=True)
    assert "audit-broke-more" in names(result)  # one step is a weak attack
    assert "audit" not in result.accuracy
    assert result.cost["audit"].gradients > 0
    again = evaluate(model, x, y, attacks=["pgd50", "aa"], eps=0.06, audit=True)
    assert "audit-broke-more" not in names(again)
    assert set(again.broken_by["audit"]) <= {None, "before"}
