"""The one table of attacks. Whatever lists, checks, prices or ranks attacks reads it; it needs no torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from moatlab.runtime.errors import UserError, did_you_mean

RESTARTS, TARGETS = 10, 9
AUDIT = "audit"  # stands beside the names of attacks in results; the audit can't be asked for as one


@dataclass(frozen=True)
class Attack:
    """`judged`: at the plain image; at the `last` iterate, for every image; at the `first` point that fools the model
    (the image itself is returned where none does); at the `best` point met; or by its `members`, one after another.

    `passes` is the cost of one try (of all queries) on an image that stays robust; `tries` says of what there are many.
    """

    name: str
    judged: Literal["plain", "last", "first", "best", "members"]
    passes: float = 0.0
    tries: Literal["one", "restarts", "targets", "queries"] = "one"
    members: tuple[str, ...] = ()
    classes: int = 2  # needed at least: the targeted DLR loss reads the four largest logits
    rank: int = 0  # strength, for the catastrophic-overfitting flag and for the axis of plots; 0: not compared
    thorough: bool = False  # enough to state a robust accuracy
    in_paper: bool = False  # a column of the paper's tables
    watched: bool = False  # measured after each epoch of a run
    like_fgsm: bool = False  # many small steps on FGSM's loss: a red flag where it is weaker than FGSM
    in_audit: bool = False  # repeated by the audit, with another seed and more restarts
    note: str = ""


AUTOATTACK = ("apgd-ce", "apgd-t", "fab-t", "square")
CATALOG = {
    attack.name: attack
    for attack in (
        Attack("clean", "plain", 0.5, in_paper=True, watched=True),
        Attack("fgsm", "last", 1, in_paper=True, watched=True),
        Attack("pgd7", "last", 7, rank=1, watched=True, like_fgsm=True),
        Attack("pgd50", "first", 50, "restarts", rank=2, thorough=True, in_paper=True, like_fgsm=True),
        Attack("cw50", "first", 50, "restarts", rank=2, thorough=True, in_paper=True, in_audit=True),
        Attack("mim50", "last", 50, in_paper=True),
        Attack("apgd-ce", "first", 100, rank=2, thorough=True, in_audit=True),
        Attack("apgd-t", "first", 100, "targets", classes=4, thorough=True, in_audit=True),
        Attack("fab-t", "first", 150, "targets"),
        Attack("square", "best", 2500, "queries"),
        Attack(
            "aa-fast",
            "members",
            members=AUTOATTACK[:2],
            classes=4,
            rank=3,
            thorough=True,
            note="an upper bound on robustness, not AutoAttack: apgd-ce and apgd-t only",
        ),
        Attack("aa", "members", members=AUTOATTACK, classes=4, rank=4, thorough=True, in_paper=True),
    )
}
NAMES = tuple(CATALOG)
PAPER = tuple(name for name, attack in CATALOG.items() if attack.in_paper)
WATCHED = tuple(name for name, attack in CATALOG.items() if attack.watched)


def check_names(names: Iterable[str] | str) -> list[str]:
    """The attacks asked for, in the order given, as a list or as one text with commas; `clean` is always measured."""
    names = names.split(",") if isinstance(names, str) else names
    names = list(dict.fromkeys(name.strip() for name in names))
    if not names:
        raise UserError(f"name at least one attack of: {', '.join(NAMES)}")
    for name in names:
        if name not in CATALOG:
            raise UserError(f"there is no attack '{name}'{did_you_mean(name, NAMES)}; there are {', '.join(NAMES)}")
    return [name for name in names if name != "clean"]


def usual_attacks(classes: int) -> list[str]:
    """Those of the paper's tables; with fewer than four classes, what works of AutoAttack takes its place."""
    members = [name for name in AUTOATTACK if CATALOG[name].classes <= classes]
    return [*PAPER[1:-1], *(["aa"] if classes >= CATALOG["aa"].classes else members)]


def check_classes(name: str, classes: int) -> None:
    if classes < (needed := CATALOG[name].classes):
        others = ", ".join(other for other, attack in CATALOG.items() if attack.classes <= classes)
        raise UserError(
            f"{name} needs at least {needed} classes and this model has {classes}; these attacks work: {others}"
        )
