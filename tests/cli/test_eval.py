"""`moat eval` and `moat verify` as a user runs them: cards, continuation, and what they refuse."""

import json
import pickle
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import moatlab
from moatlab.evaluation.card import evaluate_target
from moatlab.evaluation.result import first_broken_by, shares
from moatlab.evaluation.target import load_target
from moatlab.runtime.files import read_json, write_json
from models_for_tests import FIXTURES

ROBUST = FIXTURES / "mini_moat2.safetensors"
COLLAPSED = FIXTURES / "mini_fgsm.safetensors"


@pytest.fixture
def model_file(alone):
    return shutil.copy(COLLAPSED, alone / "fgsm.safetensors")


@pytest.fixture
def run_folder(alone):
    """As `moat train` leaves it, as far as evaluation looks."""
    folder = alone / "run"
    folder.mkdir()
    shutil.copy(COLLAPSED, folder / "model.safetensors")
    shutil.copy(ROBUST, folder / "model_best.safetensors")
    return folder


@pytest.fixture(scope="session")
def evaluated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated")
    shutil.copy(COLLAPSED, folder / "model.safetensors")
    evaluate_target(
        load_target(folder), attacks=["fgsm", "pgd50", "apgd-ce"], count=40, audit=True, save_adversarial=True
    )
    return folder


@pytest.fixture
def collapsed_card(evaluated, alone):
    return shutil.copytree(evaluated, alone / "run") / "eval.json"


def timeless(card):
    """A card without what a clock says, and without the checksum over that."""
    if isinstance(card, dict):
        return {name: timeless(value) for name, value in card.items() if name not in ("seconds", "checksum")}
    return [timeless(value) for value in card] if isinstance(card, list) else card


def test_a_run_is_evaluated_at_its_own_radius_and_its_card_says_all(moat, run_folder):
    code, out, err = moat("eval", run_folder.name, "--n", 60, "--attacks", "clean,fgsm,pgd7,pgd50,aa-fast")
    assert code == 0, err
    assert "L-inf eps 16/255" in out
    assert "RED FLAG catastrophic-overfitting" in out
    assert "upper bound" in out
    assert "AutoAttack" not in out.replace("not AutoAttack", "")
    assert max(map(len, out.splitlines())) <= 80
    card = json.loads((run_folder / "eval.json").read_text())
    assert not (run_folder / "eval.partial").exists()
    assert card["schema"] == 1
    assert card["settings"]["eps"] == "16/255"
    assert card["settings"]["norm"] == "linf"
    assert card["data"]["images"] == 60
    assert set(card["results"]) == {"clean", "fgsm", "pgd7", "pgd50", "aa-fast"}
    for name, result in card["results"].items():
        verdicts = card["broken_by"][name]
        assert len(verdicts) == 60
        assert result["accuracy"] == verdicts.count(None) / 60
        low, high = result["interval"]
        assert low <= result["accuracy"] <= high
        assert result["forwards"] >= 60
        assert result["seconds"] > 0
    assert card["first_broken_by"].count("clean") == 60 - card["results"]["clean"]["standing"]
    assert len(card["subject"]["sha256"]) == len(card["data"]["sha256"]) == 64
    assert card["environment"]["torch"] == torch.__version__


def test_threads_of_an_evaluation_are_on_its_card_and_are_set_back(moat, run_folder):
    before = torch.get_num_threads()
    assert moat("eval", run_folder.name, "--n", 4, "--attacks", "clean", "--threads", 2).code == 0
    assert json.loads((run_folder / "eval.json").read_text())["environment"]["threads"] == 2
    assert torch.get_num_threads() == before


def test_the_python_function_gives_the_numbers_of_the_card(moat, run_folder):
    moat("eval", run_folder, "--which", "best", "--n", 40, "--attacks", "pgd50", "--seed", 3)
    card = json.loads((run_folder / "eval_best.json").read_text())
    data = moatlab.load_images("mini")
    result = moatlab.evaluate(
        moatlab.load(ROBUST), data.test_x[:40], data.test_y[:40], attacks=["pgd50"], eps=16 / 255, seed=3
    )
    assert result.broken_by == card["broken_by"]
    assert result.accuracy["pgd50"] == card["results"]["pgd50"]["accuracy"] > 0


def test_json_prints_the_card_and_nothing_else(moat, model_file):
    code, out, _ = moat("eval", model_file, "--n", 20, "--attacks", "fgsm", "--json")
    assert code == 0
    assert json.loads(out) == json.loads(model_file.with_name("fgsm.safetensors.eval.json").read_text())


def test_saved_examples_are_verified_and_a_forged_one_is_caught(moat, run_folder):
    assert moat("eval", run_folder, "--n", 40, "--attacks", "pgd50,fgsm,aa", "--save-adversarial").code == 0
    card = run_folder / "eval.json"
    code, out, err = moat("verify", card)
    assert code == 0, err
    assert "examples verified" in out
    saved = dict(np.load(run_folder / "eval_adversarial.npz"))
    assert saved["aa_x"].dtype == np.float32
    for change, says in [
        (lambda x: x + np.float32(1e-4) * (x < 0.5), "further than 16/255"),
        (lambda x: np.where(x < x.min() + 1e-3, np.float32(-1e-7), x), "leaves [0, 1]"),
        (lambda x: x[::-1], "further"),
    ]:
        forged = dict(saved, aa_x=change(saved["aa_x"]).astype(np.float32))
        np.savez(run_folder / "eval_adversarial.npz", **forged)
        code, out, err = moat("verify", card)
        assert code == 1
        assert says in out
        assert re.fullmatch(r"moat: [^\n]+\n", err.splitlines(keepends=True)[-1])
    data = moatlab.load_images("mini")
    plain = data.test_x[saved["aa_rows"]].permute(0, 3, 1, 2).numpy().astype(np.float32) / 255
    np.savez(run_folder / "eval_adversarial.npz", **dict(saved, aa_x=plain))
    assert "is classified correctly" in moat("verify", card).out
    np.savez(run_folder / "eval_adversarial.npz", **dict(saved, aa_rows=saved["aa_rows"][:-1], aa_x=saved["aa_x"][:-1]))
    assert "not those of the card's broken images" in moat("verify", card).out


def all_right(card):
    """The model is never wrong, by a card whose numbers fit together."""
    card["broken_by"] = {
        name: [None if verdict == "clean" else verdict for verdict in verdicts]
        for name, verdicts in card["broken_by"].items()
        if name != "audit"
    }
    recount(card)


def more_images(card):
    card["broken_by"] = {name: [*verdicts, *[None] * 970] for name, verdicts in card["broken_by"].items()}
    recount(card)


def recount(card):
    for name, result in card["results"].items():
        result |= dict(shares(card["broken_by"][name]))
    card["first_broken_by"] = first_broken_by(card["broken_by"])
    card["all_attacks"] = dict(shares(card["first_broken_by"]))


@pytest.mark.parametrize(
    ("forge", "says"),
    [
        (lambda card: card["all_attacks"].update(standing=39, accuracy=39 / 40), "accuracies do not match"),
        (lambda card: card["results"]["apgd-ce"].update(interval=[0.9, 1.0]), "accuracies do not match"),
        (lambda card: card["results"]["pgd50"].update(standing=39), "accuracies do not match"),
        (lambda card: card["first_broken_by"].reverse(), "what broke each image first"),
        (lambda card: card.update(flags=[]), "raise a red flag that it does not list"),
        (all_right, "clean: the model is wrong about image"),
        (more_images, "not one verdict for each of the 40 images"),
        (lambda card: card["broken_by"]["pgd50"].__setitem__(slice(None), ["pgd50"] * 40), "wrong before the attack"),
        (lambda card: card["measured"].pop("pgd20"), "is not a card that moat eval wrote"),
    ],
)
def test_a_card_whose_numbers_do_not_follow_from_its_verdicts_does_not_verify(moat, collapsed_card, forge, says):
    """With a checksum that fits: it has no key, and guards against accidents only."""
    assert moat("verify", collapsed_card).code == 0
    card = read_json(collapsed_card)
    forge(card)
    write_json(collapsed_card, card)
    ended = moat("verify", collapsed_card)
    assert ended.code == (2 if "is not a card" in says else 1)
    assert says in ended.out + ended.err
    assert "Traceback" not in ended.err


def test_what_a_randomised_model_answered_is_not_verified(moat, collapsed_card):
    card = read_json(collapsed_card)
    card["measured"]["randomised"] = True
    write_json(collapsed_card, card)
    ended = moat("verify", collapsed_card)
    assert ended.code == 2
    assert "randomised model" in ended.err


def test_a_card_of_another_model_does_not_verify(moat, run_folder):
    moat("eval", run_folder, "--n", 20, "--attacks", "fgsm", "--save-adversarial")
    shutil.copy(ROBUST, run_folder / "model.safetensors")
    code, out, _ = moat("verify", run_folder / "eval.json")
    assert code == 1
    assert "it is of another model" in out


OPTIONS = ("--attacks", "fgsm,pgd50,aa", "--save-adversarial", "--eps", "0.06")
SMALL = """
import torch
from torch import nn
def factory():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=4), nn.SiLU(), nn.Flatten(),
        nn.Linear(128, 10),
    )
"""
COMMAND = ("eval", "--model", "small:factory", "--data", "mini", "--n", 300, *OPTIONS)
STATE = "small-factory.eval.partial/state.json"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The card and the examples of a run that nothing stopped."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "small.py").write_text(SMALL)
    subprocess.run([sys.executable, "-m", "moatlab", *map(str, COMMAND)], cwd=folder, check=True, capture_output=True)
    card = json.loads((folder / "small-factory.eval.json").read_text())
    return card, dict(np.load(folder / "small-factory.eval_adversarial.npz"))


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGTERM])
def test_stopped_in_the_middle_of_aa_the_same_command_gives_the_same_card(moat_process, alone, undisturbed, stop):
    (alone / "small.py").write_text(SMALL)
    stopped = last = 0
    for minimum in (6, 15):  # within targeted APGD, and within Square
        process = moat_process(*COMMAND)
        while process.poll() is None:
            state = alone / STATE
            step = json.loads(state.read_text())["step"] if state.exists() else 0
            if step > max(minimum, last):  # written by this process, which handles signals by then
                process.send_signal(stop)
                stopped, last = stopped + 1, step
                break
            time.sleep(0.02)
        _, err = process.communicate()
        if stop != signal.SIGKILL:
            assert process.returncode == 128 + stop, err
            assert "moat: interrupted by" in err
            assert "to continue, run it again" in err
        assert not (alone / "small-factory.eval.json").exists()
    assert stopped == 2
    process = moat_process(*COMMAND)
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert "resuming" in err
    card, examples = undisturbed
    assert card["results"]["aa"]["standing"] > 0  # Square ran to its end
    assert timeless(json.loads((alone / "small-factory.eval.json").read_text())) == timeless(card)
    again = dict(np.load(alone / "small-factory.eval_adversarial.npz"))
    assert again.keys() == examples.keys()
    assert all(np.array_equal(again[name], examples[name]) for name in examples)
    assert not (alone / STATE).parent.exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--seed", 1], "seed"),
        (["--n", 29], "images"),
        (["--eps", "8/255"], "eps"),
        (["--norm", "l2"], "norm"),
        (["--attacks", "aa"], "attacks"),
    ],
)
def test_an_unfinished_evaluation_of_another_setting_is_refused_and_kept(moat, moat_process, run_folder, options, says):
    shutil.copy(ROBUST, run_folder / "model.safetensors")
    process = moat_process("eval", "run", "--n", 30, *OPTIONS)
    state = run_folder / "eval.partial" / "state.json"
    while process.poll() is None and not state.exists():
        time.sleep(0.02)
    process.kill()
    process.communicate()
    before = state.read_bytes()
    code, _, err = moat("eval", run_folder, "--n", 30, *OPTIONS, *options)
    assert code == 2
    assert says in err
    assert state.read_bytes() == before
    shutil.copy(COLLAPSED, run_folder / "model.safetensors")
    code, _, err = moat("eval", run_folder, "--n", 30, *OPTIONS)
    assert code == 2
    assert "another model" in err


def test_a_bare_weights_file_is_evaluated_with_its_model_named(moat, alone):
    tensors, _ = moatlab.models.weights.read_weights(COLLAPSED)
    torch.save({"epoch": 3, "state_dict": {f"module.{name}": tensor for name, tensor in tensors.items()}}, "w.pt")
    save_file(tensors, "w.safetensors")
    expected = moat("eval", shutil.copy(COLLAPSED, alone / "a.safetensors"), "--n", 30, "--attacks", "fgsm", "--json")
    for file in ("w.pt", "w.safetensors"):
        options = ("--model", "preact_resnet18", "--data", "mini", "--eps", "16/255")
        code, out, err = moat("eval", file, *options, "--n", 30, "--attacks", "fgsm", "--json")
        assert code == 0, err
        assert json.loads(out)["broken_by"] == json.loads(expected.out)["broken_by"]
        assert (alone / f"{file}.eval.json").exists()


def test_a_model_from_ones_own_factory_is_evaluated_at_the_usual_radius(moat, alone):
    (alone / "mine.py").write_text(
        textwrap.dedent("""
        import torch
        from torch import nn
        def factory():
            torch.manual_seed(0)
            return nn.Sequential(nn.Flatten(), nn.Linear(768, 10))
        """)
    )
    code, out, err = moat("eval", "--model", "mine:factory", "--data", "mini", "--n", 20, "--attacks", "pgd7")
    assert code == 0, err
    assert "eps 8/255" in out
    assert "mine:factory: 20 test images" in out  # not the picture of a factory
    assert (alone / "mine-factory.eval.json").exists()


def test_a_model_that_fails_under_attack_is_reported_in_a_sentence(moat, alone):
    (alone / "mine.py").write_text(
        textwrap.dedent("""
        from torch import nn
        class Model(nn.Sequential):
            def forward(self, x):
                if x.requires_grad and len(x) > 10:
                    raise MemoryError("no room for gradients")
                return super().forward(x)
        def factory():
            return Model(nn.Flatten(), nn.Linear(768, 10))
        """)
    )
    code, _, err = moat("eval", "--model", "mine:factory", "--data", "mini", "--n", 20, "--attacks", "pgd7")
    assert code == 1
    assert "the model failed under attack (MemoryError: no room for gradients)" in err
    assert "Traceback" not in err


def test_a_short_look_at_images_that_are_sorted_by_class_is_warned_of(moat, alone):
    x, y = np.zeros((60, 16, 16, 3), np.uint8), np.arange(60) // 20
    np.savez(alone / "sorted.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    (alone / "mine.py").write_text(
        "from torch import nn\ndef factory(): return nn.Sequential(nn.Flatten(), nn.Linear(768, 3))"
    )
    command = ("eval", "--model", "mine:factory", "--data", "sorted.npz", "--attacks", "fgsm")
    assert "the first 30 have only 2 of 3 classes" in moat(*command, "--n", 30).err
    assert "sorted by class" not in moat(*command).err


def test_what_a_killed_clean_up_left_does_not_get_into_the_examples(moat, run_folder):
    leftovers = run_folder / "eval.partial"
    leftovers.mkdir()
    np.savez(
        leftovers / "found-fgsm-000003-000.npz", rows=np.array([3500]), points=np.zeros((1, 3, 16, 16), np.float32)
    )
    assert moat("eval", run_folder.name, "--n", 20, "--attacks", "fgsm", "--save-adversarial").code == 0
    assert moat("verify", run_folder / "eval.json").code == 0


def test_a_run_on_ones_own_images_finds_them_again(moat, alone, tiny, tiny_options):
    assert moat("train", "fgsm", *tiny_options, "--epochs", 1, "--out", "mine").code == 0
    code, out, err = moat("eval", "mine", "--attacks", "pgd50", "--save-adversarial")
    assert code == 0, err
    assert f"20 test images of {tiny.name}" in out
    assert moat("verify", alone / "mine" / "eval.json").code == 0


def test_an_l2_ball_may_be_larger_than_one(moat, model_file):
    code, out, err = moat("eval", model_file, "--norm", "l2", "--eps", "1.5", "--n", 20, "--attacks", "pgd7")
    assert code == 0, err
    assert "L2 eps 1.5" in out


def test_l1_is_a_norm_of_eval_and_verify(moat, model_file):
    attacks = "fgsm,pgd7,apgd-ce,fab-t"
    code, out, err = moat("eval", model_file, "--norm", "l1", "--n", 20, "--attacks", attacks, "--save-adversarial")
    assert code == 0, err
    assert "L1 eps 12" in out
    assert "no red flags" in out
    assert re.search(r"strongest\s+[│|]?\s+0\.0", out)
    ended = moat("verify", f"{model_file}.eval.json")
    assert ended.code == 0, ended.err
    assert 11 < float(ended.out.split("largest distance ")[1]) <= 12


def test_the_audit_is_reported(moat, run_folder):
    code, out, err = moat("eval", run_folder, "--n", 30, "--attacks", "fgsm", "--audit")
    assert code == 0, err
    assert "audit: " in out
    assert "RED FLAG audit-broke-more" in out


# --- what is refused


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--attacks", "pgd5O"], "did you mean pgd50?"),
        (["--attacks", ""], "unknown attack"),
        (["--attacks", "autoattack"], "choose from clean, fgsm"),
        (["--eps", "8"], "8/255"),
        (["--eps", "0"], "--eps 0"),
        (["--eps", "-1/255"], "--eps -1/255"),
        (["--eps", "nan"], "--eps nan"),
        (["--norm", "l0"], "linf"),
        (["--norm", "l1", "--eps", "0"], "above 0, such as 12"),
        (["--norm", "l2", "--eps", "0"], "above 0"),
        (["--norm", "l2", "--eps", "x/2"], "above 0"),
        (["--n", "0"], "--n"),
        (["--n", "1001"], "1000 test images"),
        (["--seed", "-1"], "--seed"),
        (["--batch-size", "0"], "--batch-size"),
        (["--which", "first"], "last"),
        (["--data", "cifar1o"], "did you mean cifar10?"),
        (["--device", "cuda:99"], "--device"),
        (["--device", "gpu"], "--device gpu"),
        (["--model", "nosuch"], "no model 'nosuch'"),
        (["--model", "json:loads"], "part of Python"),
        (["--attack", "aa"], "--attacks"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_option_is_refused(refuses, model_file, options, says):
    refuses("eval", model_file, *options, says=says)


def test_nothing_to_evaluate_is_refused(refuses, alone):
    refuses("eval", says="name a run folder")
    refuses("eval", "nosuch", says="nosuch")
    refuses("eval", "nosuch.pt", says="nosuch.pt")
    refuses("eval", "--model", "preact_resnet18", says="no trained weights")
    (alone / "sweep" / "fgsm").mkdir(parents=True)
    refuses("eval", "sweep", says="no model.safetensors")
    shutil.copy(COLLAPSED, alone / "sweep" / "fgsm" / "model.safetensors")
    refuses("eval", "sweep", says="did you mean sweep/fgsm?")
    refuses("eval", "sweep/fgsm", "--which", "best", says="model_best.safetensors")


def test_a_damaged_or_foreign_file_is_refused(refuses, alone, model_file):
    whole = model_file.read_bytes()
    for name, content in [("cut.safetensors", whole[:9000]), ("none.safetensors", b""), ("x.safetensors", b"{}" * 50)]:
        (alone / name).write_bytes(content)
        refuses("eval", name, says=name)
    tensors, _ = moatlab.models.weights.read_weights(model_file)
    torch.save(tensors, alone / "w.pt")
    (alone / "cut.pt").write_bytes((alone / "w.pt").read_bytes()[:50_000])
    (alone / "none.pt").write_bytes(b"")
    torch.save([1, 2], alone / "list.pt")
    torch.save({"a": 1}, alone / "number.pt")
    for name in ("cut.pt", "none.pt", "list.pt", "number.pt"):
        refuses("eval", name, "--model", "preact_resnet18", "--data", "mini", says=name)
    refuses("eval", "w.pt", says="--model")
    refuses("eval", "w.pt", "--model", "preact_resnet18", says="--data")


class Bomb:
    def __reduce__(self):
        return (open, ("exploded", "w"))


def test_a_file_that_holds_code_is_refused_unread(refuses, alone):
    torch.save({"state_dict": {"a": torch.zeros(1)}, "args": Bomb()}, alone / "bomb.pt")
    with (alone / "bare.pt").open("wb") as file:
        pickle.dump(Bomb(), file)
    for name in ("bomb.pt", "bare.pt"):
        refuses("eval", name, "--model", "preact_resnet18", "--data", "mini", says="could run code")
    assert not (alone / "exploded").exists()


def test_weights_of_another_architecture_are_refused_with_the_first_mismatch(refuses, model_file):
    tensors, _ = moatlab.models.weights.read_weights(model_file)
    options = ("--model", "preact_resnet18", "--data", "mini")
    wrong = dict(tensors)
    wrong["blocks.3.bn1.weight"] = torch.zeros(3)
    save_file(wrong, "shape.safetensors")
    refuses("eval", "shape.safetensors", *options, says="'blocks.3.bn1.weight' is (3,) there")
    save_file({name: tensor for name, tensor in tensors.items() if name != "linear.bias"}, "less.safetensors")
    refuses("eval", "less.safetensors", *options, says="lacks 'linear.bias'")
    save_file({**tensors, "more": torch.zeros(1)}, "more.safetensors")
    refuses("eval", "more.safetensors", *options, says="'more'")


def test_models_that_cannot_be_attacked_are_refused(refuses, alone):
    (alone / "mine.py").write_text(
        textwrap.dedent("""
        import torch
        from torch import nn
        class Of(nn.Module):
            def __init__(self, function):
                super().__init__()
                self.function = function
                self.bn = nn.BatchNorm2d(3, track_running_stats=False)
            def forward(self, x):
                return self.function(self, x)
        def flat(): return Of(lambda m, x: x.mean((1, 2, 3)))
        def nan(): return Of(lambda m, x: x.flatten(1)[:, :10] * float("nan"))
        def mates(): return Of(lambda m, x: m.bn(x).flatten(1)[:, :10])
        def three(): return Of(lambda m, x: x.flatten(1)[:, :3])
        def fails(): return Of(lambda m, x: x.nosuch)
        """)
    )
    for name, says in [
        ("flat", "logits"),
        ("nan", "output is NaN"),
        ("mates", "other images of its batch"),
        ("three", "3 classes"),
        ("fails", "nosuch"),
    ]:
        refuses("eval", "--model", f"mine:{name}", "--data", "mini", "--attacks", "aa", says=says)


def test_a_data_set_of_two_classes_says_which_attacks_work(refuses, alone, tiny):
    (alone / "two.py").write_text(
        "from torch import nn\ndef make(n): return nn.Sequential(nn.Flatten(), nn.Linear(192, n))"
    )
    err = refuses("eval", "--model", "two:make", "--data", tiny, "--attacks", "apgd-t", says="at least 4 classes")
    assert "pgd50" in err
    assert "square" in err


def test_without_four_classes_the_usual_attacks_are_those_that_work(moat, alone, tiny):
    (alone / "two.py").write_text(
        "from torch import nn\ndef make(n): return nn.Sequential(nn.Flatten(), nn.Linear(192, n))"
    )
    code, out, err = moat("eval", "--model", "two:make", "--data", tiny, "--n", 6)
    assert code == 0, err
    assert "AutoAttack needs four classes" in err
    card = json.loads((alone / "two-make.eval.json").read_text())
    assert list(card["results"]) == ["clean", "fgsm", "pgd50", "cw50", "mim50", "apgd-ce", "fab-t", "square"]
    assert "robust accuracy: " in out


def test_a_card_of_more_is_kept_beside_one_of_less(moat, run_folder):
    assert moat("eval", run_folder.name, "--n", 30, "--attacks", "fgsm,pgd7").code == 0
    before = (run_folder / "eval.json").read_bytes()
    code, _, err = moat("eval", run_folder.name, "--n", 30, "--attacks", "fgsm")
    assert code == 0
    assert "eval_previous.json" in err
    assert (run_folder / "eval_previous.json").read_bytes() == before
    assert list(json.loads((run_folder / "eval.json").read_text())["results"]) == ["clean", "fgsm"]
    assert "previous" not in moat("eval", run_folder.name, "--n", 30, "--attacks", "fgsm,pgd7").err


def test_kept_cards_pile_up_and_keep_their_examples(moat, run_folder):
    for attacks in ("fgsm,pgd7", "pgd7", "fgsm"):
        assert moat("eval", run_folder.name, "--n", 30, "--attacks", attacks, "--save-adversarial").code == 0
    cards = [run_folder / f"eval{suffix}.json" for suffix in ("_previous", "_previous_2", "")]
    kept = [list(json.loads(path.read_text())["results"])[1:] for path in cards]
    assert kept == [["fgsm", "pgd7"], ["pgd7"], ["fgsm"]]
    for path in cards:
        assert moat("verify", path).code == 0


def test_only_thorough_attacks_say_how_robust_a_model_is(moat, run_folder):
    assert "robust accuracy" not in moat("eval", run_folder.name, "--n", 10, "--attacks", "fgsm,pgd7").out
    assert "robust accuracy" in moat("eval", run_folder.name, "--n", 10, "--attacks", "apgd-ce").out


def test_a_run_whose_images_are_not_here_says_which_they_are(moat, refuses, alone, tiny, monkeypatch):
    shutil.copytree(tiny, alone / "photos")
    options = ("--data", "photos", "--width", 8, "--batch-size", 16, "--epochs", 1, "--out", "run", "--max-steps", 1)
    assert moat("train", "fgsm", *options).code == 0
    (alone / "elsewhere").mkdir()
    monkeypatch.chdir(alone / "elsewhere")
    refuses("eval", "../run", "--attacks", "fgsm", says="was trained on photos, which is not in ")
    assert moat("eval", "../run", "--attacks", "fgsm", "--data", "../photos").code == 0


def test_a_folder_of_images_is_no_run(refuses, alone, tiny):
    shutil.copytree(tiny, alone / "photos")
    refuses("eval", "photos", says="name the folder of a run")


def test_cards_that_cannot_be_verified_are_refused(refuses, moat, run_folder, alone):
    refuses("verify", "nosuch.json", says="nosuch.json")
    (alone / "junk.json").write_text("{")
    refuses("verify", "junk.json", says="junk.json")
    (alone / "newer.json").write_text('{"schema": 2}')
    refuses("verify", "newer.json", says="schema 2")
    (alone / "empty.json").write_text('{"schema": 1}')
    refuses("verify", "empty.json", says="not a card")
    moat("eval", run_folder, "--n", 10, "--attacks", "fgsm")
    refuses("verify", run_folder / "eval.json", says="--save-adversarial")
    moat("eval", run_folder, "--n", 10, "--attacks", "fgsm", "--save-adversarial")
    whole = (run_folder / "eval_adversarial.npz").read_bytes()
    for content in (b"junk", whole[: len(whole) // 2], b""):
        (run_folder / "eval_adversarial.npz").write_bytes(content)
        refuses("verify", run_folder / "eval.json", says="eval_adversarial.npz")
    np.savez(run_folder / "eval_adversarial.npz", other=np.zeros(3))
    refuses("verify", run_folder / "eval.json", says="eval_adversarial.npz")
    (alone / "other.json").write_text('{"schema": 1, "adversarial": "../x.npz", "settings": 3}')
    refuses("verify", "other.json", says="not a card")


def test_another_norm_than_the_runs_has_the_usual_radius_and_a_new_card_takes_old_examples_away(moat, run_folder):
    assert moat("eval", run_folder, "--n", 10, "--attacks", "fgsm", "--save-adversarial").code == 0
    assert (run_folder / "eval_adversarial.npz").exists()
    assert "L2 eps 128/255" in moat("eval", run_folder, "--n", 10, "--attacks", "fgsm", "--norm", "l2").out
    assert not (run_folder / "eval_adversarial.npz").exists()


def test_in_bf16_it_is_the_model_under_autocast_that_is_attacked_and_verified(moat, run_folder):
    options = ("--n", 16, "--attacks", "pgd7", "--which", "best", "--save-adversarial")
    code, out, err = moat("eval", run_folder.name, *options, "--precision", "bf16")
    assert code == 0, err
    assert "in bf16" in out
    card = json.loads((run_folder / "eval_best.json").read_text())
    assert card["settings"]["precision"] == "bf16"
    assert moat("verify", run_folder / "eval_best.json").code == 0
    assert moat("eval", run_folder.name, *options).code == 0
    assert "precision" not in json.loads((run_folder / "eval_best.json").read_text())["settings"]
