import re
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moatlab.methods.cost import Cost
from moatlab.methods.language import Method, Stage, parse_method
from moatlab.methods.stages import STAGES
from moatlab.runtime.errors import UserError

# Forwards, input-backwards, weight-backwards and double backwards of one step: the table of the methods, by hand.
STEP_COST = {
    "standard": lambda _: (1, 0, 1, 0),
    "mixup": lambda _: (1, 0, 1, 0),
    "cutmix": lambda _: (1, 0, 1, 0),
    "fgsm": lambda _: (2, 1, 1, 0),
    "fast": lambda _: (2, 1, 1, 0),
    "nfgsm": lambda _: (2, 1, 1, 0),
    "pgd": lambda k: (k + 1, k, 1, 0),
    "kim": lambda c: (c + 1, 1, 1, 0),
    "gradalign": lambda _: (3, 2, 1, 1),
}

steps = st.integers(1, 1000)
runs = st.integers(1, 300)  # their epochs


def growing(name, values):
    return st.lists(values, min_size=1, max_size=5).map(lambda chosen: tuple(Stage(name, one) for one in chosen))


stages = st.one_of(
    st.sampled_from(["standard", "mixup", "cutmix", "fgsm", "fast", "nfgsm"]).map(lambda name: (Stage(name),)),
    growing("pgd", steps),
    growing("kim", st.integers(1, 100)),
    growing("gradalign", st.floats(0, allow_nan=False, allow_infinity=False)),
)
cycles = st.lists(stages, min_size=1, max_size=6).map(lambda chosen: Method("", tuple(chosen)))


@given(cycles)
def test_any_cycle_is_read_back_from_what_it_is_written_as(cycle):
    assert parse_method(str(cycle)).stages == cycle.stages


@given(cycles)
def test_writing_a_parsed_method_out_is_a_fixpoint(cycle):
    written = str(parse_method(str(cycle)))
    assert str(parse_method(written)) == written


@given(cycles, st.sampled_from(["", " ", "  "]))
def test_spaces_around_separators_mean_nothing(cycle, space):
    spaced = str(cycle).replace(" ", "")
    for separator in "|:>":
        spaced = spaced.replace(separator, space + separator + space)
    assert parse_method(space + spaced + space).stages == cycle.stages


@settings(max_examples=300)
@given(st.text(alphabet="moatigdfsnpxk |:>,.0123456789e+-_", max_size=25) | st.text(max_size=10))
def test_any_text_is_a_method_or_the_users_mistake(text):
    try:
        method = parse_method(text)
    except UserError:
        return
    assert parse_method(str(method)).stages == method.stages


@given(steps)
def test_moat_is_mixup_then_fast_then_pgd(k):
    assert str(parse_method(f"moat:{k}")) == f"mixup | fast | pgd:{k}"


def test_imoat_and_its_cycle_written_out_are_the_same():
    imoat, cycle = parse_method("imoat:2,5,8"), parse_method("mixup | fast | pgd:2>5>8")
    assert imoat.stages == cycle.stages == (Stage("mixup"), Stage("fast"), *(Stage("pgd", k) for k in (2, 5, 8)))
    assert str(imoat) == "mixup | fast | pgd:2>5>8"


def test_a_method_keeps_what_the_user_typed():
    assert parse_method(" imoat:2,5,8 ").spec == "imoat:2,5,8"


def test_a_short_name_inside_a_cycle_stands_for_its_stages():
    assert str(parse_method("standard | moat:2 | imoat:1,2,3")) == (
        "standard | mixup | fast | pgd:2 | mixup | fast | pgd:1>2>3"
    )


@pytest.mark.parametrize(("short", "long"), [("gradalign", "gradalign:0.2"), ("kim", "kim:3")])
def test_a_stage_with_a_default_may_be_named_without_its_number(short, long):
    assert parse_method(short).stages == parse_method(long).stages


@given(steps, steps, steps, runs)
def test_imoat_grows_k_at_a_third_and_two_thirds_of_the_run_as_algorithm_2_prints_it(k1, k2, k3, epochs):
    method = parse_method(f"imoat:{k1},{k2},{k3}")
    for t in range(epochs):
        stage = method.stage_at(t, epochs)
        if t % 3 < 2:
            assert stage == Stage(("mixup", "fast")[t % 3])
        elif 3 * t < epochs:  # t < T/3
            assert stage == Stage("pgd", k1)
        elif 3 * t < 2 * epochs:  # t < 2T/3
            assert stage == Stage("pgd", k2)
        else:
            assert stage == Stage("pgd", k3)


def test_sixty_epochs_of_imoat_have_six_seven_and_seven_third_stages():
    method = parse_method("imoat:2,5,8")
    values = [method.stage_at(t, 60).value for t in range(2, 60, 3)]
    assert values == 6 * [2] + 7 * [5] + 7 * [8]


@given(st.lists(steps, min_size=1, max_size=7), runs)
def test_values_divide_the_run_into_equal_parts(values, epochs):
    method = Method("", (tuple(Stage("pgd", value) for value in values),))
    for t in range(epochs):
        (part,) = [i for i in range(len(values)) if i * epochs <= t * len(values) < (i + 1) * epochs]
        assert method.stage_at(t, epochs).value == values[part]


@given(cycles, runs)
def test_the_cost_of_a_run_is_the_sum_over_its_epochs(cycle, epochs):
    expected = [0, 0, 0, 0]
    for t in range(epochs):
        slot = cycle.slots[t % len(cycle.slots)]
        stage = slot[t * len(slot) // epochs]
        value = stage.value
        expected = [total + kind for total, kind in zip(expected, STEP_COST[stage.name](value), strict=True)]
    cost = cycle.cost(epochs)
    assert list(cost.kinds) == expected
    assert cost.passes == sum(expected) / 2


@given(st.lists(st.integers(0, 10**6), min_size=4, max_size=4), st.lists(st.integers(0, 10**6), min_size=4, max_size=4))
def test_costs_add_up_kind_by_kind(a, b):
    assert (Cost(*a) + Cost(*b)).kinds == tuple(x + y for x, y in zip(a, b, strict=True))
    assert (Cost(*a) + Cost(*b)).passes == Cost(*a).passes + Cost(*b).passes


def test_a_cost_over_steps_is_written_in_passes_over_the_training_set_with_whole_numbers_as_such():
    written = Cost(78, 39, 39, 0).as_dict(images=39)
    expected = {"passes": 2, "forwards": 2, "input_backwards": 1, "weight_backwards": 1, "double_backwards": 0}
    assert written == expected
    assert all(isinstance(value, int) for value in written.values())
    assert Cost(1, 0, 1).as_dict(images=2)["passes"] == 0.5


@given(cycles, runs)
def test_a_cycle_ends_at_its_last_stage_only(cycle, epochs):
    for t in range(epochs):
        last = cycle.slots[-1]
        assert cycle.ends_cycle(t) == (t % len(cycle.slots) == len(cycle.slots) - 1)
        if cycle.ends_cycle(t):
            assert cycle.stage_at(t, epochs) in last


@given(cycles, runs)
def test_the_suggested_number_of_epochs_is_the_nearest_that_ends_a_cycle(cycle, epochs):
    suggested = cycle.epochs_to_end_of_cycle(epochs)
    assert cycle.ends_cycle(suggested - 1)
    nearest = min(
        abs(epochs - other) for other in range(1, epochs + len(cycle.slots) + 1) if cycle.ends_cycle(other - 1)
    )
    assert abs(epochs - suggested) == nearest
    assert (suggested == epochs) == cycle.ends_cycle(epochs - 1)


def test_the_paper_s_two_hundred_epochs_of_moat_would_better_be_201():
    assert parse_method("moat:2").epochs_to_end_of_cycle(200) == 201


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("", "empty"),
        ("  ", "empty"),
        ("mixup |", "empty stage"),
        ("| mixup", "empty stage"),
        ("mixup || fast", "empty stage"),
        ("mixup | nothing", "'nothing'"),
        ("fsgm", "did you mean fgsm?"),
        ("imaot:2,5,8", "did you mean imoat?"),
        ("moat", "as in moat:2"),
        ("moat:", "as in moat:2"),
        ("moat:2,5", "as in moat:2"),
        ("moat:2>5", "as in moat:2"),
        ("imoat", "as in imoat:2,5,8"),
        ("imoat:2,5", "as in imoat:2,5,8"),
        ("imoat:2,5,8,11", "as in imoat:2,5,8"),
        ("imoat:2,,8", "as in imoat:2,5,8"),
        ("pgd", "as in pgd:2"),
        ("pgd:", "as in pgd:2"),
        ("pgd:2>", "as in pgd:2"),
        ("pgd:2:3", "as in pgd:2"),
        ("fgsm:2", "fgsm takes no number"),
        ("fgsm:", "fgsm takes no number"),
        ("gradalign:", "as in gradalign:0.2"),
        ("kim:", "as in kim:3"),
    ],
)
def test_a_wrong_method_is_refused_with_what_to_write_instead(spec, says):
    with pytest.raises(UserError) as error:
        parse_method(spec)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *product(["moat", "pgd"], ["0", "-1", "x", "2.5", "1001", "1e9", "1_0", "٣", "nan", "inf", "0x2", "1" * 5000]),
        *product(["kim"], ["0", "-1", "101", "3.0", "nan"]),
        *product(["gradalign"], ["-0.1", "nan", "inf", "-inf", "1e400", "x", "1_0", "٠.٢"]),
    ],
)
def test_a_number_out_of_its_range_is_refused_and_the_range_named(name, value):
    with pytest.raises(UserError, match=r"must be a (whole number from 1 to 100|number >= 0)"):
        parse_method(f"{name}:{value}")


def test_the_documents_have_the_cost_and_a_section_of_every_stage():
    text = (Path(__file__).parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[0].startswith("`"):  # the first of two such tables
            rows = {name.partition(":")[0]: cells[1:5] for name in re.findall(r"`([^`]+)`", cells[0])} | rows
    for name, entry in STAGES.items():
        assert re.search(rf"^### .*`{name}[:`]", text, re.MULTILINE), name
        values = {"K": 4, "C": 4, "M": 4}
        written = [sum(values.get(term, 0) or int(term) for term in cell.split("+")) for cell in rows[name]]
        assert tuple(written) == entry.cost(4).kinds, name


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("trades:10,bet=6", "did you mean beta="),
        ("trades:10,beta=6,beta=7", "beta is given twice"),
        ("zerograd:q=2", "q must be a number from 0 to 1"),
        ("aaer:over=fat", "did you mean fast"),
        ("free:0", "M must be a whole number from 1 to 100"),
        ("yopo:5,n=0", "n must be a whole number from 1 to 100"),
        ("free:4 | fast", "must be the only stage"),
        ("fast > free:2", "must be the only stage"),
        ("fast > moat:2", "can't stand between >"),
        ("fast >", "has an empty stage"),
        ("liet:3", "has no argument '3'"),
        ("fgsm:q=1", "takes no number"),
    ],
)
def test_bad_arguments_are_named_in_one_sentence(spec, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        parse_method(spec)


@pytest.mark.parametrize(
    "spec",
    [
        "nfgsm > nfgsm > pgd:5",
        "mixup > standard | fast | pgd:2>5>8",
        "trades:2,beta=3>5>8",
        "pgd:7,step=0.25",
        "aaer:over=nfgsm",
    ],
)
def test_slots_and_named_arguments_are_written_as_they_were(spec):
    assert str(parse_method(spec)) == spec


def test_a_bare_number_repeats_the_stage_with_its_named_arguments():
    assert parse_method("trades:2,beta=3>5").slots == parse_method("trades:2,beta=3 > trades:5,beta=3").slots
