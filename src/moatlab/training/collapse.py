"""Catastrophic overfitting: detecting a collapse, raising the alarm, acting on it."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Literal

import torch

from moatlab.training.checkpoint import Progress, Weights
from moatlab.training.logbook import Logbook
from moatlab.training.setup import Session

LOW = 0.05  # pgd7 accuracy that counts as none
GAP = 0.10  # fgsm minus pgd7 accuracy
ALIGNED = 0.4  # on mini, robust runs stay above 0.8 after their first epoch, and collapsed ones below 0.3


def collapsed_at(checks: Sequence[tuple[int, float]]) -> int | None:
    """The first epoch e >= 2 (counted from 1) from which pgd7 accuracy stays below max(5 %, a third of its best) at
    every comparable check to the end, or None. `checks`: epoch and pgd7 accuracy of the comparable ones.

    Comparable are all epochs of a one-stage method, and the last stage of each cycle: within a cycle pgd7 drops at
    stages of benign examples and recovers.
    """
    floor = max(LOW, max((pgd7 for _, pgd7 in checks), default=0.0) / 3)
    low = takewhile(lambda check: check[1] < floor, reversed(checks))
    return min((epoch for epoch, _ in low if epoch >= 2), default=None)


def judge(checks: Sequence[Mapping[str, float]]) -> Literal["good", "low", "collapsed"]:
    """The state at the last of the comparable checks so far.

    Low: pgd7 is below half of its best so far, or below 5 % after it was above. That alone may be a bad epoch. It is
    catastrophic overfitting if the loss is also nonlinear in the ball, where single steps fail: fgsm accuracy more
    than 10 points above pgd7, or gradients at x and at a random start that are poorly aligned.
    """
    now, best = checks[-1], max(check["pgd7"] for check in checks)
    if best < LOW or now["pgd7"] >= max(LOW, best / 2):
        return "good"
    nonlinear = now["fgsm"] - now["pgd7"] > GAP or now["alignment"] < ALIGNED
    return "collapsed" if nonlinear else "low"


class CollapsePolicy:
    """Carries out --on-collapse at catastrophic overfitting, and at the recovery from it."""

    def __init__(self, session: Session, progress: Progress, log: Logbook, good: Weights | None) -> None:
        self.session, self.progress, self.log = session, progress, log
        self.good = good  # the weights of the last good epoch

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
                # After a second collapse a third is likely: heal to the end.
                if recipe.on_collapse == "heal" and len(progress.alarms) == 1:
                    progress.replaced = False
                method = self.session.then if progress.replaced else self.session.method
                resumes = f"; continuing with {method}" if recipe.on_collapse == "heal" else ""
                self.log.event("recovered", f"robustness recovered at epoch {epoch}: {shown}{resumes}", **facts)
            if recipe.on_collapse != "warn":
                weights = self.session.model.state_dict()
                self.good = {name: tensor.detach().cpu().clone() for name, tensor in weights.items()}
                progress.good_epoch = epoch
        elif verdict == "collapsed" and (not progress.alarmed or (at_the_end and recipe.on_collapse != "warn")):
            if not progress.alarmed:
                progress.alarms.append(epoch)
            what = f"robustness collapsed at epoch {epoch}: {shown}, alignment {now['alignment']:.2f}"
            self.log.event("collapse", f"{what}; {self._act()}", **facts, action=recipe.on_collapse)

    def _act(self) -> str:
        """Carry out the policy, and return a description of it."""
        progress, recipe, policy = self.progress, self.session.recipe, self.session.recipe.on_collapse
        if policy == "warn":
            progress.alarmed = True
            return "training continues; --on-collapse can stop, rollback or heal"
        if policy == "stop" or progress.step == self.session.total_steps:
            self._restore()
            progress.stopped, progress.kept_epoch = True, progress.good_epoch
            return f"ended with the model of epoch {progress.good_epoch}"
        progress.replaced = True
        if policy == "heal":
            progress.alarmed = True
            return f"healing with {recipe.then} until it recovers"
        self._restore()
        return f"back to the model of epoch {progress.good_epoch}, continuing with {recipe.then}"

    def _restore(self) -> None:
        """Load the weights of the last good epoch; the state of the optimizer is reset to zero."""
        assert self.good is not None  # an alarm needs an earlier check that was better
        self.session.model.load_state_dict(self.good)
        torch.clear_autocast_cache()
        self.session.optimizer.reset()
