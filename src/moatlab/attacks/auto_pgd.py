"""Auto-PGD: gradient ascent with momentum and an adaptive step size. Croce and Hein, 2020."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moatlab.attacks.active import keep_broken, side_by_side
from moatlab.attacks.auto_pgd_l1 import WIDEST, apgd_l1
from moatlab.attacks.draws import Draws
from moatlab.attacks.losses import cross_entropy, dlr, is_wrong, targeted_dlr
from moatlab.attacks.norms import Eps, Norm, Threat, per_image
from moatlab.attacks.probe import Model, as_probe

LOSSES: dict[str, Callable[..., Tensor]] = {"ce": cross_entropy, "dlr": dlr, "targeted-dlr": targeted_dlr}
MOMENTUM, RHO = 0.75, 0.75


def apgd(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    eps: Eps,
    norm: Norm = "linf",
    loss: str = "ce",
    ranks: Sequence[int] = (2,),
    steps: int = 100,
    restart: int = 0,
    average: int = 1,
    draws: Draws | None = None,
) -> Tensor:
    """The first adversarial iterate, or x. `ranks` are the target classes of `targeted-dlr`, by their rank in the
    logits of x (2: the runner-up), tried side by side.

        u = P[z + a steepest(g)],   z' = P[z + 0.75 (u - z) + 0.25 (z - z_before)],   a = 2 eps at first

    At each of `check_steps`, if the loss rose in at most 3/4 of the steps since the last check, or a was kept and the
    best loss has not improved, a is halved and z returns to the best point. L1 has steps of its own: `apgd_l1`.

    `average` is for a randomised model: each step follows the mean of that many gradients, loss and success are those
    of the last call, and the last adversarial iterate is returned, since the first one may be due to chance.
    """
    probe, threat = as_probe(model), Threat.of(eps, norm)
    draws = draws or Draws.numbered(0, len(x))
    criterion = LOSSES[loss]
    ranks = ranks if loss == "targeted-dlr" else (2,)
    targets = [classes_of_ranks(probe.logits(x), ranks)] if loss == "targeted-dlr" else []
    start, ball = (draws.in_ball, threat.scaled(WIDEST)) if norm == "l1" else (draws.on_sphere, threat)
    z = torch.cat([start(x, ball, f"apgd {loss}", rank, restart) for rank in ranks]).clamp_(0, 1)
    found = x.clone()
    rows, x, y = side_by_side(len(ranks), x, y)
    labels = (y, *targets)
    if norm == "l1":
        return apgd_l1(probe, x, labels, z, found, rows, threat, loss=criterion, steps=steps, average=average)
    before = z
    gradient, logits = probe.gradient(z, *labels, loss=criterion, average=average)
    best, best_gradient, best_loss = z, gradient, criterion(logits, *labels)
    best_then, last_loss = best_loss, torch.zeros_like(best_loss)  # the authors' code compares the first loss with 0
    rises, halved = torch.zeros_like(best_loss), torch.ones_like(best_loss, dtype=torch.bool)
    size = torch.full_like(best_loss, 2 * threat.eps)
    checks = check_steps(steps)

    for step in range(1, steps + 2):
        wrong = is_wrong(logits, y)
        if average > 1:
            found[rows[wrong]] = z[wrong]
        elif wrong.any():
            left = keep_broken(found, z, wrong, rows)
            labels = tuple(label[left] for label in labels)
            rows, x, y, z, before, gradient, best, best_gradient = (
                state[left] for state in (rows, x, y, z, before, gradient, best, best_gradient)
            )
            best_loss, best_then, last_loss, rises, halved, size = (
                state[left] for state in (best_loss, best_then, last_loss, rises, halved, size)
            )
        if step > steps or not len(rows):
            break

        if step - 1 in checks:
            stuck = (rises <= RHO * checks[step - 1]) | (~halved & (best_then >= best_loss))
            size = torch.where(stuck, size / 2, size)
            z = torch.where(per_image(stuck), best, z)
            gradient = torch.where(per_image(stuck), best_gradient, gradient)
            halved, best_then, rises = stuck, best_loss, torch.zeros_like(rises)

        along = MOMENTUM if step > 1 else 1.0
        u = threat.project(z + per_image(size) * threat.steepest(gradient), x)
        z, before = threat.project(z + along * (u - z) + (1 - along) * (z - before), x), z

        if step == steps:  # the last iterate needs no gradient
            logits = probe.logits(z)
            continue
        gradient, logits = probe.gradient(z, *labels, loss=criterion, average=average)
        new_loss = criterion(logits, *labels)
        rises += new_loss > last_loss
        last_loss = new_loss
        better = new_loss > best_loss
        best = torch.where(per_image(better), z, best)
        best_gradient = torch.where(per_image(better), gradient, best_gradient)
        best_loss = torch.where(better, new_loss, best_loss)
    return found


def check_steps(steps: int) -> dict[int, int]:
    """Steps after which the step size is checked (of 100: 22, 41, 57, 70, 80, 87, 93, 99) -> steps since the last."""
    window, shrink, smallest = (max(int(share * steps), 1) for share in (0.22, 0.03, 0.06))
    checks, step = {}, window
    while step <= steps:
        checks[step] = window
        window = max(window - shrink, smallest)
        step += window
    return checks


def classes_of_ranks(logits: Tensor, ranks: Sequence[int]) -> Tensor:
    """The class at each of these ranks (1: the largest logit): of all images for the first rank, then the next."""
    return logits.sort(1).indices[:, [-rank for rank in ranks]].T.flatten()
