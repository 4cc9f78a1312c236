"""The steps of an evaluation, and their progress bar."""

from collections.abc import Callable
from dataclasses import dataclass

from moatlab.attacks.ensemble import Part
from moatlab.evaluation.state import State
from moatlab.runtime.console import Bar


@dataclass(frozen=True)
class Step:
    """One part of one attack on one chunk of the images."""

    chunk: int
    place: slice
    name: str
    number: int
    part: Part


class Progress(Bar):
    """The running attack, images still robust, robust accuracy so far, time left. `passes()` counts passes over one
    image each. What follows each step is summed once, so the cost of an update does not depend on their number."""

    def __init__(self, steps: list[Step], images: int, passes: Callable[[], float]) -> None:
        super().__init__("clean", 1.0)
        self.steps, self.passes, self.share_done = steps, passes, 0.0
        self.parts = {step.name: step.number + 1 for step in steps}  # the last one is kept
        self.robust = dict.fromkeys(self.parts, 0)  # images of finished chunks
        self.seen = 0
        self.ahead: list[tuple[float, float]] = []  # from each step on: this attack per image, all others in total
        same = others = 0.0
        for step in reversed(steps):
            same += step.part.passes
            self.ahead.append((same, others))
            if step.number == 0:
                same, others = 0.0, others + same * (step.place.stop - step.place.start)
        self.ahead.reverse()
        self.expect("clean", images / 2 + others)

    def expect(self, title: str, left: float, text: str = "") -> None:
        self.title, self.left, self.text, self.passes_then = title, left, text, self.passes()

    def begin(self, state: State, robust: int) -> None:
        """Start a step on `robust` images. Later attacks are assumed to keep the share of robust images so far."""
        step, (same, others) = self.steps[state.step], self.ahead[state.step]
        clean = state.broken_by["clean"]
        survival = sum(self.robust.values()) / self.seen if self.seen else clean.count(None) / len(clean)
        share = (self.robust[step.name] + robust) / step.place.stop
        member = f" {step.part.attack}" if step.part.attack != step.name else ""
        title = f"{step.name}{member} {step.number + 1}/{self.parts[step.name]}"
        self.expect(title, robust * same + survival * others, f"{robust} robust, {100 * share:.1f} % so far")

    def end(self, step: Step, state: State) -> None:
        """The last part of an attack makes its verdicts on the chunk final."""
        if step.number + 1 == self.parts[step.name]:
            verdicts = state.broken_by[step.name][step.place]
            self.robust[step.name] += verdicts.count(None)
            self.seen += len(verdicts)

    def show(self) -> None:
        passes = self.passes()
        left = max(self.left - (passes - self.passes_then), 0.0)
        self.share_done = max(self.share_done, passes / (passes + left))  # estimates vary: never go back
        self.update(passes, self.text, total=passes / self.share_done)
