"""Method specs, option values and whole command lines by the thousand: done (0) or refused (2), and nothing else."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from faults.commands import moat, run
from moatlab.methods.language import STAGES
from moatlab.reproduce.paper import EXPERIMENTS
from moatlab.training.presets import PRESETS
from moatlab.training.recipe import Recipe, option_name

names = st.sampled_from([*STAGES, "moat", "imoat", "gradlign", "PGD", "", "π"])
numbers = st.one_of(
    st.integers(-5, 2000).map(str), st.floats().map(str), st.integers(-(10**40), 10**40).map(str),
    st.sampled_from(["", "1e400", "-0", "0x10", "1_000", "٣", "nan", "inf", "8/255", "1/0", "2.", ".5", " 3 "]),
)  # fmt: skip
stages = st.builds(lambda name, values: name + (":" + values if values else ""), names, st.one_of(
    st.just(""), numbers, st.lists(numbers, min_size=1, max_size=4).map(">".join),
    st.lists(numbers, min_size=1, max_size=4).map(",".join)))  # fmt: skip
# No lone surrogates and no NUL: a shell can't pass them. Hypothesis finds --debug in the source; it means a traceback.
text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40).filter(lambda it: it != "--debug")
specs = st.one_of(st.lists(stages, min_size=1, max_size=6).map(" | ".join), text)
values = st.one_of(numbers, text, specs, st.sampled_from([
    "mini", "cifar10", "paper", "cyclic", "stepwise", "train", "test", "holdout", "eval", "auto", "cpu", "heal",
    "cuda:7", "rollback", "stop", "skip", "fp16", "preact_resnet18", "os:system", "0.2,0.2,0.2", "1/2"]))  # fmt: skip
recipe_options = [option_name(name) for name in Recipe.model_fields if name != "method"]
options = st.lists(st.tuples(st.sampled_from([*recipe_options, "--preset"]), values), max_size=4)
flags = st.sampled_from([(), ("--json",), ("--resume",), ("--no-augment",), ("--deterministic",), ("--help",)])
presets = st.sampled_from([(), *(("--preset", name) for name in PRESETS)])
planned = st.tuples(st.just("plan"), specs, presets, options, flags)
sound = st.tuples(st.just("plan"), st.sampled_from(["fgsm", "kim", "moat:2", "imoat:2,5,8", "cutmix | fast | pgd:2>5"]),
                  presets, st.just([]), st.sampled_from([(), ("--json",), ("--no-augment",)]))  # fmt: skip
sweep_options = [*recipe_options, "--methods", "--seeds", "--n", "--n-aa", "--known", "--out"]
reproduced = st.tuples(
    st.just("reproduce"), st.one_of(st.sampled_from([*EXPERIMENTS]), text), presets,
    st.lists(st.tuples(st.sampled_from(sweep_options), values), max_size=3),
    st.sampled_from([("--plan",), ("--plan", "--json")]),
)  # fmt: skip
other_commands = st.tuples(
    st.sampled_from(["eval", "verify", "data", "trian", "bench", "compare", "train", "report"]), text, st.just(()),
    st.lists(st.tuples(st.sampled_from(
        ["--n", "--eps", "--norm", "--attacks", "--seed", "--batch-size", "--which", "--device", "--max-steps"]
    ), values), min_size=1, max_size=3), st.just(("--width", "nonsense")),
)  # fmt: skip  # an option that is always wrong: these must never start to work
command_lines = st.one_of(planned, planned, sound, reproduced, other_commands)


def arguments_of(line: Any) -> list[str]:
    command, spec, preset, chosen, flag = line
    return [command, spec, *preset, *(part for option in chosen for part in option), *flag]


def in_process(count: int) -> dict[str, Any]:
    codes: Counter[int] = Counter()

    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(command_lines)
    def try_one(line: Any) -> None:
        ended = moat(*arguments_of(line))
        codes[ended.code] += 1
        assert ended.code in (0, 2), (arguments_of(line), ended)
        assert ended.code == 0 or ended.last_line.startswith("moat: "), (arguments_of(line), ended)

    try_one()
    return {"command lines": sum(codes.values()), **{f"exit code {code}": n for code, n in sorted(codes.items())}}


def as_processes(folder: Path, count: int) -> dict[str, Any]:
    codes: Counter[int] = Counter()

    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck), phases=[
        *settings().phases][:3])  # fmt: skip
    @given(command_lines)
    def try_one(line: Any) -> None:
        ended = run(folder, *arguments_of(line))
        codes[ended.code] += 1
        assert ended.code in (0, 2), (arguments_of(line), ended)
        assert "Traceback" not in ended.err, (arguments_of(line), ended)

    try_one()
    return {"command lines": sum(codes.values()), **{f"exit code {code}": n for code, n in sorted(codes.items())}}
