"""Attacks over a data set. All examples of a chunk march in lockstep, and only those still standing are worked on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moatlab.attacks.draws import Draws
from moatlab.attacks.ensemble import ENSEMBLES, FIND_OR_RETURN, LAST_ITERATE, Part, check_names, parts_of
from moatlab.attacks.losses import is_wrong
from moatlab.attacks.norms import USUAL_EPS, Norm
from moatlab.attacks.probe import Probe, evaluating
from moatlab.data.batches import as_floats
from moatlab.evaluation import red_flags
from moatlab.evaluation.checks import as_tensor, channels_last_copy, check_input, check_model, check_norm, device_of
from moatlab.evaluation.result import AUDIT, Evaluation, audited
from moatlab.evaluation.state import Partial
from moatlab.models import users_code
from moatlab.models.weights import hash_of
from moatlab.runtime import console
from moatlab.runtime.device import DTYPES, Autocast, full_precision, left_as_found
from moatlab.runtime.environment import keep_freed_memory
from moatlab.runtime.errors import Interrupted, RunFailed, UserError
from moatlab.runtime.randomness import key
from moatlab.runtime.signals import Caught, signals_caught
from moatlab.training.recipe import parse_eps

STANDING, CLEAN = 0, 1  # verdicts; from 2 on, the number of the member attack that broke the example, plus 2
CHUNK_IMAGES, CHUNK_BYTES = 1000, 2**26
BATCH, BATCH_PIXELS = 256, 3 * 32 * 32  # images of that size; fewer of larger ones
AUDIT_RESTARTS = 20


def evaluate(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    attacks: Sequence[str] | str = ("aa",),
    eps: float | str | None = None,
    norm: Norm = "linf",
    seed: int = 0,
    batch_size: int | None = None,
    chunk_size: int | None = None,
    examples: Tensor | None = None,
    audit: bool = False,
    keep_adversarial: bool = False,
    precision: str = "fp32",
    state: str | Path | None = None,
    identity: dict[str, Any] | None = None,
) -> Evaluation:
    """Accuracy of `model` on images `x` with labels `y`, plain and under attacks (by their names).

    x is float, (N, C, H, W), in [0, 1]; or bytes, (N, H, W, C), as data sets hold them. The model is evaluated in eval
    mode, in full precision, and is given back exactly as it was. The radius is 8/255 in L-inf and 128/255 in L2 unless
    it is given. An example counts as broken only where this very model misclassifies a point found in the ball. With
    another `precision`, bf16 or fp16, it is the model under autocast that is evaluated, and attacked.

    `examples` numbers the images within their data set (0, 1, ... if not given): random draws depend on the seed and
    that number alone, so that batches, chunks, order and shards change no draw. With `state`, a folder, an evaluation
    that was stopped goes on where it was. One of other weights, images or settings, or of a model that gives other
    answers, is refused; `identity` holds what else it must be an evaluation of.
    """
    names = check_names(attacks)
    check_norm(norm)
    eps = USUAL_EPS[norm] if eps is None else eps
    eps = parse_eps(eps, norm) if isinstance(eps, str) else eps
    x, y = as_tensor(x), as_tensor(y)
    check_input(x, y, eps, norm, examples)
    if precision not in DTYPES:
        raise UserError(f"the precision must be one of {', '.join(DTYPES)}, not '{precision}'")
    for name, size in (("batch_size", batch_size), ("chunk_size", chunk_size)):
        if size is not None and size < 1:
            raise UserError(f"{name} is {size}; it must be at least 1")
    keep_freed_memory()
    device = device_of(model, x)
    if precision != "fp32":
        model = Autocast(model, precision)
    with torch.inference_mode(False), evaluating(model), full_precision(), left_as_found(device):
        torch.manual_seed(key(seed, "inside the model"))  # a randomised model draws from the global generators
        x, y = (tensor.clone() if tensor.is_inference() else tensor.detach() for tensor in (x, y.long()))
        job = _Job(model, device, x, y, names, eps, norm, seed, batch_size, chunk_size, examples, audit)
        settings = {
            "attacks": ["clean", *names], "eps": eps, "norm": norm, "seed": seed, "images": len(y), "audit": audit,
            "chunk_size": job.chunk_size, "batch_size": job.attacked.batch_size, "classes": job.classes,
        }  # fmt: skip
        if precision != "fp32":
            settings["precision"] = precision
        if state is not None:
            images = hash_of("", [("x", x), ("y", y), ("examples", job.examples)])
            weights = hash_of("", [*model.named_parameters(), *model.named_buffers()])
            identity = {**settings, "model": weights, "set of images": images,
                        "keep_adversarial": keep_adversarial, **(identity or {})}  # fmt: skip
        partial = Partial(None if state is None else Path(state), identity or {}, keep_examples=keep_adversarial)
        job.run(partial, catch_signals=state is not None)
    return job.result(partial, settings)


@dataclass(frozen=True)
class Step:
    """One part of one attack on one chunk."""

    chunk: int
    place: slice
    name: str
    number: int
    part: Part


class _Job:
    def __init__(
        self, model: nn.Module, device: torch.device, x: Tensor, y: Tensor, names: list[str], eps: float, norm: Norm,
        seed: int, batch_size: int | None, chunk_size: int | None, examples: Tensor | None, audit: bool,
    ) -> None:  # fmt: skip
        self.device, self.x, self.y = device, x, y.to(device)
        self.names = [*names, AUDIT] if audit else names
        self.eps, self.norm, self.seed = eps, norm, seed
        self.examples = torch.arange(len(y)) if examples is None else examples.cpu()
        sample = self.images(slice(0, min(len(y), 8)))
        self.classes, self.answers, self.measured = check_model(model, sample, self.y, names)
        # Measured: gradients of CIFAR-sized images gain little beyond 256 at once, and memory is bounded by it.
        batch_size = batch_size or max(min(BATCH, BATCH * BATCH_PIXELS // sample[0].numel()), 32)
        # Users' models get contiguous images, which some rely on; the copy gets what it was laid out for.
        twin = channels_last_copy(model, sample)
        self.layout = torch.contiguous_format if twin is None else torch.channels_last
        self.untouched = Probe(model, batch_size=batch_size, memory_format=torch.contiguous_format)
        self.attacked = Probe(
            model if twin is None else twin, batch_size=batch_size, memory_format=self.layout,
            inference_mode=twin is not None,
        )  # fmt: skip
        usual = max(min(CHUNK_IMAGES, CHUNK_BYTES // (4 * sample[0].numel())), 1)
        self.chunk_size = chunk_size or usual
        self.sample = min(red_flags.SAMPLE, usual, len(y))
        self.chunks = [slice(begin, begin + self.chunk_size) for begin in range(0, len(y), self.chunk_size)]
        self.parts = {name: self.parts_of(name) for name in self.names}
        self.verdicts = {name: torch.zeros(len(y), dtype=torch.int8) for name in self.names}
        self.cost = {name: {"forwards": 0, "gradients": 0, "seconds": 0.0} for name in ["clean", *self.names]}
        self.clean_wrong = torch.zeros(len(y), dtype=torch.bool)

    def images(self, which: slice) -> Tensor:
        """Images as floats on the device, contiguous."""
        chosen = self.x[which].to(self.device)
        return (as_floats(chosen) if chosen.dtype == torch.uint8 else chosen).contiguous()

    def parts_of(self, name: str) -> list[Part]:
        if name != AUDIT:
            return parts_of(name, eps=self.eps, norm=self.norm, classes=self.classes)
        members = ("cw50", "apgd-ce", "apgd-t") if self.classes >= 4 else ("cw50", "apgd-ce")
        return [
            part
            for member in members
            for part in parts_of(member, eps=self.eps, norm=self.norm, classes=self.classes, restarts=AUDIT_RESTARTS)
        ]

    def members(self, name: str) -> list[str]:
        """The attacks inside an attack, in order: what a verdict's number means."""
        return list(dict.fromkeys(part.attack for part in self.parts[name]))

    # --- the loop

    def run(self, partial: Partial, *, catch_signals: bool) -> None:
        steps = [
            Step(chunk, place, name, number, part)
            for chunk, place in enumerate(self.chunks)
            for name in self.names
            for number, part in enumerate(self.parts[name])
        ]
        with _Progress(self, steps) as progress, signals_caught() if catch_signals else nullcontext(Caught()) as caught:

            def tick() -> None:
                caught.raise_if_any()
                progress.show()

            self.attacked.tick = self.untouched.tick = tick
            try:
                first, points = self._continue(partial) or self._begin(progress)
                for number in range(first, len(steps)):
                    points = self._take(steps[number], partial, progress, points)
                    if number + 1 == len(steps) or not steps[number + 1].part.continues:
                        points = None
                    partial.save(self._state(number + 1), points)
            except Interrupted as error:
                partial.flush()
                raise Interrupted(f"{error}; nothing is lost", error.signal_number) from None
            except RunFailed:
                partial.flush()
                raise

    @users_code("the model failed under attack", RunFailed)
    def _take(self, step: Step, partial: Partial, progress: _Progress, before: Tensor | None) -> Tensor | None:
        """One step on the examples still standing; who falls is entered. Returns the points of those who do not."""
        verdicts = self.verdicts[step.name][step.place]
        if step.number == 0:
            verdicts[self._out_of_reach(step.name, step.place)] = CLEAN
        rows = (verdicts == STANDING).nonzero().squeeze(1)
        progress.now(step, len(rows))
        if not len(rows):
            return None
        begun, counts = time.perf_counter(), self._counts()
        on_device = rows.to(self.device)
        x = self.images(step.place)[on_device].contiguous(memory_format=self.layout)
        y = self.y[step.place][on_device]
        seed = self.seed if step.name != AUDIT else key(self.seed, AUDIT)
        draws = Draws(seed, self.examples[step.place][rows])
        if before is not None:  # what an earlier part of Square ended at; the disk keeps no memory format
            before = before.to(self.device).contiguous(memory_format=self.layout)
        torch.manual_seed(key(self.seed, "inside the model", step.chunk, self.names.index(step.name), step.number))
        points = step.part.run(self.attacked, x, y, draws, before)
        wrong = self._broken(points, y)
        # Where rounding fools the copy and not the model itself, the attack stopped too early: on with the model.
        claimed = is_wrong(self.attacked.logits(points), y)
        if step.part.attack in FIND_OR_RETURN:  # another point than x was one that fooled the copy, in its batch then
            claimed |= (points != x).flatten(1).any(1)
        disputed = claimed & ~wrong
        if disputed.any():
            again = None if before is None else before[disputed]
            points[disputed] = step.part.run(self.untouched, x[disputed], y[disputed], draws.of(disputed), again)
            wrong = self._broken(points, y)
        fallen = rows[wrong.cpu()]
        verdicts[fallen] = 2 + self.members(step.name).index(step.part.attack)
        partial.keep(step.name, f"{step.chunk:06}-{step.number:03}", step.place.start + fallen, points[wrong])
        self._charge(step.name, begun, counts)
        return points[~wrong]

    @users_code("the model failed under attack", RunFailed)
    def _begin(self, progress: _Progress) -> tuple[int, None]:
        """Plain accuracy, and what the red flags are judged by."""
        begun, counts = time.perf_counter(), self._counts()
        for place in self.chunks:
            logits = self.untouched.logits(self.images(place))
            if logits.isnan().any():
                row = int(self.examples[place.start + int(logits.isnan().any(1).nonzero()[0])])
                raise UserError(f"the model's output for image {row} is not a number; it can't be evaluated")
            self.clean_wrong[place] = is_wrong(logits, self.y[place]).cpu()
        self._charge("clean", begun, counts)
        progress.looking_for_red_flags()
        sample = slice(0, self.sample)
        draws = Draws(self.seed, self.examples[sample])
        self.measured["labels"] = self.y.bincount(minlength=self.classes).tolist()
        self.measured |= red_flags.measure(
            self.attacked, self.images(sample), self.y[sample], eps=self.eps, norm=self.norm, draws=draws
        )
        return 0, None

    def _continue(self, partial: Partial) -> tuple[int, Tensor | None] | None:
        saved = partial.load()
        if saved is None:
            return None
        state, points = saved
        before = torch.tensor(state.get("answers", []), dtype=self.answers.dtype)
        scale = float(self.answers.abs().max())
        if not state["measured"]["randomised"] and (
            before.shape != self.answers.shape or not torch.allclose(before, self.answers, rtol=0, atol=1e-4 * scale)
        ):
            raise UserError(
                f"{partial.folder} holds an unfinished evaluation of a model that gives other answers, with the same "
                "weights; delete it to evaluate anew"
            )
        self.cost, self.measured = state["cost"], state["measured"]
        self.verdicts = {name: torch.tensor(state["verdicts"][name], dtype=torch.int8) for name in self.names}
        self.clean_wrong = torch.tensor(state["clean_wrong"], dtype=torch.bool)
        console.note("continuing the evaluation where it was")
        return state["step"], points

    def _state(self, step: int) -> dict[str, Any]:
        return {
            "step": step, "cost": self.cost, "measured": self.measured, "answers": self.answers.tolist(),
            "clean_wrong": self.clean_wrong.int().tolist(),
            "verdicts": {name: verdicts.tolist() for name, verdicts in self.verdicts.items()},
        }  # fmt: skip

    def _broken(self, points: Tensor, y: Tensor) -> Tensor:
        """Where the untouched model misclassifies a point that is one."""
        return is_wrong(self.untouched.logits(points), y) & points.isfinite().flatten(1).all(1)

    def _out_of_reach(self, name: str, place: slice) -> Tensor:
        """Examples that an attack need not look at: those wrong without any, and for the audit those already broken.

        Attacks that are judged at their last iterate are run on every image, as they are defined.
        """
        if name in LAST_ITERATE:
            return torch.zeros_like(self.clean_wrong[place])
        gone = self.clean_wrong[place].clone()
        if name == AUDIT:
            for other in self.names[:-1]:
                gone |= self.verdicts[other][place] != STANDING
        return gone

    def _counts(self) -> tuple[int, int]:
        return self.attacked.forwards + self.untouched.forwards, self.attacked.gradients + self.untouched.gradients

    def _charge(self, name: str, begun: float, before: tuple[int, int]) -> None:
        for kind, now, then in zip(("forwards", "gradients"), self._counts(), before, strict=True):
            self.cost[name][kind] += now - then
        self.cost[name]["seconds"] += time.perf_counter() - begun

    # --- the result

    def result(self, partial: Partial, settings: dict[str, Any]) -> Evaluation:
        robust = {"clean": ~self.clean_wrong}
        broken_by: dict[str, list[str | None]] = {
            "clean": ["clean" if wrong else None for wrong in self.clean_wrong.tolist()]
        }
        for name in self.names:
            meaning = [None, "before" if name == AUDIT else "clean", *self.members(name)]
            verdicts = self.verdicts[name]
            if name != AUDIT:
                robust[name] = verdicts == STANDING
            broken_by[name] = [meaning[verdict] for verdict in verdicts.tolist()]
        accuracy = {name: int(flags.sum()) / len(flags) for name, flags in robust.items()}
        return Evaluation(
            attacks=tuple(robust),
            accuracy=accuracy,
            robust=robust,
            broken_by=broken_by,
            cost=self.cost,
            flags=red_flags.judge(self.measured, accuracy, broken_by, audited(broken_by)),
            measured=self.measured,
            settings=settings,
            adversarial=partial.found,
        )


class _Progress:
    """The bar: which attack, how many images are standing, robust accuracy so far, time left."""

    def __init__(self, job: _Job, steps: list[Step]) -> None:
        self.job, self.steps = job, steps
        self.bar = console.Bar("clean", 1.0)
        self.begun = time.perf_counter()
        self.title, self.text, self.done = "clean", "", 0.0
        self.ahead, self.passes_then = self._work(steps, 1.0) + len(job.y) / 2, 0.0

    def __enter__(self) -> _Progress:
        self.bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.bar.__exit__(*error)

    def looking_for_red_flags(self) -> None:
        self.title = "red flags"
        self._expect(self._work(self.steps, 1.0) + self.job.sample * red_flags.PASSES)

    def now(self, step: Step, standing: int) -> None:
        """What is ahead: this attack on those standing, later ones on as many as stood so far (if that is known; on all
        that are correct otherwise, which is too many)."""
        job, names = self.job, self.job.names
        earlier = [
            verdicts[: step.place.stop if names.index(name) < names.index(step.name) else step.place.start]
            for name, verdicts in job.verdicts.items()
        ]
        judged = sum(int((verdicts != CLEAN).sum()) for verdicts in earlier)
        survival = sum(int((verdicts == STANDING).sum()) for verdicts in earlier) / judged if judged else 1.0
        ahead = self.steps[self.steps.index(step) :]
        same = [later for later in ahead if later.name == step.name and later.chunk == step.chunk]
        self._expect(standing * sum(one.part.work for one in same) + self._work(ahead[len(same) :], survival))

        covered = min(step.place.stop, len(job.y))
        robust = (int((job.verdicts[step.name][: step.place.start] == STANDING).sum()) + standing) / covered
        member = f" {step.part.attack}" if step.name in (*ENSEMBLES, AUDIT) else ""
        self.title = f"{step.name}{member} {step.number + 1}/{step.number + len(same)}"
        self.text = f"{standing} standing  robust so far {100 * robust:.1f} %  "

    def show(self) -> None:
        passes = self._passes()
        left = max(self.ahead - (passes - self.passes_then), 0.0)
        eta = console.duration(left * (time.perf_counter() - self.begun) / passes)
        self.done = max(self.done, passes / (passes + left))  # what is left is a guess: no bar goes back
        self.bar.update(self.done, f"{self.text}{eta} left", title=self.title)

    def _work(self, steps: list[Step], survival: float) -> float:
        correct = (~self.job.clean_wrong).float()
        return sum(step.part.work * survival * float(correct[step.place].sum()) for step in steps)

    def _expect(self, ahead: float) -> None:
        self.ahead, self.passes_then = ahead, self._passes()

    def _passes(self) -> float:
        return sum(self.job._counts()) / 2
