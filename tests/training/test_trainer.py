"""Real runs: counted costs, equal bits, interruptions."""

import copy
import io
import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import moatlab
import models_for_tests
from moatlab.methods.cost import Cost
from moatlab.methods.entry import StageEntry
from moatlab.methods.language import parse_method
from moatlab.methods.stages import STAGES
from moatlab.models.preact_resnet import PreActResNet18
from moatlab.runtime.device import Machine
from moatlab.runtime.errors import RunFailed, UserError
from moatlab.runtime.files import read_json, write_json
from moatlab.training.api import train_recipe as train
from moatlab.training.checkpoint import Progress, laid_out_like, load_checkpoint, save_checkpoint, seal
from moatlab.training.making import make_recipe
from moatlab.training.nan_guard import NanGuard
from moatlab.training.optimizer import Sgd
from moatlab.training.run_folder import RunFolder
from moatlab.training.setup import split

METHODS = [
    "standard", "fgsm", "fast", "nfgsm", "pgd:2", "pgd:7", "gradalign", "kim", "moat:2", "moat:5", "imoat:1,2,3",
    "imoat:2,5,8", "cutmix | fast | pgd:2>5>8", "mixup | kim:2 | gradalign:0.5 | nfgsm",
]  # fmt: skip
KINDS = ("forwards", "input_backwards", "weight_backwards", "double_backwards")


@pytest.fixture(autouse=True)
def _apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MOAT_DATA", raising=False)


@pytest.fixture
def small(tiny):
    """Recipes for a PreAct ResNet on images of 8x8, 8 steps an epoch, with all on that could disturb a resumed run."""

    def recipe(method, **options):
        fields = {"data": str(tiny), "width": 8, "epochs": 3, "batch_size": 8, "holdout": 16, "lr": 0.05}
        fields |= {"precision": "fp32"}
        return make_recipe(method, preset="laptop", **(fields | options))

    return recipe


def bits(folder):
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("method", METHODS)
def test_the_counted_cost_equals_the_planned_one_in_each_kind(method, tmp_path):
    epochs = len(parse_method(method).slots)
    recipe = make_recipe(method, model="models_for_tests:counted", epochs=epochs)
    record = train(recipe, tmp_path / "run")
    assert record.counted == record.planned
    assert record.planned == json.loads((tmp_path / "run" / "run.json").read_text())["planned"]
    # Counted a second time by the model itself; what monitoring asked of it (11 forwards and 8 input-backwards for
    # each 250 images: 500 after every epoch, 1,000 at the end) is counted apart.
    seen, blocks, steps = models_for_tests.CALLS, 2 * epochs + 4, record.steps_per_epoch
    monitoring = {"forwards": 11 * blocks, "input_backwards": 8 * blocks}
    first_look = {"forwards": 3}  # two images go through in either mode before the run, and for an estimate of memory
    for kind in KINDS:
        apart = monitoring.get(kind, 0) + first_look.get(kind, 0)
        assert seen[kind] - apart == steps * record.planned[kind], kind
    assert record.monitoring["forwards"] == 11 * 500 * epochs / (128 * steps)


def careless(context, x, y, _):
    """A stage that looks at the model once more than it says."""
    context.model(x)
    return x, y


def wasteful(context, x, y, _):
    """A stage that attacks with loss.backward(), and so computes weight gradients that it does not declare."""
    x = x.clone().requires_grad_()
    F.cross_entropy(context.model(x), y).backward()
    return (x + context.eps * x.grad.sign()).detach(), y


@pytest.mark.parametrize(("stage", "declared"), [(careless, Cost(1, 0, 1)), (wasteful, Cost(2, 1, 1))])
def test_a_stage_that_declares_too_little_is_caught(small, stage, declared, monkeypatch, tmp_path):
    monkeypatch.setitem(STAGES, "mine", StageEntry(stage, lambda _: declared, "a test"))
    with pytest.raises(RunFailed, match="stage mine declares"):
        train(small("mine"), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"


def test_a_stage_of_the_users_own_that_declares_what_it_does_trains(small, monkeypatch, tmp_path):
    monkeypatch.setitem(STAGES, "mine", StageEntry(careless, lambda _: Cost(2, 0, 1), "a test"))
    record = train(small("fgsm | mine", epochs=2), tmp_path / "run")
    assert record.counted == record.planned


def test_the_same_recipe_gives_the_same_bytes_and_another_seed_gives_others(small, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(small("moat:2", seed=seed), tmp_path / name)
    assert bits(tmp_path / "a") == bits(tmp_path / "b")
    assert bits(tmp_path / "a") != bits(tmp_path / "c")


def test_a_cycle_written_out_equals_imoat_bit_for_bit(small, tmp_path):
    train(small("imoat:2,5,8", epochs=6), tmp_path / "a")
    train(small("mixup | fast | pgd:2>5>8", epochs=6), tmp_path / "b")
    assert bits(tmp_path / "a") == bits(tmp_path / "b")


# 8 steps an epoch: in the middle of each stage, at the edges of epochs, and twice in a row.
STOPS = [3, 8, 11, 12, 16, 21, 24]


@pytest.mark.parametrize(
    ("method", "bn"), [("moat:2", "train"), ("moat:2", "eval"), ("imoat:1,2,3", "train"), ("kim", "train"),
                       ("gradalign", "eval")]
)  # fmt: skip
def test_an_interrupted_and_resumed_run_equals_one_that_never_stopped(small, method, bn, tmp_path):
    recipe = small(method, bn_in_attack=bn)
    whole = train(recipe, tmp_path / "whole")
    for stop in STOPS:
        record = train(recipe, tmp_path / "pieces", resume=True, max_steps=stop)
        assert record.steps_done == stop
    assert record.status == "finished"
    assert bits(tmp_path / "pieces") == bits(tmp_path / "whole")
    best = "model_best.safetensors"
    assert (tmp_path / "pieces" / best).read_bytes() == (tmp_path / "whole" / best).read_bytes()
    assert (record.counted, record.final, record.best) == (whole.counted, whole.final, whole.best)
    without_time = [
        [{k: v for k, v in line.items() if "seconds" not in k} for line in RunFolder(tmp_path / name).read_metrics()]
        for name in ("pieces", "whole")
    ]
    assert without_time[0] == without_time[1]
    assert [line["epoch"] for line in without_time[0]] == [1, 2, 3]


def test_runs_in_processes_of_their_own_give_the_same_bytes_too(tiny, tmp_path):
    options = ["--data", str(tiny), "--width", "8", "--batch-size", "8", "--epochs", "3"]

    def moat(folder, *more):
        command = [sys.executable, "-m", "moatlab", "train", "moat:2", *options, "--out", folder, *more]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    moat("whole")
    moat("pieces", "--max-steps", "13")
    moat("pieces", "--resume")
    assert bits(tmp_path / "pieces") == bits(tmp_path / "whole")


def test_dropout_in_a_users_model_is_exact_too(tmp_path):
    recipe = make_recipe("fgsm", model="models_for_tests:with_dropout", epochs=2, batch_size=500, lr=0.01)
    train(recipe, tmp_path / "whole")
    train(recipe, tmp_path / "pieces", max_steps=7)
    train(recipe, tmp_path / "pieces", resume=True)
    assert bits(tmp_path / "pieces") == bits(tmp_path / "whole")


def test_lines_written_after_the_last_checkpoint_are_neither_doubled_nor_torn(small, tmp_path):
    recipe = small("fgsm")
    train(recipe, tmp_path / "run", max_steps=8)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"schema": 1, "epoch": 2, "cut o')  # what a kill at the wrong moment leaves
    train(recipe, tmp_path / "run", resume=True)
    assert [line["epoch"] for line in RunFolder(tmp_path / "run").read_metrics()] == [1, 2, 3]


def test_other_images_under_the_same_name_are_not_trained_on(small, tmp_path):
    recipe = small("fgsm")
    train(recipe, tmp_path / "run", max_steps=2)
    record = read_json(tmp_path / "run" / "run.json")
    record["data"]["sha256"] = "0" * 64
    write_json(tmp_path / "run" / "run.json", record)
    with pytest.raises(UserError, match="is not the data"):
        train(recipe, tmp_path / "run", resume=True)


def test_the_global_generator_and_the_thread_count_of_the_caller_are_left_alone(small, tmp_path):
    torch.manual_seed(3)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    train(small("moat:2"), tmp_path / "run", machine=Machine(threads=threads + 1), max_steps=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_loading_gives_the_trained_model_back(small, tiny, tmp_path):
    train(small("fgsm", epochs=1), tmp_path / "run")
    model = moatlab.load(tmp_path / "run").to(memory_format=torch.channels_last)  # as it was trained
    assert not model.training
    weights = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["model"]
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    images = moatlab.load_images(str(tiny))
    measured = moatlab.measure(model, images.test_x, images.test_y, eps=8 / 255, seed=0)
    final = json.loads((tmp_path / "run" / "run.json").read_text())["final"]
    assert measured == pytest.approx({name: final[name] for name in measured}, abs=1e-6)


def test_a_run_can_start_from_the_weights_of_another(small, tmp_path):
    train(small("fgsm", epochs=1), tmp_path / "first")
    train(small("moat:2", epochs=1, init=str(tmp_path / "first")), tmp_path / "second", max_steps=0)
    first, second = moatlab.load(tmp_path / "first"), moatlab.load(tmp_path / "second")
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_our_sgd_is_pytorchs_bit_for_bit(momentum):
    torch.manual_seed(0)
    ours = PreActResNet18(classes=10, width=8).to(memory_format=torch.channels_last)
    theirs = copy.deepcopy(ours)
    ours.bn.weight.requires_grad_(False)  # a user may freeze some
    theirs.bn.weight.requires_grad_(False)
    arguments = SGD | {"momentum": momentum}
    optimizers = Sgd(ours.parameters(), **arguments), torch.optim.SGD(theirs.parameters(), **arguments, fused=True)
    for step in range(3):
        x = torch.rand(8, 3, 16, 16)
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            F.cross_entropy(optimizer.zero_grad() or model(x), torch.arange(8)).backward()
            optimizer.found_inf = torch.tensor(float(step == 1))  # the second step is to do nothing
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_where_no_fused_kernel_looks_for_infinities_sgd_does_so_itself(monkeypatch):
    monkeypatch.setattr("moatlab.training.optimizer.FUSED", ())
    torch.manual_seed(0)
    ours = torch.nn.Linear(5, 3)
    theirs = copy.deepcopy(ours)
    optimizer, plain = Sgd(ours.parameters(), **SGD), torch.optim.SGD(theirs.parameters(), **SGD)
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


def test_the_time_of_a_look_is_time_of_training(small, tmp_path, monkeypatch):
    """An accelerator does most of its work while it is looked at."""
    look = NanGuard.look

    def slow(guard):
        time.sleep(2)
        look(guard)

    monkeypatch.setattr(NanGuard, "look", slow)
    record = train(small("standard", epochs=1), tmp_path / "run", max_steps=1)
    assert record.train_seconds >= 2


def test_sgd_after_a_resume_equals_sgd_without_one(tmp_path):
    """Fused SGD walks raw memory: with channels-last weights a contiguous momentum would go to the wrong weights."""
    torch.manual_seed(0)
    model = PreActResNet18(classes=10, width=8).to(memory_format=torch.channels_last)
    plain = PreActResNet18(classes=10, width=8)
    plain.load_state_dict(model.state_dict())
    x, y = torch.rand(8, 3, 16, 16), torch.arange(8)

    def step(model, optimizer):
        F.cross_entropy(optimizer.zero_grad() or model(x), y).backward()
        optimizer.step()

    optimizer, plain_optimizer = Sgd(model.parameters(), **SGD), torch.optim.SGD(plain.parameters(), **SGD)
    step(model, optimizer)
    step(plain, plain_optimizer)
    folder, path = RunFolder(tmp_path), tmp_path / "checkpoint.pt"
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    session = SimpleNamespace(
        model=model, optimizer=optimizer, scaler=scaler, identity="this run", average=None, memory={}
    )
    save_checkpoint(folder, session, Progress(step=1), None)
    content = torch.load(path, weights_only=True)  # what a contiguous round trip would leave in the file
    content["optimizer"] = [[tensor.contiguous() for tensor in tensors] for tensors in content["optimizer"]]
    buffer = io.BytesIO()
    torch.save(content, buffer)
    path.write_bytes(seal(buffer.getvalue()))

    resumed = PreActResNet18(classes=10, width=8).to(memory_format=torch.channels_last)
    resumed_optimizer = Sgd(resumed.parameters(), **SGD)
    session.model, session.optimizer = resumed, resumed_optimizer
    assert load_checkpoint(path, session, session.identity) == (Progress(step=1), None)
    step(resumed, resumed_optimizer)
    step(model, optimizer)
    step(plain, plain_optimizer)
    for again, once, other in zip(resumed.parameters(), model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(again, once)
        torch.testing.assert_close(again, other, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("aloud")
def test_a_softmax_at_the_end_is_warned_of(small, capsys):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 2), torch.nn.Softmax(1))
    train(small("fgsm"), "run", model=model, max_steps=1)
    assert "seems to return probabilities" in capsys.readouterr().err


def test_a_training_process_does_not_import_the_compiler(small):
    """It takes two seconds."""
    code = (
        "import sys; from moatlab.training.recipe import Recipe; from moatlab.training.api import train_recipe; "
        "train_recipe(Recipe.model_validate_json(sys.argv[1]), 'run'); assert 'torch._dynamo' not in sys.modules"
    )
    recipe = small("moat:2", epochs=3).model_dump_json()
    subprocess.run([sys.executable, "-c", code, recipe], check=True)


def test_momentum_takes_the_strides_of_its_parameter():
    parameter = torch.rand(4, 3, 3, 3).to(memory_format=torch.channels_last)
    buffer = torch.rand(4, 3, 3, 3)
    (copied,) = laid_out_like([parameter], [buffer])
    assert copied.stride() == parameter.stride() != buffer.stride()
    assert torch.equal(copied, buffer)


@pytest.mark.usefixtures("aloud")
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_leads_to_the_same_bits(small, tmp_path, capsys):
    recipe = small("moat:2")
    train(recipe, tmp_path / "whole")
    train(recipe, tmp_path / "run", max_steps=11)
    checkpoint = tmp_path / "run" / "checkpoint.pt"
    checkpoint.write_bytes(checkpoint.read_bytes()[:5000])
    train(recipe, tmp_path / "run", resume=True)
    assert "checkpoint.pt can't be read" in capsys.readouterr().err
    assert bits(tmp_path / "run") == bits(tmp_path / "whole")


def test_where_both_checkpoints_are_damaged_nothing_is_changed(small, tmp_path):
    recipe = small("fgsm")
    train(recipe, tmp_path / "run", max_steps=2)
    for name in ("checkpoint.pt", "checkpoint_previous.pt"):
        (tmp_path / "run" / name).write_bytes(b"PK")
    record = (tmp_path / "run" / "run.json").read_bytes()
    with pytest.raises(UserError, match=r"checkpoint\.pt can't be read.*checkpoint_previous\.pt can't be read"):
        train(recipe, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "run.json").read_bytes() == record


@pytest.mark.usefixtures("aloud")
def test_a_checkpoint_of_another_run_is_not_continued(small, tmp_path, capsys):
    train(small("fgsm"), tmp_path / "whole")
    train(small("fgsm"), tmp_path / "run", max_steps=9)
    train(small("fgsm", lr=0.01), tmp_path / "other", max_steps=12)
    (tmp_path / "other" / "checkpoint.pt").replace(tmp_path / "run" / "checkpoint.pt")
    train(small("fgsm"), tmp_path / "run", resume=True)
    assert "of another run" in capsys.readouterr().err
    assert bits(tmp_path / "run") == bits(tmp_path / "whole")


@pytest.mark.usefixtures("aloud")
def test_the_metrics_of_a_finished_run_are_mended_from_its_checkpoint(small, tmp_path, capsys):
    train(small("fgsm"), tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole.replace('"epoch": 2', '"epoch": 7'))
    record = train(small("fgsm"), tmp_path / "run", resume=True)
    assert "metrics.jsonl is damaged" in capsys.readouterr().err
    assert (record.status, path.read_text()) == ("finished", whole)


def test_a_run_that_has_lost_its_checkpoints_is_not_begun_anew_over_what_is_left(small, tmp_path):
    train(small("fgsm"), tmp_path / "run", max_steps=9)
    for path in (tmp_path / "run").glob("checkpoint*"):
        path.unlink()
    with pytest.raises(UserError, match="lost its checkpoint"):
        train(small("fgsm"), tmp_path / "run", resume=True)


def test_weights_that_are_no_longer_finite_never_replace_a_good_checkpoint(small, tmp_path):
    """The last step of an epoch can explode the weights after its own loss was still finite."""
    recipe = small("standard", lr=3e38, schedule="stepwise", epochs=1, batch_size=64, weight_decay=50.0)
    with pytest.raises(RunFailed, match=r"no longer finite"):
        train(recipe, tmp_path / "run")
    weights = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["model"]
    assert all(torch.isfinite(tensor.float()).all() for tensor in weights.values())


def test_the_best_epoch_is_chosen_on_held_out_images_and_on_no_others(small, tmp_path):
    for monitor, holdout in (("holdout", 16), ("train", 0), ("test", 16)):
        record = train(small("fgsm", monitor=monitor, holdout=holdout, epochs=2), tmp_path / monitor)
        chosen = (tmp_path / monitor / "model_best.safetensors").exists()
        assert chosen == (record.best is not None) == (monitor == "holdout")


def test_the_images_trained_on_are_never_those_held_out():
    images = moatlab.load_images("mini")
    batches, watched_x, watched_y = split(images, make_recipe("fgsm"), torch.device("cpu"))
    assert torch.equal(batches.x, images.train_x[:5000])
    assert torch.equal(watched_x, images.train_x[5000:])
    assert torch.equal(watched_y, images.train_y[5000:])


def test_without_held_out_images_a_fixed_sample_of_the_training_images_is_watched():
    images = moatlab.load_images("mini")
    batches, watched_x, _ = split(images, make_recipe("fgsm", holdout=0, seed=1), torch.device("cpu"))
    _, again, _ = split(images, make_recipe("fgsm", holdout=0, seed=2), torch.device("cpu"))
    assert len(batches.y) == 5500
    assert len(watched_x) == 1000
    assert torch.equal(watched_x, again)


def test_an_initialisation_does_not_depend_on_what_was_drawn_before(small, tmp_path):
    states = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        train(small("fgsm"), tmp_path / str(noise), max_steps=0)
        states.append(copy.deepcopy(bits(tmp_path / str(noise))))
    assert states[0] == states[1]


@pytest.mark.usefixtures("aloud")
def test_a_run_that_goes_on_elsewhere_says_that_its_bits_will_differ(small, tmp_path, capsys):
    train(small("fgsm"), tmp_path / "run", max_steps=3)
    train(small("fgsm"), tmp_path / "run", max_steps=5, resume=True)
    assert "resumes with another" not in capsys.readouterr().err
    record = read_json(tmp_path / "run" / "run.json")
    record["environment"] |= {"precision": "bf16", "device": "cuda:3"}
    write_json(tmp_path / "run" / "run.json", record)
    train(small("fgsm"), tmp_path / "run", max_steps=6, resume=True)
    printed = capsys.readouterr().err
    assert "another device (cpu, not cuda)" in printed
    assert "another precision (fp32, not bf16)" in printed


@pytest.mark.usefixtures("aloud")
def test_a_run_resumes_with_another_number_of_threads_and_says_so(small, tmp_path, capsys):
    recipe = small("fgsm")
    train(recipe, tmp_path / "run", machine=Machine(threads=2), max_steps=3)
    record = train(recipe, tmp_path / "run", machine=Machine(threads=1), resume=True)
    assert record.status == "finished"
    assert record.environment["threads"] == 1
    assert "another threads (1, not 2); its last bits may differ" in capsys.readouterr().err


def test_a_run_resumes_with_the_threads_that_it_was_started_with(small, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("moatlab.runtime.distributed.cores", lambda: 2)
    recipe = small("moat:2")
    train(recipe, tmp_path / "whole", machine=Machine(threads=2))
    train(recipe, tmp_path / "pieces", machine=Machine(threads=2), max_steps=5)
    assert train(recipe, tmp_path / "pieces", resume=True).environment["threads"] == 2
    assert bits(tmp_path / "whole") == bits(tmp_path / "pieces")
