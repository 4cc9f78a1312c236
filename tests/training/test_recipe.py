import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from moatlab.attacks.norms import Threat
from moatlab.data.sizes import Sizes
from moatlab.runtime.errors import UserError
from moatlab.training.making import ADAMW_LR, make_recipe
from moatlab.training.presets import PRESETS, default_preset
from moatlab.training.recipe import Recipe, load_recipe, read_recipe_file, slug

methods = st.sampled_from(
    ["standard", "fgsm", "fast", "nfgsm", "pgd:7", "gradalign", "gradalign:0.5", "kim", "moat:2", "imoat:2,5,8",
     "cutmix | fast | pgd:2>5>8", "mixup | gradalign | kim:4"]
)  # fmt: skip
positive = st.floats(0, exclude_min=True, allow_nan=False, allow_infinity=False)
FIELDS = {
    "method": methods,
    "data": st.sampled_from(["mini", "cifar10", "cifar100"]) | st.text(min_size=1).map("no/such/{}".format),
    "image_size": st.none() | st.integers(8, 4096),
    "model": st.sampled_from(["preact_resnet18", "my.models:small"]),
    "width": st.integers(8, 1024),
    "stem": st.sampled_from(["auto", "3x3", "4x4s2", "7x7s4"]),
    "shortcut": st.sampled_from(["activated", "raw"]),
    "final_norm": st.booleans(),
    "std": st.none() | st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=4).map(tuple),
    "init": st.none() | st.text(min_size=1),
    "schedule": st.sampled_from(["cyclic", "stepwise", "cosine"]),
    "optimizer": st.sampled_from(["sgd", "adamw"]),
    "warmup": st.floats(0, 1),
    "eps_warmup": st.floats(0, 1),
    "epochs": st.integers(1, 100_000),
    "eps": st.integers(1, 254).map("{}/255".format) | st.floats(1e-6, 0.999).map(str),
    "norm": st.sampled_from(["linf", "l2"]),
    "lr": positive,
    "momentum": st.floats(0, 1, exclude_max=True),
    "cycle_momentum": st.booleans(),
    "weight_decay": st.floats(0, allow_nan=False, allow_infinity=False),
    "batch_size": st.integers(1, 10**6),
    "augment": st.booleans(),
    "bn_in_attack": st.sampled_from(["train", "eval"]),
    "holdout": st.integers(1, 10**6),
    "monitor": st.sampled_from(["holdout", "train", "test"]),
    "monitor_every": st.integers(1, 100),
    "monitor_images": st.none() | st.integers(1, 100),
    "seed": st.integers(0, 2**63 - 1),
    "precision": st.sampled_from(["auto", "fp32", "bf16", "fp16"]),
    "on_collapse": st.sampled_from(["warn", "stop", "rollback", "heal"]),
    "check_every": st.none(),
    "activation": st.sampled_from(["relu", "silu"]),
    "dropout": st.just(0.0),
    "average": st.sampled_from(["ema", "swa"]),
    "average_decay": st.none() | st.floats(0.1, 0.9),
    "label_smoothing": st.floats(0, 0.9),
    "awp": st.just(0.0),
    "then": st.sampled_from(["pgd:2", "pgd:5", "pgd:2 | pgd:7"]),
    "on_nan": st.sampled_from(["stop", "skip"]),
    "deterministic": st.booleans(),
}


def cycling(fields):
    """Momentum can cycle with a cyclic rate of SGD only, and by a tenth."""
    can = (fields["schedule"], fields["optimizer"]) == ("cyclic", "sgd") and fields["momentum"] >= 0.1
    return fields if can else fields | {"cycle_momentum": False}


recipes = st.fixed_dictionaries(FIELDS).map(lambda fields: Recipe(**cycling(fields)))
ALONE = "method cycle_momentum average_decay check_every monitor monitor_images std init image_size"
layered = sorted(FIELDS.keys() - set(ALONE.split()))
some_fields = st.fixed_dictionaries({}, optional={name: FIELDS[name] for name in layered})


def written(folder, text):
    path = Path(folder) / "recipe.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_the_strategies_here_cover_every_field():
    assert FIELDS.keys() == Recipe.model_fields.keys()


@given(recipes)
def test_any_recipe_is_read_back_from_its_file(recipe):
    with TemporaryDirectory() as folder:
        assert load_recipe(written(folder, recipe.to_toml())) == recipe


@given(st.sampled_from(sorted(PRESETS)), st.fixed_dictionaries(FIELDS))
def test_the_recipe_file_of_a_run_makes_the_same_recipe_again(preset, fields):
    fields["image_size"] = None  # for folders only
    fields["on_collapse"] = "warn" if fields["monitor"] == "test" else fields["on_collapse"]
    recipe = make_recipe(preset=preset, **cycling(fields))
    with TemporaryDirectory() as folder:
        assert make_recipe(file=written(folder, recipe.to_toml()), trust_model_code=True) == recipe


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("data", ["mini", "cifar10"])
def test_the_file_of_a_gradalign_run_keeps_its_weight_whatever_preset_it_came_from(tmp_path, preset, data):
    recipe = make_recipe("gradalign", preset=preset, data=data)
    again = make_recipe(file=written(tmp_path, recipe.to_toml()))
    assert again.parsed_method.stages == recipe.parsed_method.stages


@settings(max_examples=60)
@given(st.sampled_from(sorted(PRESETS.keys() - {"own"})), some_fields, some_fields)
def test_options_win_over_the_file_and_the_file_over_the_preset(preset, in_file, options):
    with TemporaryDirectory() as folder:
        file = written(folder, tomli_w.dumps(in_file))
        recipe = make_recipe("moat:2", preset=preset, file=file, trust_model_code=True, **options)
    expected = PRESETS[preset] | in_file | options
    norm, in_files = expected.get("norm", "linf"), in_file.get("norm", "linf")
    if "eps" not in options and ("eps" not in in_file or norm != in_files):  # a radius of one norm is none of another
        expected["eps"] = "128/255" if norm == "l2" else PRESETS[preset]["eps"]
    optimizer, in_files = expected.get("optimizer", "sgd"), in_file.get("optimizer", "sgd")
    if "lr" not in options and ("lr" not in in_file or optimizer != in_files):
        expected["lr"] = ADAMW_LR if optimizer == "adamw" else PRESETS[preset]["lr"]
    for name in layered:
        if name in expected:
            assert getattr(recipe, name) == expected[name]


def test_an_option_that_is_none_was_not_given():
    assert make_recipe("moat:2", epochs=None) == make_recipe("moat:2")


def test_a_method_may_come_from_the_file_alone_and_an_argument_wins_over_it(tmp_path):
    path = written(tmp_path, 'method = "fgsm"')
    assert make_recipe(file=path).method == "fgsm"
    assert make_recipe("moat:2", file=path).method == "moat:2"


def test_a_recipe_without_a_method_is_refused():
    with pytest.raises(UserError, match="name a method"):
        make_recipe(epochs=3)


def test_a_recipe_file_carries_its_schema_and_keeps_eps_as_it_was_typed():
    fields = tomllib.loads(make_recipe("moat:2", eps=" 8/255 ").to_toml())
    assert fields["schema"] == 1
    assert fields["eps"] == "8/255"


def test_a_recipe_cannot_be_changed():
    with pytest.raises(ValidationError):
        make_recipe("moat:2").epochs = 3


# --- presets


SHARED = {
    "model": "preact_resnet18", "shortcut": "activated", "schedule": "cyclic", "momentum": 0.9, "weight_decay": 5e-4,
    "seed": 0, "init": None,
}  # fmt: skip
BASE = SHARED | {
    "data": "cifar10", "width": 64, "final_norm": True, "std": None, "epochs": 60, "eps": "8/255", "lr": 0.2,
    "batch_size": 128, "augment": True, "bn_in_attack": "train",
}  # fmt: skip
PAPER = BASE | {"cycle_momentum": True}
MINI = BASE | {
    "data": "mini", "width": 16, "epochs": 21, "eps": "16/255", "augment": False, "holdout": 500, "monitor": "holdout",
}  # fmt: skip


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("paper", PAPER | {"final_norm": False, "std": (0.2023, 0.1994, 0.2010), "bn_in_attack": "eval"}),
        ("paper-fast", PAPER | {"shortcut": "raw"}),
        ("mini", MINI),
        ("mini-long", MINI | {"bn_in_attack": "eval", "batch_size": 32, "lr": 0.1, "epochs": 36}),
        ("laptop", BASE | {"width": 16, "stem": "4x4s2", "epochs": 30, "holdout": 1000}),
    ],
)
def test_a_preset_trains_as_the_paper_or_the_measured_small_setting_does(preset, expected):
    fields = make_recipe("moat:2", preset=preset).model_dump()
    assert {name: fields[name] for name in expected} == expected


def test_mini_has_one_precision_on_every_machine_and_the_others_that_of_the_hardware():
    precisions = {preset: make_recipe("moat:2", preset=preset).precision for preset in PRESETS}
    assert {preset for preset in PRESETS if precisions[preset] == "fp32"} == {"mini", "mini-long"}
    assert {precisions[preset] for preset in ("laptop", "paper", "paper-fast", "own")} == {"auto"}
    assert make_recipe("moat:2", precision="bf16").precision == "bf16"


def test_there_are_six_presets():
    assert set(PRESETS) == {"mini", "mini-long", "laptop", "paper", "paper-fast", "own"}


def test_kim_s_standard_deviations_are_those_of_cifar10_only():
    assert make_recipe("moat:2", preset="paper", data="cifar100").std is None
    assert make_recipe("moat:2", preset="paper", std="1,1,1").std == (1.0, 1.0, 1.0)


def test_the_paper_s_presets_cycle_the_momentum_and_no_others():
    assert {preset for preset in PRESETS if make_recipe("moat:2", preset=preset).cycle_momentum} == {
        "paper",
        "paper-fast",
    }
    assert not make_recipe("moat:2", preset="paper", schedule="stepwise").cycle_momentum
    assert not make_recipe("moat:2", preset="paper", optimizer="adamw").cycle_momentum
    assert not make_recipe("moat:2", preset="paper", cycle_momentum=False).cycle_momentum
    assert ", cycled momentum" in make_recipe("moat:2", preset="paper").setting


@pytest.mark.parametrize("options", [{"schedule": "stepwise"}, {"optimizer": "adamw"}, {"momentum": 0.05}])
def test_momentum_that_cannot_cycle_is_refused(options):
    with pytest.raises(UserError, match="cycle_momentum"):
        make_recipe("moat:2", cycle_momentum=True, **options)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_makes_a_whole_recipe_whose_cycle_ends_at_its_last_stage(preset):
    recipe = make_recipe("imoat:2,5,8", preset=preset)
    assert recipe.parsed_method.ends_cycle(recipe.epochs - 1)


@pytest.mark.parametrize("has_gpu", [False, True])
@pytest.mark.parametrize("data", [None, "mini", "cifar10", "cifar100"])
def test_the_default_preset_is_mini_and_for_cifar_paper_with_a_gpu_and_laptop_without(monkeypatch, data, has_gpu):
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    for_cifar = "paper" if has_gpu else "laptop"
    assert default_preset(data) == ("mini" if data in (None, "mini") else for_cifar)
    assert make_recipe("moat:2", data=data) == make_recipe("moat:2", preset=default_preset(data), data=data)


def test_own_images_have_their_preset_with_and_without_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", None)  # whoever asks fails
    assert default_preset("photos") == "own"


@pytest.mark.parametrize(
    ("count", "side", "expected"),
    [
        (50_000, 32, (1000, 128)), (5_000, 64, (500, 128)), (5_000, 65, (500, 64)), (5_000, 224, (500, 32)),
        (1_000, 32, (100, 32)), (539, 224, (53, 16)), (60, 32, (6, 8)), (9, 32, (0, 8)),
    ],
)  # fmt: skip
def test_the_preset_for_own_images_goes_by_their_number_and_size(count, side, expected):
    recipe = make_recipe("moat:2", data="mine", images=Sizes(count, 10, 2, side, side))
    assert (recipe.holdout, recipe.batch_size) == expected
    assert (recipe.epochs, recipe.eps, recipe.lr, recipe.width, recipe.augment) == (30, "8/255", 0.2, 64, True)
    assert recipe.monitor == ("holdout" if expected[0] else "train")


def test_options_win_over_what_the_images_suggest():
    recipe = make_recipe("moat:2", data="mine", images=Sizes(500, 10, 2, 32, 32), holdout=100, epochs=3)
    assert (recipe.holdout, recipe.batch_size, recipe.epochs) == (100, 16, 3)
    assert make_recipe("moat:2", data="mine", images=Sizes(500, 10, 2, 32, 32), batch_size=50).batch_size == 50


def test_the_size_of_a_folder_s_images_is_recorded_and_that_of_arrays_cannot_be_chosen(tiny):
    assert make_recipe("moat:2", data=str(tiny)).image_size is None  # all are 8x8
    recipe = make_recipe("moat:2", data=str(tiny), image_size=16)
    assert recipe.image_size == 16
    assert recipe.setting.startswith(f"{tiny} at 16x16, preact_resnet18 width 64, eps 8/255 (L-inf), 30 epochs, cyclic")
    assert load_recipe(written(tiny.parent, recipe.to_toml())) == recipe
    for data in ("mini", "cifar10"):
        with pytest.raises(UserError, match="image_size=16 is for folders"):
            make_recipe("moat:2", data=data, image_size=16)


def test_a_stem_is_in_the_file_only_if_it_was_chosen():
    assert "stem" not in make_recipe("moat:2").to_toml()
    assert 'stem = "7x7s4"' in make_recipe("moat:2", stem="7x7s4").to_toml()


def test_a_bad_option_is_refused_before_the_images_are_looked_at(tmp_path):
    with pytest.raises(UserError, match="lr"):
        make_recipe("moat:2", data=str(tmp_path / "nothing"), lr=-1)
    with pytest.raises(UserError, match=r"no data set, folder or \.npz file"):
        make_recipe("moat:2", data=str(tmp_path / "nothing"))


def test_data_in_a_recipe_file_chooses_the_default_preset_too(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert make_recipe("moat:2", file=written(tmp_path, 'data = "cifar100"')).width == 64


def test_an_unknown_preset_is_refused_and_the_known_ones_named():
    with pytest.raises(UserError, match="mini-long, laptop, paper, paper-fast, own"):
        make_recipe("moat:2", preset="papr")


@pytest.mark.parametrize(
    ("method", "epochs"),
    [("fgsm", 200), ("gradalign", 200), ("moat:2", 201), ("imoat:2,5,8", 201), ("mixup | fast | pgd:3", 201)],
)
def test_stepwise_training_takes_200_epochs_or_201_where_a_cycle_must_reach_its_last_stage(method, epochs):
    assert make_recipe(method, preset="paper", schedule="stepwise").epochs == epochs


def test_epochs_that_the_user_names_are_not_corrected():
    assert make_recipe("moat:2", preset="paper", schedule="stepwise", epochs=200).epochs == 200


@pytest.mark.parametrize(
    ("preset", "method", "values"),
    [
        ("mini", "gradalign", [2.0]),
        ("mini-long", "gradalign", [2.0]),
        ("mini", "gradalign:0.5", [0.5]),
        ("mini", "mixup | gradalign | gradalign : 0.3", [None, 2.0, 0.3]),
        ("paper", "gradalign", [0.2]),
        ("paper-fast", "gradalign", [0.2]),
    ],
)
def test_gradalign_s_weight_belongs_to_the_preset_s_radius_unless_it_is_named(preset, method, values):
    stages = make_recipe(method, preset=preset).parsed_method.stages
    assert [stage.value for stage in stages] == values


def test_without_held_out_images_training_images_are_watched():
    assert make_recipe("moat:2", preset="paper").monitor == "train"
    assert make_recipe("moat:2", holdout=0).monitor == "train"
    assert make_recipe("moat:2", preset="paper", holdout=100).monitor == "holdout"


def test_the_setting_names_the_radius_and_the_mode_of_batchnorm():
    expected = "mini, preact_resnet18 width 16, eps 16/255 (L-inf), 21 epochs, cyclic lr 0.2, batch 128, "
    expected += "BatchNorm in attacks: train mode, no augmentation, seed 0"
    assert make_recipe("moat:2").setting == expected
    assert "BatchNorm in attacks: eval mode" in make_recipe("moat:2", bn_in_attack="eval").setting


# --- what is refused


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("width", 7), ("width", 2000), ("epochs", 0), ("epochs", 2.5), ("epochs", 10**9), ("lr", 0), ("lr", -1),
        ("lr", float("nan")), ("lr", float("inf")), ("momentum", 1), ("momentum", -0.1), ("momentum", float("nan")),
        ("weight_decay", -1), ("weight_decay", float("nan")), ("batch_size", 0), ("holdout", -1), ("seed", -1),
        ("seed", 2**63), ("warmup", -1), ("eps_warmup", float("nan")), ("warmup", 61), ("eps_warmup", 61),
        ("optimizer", "lion"),
        ("schedule", "linear"), ("shortcut", "none"), ("bn_in_attack", "both"), ("monitor", "all"), ("std", "a,b,c"),
        ("std", ""), ("std", "0,1,1"), ("std", "nan,1,1"), ("std", (-1.0,)), ("eps", 8), ("method", 3),
    ],
)  # fmt: skip
def test_a_field_out_of_its_range_is_refused_by_the_name_of_its_option(option, value):
    with pytest.raises(UserError) as error:
        make_recipe(**({"method": "moat:2", "preset": "paper"} | {option: value}))
    assert option in str(error.value) or option == "method"


def test_watching_held_out_images_needs_some():
    with pytest.raises(UserError, match='holdout=1000 or monitor="train"'):
        make_recipe("moat:2", monitor="holdout", holdout=0)


@pytest.mark.parametrize("policy", ["stop", "rollback", "heal"])
def test_test_images_may_be_watched_but_not_decide_how_a_run_goes(policy):
    make_recipe("fgsm", monitor="test")
    with pytest.raises(UserError, match="must not use test images"):
        make_recipe("fgsm", monitor="test", on_collapse=policy)


@pytest.mark.parametrize("then", ["fast", "moat:2", "pgd:2 | fgsm"])
def test_only_multi_step_stages_heal(then):
    make_recipe("fgsm", on_collapse="rollback", then=then)
    with pytest.raises(UserError, match="multi-step"):
        make_recipe("fgsm", on_collapse="heal", then=then)


def test_a_file_that_names_a_model_of_somebodys_own_needs_to_be_trusted(tmp_path):
    path = written(tmp_path, 'method = "fgsm"\nmodel = "theirs:net"')
    with pytest.raises(UserError, match=r"theirs:net.*trust_model_code=True"):
        make_recipe(file=path)
    assert make_recipe(file=path, trust_model_code=True).model == "theirs:net"
    assert make_recipe(file=path, model="mine:net").model == "mine:net"
    assert make_recipe("fgsm", model="mine:net").model == "mine:net"


def test_a_field_that_a_recipe_lacks_is_refused():
    with pytest.raises(UserError, match="'lerning_rate'"):
        make_recipe("moat:2", lerning_rate=0.1)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("epoch = 3", "unknown key 'epoch'"),
        ("schema = 2", "schema 2"),
        ('schema = "1"', "schema"),
        ("epochs 3", "not valid TOML"),
        ("epochs = 3\nepochs = 4", "not valid TOML"),
        (b"\xff\xfe", "not valid TOML"),
        ("[moat]\nepochs = 3", "unknown key 'moat'"),
        ("epochs = [3]", "epochs"),
        ("epochs = 2020-01-01", "epochs"),
        ("method = 2", "method"),
        ('method = 2\nschedule = "stepwise"', "method"),
        ("data = 5", "data"),
        ("holdout = [1]", "holdout"),
        ("eps = 8", "eps"),
    ],
)
def test_a_recipe_file_with_a_mistake_is_refused(tmp_path, content, says):
    path = written(tmp_path, content)
    method = None if b"method" in path.read_bytes() else "fgsm"
    with pytest.raises(UserError) as error:
        make_recipe(method, preset="paper", file=path)
    assert says in str(error.value)


def test_a_recipe_file_that_is_missing_or_a_folder_is_refused(tmp_path):
    for path in (tmp_path / "missing.toml", tmp_path):
        with pytest.raises(UserError, match=path.name):
            read_recipe_file(path)


# --- the radius


@given(st.integers(1, 254), st.sampled_from(["{}/255", " {} / 255 ", "{}.0/255"]))
def test_a_radius_in_pixel_steps_is_a_fraction_of_255(pixels, form):
    assert Threat.of(form.format(pixels)).eps == pixels / 255


@given(st.floats(0, 1, exclude_min=True, exclude_max=True))
def test_a_radius_may_be_a_plain_number_between_0_and_1(eps):
    assert Threat.of(str(eps)).eps == Threat.of(eps).eps == eps


@pytest.mark.parametrize(
    "text",
    ["0", "-1/255", "1/-255", "0/255", "0/0", "8/0", "nan", "nan/255", "inf", "1/inf", "1", "255/255", "8/", "/255",
     "8/255/2", "", "eight", "1e-400", "8/255px"],
)  # fmt: skip
def test_a_radius_outside_of_0_to_1_is_refused(text):
    with pytest.raises(UserError, match="between 0 and 1"):
        Threat.of(text)


def test_a_radius_in_pixel_steps_without_255_is_met_with_the_right_spelling():
    with pytest.raises(UserError, match="did you mean 8/255"):
        Threat.of("8")


# --- names of folders


@given(st.text())
def test_a_slug_is_a_plain_folder_name_whatever_it_is_made_from(text):
    name = slug(text)
    assert name
    assert name not in (".", "..")
    assert all(letter.isascii() and (letter.isalnum() or letter in "-.") for letter in name)


def test_slugs_are_readable():
    assert slug("imoat:2,5,8") == "imoat-2-5-8"
    assert slug("mixup | fast | pgd:2>5") == "mixup-fast-pgd-2-5"


def test_a_field_that_is_left_out_at_its_default_changes_no_checksum():
    plain, same, other = (make_recipe("fgsm", monitor_every=every) for every in (None, 1, 2))
    assert "monitor_every" not in plain.to_toml()
    assert plain.sha256 == same.sha256 != other.sha256
    assert "monitor_every = 2" in other.to_toml()


def test_a_recipe_of_another_norm_is_another_recipe():
    assert make_recipe("moat:2", norm="l2").sha256 != make_recipe("moat:2", eps="128/255").sha256


@pytest.mark.parametrize(
    ("preset", "eps", "weight"), [("mini", "8/255", 0.2), ("mini", None, 2.0), ("paper", "16/255", 2.0)]
)
def test_the_weight_of_a_bare_gradalign_goes_by_the_radius_and_not_by_the_preset(preset, eps, weight):
    recipe = make_recipe("mixup | gradalign", preset=preset, eps=eps, then="gradalign")
    assert recipe.method == f"mixup | gradalign:{weight}"
    assert recipe.then == f"gradalign:{weight}"
    assert make_recipe("gradalign:0.7", preset=preset, eps=eps).method == "gradalign:0.7"


def test_l2_has_a_radius_of_its_own_unless_one_is_given():
    assert make_recipe("moat:2", norm="l2").eps == "128/255"
    assert make_recipe("moat:2", norm="l2", eps="1.5").threat.eps == 1.5
    with pytest.raises(UserError, match="between 0 and 1"):
        make_recipe("moat:2", eps="1.5")


def test_a_radius_in_a_file_is_not_taken_for_one_of_another_norm(tmp_path):
    file = written(tmp_path, 'eps = "8/255"\n')
    assert make_recipe("moat:2", file=file, norm="l2").eps == "128/255"
    assert make_recipe("moat:2", file=file, norm="l2", eps="1").eps == "1"
    file = written(tmp_path, 'eps = "1.0"\nnorm = "l2"\n')
    assert make_recipe("moat:2", file=file).eps == "1.0"
    assert make_recipe("moat:2", file=file, norm="linf").eps == "16/255"
