"""SVG charts that need no script and print well; a script adds values on hover.

Colours are CSS classes (`s0`, `s1`, ...), defined in page.css for the light and the dark scheme.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

WIDTH, HEIGHT = 520, 320
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 12, 42
COLOURS = 12

Point = tuple[float, float]
Band = tuple[float, float, int]  # background of a part of the x axis: begin, end, kind


@dataclass(frozen=True)
class Series:
    name: str
    colour: int
    points: list[Point]
    bold: list[Point] | None = None  # drawn bold, over all `points` drawn faint
    marks: tuple[Point, ...] = ()  # crosses: the collapse


def tag(name: str, *children: str, **attributes: Any) -> Markup:
    """An element with escaped content, except what is markup already. `class_` becomes class, other `_` become `-`."""
    written = ""
    for key, value in attributes.items():
        text = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
        written += f' {key.rstrip("_").replace("_", "-")}="{escape(text)}"'
    inside = "".join(map(escape, children))
    return Markup(f"<{name}{written}>{inside}</{name}>")


@dataclass(frozen=True)
class Frame:
    """Maps values to positions in the drawing."""

    x_low: float
    x_high: float
    y_high: float
    y_low: float = 0.0

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low or 1) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y_low) / (self.y_high - self.y_low or 1) * (HEIGHT - TOP - BOTTOM)

    def path(self, points: Sequence[Point]) -> str:
        return "M" + "L".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)


def ticks(low: float, high: float, most: int = 6, *, whole: bool = False) -> list[float]:
    """Round numbers from low to high, in steps of 1, 2 or 5 times a power of ten; `whole`: no fractions."""
    span = (high - low) or 1.0
    step = 10.0 ** max(math.floor(math.log10(span / most)), 0 if whole else -math.inf)
    step *= next(factor for factor in (1, 2, 5, 10, 20) if span / (step * factor) <= most)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def line_chart(
    series: Sequence[Series], *, x_label: str, y_label: str, bands: Sequence[Band] = (), guide: float | None = None
) -> Markup:
    """Curves in percent. `guide` marks an x value, such as the training radius."""
    shown = [one for one in series if one.points]
    xs = [x for one in shown for x, _ in one.points] or [0.0, 1.0]
    highest = max([y for one in shown for _, y in one.points], default=1.0)
    alone = 0.5 if min(xs) == max(xs) else 0.0  # a single epoch is in the middle
    frame = Frame(min(xs) - alone, max(xs) + alone, max(highest * 1.08, 1.0))
    parts = []
    for begin, end, kind in bands:
        left, right = frame.x(max(begin, frame.x_low)), frame.x(min(end, frame.x_high))
        height = HEIGHT - TOP - BOTTOM
        parts.append(tag("rect", class_=f"band b{kind % 4}", x=left, y=TOP, width=right - left, height=height))
    parts += _axes(frame, x_label, y_label)
    if guide is not None and frame.x_low <= guide <= frame.x_high:
        parts.append(tag("line", class_="own", x1=frame.x(guide), x2=frame.x(guide), y1=TOP, y2=HEIGHT - BOTTOM))
    for one in shown:
        style = f"s{one.colour % COLOURS}" + (" dash" if one.colour >= COLOURS else "")
        if one.bold is not None:
            parts.append(tag("path", class_=f"line faint {style}", d=frame.path(one.points)))
        strong = one.points if one.bold is None else one.bold
        if strong:
            parts.append(tag("path", class_=f"line {style}", d=frame.path(strong)))
        if 0 < len(strong) <= 40:
            parts += [tag("circle", class_=f"dot {style}", cx=frame.x(x), cy=frame.y(y), r=2.2) for x, y in strong]
        for x, y in one.marks:
            at = f"translate({frame.x(x):.1f} {frame.y(y):.1f})"
            parts.append(tag("path", class_=f"cross {style}", d="M-6,-6L6,6M-6,6L6,-6", transform=at))
    values = [_values(one.name, one.colour, one.points) for one in shown]
    return _figure(parts, f"{y_label} by {x_label}", frame, kind="lines", series=values, unit=x_label.partition(" ")[0])


def scatter(
    points: Sequence[tuple[str, int, float, float]],
    *,
    x_label: str,
    y_label: str,
    unit: str = "",
    front: Sequence[Point] = (),
    from_zero: bool = True,
) -> Markup:
    """Named points (name, colour, x, y in percent) and a line through the Pareto `front`. `from_zero`: the axes begin
    at zero, not at the points. `unit` of x, shown on hover; by default its label."""
    frame = _frame(points) if from_zero else _close_frame(points)
    parts = _axes(frame, x_label, y_label)
    if len(front) > 1:
        parts.append(tag("path", class_="front", d=frame.path(front)))
    # The left and right ends of points and names, and their heights.
    taken = [(frame.x(x) - 7, frame.x(x) + 7, frame.y(y) + 4) for _, _, x, y in points]
    for name, colour, x, y in sorted(points, key=lambda point: (point[2], point[3])):
        point = [tag("circle", class_=f"big s{colour % COLOURS}", cx=frame.x(x), cy=frame.y(y), r=6)]
        length, y_name = 7.5 * len(name), frame.y(y) + 4
        begin = frame.x(x) + 10 if frame.x(x) + 10 + length < WIDTH else frame.x(x) - 10 - length
        while any(abs(y_name - y_) < 13 and begin < end and begin + length > start for start, end, y_ in taken):
            y_name -= 3  # avoid overlapping names
        if y_name >= TOP and begin >= LEFT:  # else there is no room, and the legend has the name
            taken.append((begin, begin + length, y_name))
            right = begin > frame.x(x)  # of its point
            x_name, anchor = (begin, "start") if right else (begin + length, "end")
            point.append(tag("text", name, class_="name", x=x_name, y=y_name, text_anchor=anchor))
        parts.append(tag("g", *point, data_name=name))
    values = [_values(name, colour, [(x, y)]) for name, colour, x, y in points]
    return _figure(parts, f"{y_label} by {x_label}", frame, kind="points", series=values, unit=unit or x_label)


def _frame(points: Sequence[tuple[str, int, float, float]]) -> Frame:
    highest = max((y for *_, y in points), default=1.0)
    widest = max((x for _, _, x, _ in points), default=1.0)
    return Frame(0.0, widest * 1.12 or 1.0, max(highest * 1.15, 1.0))


def _close_frame(points: Sequence[tuple[str, int, float, float]]) -> Frame:
    """Both axes are in percent, with a margin of a tenth, at least 2.5 points."""
    bounds = []
    for values in ([x for _, _, x, _ in points], [y for *_, y in points]):
        margin = max(0.1 * (max(values) - min(values)), 2.5)
        bounds += [max(min(values) - margin, 0.0), min(max(values) + margin, 100.0)]
    return Frame(bounds[0], bounds[1], bounds[3], bounds[2])


def pareto(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats in both (smaller x, larger y), from left to right."""
    front: list[Point] = []
    for x, y in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or y > front[-1][1]:
            front.append((x, y))
    return front


def surface(loss: list[list[float]], wrong: list[list[int]]) -> Markup:
    """The loss along two directions in perspective; red where the model misclassifies."""
    side = len(loss)
    low, high = min(map(min, loss)), max(map(max, loss))
    span = max(high - low, 0.5)  # so that a flat surface looks flat

    def place(i: int, j: int) -> Point:
        """The gradient points to the front right, the random direction to the back right."""
        a, b = 2 * i / (side - 1) - 1, 2 * j / (side - 1) - 1
        return WIDTH / 2 + (a + b) * 118, 232 + (a - b) * 44 - (loss[i][j] - low) / span * 130

    cells = []
    for i in range(side - 1):  # back to front
        for j in range(side - 2, -1, -1):
            corners = [place(i, j), place(i + 1, j), place(i + 1, j + 1), place(i, j + 1)]
            height = (loss[i][j] + loss[i + 1][j + 1]) / 2
            kind = ("w" if wrong[i][j] or wrong[i + 1][j + 1] else "r") + str(min(int(4 * (height - low) / span), 3))
            cells.append(tag("path", class_=kind, d="M" + "L".join(f"{x:.0f},{y:.0f}" for x, y in corners) + "Z"))
    x, y = place(side // 2, side // 2)
    parts = [
        tag("g", *cells, class_="surface"),
        tag("circle", class_="start", cx=x, cy=y, r=4),
        tag("text", "gradient direction →", class_="axis", x=WIDTH / 2 - 150, y=HEIGHT - 16, text_anchor="middle"),
        tag("text", "random direction →", class_="axis", x=WIDTH / 2 + 150, y=HEIGHT - 16, text_anchor="middle"),
        tag("text", f"loss {low:.2g} to {high:.2g}", class_="axis", x=12, y=24, text_anchor="start"),
    ]
    return _figure(parts, "loss around one image")


def _axes(frame: Frame, x_label: str, y_label: str) -> list[Markup]:
    parts = []
    for value in ticks(frame.y_low, frame.y_high):
        y = frame.y(value)
        parts.append(tag("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y))
        parts.append(tag("text", f"{value:g}", class_="tick", x=LEFT - 6, y=y + 4, text_anchor="end"))
    for value in ticks(frame.x_low, frame.x_high, whole=x_label == "epoch"):
        below = HEIGHT - BOTTOM + 16
        parts.append(tag("text", f"{value:g}", class_="tick", text_anchor="middle", x=frame.x(value), y=below))
    middle, turned = (LEFT + WIDTH - RIGHT) / 2, f"translate(13 {(TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)"
    parts.append(tag("text", x_label, class_="axis", x=middle, y=HEIGHT - 6, text_anchor="middle"))
    return [*parts, tag("text", y_label, class_="axis", transform=turned, text_anchor="middle")]


def _values(name: str, colour: int, points: Sequence[Point]) -> dict[str, Any]:
    """The data of page.js, which shows values on hover."""
    xs, ys = [x for x, _ in points], [round(y, 2) for _, y in points]
    return {"name": name, "colour": colour % COLOURS, "x": xs, "y": ys}


def _figure(parts: Sequence[str], label: str, frame: Frame | None = None, **chart: Any) -> Markup:
    """A drawing; `chart` is the data for page.js."""
    drawing = tag("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=label)
    if frame is None:
        return tag("div", drawing, class_="plot")
    x, y = [frame.x_low, frame.x_high, LEFT, WIDTH - RIGHT], [frame.y_low, frame.y_high, HEIGHT - BOTTOM, TOP]
    return tag("div", drawing, class_="plot", data_chart=json.dumps({**chart, "view": [WIDTH, HEIGHT], "x": x, "y": y}))
