"""Every stage trains as planned, and resumes to the same bits; averages, AWP, dropout, smoothing, checks."""

import copy

import pytest
import torch
import torch.nn.functional as F

import moatlab
from moatlab.methods.entry import Argument
from moatlab.methods.language import parse_method
from moatlab.methods.stages import STAGES
from moatlab.models.preact_resnet import Activation
from moatlab.runtime.errors import UserError
from moatlab.runtime.files import read_json
from moatlab.training.api import train_recipe
from moatlab.training.averaging import Average
from moatlab.training.making import make_recipe
from moatlab.training.perturbation import perturb, restore
from moatlab.training.run_folder import RunFolder
from moatlab.training.setup import Session

FIELD = [
    "zerograd",
    "aaer",
    "aaer:over=nfgsm",
    "elle",
    "trades:2",
    "mart:2",
    "nuat",
    "gat",
    "liet",
    "pgi",
    "free:2",
    "yopo:2,n=2",
]
CYCLES = ["mixup | liet | pgd:2", "mixup | fast | trades:1>2", "nuat > gat | pgi | yopo:2"]
HELPERS = {
    "ema": {"average": "ema"},
    "swa": {"average": "swa", "average_decay": 0.9},
    "awp": {"awp": 0.01},
    "dropout": {"dropout": 0.3, "activation": "silu"},
    "smoothing": {"label_smoothing": 0.1},
    "checks": {"on_collapse": "heal", "check_every": 5},
}


@pytest.fixture
def small(tiny):
    def recipe(method, **options):
        fields = {"data": str(tiny), "width": 8, "batch_size": 8, "holdout": 16, "lr": 0.05, "precision": "fp32"}
        return make_recipe(method, preset="laptop", **(fields | options))

    return recipe


def epochs_of(method):
    return max(len(parse_method(method).slots), parse_method(method).replays, 2)


def weights(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def agree(recipe, tmp_path):
    """Twice, and in three pieces: the same bits, and counted = planned."""
    whole = train_recipe(recipe, tmp_path / "whole")
    planned = {kind: whole.planned[kind] + whole.healing[kind] for kind in whole.planned}
    assert whole.counted == pytest.approx(planned)
    for stop in (3, 11, None):
        train_recipe(recipe, tmp_path / "pieces", resume=True, max_steps=stop)
    assert weights(tmp_path / "pieces") == weights(tmp_path / "whole")
    return whole


@pytest.mark.parametrize("method", FIELD + CYCLES)
def test_a_method_of_the_field_costs_what_it_plans_and_resumes_to_the_same_bits(method, small, tmp_path):
    agree(small(method, epochs=epochs_of(method)), tmp_path)


@pytest.mark.parametrize("helper", HELPERS)
def test_a_helper_costs_what_it_plans_and_resumes_to_the_same_bits(helper, small, tmp_path):
    method = "fast" if helper == "checks" else "fast | pgd:2"
    record = agree(small(method, epochs=2, **HELPERS[helper]), tmp_path)
    extra = {"awp": 2.0}.get(helper, 0.0)  # a forward and a backward more in each of the two epochs
    assert record.planned["passes"] == parse_method(method).cost(2).passes + extra


def test_the_average_is_saved_monitored_evaluated_and_in_the_record(small, tmp_path):
    record = train_recipe(small("fgsm", epochs=2, average="ema"), tmp_path / "run")
    lines = RunFolder(tmp_path / "run").read_metrics()
    assert {"clean_average", "fgsm_average", "pgd7_average"} <= lines[0].keys() & record.final.keys()
    averaged, last = (moatlab.load(tmp_path / "run" / f"model{name}.safetensors") for name in ("_average", ""))
    assert any(not torch.equal(a, b) for a, b in zip(averaged.parameters(), last.parameters(), strict=True))


def test_the_average_follows_its_formula_and_copies_the_buffers():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    average, expected = Average(model, "ema", 0.5, steps=80), model[0].weight.detach().clone()
    for step in range(1, 8):
        with torch.no_grad():
            model[0].weight.add_(1.0)
        average.update(model, step)
        count = step - 2  # 2.5 % of 80 steps
        decay = min(0.5, (1 + count) / (10 + count)) if count > 0 else 0
        expected = decay * expected + (1 - decay) * model[0].weight.detach()
        assert torch.allclose(average.model[0].weight, expected)
    model(torch.rand(5, 2))
    average.update_buffers(model, [])
    assert torch.equal(average.model[1].running_mean, model[1].running_mean)
    assert average.model[1].running_mean is not model[1].running_mean


def test_the_statistics_of_swa_are_those_of_the_averaged_weights_on_the_images():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1), torch.nn.BatchNorm2d(2))
    average, images = Average(model, "swa", None, steps=10), [torch.rand(4, 1, 2, 2) for _ in range(3)]
    average.update_buffers(model, images)
    means = torch.stack([model[0](x).mean((0, 2, 3)) for x in images]).mean(0)
    assert torch.allclose(average.model[1].running_mean, means)
    assert average.model[1].momentum == model[1].momentum
    assert not average.model.training


def test_weights_are_perturbed_uphill_by_their_own_length_and_restored():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3), torch.nn.BatchNorm1d(3)).double()
    x, y = torch.rand(8, 3, 2, 2).double(), torch.arange(8) % 3
    before, loss = copy.deepcopy(model.state_dict()), lambda: F.cross_entropy(model(x), y)
    gradient = torch.autograd.grad(loss(), model[1].weight)[0]
    model.load_state_dict(before)
    moved = perturb(model, loss, 0.01)
    assert [tensor.shape for tensor, _ in moved] == [(3, 12)]
    expected = before["1.weight"] + 0.01 * before["1.weight"].norm() * gradient / gradient.norm()
    assert torch.allclose(model[1].weight, expected, rtol=1e-12)
    assert torch.equal(model[2].running_mean, before["2.running_mean"])
    restore(moved)
    assert torch.allclose(model[1].weight, before["1.weight"], rtol=1e-12)


def test_dropout_falls_linearly_to_zero(small):
    recipe = small("standard", epochs=2, dropout=0.4)
    session = Session(recipe, torch.device("cpu"), moatlab.load_images(recipe.data))
    rates = []
    for step in (0, 8, 15):
        session.dropout(step)
        rates += {layer.dropout for layer in session.model.modules() if isinstance(layer, Activation)}
    assert rates == pytest.approx([0.4, 0.2, 0.4 / 16])
    x = torch.rand(4, 3, 8, 8)
    session.dropout(0)
    assert not torch.equal(session.model(x), session.model(x))
    session.model.eval()
    assert torch.equal(session.model(x), session.model(x))


def test_a_check_within_an_epoch_replaces_the_next_steps_and_counts_them(small, tmp_path, monkeypatch):
    """The measured accuracy is made up here; real collapses are in docs/results."""
    found = iter([0.5, 0.5, 0.1, 0.45, 0.5, 0.5])
    monkeypatch.setattr("moatlab.training.trainer.Trainer.check", lambda self: self.policy.check(next(found)))
    record = train_recipe(small("fast", epochs=2, on_collapse="heal", check_every=4), tmp_path / "run")
    assert [step for step, _ in record.checks] == [4, 8, 12, 16]
    assert record.healing["passes"] == 4 / 8  # four of eight steps an epoch, one pass more each
    (event,) = [line for line in RunFolder(tmp_path / "run").read_events() if line["event"] == "burst"]
    assert "fell to 10.0 % (best 50.0 %) at step 12" in event["message"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"method": "free:4", "epochs": 6}, "must be a multiple"),
        ({"method": "liet", "awp": 0.01}, "can't be used with liet"),
        ({"average": "ema", "average_decay": 1}, "less than 1"),
        ({"average_decay": 0.9}, "needs"),
        ({"check_every": 0, "on_collapse": "heal"}, "greater than or equal to 1"),
        ({"check_every": 5}, "heal"),
        ({"check_every": 5, "on_collapse": "heal", "method": "moat:2"}, "methods of one stage"),
        ({"dropout": 0.1, "model": "mine:build"}, "built-in"),
    ],
)
def test_helpers_that_do_not_fit_are_refused_with_a_sentence(options, sentence):
    with pytest.raises(UserError, match=sentence):
        make_recipe(**{"method": "fast", **options})


def test_pgi_needs_its_images_in_memory(tiny, tmp_path):
    with pytest.raises(UserError, match="keeps a perturbation of each image in memory"):
        moatlab.train("preact_resnet18", str(tiny), method="pgi", epochs=1, stream=True, out=tmp_path / "run")


class Assigning(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(192, 2))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen = self.seen + 1
        return super().forward(x)


def test_a_model_that_assigns_its_buffers_has_no_average(tiny, tmp_path):
    with pytest.raises(UserError, match="replaces its buffer seen"):
        moatlab.train(Assigning(), str(tiny), method="fast", epochs=1, average="ema", out=tmp_path / "run")


@pytest.fixture
def own_stages():
    before = dict(STAGES)
    yield
    for name in STAGES.keys() - before.keys():
        del STAGES[name]


@pytest.mark.usefixtures("own_stages")
def test_users_add_loss_stages_with_named_arguments_and_memory(small, tmp_path):
    def logit_squeezing(context, x, y, _, *, weight):
        """CE on FGSM examples plus weight mean |logits|^2, of logits centred by their running mean."""
        adversarial = context.climb(x, x, y, steps=1, step_size=context.eps)
        logits = context.forward(adversarial)
        mean = context.memory.get("mean", torch.zeros_like(logits[0]))
        context.memory["mean"] = mean.lerp(logits.detach().mean(0), 0.1)
        return F.cross_entropy(logits, y) + weight * (logits - mean).square().mean()

    named = {"weight": Argument("WEIGHT", default=0.1)}
    moatlab.add_stage("squeeze", logit_squeezing, kind="loss", forwards=1, input_backwards=1, named=named)
    agree(small("squeeze:weight=0.5 | pgd:2", epochs=2), tmp_path)


@pytest.mark.usefixtures("own_stages")
def test_users_add_replay_stages(small, tmp_path):
    def repeated(context, x, y, _times):
        """Plain training, each batch several times in a row."""
        return F.cross_entropy(context.forward(x), y)

    moatlab.add_stage("repeated", repeated, kind="replay", argument=Argument("M", whole=True, low=1))
    record = agree(small("repeated:2", epochs=2), tmp_path)
    assert record.planned["passes"] == 2
    with pytest.raises(UserError, match="must be the only stage"):
        parse_method("fast | repeated:2")


def test_the_average_is_evaluated_by_its_name(small, tmp_path):
    from moatlab.evaluation.card import evaluate_target
    from moatlab.evaluation.target import load_target

    train_recipe(small("fgsm", epochs=1, average="ema"), tmp_path / "run")
    evaluate_target(load_target(tmp_path / "run", which="average"), attacks=["clean", "fgsm"])
    assert "fgsm" in read_json(tmp_path / "run" / "eval_average.json")["results"]
    train_recipe(small("fgsm", epochs=1), tmp_path / "plain")
    with pytest.raises(UserError, match="weights are averaged only with"):
        load_target(tmp_path / "plain", which="average")
