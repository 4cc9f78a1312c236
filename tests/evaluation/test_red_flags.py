"""Numbers that are too high are caught: planted models, each with the flag that it must raise."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from pyautoattack import AutoAttack
from torch import nn

import moatlab
from moatlab import evaluate, make_recipe, train
from moatlab.evaluation.card import Card, evaluate_target
from moatlab.evaluation.red_flags import MEANING, RAISED_IF, Measured, judge
from moatlab.evaluation.target import load_target
from moatlab.evaluation.verify import inconsistency
from moatlab.reproduce.outcomes import unpack
from models_for_tests import FIXTURES, Returns, images, network

RESULTS = Path(__file__).parents[2] / "docs" / "results"


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


def aa(cross_entropy=0, targeted=0):
    """AutoAttack on 100 images, 20 of them misclassified before; how many its first two members broke."""
    broken = ["clean"] * 20 + ["apgd-ce"] * cross_entropy + ["apgd-t"] * targeted
    return {"aa": broken + [None] * (100 - len(broken))}


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
        ("pgd-far-above-aa", {}, accuracy(fgsm=0.5, pgd50=0.45, aa=0.3)),
        (None, {}, accuracy(fgsm=0.5, pgd50=0.45, aa=0.37)),  # 8 of 100 images, so maybe 6 % of all images
        ("pgd-far-above-aa", {}, aa(targeted=20)),
        (None, {}, aa(cross_entropy=20)),
        (None, {}, accuracy(fgsm=0.5, pgd7=0.45) | aa(cross_entropy=50)),  # seven steps are few
    ],
)
def test_each_flag_is_raised_by_its_numbers_and_by_no_others(flag, measured, verdicts):
    raised = judge(MEASURED.model_copy(update=measured), accuracy(clean=0.8) | verdicts, "linf")
    assert [one.name for one in raised] == ([flag] if flag else [])
    assert all(one.meaning == MEANING[one.name] for one in raised)
    assert MEANING.keys() == RAISED_IF.keys()


@pytest.mark.parametrize(("count", "raised"), [(5, False), (49, False), (50, True)])
def test_a_few_images_raise_no_flag_of_guessing(count, raised):
    right = count // 5
    measured = MEASURED.model_copy(update={"labels": [count - count // 2, count // 2], "sample": count})
    flags = judge(measured, {"clean": [None] * right + ["clean"] * (count - right)}, "linf")
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


class Decoys(nn.Module):
    """With t the mean change of a pixel, over eps: logits 0 (the label's), t - 0.9, and six times -t - 1.2.

    Cross-entropy grows fastest towards t = -1, where no class wins over the label's. At t = 1 the second one does.
    """

    eps = 0.05

    def forward(self, x):
        t = (x - 0.5).flatten(1).mean(1) / self.eps
        return torch.stack([0 * t, t - 0.9, *[-t - 1.2] * 6], 1)


@pytest.mark.parametrize(("attacks", "weaker"), [(["pgd50", "aa"], "pgd50"), (["aa"], "apgd-ce")])
def test_a_model_whose_cross_entropy_leads_astray_is_flagged_by_what_autoattack_broke(attacks, weaker):
    x = torch.full((48, 3, 8, 8), 0.5)
    result = evaluate(Decoys(), x, torch.zeros(48, dtype=torch.int64), attacks=attacks, eps=Decoys.eps)
    assert [(flag.name, flag.evidence) for flag in result.flags] == [
        ("pgd-far-above-aa", f"{weaker} 100.0 %, aa 0.0 %")
    ]


def evaluated_in(content):
    """Every model in a result of `moat reproduce` that both PGD and AutoAttack attacked."""
    robust = content.get("standing") if isinstance(content, dict) else None
    if isinstance(robust, dict) and {"pgd50", "aa"} <= robust.keys():
        yield {name: unpack(text) for name, text in robust.items()}
    for one in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        yield from evaluated_in(one)


def test_no_model_of_the_published_results_raises_the_flag_of_pgd_above_autoattack():
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*.json")]
    models = [model for content in contents for model in evaluated_in(content)]
    assert len(models) > 140
    largest = 0.0
    for model in models:
        count = len(model["aa"])  # the first of those of pgd50
        verdicts = {name: [None if one else name for one in robust[:count]] for name, robust in model.items()}
        raised = judge(MEASURED.model_copy(update={"labels": [count // 10] * 10}), verdicts, "linf")
        assert "pgd-far-above-aa" not in [flag.name for flag in raised]
        largest = max(largest, (sum(model["pgd50"][:count]) - sum(model["aa"])) / count)
    assert largest == pytest.approx(0.07)  # of 200 images, so the difference alone would not do as a rule


def test_no_published_result_without_verdicts_has_pgd_far_above_autoattack():
    field = json.loads((RESULTS / "field-mini.json").read_text())["runs"][0]
    laptop = json.loads((RESULTS / "laptop-run.json").read_text())["accuracy"]
    pairs = [(field[part]["pgd50"], field[part]["aa"]) for part in ("last", "average")]
    for pgd, aa in [*pairs, (laptop["pgd50"]["accuracy"], laptop["aa"]["accuracy"])]:
        assert pgd - aa < 0.06


def test_the_robust_fixture_raises_no_flag_under_pgd_and_fast_autoattack():
    x, y = fixture_images(100)
    model = moatlab.load(FIXTURES / "mini_moat2.safetensors")
    assert not evaluate(model, x, y, attacks=["fgsm", "pgd50", "aa-fast"], eps=16 / 255).flags


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny):
    """One run that watched held-out images, and one that watched the test images."""
    folder = tmp_path_factory.mktemp("watched")
    for monitor, holdout in (("holdout", 16), ("test", 0)):
        options = {"epochs": 1, "width": 8, "batch_size": 16, "holdout": holdout, "monitor": monitor}
        train(make_recipe("fgsm", data=str(tiny), **options), folder / monitor, threads=1)
    return folder


def test_training_chooses_no_epoch_on_test_images(runs):
    assert (runs / "holdout" / "model_best.safetensors").exists()
    assert not (runs / "test" / "model_best.safetensors").exists()


def test_a_best_epoch_of_a_run_that_watched_test_images_is_flagged(runs, tiny, tmp_path):
    planted = shutil.copytree(runs / "test", tmp_path / "planted")
    shutil.copy(planted / "model.safetensors", planted / "model_best.safetensors")  # as another program may
    card = evaluate_target(load_target(planted, which="best"), attacks=["fgsm"])
    (flag,) = [flag for flag in card.flags if flag.name == "epoch-chosen-on-test"]
    assert flag.evidence == "its run monitored test images"
    read = Card.read(planted / "eval_best.json")
    assert read == card
    assert inconsistency(read) is None
    read.flags.remove(flag)
    assert inconsistency(read) == "its numbers raise a red flag that it does not list: epoch-chosen-on-test"
    (planted / "recipe.toml").unlink()  # its record shows it too
    assert load_target(planted, which="best", data=str(tiny)).subject.chosen_on_test is False  # not known to be these
    shutil.copy(runs / "test" / "recipe.toml", planted)
    assert load_target(planted).subject.chosen_on_test is False  # the last epoch was not chosen
    assert load_target(runs / "holdout", which="best").subject.chosen_on_test is False
