import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from importlib.metadata import version

import pytest
import torch
from click.shell_completion import ShellComplete
from PIL import Image

import moatlab
from images_for_tests import cifar_folder
from moatlab.cli.main import cli
from moatlab.cli.training import compare_command, plan_command, train_command
from moatlab.data.loading import MINI_FOLDER
from moatlab.methods.language import parse_method
from moatlab.runtime import distributed
from moatlab.training.making import make_recipe
from moatlab.training.recipe import Recipe

LAPTOP = "no CUDA GPU: using the preset laptop; for the paper's network, use --preset paper\n"
METRICS = {
    "schema", "epoch", "stage", "k", "lr", "loss", "clean", "fgsm", "pgd7", "alignment", "zero_gradients",
    "monitor", "comparable",
    "passes", "train_seconds", "monitor_seconds",
}  # fmt: skip


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def read_metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def read_record(run):
    return json.loads((run / "run.json").read_text())


# --- moat --version, --help, env, data


def test_version_is_the_package_s(moat):
    assert moat("--version") == (0, f"moat, version {version('moatlab')}\n", "")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_names_every_command(moat, arguments):
    code, out, err = moat(*arguments)
    assert (code, err) == (0, "")
    for command in ("train", "plan", "compare", "demo", "data", "env"):
        assert f"\n  {command} " in out


@pytest.mark.parametrize("command", ["train", "plan", "compare"])
def test_all_help_of_a_training_command_has_an_option_for_every_field_of_a_recipe(moat, command):
    code, out, _ = moat(command, "--help-all")
    assert code == 0
    for field in moatlab.Recipe.model_fields.keys() - {"method"}:
        assert f"--{field.replace('_', '-')}" in out


@pytest.mark.parametrize("command", ["train", "plan", "compare", "reproduce"])
def test_help_shows_the_usual_options_and_counts_those_of_help_all(moat, command):
    usual, everything = moat(command, "--help")[1], moat(command, "--help-all")[1]
    shown, known = (set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", out, re.MULTILINE)) for out in (usual, everything))
    assert {"--epochs", "--eps", "--model", "--preset", "--quiet"} <= shown < known
    assert "--momentum" not in shown
    assert len(shown) <= 18
    more = len(known - shown - {"--help", "--help-all"})
    assert usual.splitlines()[-1] == f"moat {command} --help-all shows {more} more options."
    assert "--help-all shows" not in everything


COMMANDS = [[], *([name] for name in cli.commands), ["data", "list"], ["data", "get"]]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_fits_into_eighty_columns_and_names_each_option_once(moat, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = moat(*command, "--help")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    flags = re.findall(r"^  (?:-\w, )?(--[\w-]+)", out[out.index("Options:") :], re.MULTILINE)
    assert len(flags) == len(set(flags)) >= 1
    assert "\x1b" not in out


@pytest.mark.parametrize("command", [name for name in cli.commands if name not in ("data", "demo", "env", "bench")])
def test_help_of_a_command_that_takes_something_shows_an_example(moat, command):
    assert re.search(rf"^  (eval \"\$\()?moat {command} ", moat(command, "--help")[1], re.MULTILINE)


def test_options_that_many_commands_share_stand_under_headings(moat):
    out = moat("train", "--help-all")[1]
    assert out.index("Options:") < out.index("--resume  ") < out.index("Data and model:") < out.index("--model TEXT")
    assert out.index("Optimisation:") < out.index("--lr ") < out.index("Monitoring:")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("tr", "train"),
        ("train im", "imoat:2,5,8"),
        ("compare fgsm pg", "pgd:7"),
        ("train moat:2 --sched", "--schedule"),
        ("train moat:2 --schedule st", "stepwise"),
        ("reproduce tab", "table2a"),
        ("data get c", "cifar100"),
    ],
)
def test_a_shell_can_complete_commands_methods_and_options(words, offered):
    *before, start = words.split()
    found = ShellComplete(cli, {}, "moat", "_MOAT_COMPLETE").get_completions(before, start)
    assert offered in [item.value for item in found]


def test_a_shell_can_complete_files():
    (found,) = ShellComplete(cli, {}, "moat", "_MOAT_COMPLETE").get_completions(["eval"], "ru")
    assert found.type == "file"


def test_the_command_answers_a_shell_that_asks():
    asked = {**os.environ, "_MOAT_COMPLETE": "bash_complete", "COMP_WORDS": "moat tr", "COMP_CWORD": "1"}
    program = "import sys; sys.argv[0] = 'moat'; from moatlab.cli.main import run; run()"
    answer = subprocess.run([sys.executable, "-c", program], env=asked, capture_output=True, text=True, check=True)
    assert answer.stdout == "plain,train\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_the_shell(moat, shell):
    code, out, _ = moat("completion", shell)
    assert code == 0
    assert f"_MOAT_COMPLETE={shell}_complete" in out


def test_env_tells_versions_and_hardware_and_its_json_the_same(moat):
    code, out, _ = moat("env")
    assert code == 0
    json_code, json_out, json_err = moat("env", "--json")
    assert (json_code, json_err) == (0, "")
    facts = json.loads(json_out)
    assert facts["moatlab"] == version("moatlab")
    assert facts["torch"] == torch.__version__
    assert [line.split(maxsplit=1) for line in out.splitlines()] == [[name, str(facts[name])] for name in facts]


def test_data_list_names_every_data_set_and_where_it_is(moat):
    code, out, err = moat("data", "list")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    names = [line.split()[0] for line in lines[::2]]
    places = [line.strip() for line in lines[1::2]]
    assert names == ["mini", "cifar10", "cifar100", "FOLDER"]
    assert places[:3] == ["embedded", "not downloaded: moat data get cifar10", "not downloaded: moat data get cifar100"]
    assert "FOLDER/CLASS/IMAGE" in places[3]
    assert max(map(len, lines)) <= 80


def test_data_get_of_what_is_here_says_where(moat):
    assert moat("data", "get", "mini") == (0, f"{MINI_FOLDER}\n", "")


# --- moat plan


@pytest.mark.parametrize(
    ("method", "passes", "forwards", "input_backwards", "double_backwards"),
    [
        ("standard", 60, 60, 0, 0),
        ("fgsm", 120, 120, 60, 0),
        ("fast", 120, 120, 60, 0),
        ("nfgsm", 120, 120, 60, 0),
        ("moat:2", 120, 120, 60, 0),
        ("imoat:1,2,3", 121, 121, 61, 0),
        ("pgd:2", 180, 180, 120, 0),
        ("moat:5", 180, 180, 120, 0),
        ("kim:3", 180, 240, 60, 0),
        ("kim", 180, 240, 60, 0),
        ("imoat:2,5,8", 183, 183, 123, 0),
        ("mixup | fast | pgd:2>5>8", 183, 183, 123, 0),
        ("gradalign", 210, 180, 120, 60),
        ("pgd:7", 480, 480, 420, 0),
    ],
)
def test_plan_counts_what_sixty_epochs_cost(moat, method, passes, forwards, input_backwards, double_backwards):
    code, out, err = moat("plan", method, "--preset", "paper", "--json")
    assert (code, err) == (0, "")
    plan = json.loads(out)
    # 1.11 GFLOP a forward (tests/models), 49,920 images; a weight backward counts twice, a double backward 4.1 times
    calls = forwards + input_backwards + 2 * 60 + 4.1 * double_backwards
    assert plan.pop("flops") == pytest.approx(1_110_845_440 * 49_920 * calls)
    assert plan == {
        "method": "gradalign:0.2" if method == "gradalign" else method,  # written out, because it depends on the preset
        "epochs": 60,
        "steps_per_epoch": 390,
        "passes": passes,
        "forwards": forwards,
        "input_backwards": input_backwards,
        "weight_backwards": 60,
        "double_backwards": double_backwards,
    }


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ([], 39),
        (["--preset", "mini-long"], 156),
        (["--data", "cifar10"], 382),
        (["--data", "cifar100"], 382),
        (["--batch-size", 5000], 1),
        (["--data", "cifar10", "--holdout", 0], 390),
    ],
)
def test_plan_knows_the_steps_of_an_epoch_without_touching_data(moat, alone, monkeypatch, options, steps):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, out, _ = moat("plan", "moat:2", *options, "--json")
    assert code == 0
    assert json.loads(out)["steps_per_epoch"] == steps
    assert list(alone.iterdir()) == []


def test_cifar_without_a_gpu_has_the_preset_laptop_and_one_line_names_the_paper_s(moat, alone, monkeypatch):
    for has_gpu in (False, True):
        monkeypatch.setattr("torch.cuda.is_available", lambda has_gpu=has_gpu: has_gpu)
        code, out, err = moat("plan", "moat:2", "--data", "cifar10")
        assert code == 0
        assert f"width {64 if has_gpu else 16}, eps 8/255 (L-inf), {60 if has_gpu else 30} epochs" in out
        assert err == ("" if has_gpu else LAPTOP)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (alone / "few.toml").write_text('data = "cifar10"\n')
    (alone / "all.toml").write_text(make_recipe("moat:2", preset="paper").to_toml())
    for options, shown in ((["few.toml"], LAPTOP), (["few.toml", "--preset", "paper"], ""), (["all.toml"], "")):
        assert moat("plan", "moat:2", "--recipe", *options).err == shown
    assert moat("-q", "plan", "moat:2", "--data", "cifar10").err == ""
    assert moat("reproduce", "figure1a", "--plan").err == LAPTOP
    assert "preset laptop: cifar10" in moat("reproduce", "figure1a", "--plan").out
    assert moat("reproduce", "figure1a", "--preset", "mini", "--plan").err == ""


def test_a_run_on_cifar_without_a_gpu_explains_its_preset_once_and_not_when_it_is_resumed(moat, alone, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    cifar_folder(alone, "cifar10", count=60)
    small = ("--data-dir", ".", "--width", 8, "--holdout", 20, "--batch-size", 20, "--threads", 1, "--max-steps", 1)
    ended = moat("train", "fgsm", "--data", "cifar10", *small)
    assert ended.code == 0, ended.err
    assert ended.err.count(LAPTOP) == 1
    assert 'stem = "4x4s2"' in (alone / "runs" / "fgsm_cifar10_s0" / "recipe.toml").read_text()
    assert LAPTOP not in moat("train", "fgsm", "--data", "cifar10", *small, "--resume").err


def test_plan_looks_at_a_folder_and_measures_a_few_steps(moat, alone, tiny):
    options = ("--data", tiny, "--width", 8, "--threads", 1)
    code, out, _ = moat("plan", "moat:2", *options, "--json")
    assert code == 0
    plan = json.loads(out)
    assert (plan["steps_per_epoch"], plan["images"], plan["test_images"], plan["classes"]) == (9, 80, 20, 2)
    assert plan["image_shape"] == [8, 8, 3]
    assert 0 < plan["minutes"] < 5
    assert 0 < plan["step_gigabytes"] < 0.1
    assert list(alone.iterdir()) == []
    code, out, _ = moat("plan", "moat:2", *options)
    assert "80 training and 20 test images in 2 classes, 8x8" in out
    assert "on this machine" in out
    code, out, _ = moat("plan", "moat:2", *options, "--no-measure")
    assert "on this machine" not in out
    assert "no data set, folder or .npz file" in moat("plan", "moat:2", "--data", "nothing").err


def test_plan_in_words_has_the_cycle_the_setting_and_the_stages(moat):
    code, out, err = moat("plan", "imoat:2,5,8", "--preset", "paper")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "imoat:2,5,8 = mixup | fast | pgd:2>5>8"
    assert "eps 8/255 (L-inf)" in lines[1]
    assert lines[2] == "60 epochs of 390 steps"
    assert "183" in next(line for line in lines if line.startswith("passes"))
    assert lines[-1] == "stages: 20 x mixup, 20 x fast, 6 x pgd:2, 7 x pgd:5, 7 x pgd:8"


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "imoat:2,5,8"], ["train", "--help"], ["data", "list"]])
def test_a_command_that_trains_nothing_answers_without_importing_torch(alone, arguments):
    script = (
        "import sys; from moatlab.cli.main import run\n"
        "try: run()\n"
        "except SystemExit as ending: assert ending.code == 0\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", script, *arguments]
    ended = subprocess.run(command, cwd=alone, capture_output=True, text=True, timeout=60, check=False)
    slow = {"torch", "numpy"} if arguments[-1] == "--help" else {"torch"}
    assert not slow & {*ended.stderr.split()}
    assert ended.stdout


# --- moat train


def test_train_without_options_trains_mini_into_a_folder_named_after_method_data_and_seed(moat, alone):
    code, out, _ = moat("train", "moat:2", "--width", 8, "--threads", 1, "--max-steps", 1)
    assert (code, out) == (0, "")
    assert [path.name for path in (alone / "runs").iterdir()] == ["moat-2_mini_s0"]
    record = read_record(alone / "runs" / "moat-2_mini_s0")
    assert (record["status"], record["steps_done"], record["steps_per_epoch"]) == ("stopped", 1, 39)


def test_the_default_folder_is_named_after_the_users_data_and_seed(moat, alone, tiny_options):
    assert moat("train", "imoat:2,5,8", *tiny_options, "--seed", 7, "--max-steps", 0).code == 0
    assert [path.name for path in (alone / "runs").iterdir()] == ["imoat-2-5-8_tiny_s7"]


@pytest.mark.parametrize("steps", [0, 1, 5, 7])
def test_max_steps_stops_the_run_with_a_checkpoint_and_a_model(moat, alone, tiny_options, steps):
    arguments = ("train", "fgsm", *tiny_options, "--epochs", 2, "--out", "run")
    code, out, err = moat(*arguments, "--max-steps", steps)
    assert (code, out) == (0, "")
    assert f"stopped after step {steps} of 10" in err
    assert "--resume" in err
    run = alone / "run"
    record = read_record(run)
    assert (record["status"], record["steps_done"]) == ("stopped", steps)
    assert torch.load(run / "checkpoint.pt", weights_only=True)["progress"]["step"] == steps
    assert moatlab.load(run)(torch.zeros(2, 3, 8, 8)).shape == (2, 2)
    assert len(read_metrics(run)) == steps // 5


def test_a_stopped_run_goes_on_with_resume_and_ends_as_one_that_never_stopped(moat, alone, tiny_options):
    arguments = ("train", "moat:2", *tiny_options, "--epochs", 3)
    assert moat(*arguments, "--out", "whole").code == 0
    assert moat(*arguments, "--out", "parts", "--resume", "--max-steps", 3).code == 0
    code, _, err = moat(*arguments, "--out", "parts", "--resume", "--max-steps", 12)
    assert code == 0
    assert "resuming parts at step 3 of 15" in err
    code, out, _ = moat("train", "--out", "parts", "--resume")  # its recipe is in its folder
    assert code == 0
    assert "the run is in parts" in out
    whole, parts = (alone / "whole"), (alone / "parts")
    assert (whole / "model.safetensors").read_bytes() == (parts / "model.safetensors").read_bytes()
    for one, other in zip(read_metrics(whole), read_metrics(parts), strict=True):
        assert {name: one[name] for name in one if "seconds" not in name} == {
            name: other[name] for name in other if "seconds" not in name
        }
    assert read_record(whole)["final"] == read_record(parts)["final"]


def test_resuming_a_finished_run_says_so_and_changes_no_byte(moat, alone, tiny_options):
    arguments = ("train", "fgsm", *tiny_options, "--epochs", 1, "--out", "run", "--resume")
    first = moat(*arguments)
    assert first.code == 0
    before = files(alone / "run")
    code, out, err = moat(*arguments)
    assert code == 0
    assert "already finished" in err
    assert out == first.out  # its result is shown again
    assert files(alone / "run") == before


def test_a_finished_run_tells_its_accuracies_and_its_record_says_the_same(moat, alone, tiny_options):
    code, out, err = moat("train", "moat:2", *tiny_options, "--epochs", 3, "--holdout", 20, "--out", "run")
    assert code == 0
    record = read_record(alone / "run")
    assert record["status"] == "finished"
    assert record["schema"] == 1
    final = record["final"]
    shown = "  ".join(f"{name} {100 * final[name]:.1f} %" for name in ("clean", "fgsm", "pgd7"))
    assert out.splitlines()[0].startswith(f"moat:2 on 20 test images: {shown}")
    assert re.fullmatch(r"6 passes; training \d+ s, monitor \d+ s; the run is in run", out.splitlines()[1])
    assert record["counted"] == record["planned"] == parse_method("moat:2").cost(3).as_dict()
    assert record["steps_done"] == 3 * record["steps_per_epoch"] == 9
    assert record["data"]["held_out"] == record["data"]["monitored"] == 20
    assert record["best"]["epoch"] == 3
    assert "moat:2 = mixup | fast | pgd:2: 6 passes over 60 training images" in err
    written = set(files(alone / "run"))
    assert {"recipe.toml", "run.json", "metrics.jsonl", "checkpoint.pt", "model.safetensors"} <= written
    assert not [name for name in written if name.endswith(".tmp")]


def test_the_recipe_that_a_run_leaves_starts_the_same_run_again(moat, alone, tiny_options):
    assert moat("train", "moat:2", *tiny_options, "--epochs", 3, "--max-steps", 2, "--out", "one").code == 0
    assert moat("train", "--recipe", "one/recipe.toml", "--threads", 1, "--max-steps", 2, "--out", "two").code == 0
    for name in ("recipe.toml", "model.safetensors"):
        assert (alone / "one" / name).read_bytes() == (alone / "two" / name).read_bytes()


def test_train_can_start_from_the_weights_of_another_run(moat, alone, tiny_options):
    assert moat("train", "fgsm", *tiny_options, "--max-steps", 3, "--out", "one").code == 0
    for init in ("one", "one/model.safetensors"):
        out = f"from-{init.replace('/', '-')}"
        assert moat("train", "fgsm", *tiny_options, "--init", init, "--max-steps", 0, "--out", out).code == 0
        assert (alone / out / "model.safetensors").read_bytes() == (alone / "one" / "model.safetensors").read_bytes()


def test_train_json_prints_one_object_and_it_is_the_run_s_record(moat, alone, tiny_options):
    code, out, _ = moat("train", "standard", *tiny_options, "--epochs", 1, "--out", "run", "--json")
    assert code == 0
    assert json.loads(out) == read_record(alone / "run")


@pytest.mark.parametrize("steps", [0, 3])
def test_train_json_prints_one_object_for_a_stopped_run_too(moat, tiny_options, steps):
    code, out, _ = moat("train", "standard", *tiny_options, "--max-steps", steps, "--out", "run", "--json")
    assert code == 0
    assert json.loads(out)["status"] == "stopped"


def test_metrics_have_one_line_for_each_epoch_with_its_stage_and_its_rate(moat, alone, tiny_options):
    assert moat("train", "imoat:1,2,3", *tiny_options, "--epochs", 6, "--out", "run").code == 0
    lines = read_metrics(alone / "run")
    assert [line["epoch"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line.keys() == METRICS for line in lines)
    assert [line["stage"] for line in lines] == ["mixup", "fast", "pgd:2", "mixup", "fast", "pgd:3"]
    assert [line["k"] for line in lines] == [None, None, 2, None, None, 3]
    assert [line["passes"] for line in lines] == [1, 3, 6, 7, 9, 13]
    total = 30
    rates = [0.2 * (1 - abs(2 * step / total - 1)) for step in (4, 9, 14, 19, 24, 29)]
    assert [line["lr"] for line in lines] == pytest.approx(rates)
    for line in lines:
        assert line["schema"] == 1
        assert line["monitor"] == "train"
        assert all(0 <= line[name] <= 1 for name in ("clean", "fgsm", "pgd7"))
        assert line["loss"] > 0
        assert min(line["train_seconds"], line["monitor_seconds"]) > 0


def test_every_epoch_is_shown_as_a_row(moat, tiny_options):
    _, _, err = moat("train", "moat:2", *tiny_options, "--epochs", 3)
    lines = [line.split() for line in err.splitlines()]
    header = next(number for number, line in enumerate(lines) if line[:2] == ["epoch", "stage"])
    rows = [line for line in lines[header + 1 :] if line[0].isdigit()]
    assert [row[:2] for row in rows] == [["1", "mixup"], ["2", "fast"], ["3", "pgd:2"]]


def test_tensorboard_can_read_the_run(moat, alone, tiny_options):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    arguments = ("train", "fgsm", *tiny_options, "--epochs", 3, "--out", "run", "--resume")
    assert moat(*arguments, "--max-steps", 7).code == 0
    assert moat(*arguments).code == 0
    assert list((alone / "run").glob("events.out.tfevents.*"))
    events = accumulator.EventAccumulator(str(alone / "run")).Reload()
    for name in ("pgd7", "clean", "loss", "lr"):
        scalars = events.Scalars(name)
        assert [scalar.step for scalar in scalars] == [1, 2, 3]
        assert [scalar.value for scalar in scalars] == pytest.approx(
            [line[name] for line in read_metrics(alone / "run")]
        )
    assert [image.step for image in events.Images("images/pgd7")] == [1, 2, 3]
    assert [text.step for text in events.Tensors("stage/text_summary")] == [1, 2, 3]
    assert events.PluginTagToContent("hparams")
    final = json.loads((alone / "run" / "run.json").read_text())["final"]
    assert events.Scalars("test/pgd7")[0].value == pytest.approx(final["pgd7"])


@pytest.mark.parametrize(("epochs", "stage", "better"), [(1, "mixup", 3), (4, "mixup", 3), (5, "fast", 6)])
def test_epochs_that_miss_the_last_stage_are_warned_of_once_with_the_nearest_better_number(
    moat, tiny_options, epochs, stage, better
):
    code, _, err = moat("train", "moat:2", *tiny_options, "--epochs", epochs, "--max-steps", 0)
    assert code == 0
    (warning,) = [line for line in err.splitlines() if "at the stage" in line]
    assert f"epoch {epochs} is at the stage {stage}" in warning
    assert f"--epochs {better} " in warning


@pytest.mark.parametrize(("method", "epochs"), [("moat:2", 6), ("fgsm", 4), ("mixup | fast", 4)])
def test_epochs_that_end_at_the_last_stage_are_not_warned_of(moat, tiny_options, method, epochs):
    code, _, err = moat("train", method, *tiny_options, "--epochs", epochs, "--max-steps", 0)
    assert code == 0
    assert "at the stage" not in err


def test_a_model_of_the_users_own_is_found_in_the_current_folder(moat, alone, tiny_options):
    (alone / "own.py").write_text(
        "from torch import nn\n"
        "def small(num_classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, num_classes))\n"
    )
    code, out, err = moat("train", "moat:2", *tiny_options, "--model", "own:small", "--epochs", 3, "--out", "run")
    assert code == 0, err
    assert out.startswith("moat:2 on 20 test images")


# --- signals


def wait_for_first_epoch(process, run):
    for _ in range(600):
        if process.poll() is not None or ((run / "metrics.jsonl").exists() and read_metrics(run)):
            return
        time.sleep(0.05)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_run_with_a_checkpoint_and_says_how_to_go_on(
    moat, moat_process, alone, tiny_options, number, code
):
    arguments = ("train", "fgsm", *tiny_options, "--epochs", 5000, "--out", "run")
    process = moat_process(*arguments)
    try:
        wait_for_first_epoch(process, alone / "run")
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == code, err
    assert out == ""
    assert "Traceback" not in err
    message = err.splitlines()[-1]
    assert message.startswith(f"moat: interrupted by {number.name}")
    assert "--resume" in message
    record = read_record(alone / "run")
    progress = torch.load(alone / "run" / "checkpoint.pt", weights_only=True)["progress"]
    assert record["status"] == "interrupted"
    assert record["steps_done"] == progress["step"] >= 5
    assert len(read_metrics(alone / "run")) == progress["epochs_logged"] >= 1
    continued = moat(*arguments, "--resume", "--max-steps", progress["step"] + 3)
    assert continued.code == 0
    assert f"resuming run at step {progress['step']} of 25000" in continued.err


def test_an_interrupted_demo_names_no_option_that_it_does_not_have(moat, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)  # one thread is enough here
    before = signal.getsignal(signal.SIGINT)

    def interrupt_as_soon_as_the_run_listens():
        for _ in range(6000):
            if signal.getsignal(signal.SIGINT) is not before:
                os.kill(os.getpid(), signal.SIGINT)
                return
            time.sleep(0.01)

    thread = threading.Thread(target=interrupt_as_soon_as_the_run_listens)
    thread.start()
    code, out, err = moat("demo")
    thread.join()
    assert (code, out) == (130, "")
    message = err.splitlines()[-1]
    assert message.startswith("moat: interrupted by SIGINT")
    assert "--resume" not in message  # it continues by being started again


def test_a_quiet_command_prints_its_result_and_nothing_on_stderr(moat, tiny_options):
    ended = moat("train", "--quiet", "fgsm", *tiny_options, "--epochs", 1, "--out", "q")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith("fgsm on 20 test images")
    ended = moat("-q", "train", "fgsm", *tiny_options, "--epochs", 1, "--out", "q")
    assert ended.code == 2
    assert ended.err.startswith("moat: --out q has a run already")
    assert moat("data", "list", "-q").code == 0
    assert "epoch" in moat("train", "fgsm", *tiny_options, "--max-steps", 0, "--out", "loud").err  # not quiet any more


# --- moat compare


def test_compare_trains_each_method_and_puts_their_results_side_by_side(moat, alone, tiny_options):
    arguments = ("compare", "fgsm", "moat:2", *tiny_options, "--epochs", 3, "--out", "both")
    code, out, _ = moat(*arguments)
    assert code == 0
    assert "accuracy on 20 test images" in out
    for word in ("method", "clean %", "fgsm %", "pgd7 %", "passes", "outcome", "moat:2"):
        assert word in out
    assert "BatchNorm in attacks: train mode" in " ".join(out.split())
    assert "plot: both/pgd7.png" in out
    with Image.open(alone / "both" / "pgd7.png") as image:
        image.load()
        assert image.format == "PNG"
        assert min(image.size) > 300
        assert len(image.getcolors(1 << 20)) > 2  # something is drawn

    result = json.loads((alone / "both" / "compare.json").read_text())
    assert result["schema"] == 1
    assert result["bn_in_attack"] == "train"
    assert [row["method"] for row in result["rows"]] == ["fgsm", "moat:2"]
    assert [row["passes"] for row in result["rows"]] == [6, 6]
    for row, folder in zip(result["rows"], ("fgsm", "moat-2"), strict=True):
        record = read_record(alone / "both" / folder)
        assert record["status"] == "finished"
        assert {name: row[name] for name in record["final"]} == record["final"]
        assert row["run"] == f"both/{folder}"

    before = {name: files(alone / "both" / name) for name in ("fgsm", "moat-2")}
    code, out, err = moat(*arguments, "--resume", "--json")
    assert code == 0
    assert err.count("already finished") == 2
    assert json.loads(out) == result
    assert {name: files(alone / "both" / name) for name in ("fgsm", "moat-2")} == before


def test_a_comparison_that_was_stopped_goes_on_where_it_was(moat, alone, tiny_options):
    arguments = ("--epochs", 1, *tiny_options, "--resume", "--out")
    assert moat("train", "fgsm", *arguments, "both/fgsm").code == 0
    before = files(alone / "both" / "fgsm")
    code, _, err = moat("compare", "fgsm", "standard", *arguments, "both")
    assert code == 0
    assert err.count("already finished") == 1
    assert files(alone / "both" / "fgsm") == before
    assert read_record(alone / "both" / "standard")["status"] == "finished"


def test_with_debug_the_exit_code_is_the_same_and_a_traceback_is_shown(alone):
    command = [sys.executable, "-m", "moatlab", "plan", "mota:2"]
    for arguments, shown in (([], False), (["--debug"], True)):
        ended = subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=alone, check=False)
        assert ended.returncode == 2
        assert ("Traceback" in ended.stderr) == shown
        assert "moat: there is no method or stage 'mota'" in ended.stderr


def test_bash_completes_a_method_beyond_its_colon(moat):
    assert moat("completion", "bash").out.startswith("COMP_WORDBREAKS=${COMP_WORDBREAKS//:}")


def test_threads_are_those_that_the_environment_names(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = distributed.threads()
    for named, expected in (("3", 3), ("0", cores), ("many", cores)):
        monkeypatch.setenv("OMP_NUM_THREADS", named)
        assert distributed.threads() == expected
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("moatlab.runtime.distributed.launched", lambda: 2)  # by torchrun, which sets it by itself
    assert distributed.threads() == cores


@pytest.mark.parametrize("command", [train_command, plan_command, compare_command])
def test_an_option_that_is_not_given_leaves_the_preset_as_it_is(command):
    given = command.make_context("moat", ["moat:2"]).params
    assert {given[name] for name in Recipe.model_fields if name != "method"} == {None}
