"""The attacks by the names that people type, each as a list of parts; and AutoAttack, which is four of them in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moatlab.attacks.auto_pgd import apgd
from moatlab.attacks.draws import Draws, start_in_ball
from moatlab.attacks.fast_boundary import fab
from moatlab.attacks.first_order import cw, fgsm, mim, pgd, strong_pgd
from moatlab.attacks.losses import is_wrong
from moatlab.attacks.norms import Norm
from moatlab.attacks.probe import Probe, as_probe
from moatlab.attacks.square_attack import QUERIES, square
from moatlab.runtime.errors import UserError, did_you_mean

RESTARTS = 10
TARGETS = 9
GROUP = 3  # restarts or targets that are tried side by side
SEGMENT = 500  # of Square's queries, after which an evaluation can be continued

AUTOATTACK = ("apgd-ce", "apgd-t", "fab-t", "square")
ENSEMBLES = {"aa": AUTOATTACK, "aa-fast": AUTOATTACK[:2]}
FIND_OR_RETURN = ("pgd50", "cw50", "apgd-ce", "apgd-t", "fab-t")  # return x itself where they find nothing
LAST_ITERATE = ("fgsm", "pgd7", "mim50")  # judged at one point, for every image
NAMES = ("clean", "fgsm", "pgd7", "pgd50", "cw50", "mim50", "apgd-ce", "apgd-t", "fab-t", "square", "aa", "aa-fast")
FOUR_CLASSES = ("apgd-t", "aa", "aa-fast")  # their loss needs the four largest logits

# (probe, x, y, draws, the points that the part before ended at) -> points
Run = Callable[[Probe, Tensor, Tensor, Draws, Tensor | None], Tensor]


@dataclass(frozen=True)
class Part:
    """Some restarts, targets or queries of an attack: what runs between two looks at who is still standing."""

    attack: str
    run: Run
    work: float  # passes over an image, at most; for the time left
    continues: bool = False  # it goes on from the points where the part before ended


def parts_of(name: str, *, eps: float, norm: Norm, classes: int, restarts: int = RESTARTS) -> list[Part]:
    """What an attack does, in order. `restarts` are those of pgd50 and cw50."""
    if name in ENSEMBLES:
        return [part for member in ENSEMBLES[name] for part in parts_of(member, eps=eps, norm=norm, classes=classes)]
    ranks = range(2, min(TARGETS, classes - 1) + 2)
    runs: list[Run]
    match name:
        case "fgsm":
            runs, work = [lambda p, x, y, _d, _b: fgsm(p, x, y, eps=eps, norm=norm)], 1.0
        case "mim50":
            runs = [lambda p, x, y, _d, _b: mim(p, x, y, eps=eps, step_size=eps / 50, steps=50, norm=norm)]
            work = 50.0
        case "pgd7":
            runs, work = [_from_random_starts(pgd, name, range(1), 7, eps, norm)], 7.0
        case "pgd50" | "cw50":
            attack = strong_pgd if name == "pgd50" else cw
            groups = in_groups(range(restarts), first=1)
            runs = [_from_random_starts(attack, name, group, 50, eps, norm) for group in groups]
            work = 50.0 * restarts / len(groups)
        case "apgd-ce":
            runs, work = [lambda p, x, y, d, _b: apgd(p, x, y, eps=eps, norm=norm, draws=d)], 100.0
        case "apgd-t":
            groups = in_groups(ranks, first=1)
            runs = [_targeted_apgd(group, eps, norm) for group in groups]
            work = 100.0 * len(ranks) / len(groups)
        case "fab-t":
            groups = in_groups(ranks, first=GROUP)  # after targeted APGD, nobody falls early
            runs = [_targeted_fab(group, eps, norm) for group in groups]
            work = 150.0 * len(ranks) / len(groups)
        case "square":
            segments = [range(begin, begin + SEGMENT) for begin in range(0, QUERIES, SEGMENT)]
            runs, work = [_square_segment(queries, eps, norm) for queries in segments], SEGMENT / 2
        case _:
            raise UserError(unknown_attack(name))
    return [Part(name, run, work, continues=name == "square" and run is not runs[0]) for run in runs]


def in_groups(numbers: range, first: int) -> list[range]:
    """Restarts or targets that are tried side by side: few examples stand by then, and batches are fuller so. The first
    ones, in which most of those that fall do, go `first` at a time."""
    head, rest = numbers[:first], numbers[first:]
    return [head, *(rest[begin : begin + GROUP] for begin in range(0, len(rest), GROUP))]


def _from_random_starts(
    attack: Callable[..., Tensor], name: str, restarts: range, steps: int, eps: float, norm: Norm
) -> Run:
    def run(probe: Probe, x: Tensor, y: Tensor, draws: Draws, _before: Tensor | None) -> Tensor:
        starts = [start_in_ball(x, eps, norm, draws, f"{name} start", restart) for restart in restarts]
        return attack(probe, x, y, eps=eps, step_size=eps / 4, steps=steps, norm=norm, start=torch.cat(starts))

    return run


def _targeted_apgd(ranks: range, eps: float, norm: Norm) -> Run:
    return lambda p, x, y, d, _b: apgd(p, x, y, eps=eps, norm=norm, loss="targeted-dlr", ranks=ranks, draws=d)


def _targeted_fab(ranks: range, eps: float, norm: Norm) -> Run:
    return lambda p, x, y, _d, _b: fab(p, x, y, eps=eps, norm=norm, ranks=ranks)


def _square_segment(queries: range, eps: float, norm: Norm) -> Run:
    return lambda p, x, y, d, before: square(p, x, y, eps=eps, norm=norm, queries=queries, start=before, draws=d)


def autoattack(
    model: Probe | nn.Module, x: Tensor, y: Tensor, *, eps: float, norm: Norm = "linf", draws: Draws | None = None
) -> Tensor:
    """An example that fools the model for each image where one was found, and the image itself elsewhere.

    APGD on the cross-entropy, targeted APGD on the DLR loss, targeted FAB and Square, each on what the ones before it
    left standing: "standard" AutoAttack. Croce and Hein, 2020.
    """
    probe = as_probe(model)
    logits = probe.logits(x)
    if logits.shape[1] < 4:
        raise UserError(too_few_classes("autoattack", logits.shape[1]))
    found = x.clone()
    standing = ~is_wrong(logits, y)
    points: Tensor | None = None
    draws = draws or Draws.numbered(0, len(x))
    for part in parts_of("aa", eps=eps, norm=norm, classes=logits.shape[1]):
        if not standing.any():
            break
        rows = standing.nonzero().squeeze(1)
        points = part.run(probe, x[rows], y[rows], draws.of(rows), points if part.continues else None)
        wrong = is_wrong(probe.logits(points), y[rows])
        found[rows[wrong]] = points[wrong]
        standing[rows[wrong]] = False
        points = points[~wrong]
    return found


def check_names(names: Iterable[str] | str) -> list[str]:
    """The attacks asked for, in the order given; `clean` is measured in any case. In a text they stand between
    commas."""
    names = names.split(",") if isinstance(names, str) else names
    names = list(dict.fromkeys(name.strip() for name in names))
    if not names:
        raise UserError(f"name at least one attack of: {', '.join(NAMES)}")
    for name in names:
        if name not in NAMES:
            raise UserError(unknown_attack(name))
    return [name for name in names if name != "clean"]


def unknown_attack(name: str) -> str:
    return f"there is no attack '{name}'{did_you_mean(name, NAMES)}; there are {', '.join(NAMES)}"


def usual_attacks(classes: int) -> list[str]:
    """Those of the paper's tables; with fewer than four classes, what works of AutoAttack takes its place."""
    return ["fgsm", "pgd50", "cw50", "mim50", *(["aa"] if classes >= 4 else ["apgd-ce", "fab-t", "square"])]


def too_few_classes(name: str, classes: int) -> str:
    others = ", ".join(other for other in NAMES if other not in FOUR_CLASSES)
    return f"{name} needs at least 4 classes and this model has {classes}; these attacks work: {others}"
