"""Whatever a user gets wrong ends with exit code 2 and one sentence, and leaves every file as it was."""

import re
import shutil
import subprocess
import sys
import textwrap
from itertools import chain

import numpy as np
import pytest
import torch

from moatlab import make_recipe, train
from moatlab.data.cifar import to_records
from moatlab.runtime.files import read_json


@pytest.fixture(scope="session")
def a_run(tmp_path_factory, tiny):
    """A run of fgsm that stopped after its first step."""
    folder = tmp_path_factory.mktemp("run") / "stopped"
    recipe = make_recipe("fgsm", data=str(tiny), width=8, batch_size=16, epochs=2, holdout=0)
    train(recipe, folder, max_steps=1)
    return folder


@pytest.fixture
def stopped(a_run, alone):
    """A copy of that run, to be mistreated."""
    return shutil.copytree(a_run, alone / "stopped")


def write_module(alone, source):
    (alone / "mine.py").write_text("import torch\nfrom torch import nn\n" + textwrap.dedent(source))


def as_typed(parameter):
    return " ".join(parameter) if isinstance(parameter, list) else None


# --- methods and options


SHORT = ("--width", 8, "--epochs", 1)  # should a mistake be let through, little is trained


@pytest.mark.parametrize("command", ["train", "plan", "compare"])
@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("moat", "moat:2"),
        ("moat:0", "from 1 to 1000"),
        ("moat:-1", "from 1 to 1000"),
        ("moat:x", "from 1 to 1000"),
        ("moat:2.5", "from 1 to 1000"),
        ("imoat:2,5", "imoat:2,5,8"),
        ("mixup |", "empty stage"),
        ("mixup | nothing", "'nothing'"),
        ("", "empty"),
        ("pgd:1e9", "from 1 to 1000"),
        ("gradalign:nan", "a number >= 0"),
        ("kim:0", "from 1 to 100"),
        ("fsgm", "did you mean fgsm?"),
        ("no\nsuch method", "such method"),
    ],
)
def test_a_wrong_method_is_refused_by_every_command(refuses, command, method, says):
    refuses(command, *SHORT, "--", method, says=says)


@pytest.mark.parametrize("command", ["train", "plan", "compare"])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--eps", "8"], "8/255"),
        (["--eps", "-1/255"], "--eps -1/255"),
        (["--eps", "0/0"], "--eps 0/0"),
        (["--eps", "nan"], "--eps nan"),
        (["--epochs", "0"], "--epochs 0"),
        (["--epochs", "many"], "--epochs"),
        (["--lr", "-1"], "--lr -1"),
        (["--lr", "nan"], "--lr nan"),
        (["--momentum", "1"], "--momentum 1"),
        (["--batch-size", "0"], "--batch-size 0"),
        (["--width", "7"], "--width 7"),  # PyTorch's own memory is overrun there, see `Recipe.width`
        (["--batch-size", "5001"], "--batch-size 5001"),
        (["--schedule", "linear"], "stepwise"),
        (["--preset", "papr"], "paper"),
        (["--std", "1,x,1"], "--std"),
        (["--device", "gpu"], "--device gpu"),
        (["--seed", "-1"], "--seed -1"),
        (["--monitor", "holdout", "--holdout", "0"], "--holdout"),
        (["--epoch", "3"], "--epochs"),
        (["--nonsense"], "--nonsense"),
        (["--lr"], "--lr"),
        (["--recipe", "missing.toml"], "missing.toml"),
    ],
    ids=as_typed,
)
def test_a_wrong_option_is_refused_by_every_command(refuses, command, options, says):
    refuses(command, *SHORT, "fgsm", *options, says=says)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("epoch = 3", "'epoch'"),
        ("schema = 2", "schema 2"),
        ("epochs 3", "TOML"),
        ("epochs = 0", "--epochs"),
        ('method = "moat:x"', "moat:x"),
        ("method = 2\ndata = 'cifar10'\nschedule = 'stepwise'", "method"),
    ],
)
@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_recipe_file_with_a_mistake_is_refused(refuses, alone, command, content, says):
    (alone / "mine.toml").write_text(content)
    method = [] if "method" in content else ["fgsm"]
    refuses(command, *method, "--recipe", "mine.toml", says=says)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["trian", "moat:2"], "'train'"),
        (["data", "gte", "mini"], "'get'"),
        (["train"], "name a method"),
        (["train", "fgsm", "--max-steps", "-1"], "--max-steps"),
        (["train", "fgsm", "--checkpoint-every", "-1"], "--checkpoint-every"),
        (["train", "fgsm", "--std", "1,2", "--max-steps", "0"], "--std"),
        (["train", "fgsm", "moat:2"], "moat:2"),
        (["demo", "--seed", "-1"], "--seed -1"),
        (["demo", "--seed", "x"], "--seed"),
        (["compare"], "METHODS"),
        (["compare", "fgsm", "fgsm"], "once"),
        (["train", "--resume"], "name the run to resume with --out"),
        (["train", "--resume", "--out", "nothing"], "there is no run in nothing to resume"),
        (["eval", "nothing.pt", "--attacks", "pgd50 aa"], "unknown attack 'pgd50 aa'"),
        (["compare", "fgsm", " fgsm"], "once"),
        (["data", "get", "nosuch"], "'nosuch'"),
        (["data", "get", "cifar1o"], "did you mean cifar10?"),
        (["data", "list", "--data-dir", "nosuch"], "nosuch"),
        (["env", "more"], "more"),
        (["bench", "more"], "more"),
        (["bench", "--width", "4"], "--width"),
        (["bench", "--batch-size", "1"], "--batch-size"),
        (["bench", "--threads", "0"], "--threads"),
        (["bench", "--device", "gpu"], "--device gpu"),
        (["bench", "--device", "cuda:99"], "--device cuda:99"),
        (["bench", "--model", "nosuch"], "'nosuch'"),
        (["bench", "--model", "nosuch:factory"], "nosuch"),
    ],
    ids=as_typed,
)
def test_a_wrong_command_is_refused(refuses, arguments, says):
    refuses(*arguments, says=says)


def test_a_device_that_is_not_there_is_refused(refuses):
    device = "cuda:99" if torch.cuda.is_available() else "cuda"
    refuses("train", "fgsm", "--device", device, "--max-steps", 0, says=f"--device {device}")


def test_a_device_number_that_no_machine_has_is_refused(refuses):
    refuses("train", "fgsm", "--device", "cuda:99999999999999999999", "--max-steps", 0, says="--device")


# --- data


def refuses_data(refuses, *options, says):
    refuses("train", "fgsm", *SHORT, "--max-steps", 0, "--out", "new/run", *options, says=says)


def test_data_that_is_neither_known_nor_a_folder_is_refused(refuses):
    refuses_data(refuses, "--data", "nosuch", says="'nosuch'")


def test_a_folder_of_other_files_is_no_place_for_a_run(refuses, alone, tiny):
    shutil.copytree(tiny, alone / "photos")
    refuses(
        "train", "fgsm", "--data", "photos", "--width", 8, "--batch-size", 16, "--out", "photos", says="other files"
    )


def test_a_job_s_log_may_stand_in_the_folder_of_its_run(moat, alone):
    (alone / "run").mkdir()
    (alone / "run" / "slurm-17.out").write_text("begun\n")
    assert moat("train", "fgsm", *SHORT, "--max-steps", 1, "--out", "run").code == 0


def test_an_empty_folder_is_no_data(refuses, alone):
    (alone / "empty").mkdir()
    refuses_data(refuses, "--data", "empty", says="empty is empty")


@pytest.mark.parametrize("content", [b"", b"no image at all", b"\x89PNG\r\n\x1a\n"])
def test_an_image_that_cannot_be_read_is_named(refuses, alone, tiny, content):
    shutil.copytree(tiny, alone / "pets")
    (alone / "pets" / "train" / "dark" / "7.png").write_bytes(content)
    refuses_data(refuses, "--data", "pets", "--batch-size", 8, says="pets/train/dark/7.png")


def test_a_cut_off_image_is_named(refuses, alone, tiny):
    path = shutil.copytree(tiny, alone / "pets") / "test" / "bright" / "3.png"
    path.write_bytes(path.read_bytes()[:-40])
    refuses_data(refuses, "--data", "pets", "--batch-size", 8, says="pets/test/bright/3.png")


def test_a_batch_larger_than_the_data_is_refused(refuses, tiny):
    refuses_data(refuses, "--data", tiny, "--batch-size", 81, says="80")


def test_a_batch_larger_than_what_is_left_after_holding_images_out_is_refused(refuses, tiny):
    refuses_data(refuses, "--data", tiny, "--batch-size", 8, "--holdout", 73, says="73")


def test_one_image_a_step_is_refused_where_batchnorm_cannot_work_on_it(refuses, tiny):
    refuses_data(refuses, "--data", tiny, "--batch-size", 1, "--max-steps", 1, says="batch")


def test_a_truncated_archive_is_refused(refuses, alone):
    (alone / "cifar-10-binary.tar.gz").write_bytes(b"\x1f\x8b\x08\x00 the rest is missing")
    refuses_data(refuses, "--data", "cifar10", "--data-dir", ".", says="cifar-10-binary.tar.gz")


def test_a_data_folder_that_does_not_exist_is_refused(refuses):
    refuses_data(refuses, "--data", "cifar10", "--data-dir", "nosuch", says="--data-dir")


def write_cifar10(folder, labels=(0, 9), appended=b""):
    folder.mkdir()
    images = np.zeros((len(labels), 32, 32, 3), np.uint8)
    (folder / "data_batch_1.bin").write_bytes(to_records(images, np.array(labels)).tobytes() + appended)
    (folder / "test_batch.bin").write_bytes(to_records(images, np.zeros(len(labels), int)).tobytes())


def test_a_file_that_is_not_a_whole_number_of_records_is_refused(refuses, alone):
    write_cifar10(alone / "cifar-10-batches-bin", appended=b"more")
    refuses_data(refuses, "--data", "cifar10", "--data-dir", ".", "--batch-size", 2, says="data_batch_1.bin")


def test_labels_out_of_range_are_refused(refuses, alone):
    write_cifar10(alone / "cifar-10-batches-bin", labels=(0, 10))
    refuses_data(refuses, "--data", "cifar10", "--data-dir", ".", "--batch-size", 2, says="label 10")


def test_half_a_data_set_is_refused(refuses, alone):
    write_cifar10(alone / "cifar-10-batches-bin")
    (alone / "cifar-10-batches-bin" / "test_batch.bin").unlink()
    refuses_data(refuses, "--data", "cifar10", "--data-dir", ".", "--batch-size", 2, says="test_batch.bin")


# --- folders of runs


def test_a_folder_that_holds_a_run_is_not_written_over(refuses, stopped, tiny_options):
    refuses("train", "fgsm", *tiny_options, "--epochs", 2, "--out", stopped, says="--resume")


def test_a_folder_that_holds_a_finished_run_without_its_checkpoint_is_not_written_over(refuses, stopped, tiny_options):
    (stopped / "checkpoint.pt").unlink()
    refuses("train", "fgsm", *tiny_options, "--epochs", 2, "--out", stopped, says="--resume")


def test_a_comparison_does_not_write_over_a_run_either(refuses, alone, stopped, tiny_options):
    stopped.rename(alone / "fgsm")
    refuses("compare", "standard", "fgsm", *tiny_options, "--epochs", 1, "--out", alone, says="--resume")


@pytest.mark.parametrize("command", ["train", "compare"])
@pytest.mark.parametrize("out", ["a_file", "a_file/run"])
def test_a_file_is_no_folder_for_a_run(refuses, alone, tiny_options, command, out):
    (alone / "a_file").write_text("keep me")
    refuses(command, "fgsm", *tiny_options, "--epochs", 1, "--out", out, says="a_file")


@pytest.mark.parametrize(
    ("method", "options", "field"),
    [
        ("moat:2", [], "method"),
        ("fgsm", ["--seed", 1], "seed"),
        ("fgsm", ["--lr", 0.3], "lr"),
        ("fgsm", ["--eps", "4/255"], "eps"),
        ("fgsm", ["--epochs", 1], "epochs"),
        ("fgsm", ["--batch-size", 4], "batch-size"),
        ("fgsm", ["--bn-in-attack", "eval"], "bn-in-attack"),
        ("fgsm", ["--no-augment"], "augment"),
    ],
)
def test_a_run_is_not_resumed_by_another_recipe(refuses, stopped, tiny_options, method, options, field):
    arguments = (*tiny_options, "--epochs", 2, *options, "--out", stopped, "--resume")
    refuses("train", method, *arguments, says=f"{field} = ")


def test_a_run_whose_checkpoint_is_gone_is_not_taken_for_one_of_another_recipe(refuses, stopped, tiny_options):
    (stopped / "checkpoint.pt").unlink()
    arguments = (*tiny_options, "--epochs", 2, "--seed", 1, "--out", stopped, "--resume")
    refuses("train", "fgsm", *arguments, says="seed = ")


def test_a_run_is_not_resumed_on_other_images(refuses, alone, stopped, tiny):
    other = shutil.copytree(tiny, alone / "other")
    shutil.copy(other / "train" / "dark" / "0.png", other / "train" / "dark" / "1.png")
    recipe = (stopped / "recipe.toml").read_text().replace(str(tiny), str(other))
    (stopped / "recipe.toml").write_text(recipe)
    arguments = ("--recipe", stopped / "recipe.toml", "--out", stopped, "--resume")
    refuses("train", *arguments, says="not the data")


DAMAGE = ["half of it", "nothing", "no byte as it was"]


def damage(path, left):
    content = path.read_bytes()
    if left == "half of it":
        content = content[: len(content) // 2]
    else:
        content = b"" if left == "nothing" else bytes(255 - byte for byte in content)
    path.write_bytes(content)


@pytest.mark.parametrize("left", DAMAGE)
def test_a_run_with_a_damaged_recipe_is_not_resumed_and_the_file_is_named(refuses, stopped, tiny_options, left):
    damage(stopped / "recipe.toml", left)
    refuses("train", "fgsm", *tiny_options, "--epochs", 2, "--out", stopped, "--resume", says="recipe.toml")


@pytest.mark.parametrize("name", ["checkpoint.pt", "run.json"])
@pytest.mark.parametrize("left", DAMAGE)
def test_a_damaged_file_that_can_be_replaced_is_named_and_the_run_goes_on(moat, stopped, tiny_options, name, left):
    damage(stopped / name, left)
    code, _, err = moat("train", "fgsm", *tiny_options, "--epochs", 2, "--out", stopped, "--resume")
    assert code == 0, err
    assert name in err.splitlines()[0], err


# --- models


def refuses_model(refuses, name, says):
    err = refuses("train", "fgsm", *SHORT, "--max-steps", 0, "--out", "new", "--model", name, says=says)
    assert name in err


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("resnet50", "preact_resnet18"),
        ("nosuchmodule:small", "nosuchmodule"),
        ("mine:nosuch", "it has Net"),
        ("mine:number", "int"),
        ("mine:built", "Net, not a function"),
        ("../mine.py:Net", "mine:Net"),
        ("mine:", "mine"),
        (":small", ":small"),
        ("..:small", "..:small"),
    ],
)
def test_a_model_that_cannot_be_found_is_refused(refuses, alone, name, says):
    write_module(alone, "from torch import nn\nnumber = 3\nclass Net(nn.Identity): pass\nbuilt = Net()")
    refuses_model(refuses, name, says)


@pytest.mark.parametrize("source", ["def", "1 / 0", "import nosuchmodule", "raise ValueError('two\\nlines')"])
def test_a_module_that_fails_to_import_is_refused(refuses, alone, source):
    write_module(alone, source)
    refuses_model(refuses, "mine:small", "import")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def small(): return 'no model'", "str"),
        ("def small(num_classes): return None", "NoneType"),
        ("def small(classes): raise RuntimeError('first line\\nsecond line')", "first line"),
        ("def small(): raise KeyError", "KeyError"),
        ("def small(num_classes): return nn.Linear(1, num_classes, no_such_argument=1)", "no_such_argument"),
        ("def small(width, depth): return nn.Linear(width, depth)", "classes"),
        ("def small(*, width): return nn.Linear(width, 1)", "classes"),
        ("def small(num_classes, width): return nn.Linear(width, num_classes)", "classes"),
        ("small = nn.Identity", "no parameters"),
    ],
)
def test_a_factory_that_makes_no_model_is_refused(refuses, alone, source, says):
    write_module(alone, source)
    refuses_model(refuses, "mine:small", says)


@pytest.mark.parametrize("classes", [2, 9, 11, 100])
def test_a_model_with_the_wrong_number_of_classes_is_refused(refuses, alone, classes):
    write_module(alone, f"def small(): return nn.Sequential(nn.Flatten(), nn.Linear(768, {classes}))")
    refuses_model(refuses, "mine:small", f"(2, {classes})" if classes > 10 else f"the model has {classes} classes")


@pytest.mark.parametrize(
    "forward",
    [
        "self.linear(x.flatten(1))",
        "self.linear(x)",
        "x.no_such_method()",
        "{}[x.shape]",
        "[][0]",
        "(_ for _ in ()).throw(ValueError)",
        "(_ for _ in ()).throw(AssertionError)",
        "(_ for _ in ()).throw(NotImplementedError('two\\nlines'))",
        "None",
        "(x, x)",
    ],
)
def test_a_model_that_cannot_take_the_images_is_refused(refuses, alone, forward):
    write_module(
        alone,
        f"""
        class Small(nn.Module):
            def __init__(self, num_classes):
                super().__init__()
                self.linear = nn.Linear(7, num_classes)

            def forward(self, x):
                return {forward}
        """,
    )
    refuses_model(refuses, "mine:Small", "logits" if forward in ("None", "(x, x)") else "images")


# --- weights to start from


def refuses_weights(refuses, tiny_options, path, says):
    refuses("train", "fgsm", *tiny_options, "--max-steps", 0, "--out", "new", "--init", path, says=says)


def test_weights_that_are_not_there_are_refused(refuses, alone, tiny_options):
    (alone / "empty").mkdir()
    for path in ("missing.safetensors", "empty"):
        refuses_weights(refuses, tiny_options, path, path)


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff" * 1000, b"\x02" + 7 * b"\0" + b"[]"])
def test_garbage_is_no_weights(refuses, alone, tiny_options, content):
    (alone / "garbage.safetensors").write_bytes(content)
    refuses_weights(refuses, tiny_options, "garbage.safetensors", "garbage.safetensors")


def test_weights_of_another_model_are_refused(refuses, stopped, tiny_options):
    refuses_weights(refuses, (*tiny_options, "--width", 9), stopped / "model.safetensors", "don't fit")


# --- a failure that is not the user's mistake


def not_finite(checkpoint):
    tensors = checkpoint["model"] | dict(enumerate(chain(*checkpoint["optimizer"])))
    return [name for name, tensor in tensors.items() if not tensor.isfinite().all()]


@pytest.mark.parametrize(
    ("method", "options", "stage"),
    [
        ("moat:2", ["--lr", "1e30"], "mixup"),
        ("fgsm", ["--lr", "1e3"], "fgsm"),  # breaks in its second epoch
    ],
    ids=as_typed,
)
def test_a_run_that_diverges_fails_with_its_step_and_stage_and_keeps_a_good_checkpoint(
    moat, alone, tiny_options, method, options, stage
):
    code, out, err = moat("train", method, *tiny_options, "--epochs", 2, *options, "--out", "run")
    assert (code, out) == (1, "")
    checkpoint = torch.load(alone / "run" / "checkpoint.pt", weights_only=True)
    assert not_finite(checkpoint) == []
    record, message = read_json(alone / "run" / "run.json"), err.splitlines()[-1]
    assert record["status"] == "failed"
    assert message == f"moat: {record['message']}"
    step = re.search(r"step (\d+)", message)
    assert step, message
    assert checkpoint["progress"]["step"] <= int(step[1])
    assert f"stage {stage}" in message


def test_a_model_that_fails_while_it_trains_ends_with_one_sentence(moat, alone, tiny_options):
    write_module(
        alone,
        """
        class Small(nn.Linear):
            def __init__(self, num_classes):
                super().__init__(192, num_classes)

            def forward(self, x):
                if self.training:
                    raise RuntimeError("it broke\\nand here is a long story")
                return super().forward(x.flatten(1))
        """,
    )
    code, out, err = moat("train", "standard", *tiny_options, "--model", "mine:Small", "--out", "run")
    assert code in (1, 2)
    assert out == ""
    assert err.splitlines()[-1].startswith("moat: ")
    assert "it broke" in err.splitlines()[-1]
    if (alone / "run").exists():
        assert read_json(alone / "run" / "run.json")["status"] == "failed"


def test_weights_that_break_before_the_loss_does_are_not_saved_either(moat, alone, tiny_options):
    write_module(
        alone,
        """
        class Steep(nn.Module):  # the root of 0 is finite, its slope is not
            def __init__(self, num_classes):
                super().__init__()
                self.linear, self.zero = nn.Linear(192, num_classes), nn.Parameter(torch.zeros(num_classes))

            def forward(self, x):
                return self.linear(x.flatten(1)) + self.zero.sqrt()
        """,
    )
    options = (*tiny_options, "--model", "mine:Steep", "--epochs", 1, "--checkpoint-every", 0)
    code, _, err = moat("train", "standard", *options, "--out", "run")
    assert code == 1, err
    assert "step 1" in err.splitlines()[-1]
    assert not_finite(torch.load(alone / "run" / "checkpoint.pt", weights_only=True)) == []
    assert read_json(alone / "run" / "run.json")["status"] == "failed"


def test_overflowing_batchnorm_statistics_do_not_replace_a_good_checkpoint(moat, alone, tiny_options):
    write_module(
        alone,
        """
        class Exploding(nn.Module):  # in train mode its loss and its weights stay finite
            def __init__(self, num_classes):
                super().__init__()
                self.norm, self.linear = nn.BatchNorm1d(192), nn.Linear(192, num_classes)

            def forward(self, x):
                return self.linear(self.norm(1e25 * x.flatten(1)))
        """,
    )
    options = (*tiny_options, "--model", "mine:Exploding", "--epochs", 1, "--checkpoint-every", 0)
    code, _, err = moat("train", "standard", *options, "--out", "run")
    checkpoint = torch.load(alone / "run" / "checkpoint.pt", weights_only=True)
    assert not_finite(checkpoint) == []
    assert code == 1, err
    assert read_json(alone / "run" / "run.json")["status"] == "failed"


def test_a_constant_that_is_infinite_by_design_is_no_failure(moat, alone, tiny_options):
    write_module(
        alone,
        """
        class Masked(nn.Module):
            def __init__(self, num_classes):
                super().__init__()
                self.linear = nn.Linear(192, num_classes)
                self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))

            def forward(self, x):
                return self.linear(x.flatten(1)) * self.mask.softmax(1)[0, 0]
        """,
    )
    options = (*tiny_options, "--model", "mine:Masked", "--epochs", 1, "--out", "run")
    code, _, err = moat("train", "standard", *options)
    assert code == 0, err


# --- as a shell sees it


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "moat:x"], "moat:x"),
        (["nosuch"], "nosuch"),
        (["train", "fgsm", "--data", "nosuch"], "nosuch"),
    ],
    ids=as_typed,
)
def test_a_process_ends_with_code_2_and_one_sentence(alone, moat_process, arguments, says):
    process = moat_process(*arguments)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert out == ""
    assert re.fullmatch(r"(no CUDA GPU: [^\n]+\n)?moat: [^\n]+\n", err), err
    assert says in err
    assert list(alone.iterdir()) == []


def test_a_traceback_is_shown_where_it_is_asked_for(alone):
    command = [sys.executable, "-m", "moatlab", "plan", "moat:x", "--debug"]
    ended = subprocess.run(command, cwd=alone, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode != 0
    assert "Traceback" in ended.stderr
    assert "UserError: 'moat:x'" in ended.stderr
