"""Auto-PGD: gradient ascent with momentum that finds its own step size. Croce and Hein, 2020."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from moatlab.attacks.active import first_broken, side_by_side
from moatlab.attacks.draws import Draws
from moatlab.attacks.losses import cross_entropy, dlr, is_wrong, targeted_dlr
from moatlab.attacks.norms import Norm, Threat, per_image
from moatlab.attacks.probe import Probe, as_probe

LOSSES: dict[str, Callable[..., Tensor]] = {"ce": cross_entropy, "dlr": dlr, "targeted-dlr": targeted_dlr}
MOMENTUM, RHO = 0.75, 0.75


def apgd(
    model: Probe | nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    eps: float | str,
    norm: Norm = "linf",
    loss: str = "ce",
    ranks: Sequence[int] = (2,),
    steps: int = 100,
    restart: int = 0,
    draws: Draws | None = None,
) -> Tensor:
    """The first iterate that fools the model, or x itself. `ranks` are the targets of `targeted-dlr` among the model's
    answers for x, tried side by side: 2 is the runner-up.

        u = P[z + a steepest(g)],   z' = P[z + 0.75 (u - z) + 0.25 (z - z_before)],   a = 2 eps at first

    At a growing frequency an example is checked. If its loss rose in at most 3/4 of the steps since the last check, or
    its best loss has not changed since then although a was kept, then a is halved and z goes back to the best point.
    """
    probe, threat = as_probe(model), Threat.of(eps, norm)
    draws = draws or Draws.numbered(0, len(x))
    criterion = LOSSES[loss]
    ranks = ranks if loss == "targeted-dlr" else (2,)
    targets = classes_of_ranks(probe.logits(x), ranks) if loss == "targeted-dlr" else None
    starts = [draws.on_sphere(x, threat, f"apgd {loss}", rank, restart) for rank in ranks]
    z = torch.cat(starts).clamp_(0, 1)
    found = x.clone()
    rows, x, y = side_by_side(len(ranks), x, y)
    labels: tuple[Tensor, ...] = (y,) if targets is None else (y, targets)
    before = z
    gradient, logits = probe.gradient(z, *labels, loss=criterion)
    best, best_gradient, best_loss = z, gradient, criterion(logits, *labels)
    best_then, last_loss = best_loss, torch.zeros_like(best_loss)  # the authors' code compares the first loss with 0
    rises, halved = torch.zeros_like(best_loss), torch.ones_like(best_loss, dtype=torch.bool)
    size = torch.full_like(best_loss, 2 * threat.eps)
    checks = check_steps(steps)

    for step in range(1, steps + 2):
        wrong = is_wrong(logits, y)
        if wrong.any():
            hits, left = first_broken(wrong, rows, len(found))
            found[rows[hits]] = z[hits]
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
            window = checks[step - 1]
            stuck = (rises <= RHO * window) | (~halved & (best_then >= best_loss))
            size = torch.where(stuck, size / 2, size)
            z = torch.where(per_image(stuck), best, z)
            gradient = torch.where(per_image(stuck), best_gradient, gradient)
            halved, best_then, rises = stuck, best_loss, torch.zeros_like(rises)

        along = MOMENTUM if step > 1 else 1.0
        u = threat.project(z + per_image(size) * threat.steepest(gradient), x)
        z, before = threat.project(z + along * (u - z) + (1 - along) * (z - before), x), z

        if step == steps:  # nothing follows the last iterate: its logits are enough
            logits = probe.logits(z)
            continue
        gradient, logits = probe.gradient(z, *labels, loss=criterion)
        new_loss = criterion(logits, *labels)
        rises += new_loss > last_loss
        last_loss = new_loss
        better = new_loss > best_loss
        best = torch.where(per_image(better), z, best)
        best_gradient = torch.where(per_image(better), gradient, best_gradient)
        best_loss = torch.where(better, new_loss, best_loss)
    return found


def check_steps(steps: int) -> dict[int, int]:
    """The steps after which the step size is checked, each with the number of steps since the one before it: 22, 41,
    57, 70, 80, 87, 93 and 99 of 100."""
    window, shrink, smallest = (max(int(share * steps), 1) for share in (0.22, 0.03, 0.06))
    checks, step = {}, window
    while step <= steps:
        checks[step] = window
        window = max(window - shrink, smallest)
        step += window
    return checks


def classes_of_ranks(logits: Tensor, ranks: Sequence[int]) -> Tensor:
    """The classes that the logits put at these ranks (counted from 1): of all examples the first, then the next."""
    ranked = logits.sort(1).indices
    return torch.cat([ranked[:, -rank] for rank in ranks])
