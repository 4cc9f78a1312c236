"""Attacks by name, each as a list of parts; and AutoAttack, a sequence of four."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moatlab.attacks.auto_pgd import apgd
from moatlab.attacks.catalog import CATALOG, L1_RESTARTS, L1_TARGETS, RESTARTS, TARGETS, check_classes
from moatlab.attacks.draws import Draws
from moatlab.attacks.fast_boundary import fab
from moatlab.attacks.first_order import cw, fgsm, mim, pgd, strong_pgd
from moatlab.attacks.losses import is_wrong
from moatlab.attacks.norms import Eps, Norm, Threat
from moatlab.attacks.probe import Model, Probe, as_probe
from moatlab.attacks.square_attack import QUERIES, square

GROUP = 3  # restarts or targets tried side by side
SEGMENT = 500  # queries of Square per part; an evaluation can resume after each


@dataclass(frozen=True)
class Part:
    """Some restarts, targets or queries of an attack. After each part, broken images are dropped."""

    attack: str
    threat: Threat
    tries: range

    @property
    def passes(self) -> float:
        """The highest cost per image, to estimate the remaining time."""
        entry = CATALOG[self.attack]
        return entry.passes * len(self.tries) / (QUERIES if entry.tries == "queries" else 1)

    @property
    def continues(self) -> bool:
        """Whether it starts from the final points of the previous part."""
        return self.attack == "square" and self.tries.start > 0

    def run(self, probe: Probe, x: Tensor, y: Tensor, draws: Draws, before: Tensor | None = None) -> Tensor:
        eps, norm = self.threat.eps, self.threat.norm
        match self.attack:
            case "fgsm":
                return fgsm(probe, x, y, eps=eps, norm=norm)
            case "pgd7" | "pgd50" | "cw50":
                attack, steps = {"pgd7": (pgd, 7), "pgd50": (strong_pgd, 50), "cw50": (cw, 50)}[self.attack]
                starts = [draws.in_ball(x, self.threat, f"{self.attack} start", restart) for restart in self.tries]
                return attack(probe, x, y, eps=eps, step_size=eps / 4, steps=steps, norm=norm, start=torch.cat(starts))
            case "mim50":
                return mim(probe, x, y, eps=eps, step_size=eps / 50, steps=50, norm=norm)
            case "apgd-ce":
                return apgd(probe, x, y, eps=eps, norm=norm, restart=self.tries.start, draws=draws)
            case "apgd-ce-eot" | "apgd-dlr-eot":
                loss, average = self.attack.split("-")[1], CATALOG[self.attack].average
                return apgd(probe, x, y, eps=eps, norm=norm, loss=loss, average=average, draws=draws)
            case "apgd-t":
                return apgd(probe, x, y, eps=eps, norm=norm, loss="targeted-dlr", ranks=self.tries, draws=draws)
            case "fab-t":
                return fab(probe, x, y, eps=eps, norm=norm, ranks=self.tries)
            case _:
                return square(probe, x, y, eps=eps, norm=norm, queries=self.tries, start=before, draws=draws)


def parts_of(name: str, threat: Threat, classes: int, *, restarts: int = RESTARTS) -> list[Part]:
    """The parts of an attack, in order. `restarts` applies to pgd50 and cw50."""
    attack = CATALOG[name]
    if attack.members:
        return [part for member in attack.members for part in parts_of(member, threat, classes)]
    in_l1 = threat.norm == "l1"
    ranks = range(2, min(L1_TARGETS if in_l1 and name == "apgd-t" else TARGETS, classes - 1) + 2)
    starts = L1_RESTARTS if in_l1 and name == "apgd-ce" else 1
    tries = {
        "one": [range(start, start + 1) for start in range(starts)],
        "restarts": in_groups(range(restarts), first=1),
        "targets": in_groups(ranks, first=GROUP if name == "fab-t" else 1),  # after apgd-t, few images are broken early
        "queries": [range(begin, begin + SEGMENT) for begin in range(0, QUERIES, SEGMENT)],
    }
    return [Part(name, threat, some) for some in tries[attack.tries]]


def in_groups(numbers: range, first: int) -> list[range]:
    """The `first` numbers, which break most images, then groups of GROUP, which fill the batches with what is left."""
    return [numbers[:first], *(numbers[begin : begin + GROUP] for begin in range(first, len(numbers), GROUP))]


def autoattack(
    model: Model, x: Tensor, y: Tensor, *, eps: Eps, norm: Norm = "linf", draws: Draws | None = None
) -> Tensor:
    """An adversarial example for each image, or the image if none was found. This is "standard" AutoAttack: APGD on
    cross-entropy, targeted APGD on DLR, targeted FAB and Square, each on the images still robust. Croce and Hein, 2020.
    """
    probe = as_probe(model)
    logits = probe.logits(x)
    check_classes("aa", logits.shape[1])
    found, points = x.clone(), None
    rows = (~is_wrong(logits, y)).nonzero().squeeze(1)
    draws = draws or Draws.numbered(0, len(x))
    for part in parts_of("aa", Threat.of(eps, norm), logits.shape[1]):
        if not len(rows):
            break
        points = part.run(probe, x[rows], y[rows], draws.of(rows), points if part.continues else None)
        wrong = is_wrong(probe.logits(points), y[rows])
        found[rows[wrong]] = points[wrong]
        rows, points = rows[~wrong], points[~wrong]
    return found
