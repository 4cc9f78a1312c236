"""Signs that a robust accuracy is not to be believed. Most wrong claims are gradients that show the wrong way."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor

from moatlab.attacks.draws import Draws, start_in_ball
from moatlab.attacks.first_order import fgsm, strong_pgd
from moatlab.attacks.losses import is_wrong
from moatlab.attacks.norms import Norm, distance
from moatlab.attacks.probe import Probe
from moatlab.evaluation.intervals import wilson

SAMPLE = 200  # images that are looked at
STEPS = 20
PASSES = 2 + 2 * STEPS  # over an image, about, because many fall on the way
STRONG: tuple[str, ...] = ("pgd7", "pgd50", "cw50", "apgd-ce", "aa-fast", "aa")

MEANING = {
    "square-beats-gradients": "Square, which sees no gradients, broke images that all gradient attacks left standing: "
    "gradients are masked, and more queries would break more.",
    "pgd-weaker-than-fgsm": "many small steps do less harm than one large step: the gradient misleads, so robustness "
    "against gradient attacks proves nothing.",
    "fgsm-above-clean": "the model is better on FGSM examples than on plain images: it has learnt to recognise the "
    "attack (label leaking, catastrophic overfitting).",
    "zero-gradients": "for many images the gradient is exactly zero (saturated or non-differentiable model): attacks "
    "that use it can't move, and their numbers are too high.",
    "randomised": "two answers for the same images differ: the model is randomised, and each number is the outcome of "
    "one draw; attacks must average over draws (EOT), which these do not.",
    "probabilities": "the outputs look like probabilities: remove the softmax, or the loss of attacks saturates and "
    "their numbers are too high.",
    "rises-with-eps": "accuracy under attack rises with eps, though a larger ball holds the smaller one: the attack "
    "fails to find what is there.",
    "not-zero-at-half": "some images stand at a radius of 0.5 per pixel, where every image can be made plain grey: the "
    "attack fails to find what is there.",
    "no-better-than-guessing": "plain accuracy may be that of always giving the most frequent class: the robustness of "
    "a model that has learnt nothing means nothing; train it longer, or look at more images.",
    "catastrophic-overfitting": "FGSM accuracy is far above accuracy under a stronger attack: the model holds against "
    "the single step only.",
    "audit-broke-more": "with another seed and more restarts, over 1 % of the images that stood were broken: the "
    "attacks had not converged.",
}


@dataclass(frozen=True)
class Flag:
    name: str
    evidence: str  # the numbers
    meaning: str  # one sentence for a person


def measure(probe: Probe, x: Tensor, y: Tensor, *, eps: float, norm: Norm, draws: Draws) -> dict[str, Any]:
    """What a few images show: zero gradients, FGSM, and PGD-20 accuracy as the radius grows."""
    gradient, logits = probe.gradient(x, y)
    right = ~is_wrong(logits, y)
    zero = (distance(gradient, "linf") == 0) & right
    half = 0.5 if norm == "linf" else 0.5 * x[0].numel() ** 0.5

    def standing(radius: float) -> float:
        start = start_in_ball(x, radius, norm, draws, "red flags")
        points = strong_pgd(probe, x, y, eps=radius, step_size=radius / 4, steps=STEPS, norm=norm, start=start)
        return (~is_wrong(probe.logits(points), y) & right).float().mean().item()

    single = fgsm(probe, x, y, eps=eps, norm=norm)
    return {
        "sample": len(x),
        "clean": right.float().mean().item(),
        "zero_gradients": zero.sum().item() / max(right.sum().item(), 1),
        "fgsm": (~is_wrong(probe.logits(single), y)).float().mean().item(),
        "pgd20": {"at half of eps": standing(eps / 2), "at eps": standing(eps), "at twice eps": standing(2 * eps)},
        "pgd20_at_half": standing(half),
    }


def judge(
    measured: dict[str, Any],
    accuracy: dict[str, float],
    broken_by: dict[str, list[str | None]],
    audited: tuple[int, int] | None,
) -> list[Flag]:
    """The flags that the numbers raise. A number over all images goes before one over the sample. Where two numbers are
    compared, a difference of two or three images says nothing, however few there are."""
    raised: list[tuple[str, str]] = []
    ladder: list[float] = list(measured["pgd20"].values())
    sample, count = measured["sample"], len(broken_by["clean"])
    one = 1 / (count if "fgsm" in accuracy else sample)  # image
    sampled = "" if "fgsm" in accuracy else f" (on {sample} images)"
    single = accuracy.get("fgsm", measured["fgsm"])
    clean = accuracy["clean"] if "fgsm" in accuracy else measured["clean"]
    strong = [(accuracy[name], name) for name in STRONG if name in accuracy and "fgsm" in accuracy]
    strongest, strong_name = min(strong or [(ladder[1], "pgd20")])

    right, guessing = broken_by["clean"].count(None), max(measured["labels"]) / count
    if wilson(right, count)[0] <= guessing:
        guessed = f"guessing {100 * guessing:.1f} %"
        raised.append(("no-better-than-guessing", f"{_of('clean', right / count)}, {guessed}"))
    broken, left = _only_square(broken_by)
    if broken > 0.002 * count:
        raised.append(("square-beats-gradients", f"{broken} of {left} images that were left"))
    pairs = [(name, accuracy[name], single, one) for name in ("pgd7", "pgd50") if {name, "fgsm"} <= accuracy.keys()]
    for name, several, once, image in [*pairs, ("pgd20", ladder[1], measured["fgsm"], 1 / sample)]:
        if several > once + 0.01 + 2 * image:
            raised.append(("pgd-weaker-than-fgsm", f"{_of(name, several)}, {_of('fgsm', once)}"))
            break
    if single > clean + one:
        raised.append(("fgsm-above-clean", f"{_of('fgsm', single)}, {_of('clean', clean)}{sampled}"))
    if measured["zero_gradients"] > 0.05:
        raised.append(("zero-gradients", f"{100 * measured['zero_gradients']:.0f} % of the images looked at"))
    if measured["randomised"]:
        raised.append(("randomised", "two forward passes differ"))
    if measured["probabilities"]:
        raised.append(("probabilities", "all outputs are in [0, 1] and sum to 1"))
    if any(larger > smaller + 0.02 + 2 / sample for smaller, larger in pairwise(ladder)):
        shown = ", ".join(f"{100 * value:.0f} % {where}" for where, value in measured["pgd20"].items())
        raised.append(("rises-with-eps", f"PGD-20 {shown}"))
    if measured["pgd20_at_half"] > 0.01:
        raised.append(("not-zero-at-half", f"{100 * measured['pgd20_at_half']:.0f} % of the images looked at"))
    if single > strongest + 0.1 + 3 * one and strongest < single / 2:
        raised.append(("catastrophic-overfitting", f"{_of('fgsm', single)}, {_of(strong_name, strongest)}{sampled}"))
    if audited and audited[0] > 0.01 * audited[1]:
        raised.append(("audit-broke-more", f"{audited[0]} of {audited[1]} images"))
    return [Flag(flag, evidence, MEANING[flag]) for flag, evidence in raised]


def _only_square(broken_by: dict[str, list[str | None]]) -> tuple[int, int]:
    """How many images Square broke, and how many there were, that no gradient attack had broken."""
    if "aa" in broken_by:
        left = [verdict for verdict in broken_by["aa"] if verdict in (None, "square")]
    else:
        others = [broken_by[name] for name in ("apgd-ce", "apgd-t", "fab-t", "pgd50", "cw50") if name in broken_by]
        if not others or "square" not in broken_by:
            return 0, 0
        left = [own for own, *rest in zip(broken_by["square"], *others, strict=True) if not any(rest)]
    return left.count("square"), len(left)


def _of(name: str, value: float) -> str:
    return f"{name} {100 * value:.1f} %"
