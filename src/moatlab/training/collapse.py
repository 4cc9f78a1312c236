"""Catastrophic overfitting: when a run has collapsed, when the alarm is raised, and what is done about it."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from moatlab.training.checkpoint import Progress, Weights
from moatlab.training.logbook import Logbook
from moatlab.training.setup import Session

LOW = 0.05  # pgd7 accuracy that is none
GAP = 0.10  # of fgsm over pgd7 accuracy
ALIGNED = 0.4  # on mini, robust runs stay above 0.8 after their first epoch, and collapsed ones below 0.3


def collapsed_at(checks: Sequence[tuple[int, float]]) -> int | None:
    """The epoch (counted from 1) from which a run has collapsed, or None. `checks`: epoch and pgd7 accuracy of the
    comparable ones.

    Collapsed at e >= 2: from e on, at every comparable check to the end, pgd7 accuracy stays below
    max(5 %, a third of its best). Comparable are all epochs of a one-stage method, and the ends of the last stage of
    a cycle (within a cycle pgd7 drops at each stage of benign examples, and recovers).
    """
    if not checks:
        return None
    floor = max(LOW, max(value for _, value in checks) / 3)
    collapse = None
    for epoch, value in checks:
        if value >= floor:
            collapse = None
        elif collapse is None and epoch >= 2:
            collapse = epoch
    return collapse


def judge(checks: Sequence[Mapping[str, float]]) -> Literal["good", "low", "collapsed"]:
    """What the last of the comparable checks so far says, while the end is not known.

    Low: pgd7 is below half of its best so far, or below 5 % after it was not. That alone may be a bad epoch. It is
    catastrophic overfitting where the loss is bent as well, so that single steps no longer lead to where it is high:
    fgsm accuracy more than 10 points above pgd7, or gradients at x and at a random start of little alignment.
    """
    now, best = checks[-1], max(check["pgd7"] for check in checks)
    if best < LOW or now["pgd7"] >= max(LOW, best / 2):
        return "good"
    bent = now["fgsm"] - now["pgd7"] > GAP or now["alignment"] < ALIGNED
    return "collapsed" if bent else "low"


class CollapsePolicy:
    """Acts as the recipe says where a comparable check shows catastrophic overfitting, and where it is over."""

    def __init__(self, session: Session, progress: Progress, log: Logbook, good: Weights | None) -> None:
        self.session, self.progress, self.log = session, progress, log
        self.good = good  # the weights of the last good epoch, which a collapse may call for

    def watch(self) -> None:
        progress, recipe = self.progress, self.session.recipe
        checks = [line for line in progress.history if line["comparable"]]
        verdict, epoch, now = judge(checks), progress.epochs_logged, checks[-1]
        at_the_end = progress.step == self.session.total_steps
        best = max(check["pgd7"] for check in checks)
        facts = {name: now[name] for name in ("fgsm", "pgd7", "alignment")} | {"epoch": epoch, "best_pgd7": best}
        shown = f"pgd7 {100 * now['pgd7']:.1f} % (best {100 * best:.1f} %), fgsm {100 * now['fgsm']:.1f} %"
        if verdict == "good":
            if progress.alarmed:
                progress.alarmed = False
                # Once it has collapsed twice, it would again: then it is healed to the end.
                if recipe.on_collapse == "heal" and len(progress.alarms) == 1:
                    progress.replaced = False
                method = self.session.then if progress.replaced else self.session.method
                resumes = f"; on with {method}" if recipe.on_collapse == "heal" else ""
                self.log.event("recovered", f"robustness is back at epoch {epoch}: {shown}{resumes}", **facts)
            if recipe.on_collapse != "warn":
                weights = self.session.model.state_dict()
                self.good = {name: tensor.detach().cpu().clone() for name, tensor in weights.items()}
                progress.good_epoch = epoch
        elif verdict == "collapsed" and (not progress.alarmed or (at_the_end and recipe.on_collapse != "warn")):
            if not progress.alarmed:
                progress.alarms.append(epoch)
            what = f"robustness collapsed at epoch {epoch}: {shown}, alignment {now['alignment']:.2f}"
            action = self._act()
            self.log.event("collapse", f"{what}; {action}", **facts, action=recipe.on_collapse)

    def _act(self) -> str:
        """Do what the recipe says, and return what was done."""
        progress, recipe, policy = self.progress, self.session.recipe, self.session.recipe.on_collapse
        if policy == "warn":
            progress.alarmed = True
            return "--on-collapse stop, rollback or heal would act on it"
        if policy == "stop" or progress.step == self.session.total_steps:
            self._go_back()
            progress.stopped, progress.kept_epoch = True, progress.good_epoch
            return f"ended with the model of epoch {progress.good_epoch}"
        progress.replaced = True
        if policy == "heal":
            progress.alarmed = True
            return f"healing with {recipe.then} until it is back"
        self._go_back()
        return f"back to the model of epoch {progress.good_epoch}, and on with {recipe.then}"

    def _go_back(self) -> None:
        """The weights of the last good epoch, with the momentum at rest."""
        assert self.good is not None  # an alarm needs a check that was better
        self.session.model.load_state_dict(self.good)
        torch.clear_autocast_cache()
        for velocity in self.session.optimizer.velocity.values():
            velocity.zero_()
