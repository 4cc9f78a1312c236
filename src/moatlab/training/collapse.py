"""Acting on catastrophic overfitting: --on-collapse."""

import torch

from moatlab.training.checkpoint import Progress, Weights
from moatlab.training.logbook import Logbook
from moatlab.training.outcome import judge
from moatlab.training.setup import Session

FALL = 0.10  # of pgd7 accuracy between checks within an epoch


class CollapsePolicy:
    """Carries out --on-collapse at catastrophic overfitting, and at the recovery from it."""

    def __init__(self, session: Session, progress: Progress, log: Logbook, good: Weights | None) -> None:
        self.session, self.progress, self.log = session, progress, log
        self.good = good  # the weights of the last good epoch

    def watch(self) -> None:
        progress, recipe = self.progress, self.session.recipe
        checks = [line for line in progress.history if line["comparable"]]
        epoch, now = progress.epochs_logged, checks[-1]
        verdict = judge(checks, len(self.session.images.classes), alarmed=progress.alarmed)
        at_the_end = progress.step == self.session.total_steps
        best = max(check["pgd7"] for check in checks)
        facts = {name: now[name] for name in ("fgsm", "pgd7", "alignment")} | {"epoch": epoch, "best_pgd7": best}
        shown = f"pgd7 {100 * now['pgd7']:.1f} % (best {100 * best:.1f} %), fgsm {100 * now['fgsm']:.1f} %"
        if verdict == "good":
            if progress.alarmed:
                progress.alarmed = False
                # After a second collapse a third is likely: heal to the end.
                if recipe.on_collapse == "heal" and not recipe.check_every and len(progress.alarms) == 1:
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

    def check(self, accuracy: float) -> None:
        """A check between epochs (Li et al., 2020): after a drop by ten points, or to half of the best, multi-step
        updates until the next check that is good."""
        progress, then = self.progress, self.session.then
        progress.checks.append((progress.step, accuracy))
        best = max(pgd7 for _, pgd7 in progress.checks)
        low = accuracy < max(best - FALL, best / 2)
        if low and not progress.replaced:
            fell = f"pgd7 fell to {100 * accuracy:.1f} % (best {100 * best:.1f} %) at step {progress.step}"
            self.log.event("burst", f"{fell}; training with {then} until the next check", pgd7=accuracy, best_pgd7=best)
        progress.replaced = low

    def _act(self) -> str:
        """Carry out the policy, and return a description of it."""
        progress, recipe, policy = self.progress, self.session.recipe, self.session.recipe.on_collapse
        if policy == "warn":
            progress.alarmed = True
            return "training continues; --on-collapse can stop, rollback or heal"
        if policy == "stop" or progress.step == self.session.total_steps:
            progress.stopped = True
            if not self._restore():
                return "ended; no earlier epoch was good"
            progress.kept_epoch = progress.good_epoch
            return f"ended with the model of epoch {progress.good_epoch}"
        if recipe.check_every:
            progress.alarmed = True
            return f"checks every {recipe.check_every} steps act on it"
        progress.replaced = True
        if policy == "heal":
            progress.alarmed = True
            return f"healing with {recipe.then} until it recovers"
        restored = (
            f"back to the model of epoch {progress.good_epoch}" if self._restore() else "no earlier epoch was good"
        )
        return f"{restored}, continuing with {recipe.then}"

    def _restore(self) -> bool:
        """Load the weights of the last good epoch, if there is one; the state of the optimizer is reset to zero."""
        if self.good is None:
            return False
        self.session.model.load_state_dict(self.good)
        torch.clear_autocast_cache()
        self.session.optimizer.reset()
        return True
