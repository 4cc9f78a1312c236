"""A result as a table with lines below it: text for a terminal, and a small HTML card for a notebook."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal, NamedTuple

from rich.console import Console
from rich.table import Column, Table

# Colours are those of the notebook's theme; the grey and red ones are visible on white and on black.
CARD = "display:inline-block;max-width:46em;padding:.7em 1em;border:1px solid #8888;border-radius:6px;line-height:1.5"
TABLE = "color:inherit;font-size:inherit;border-collapse:collapse;margin:.4em 0;font-variant-numeric:tabular-nums"
CELL = "padding:.1em .8em .1em 0;text-align:{};border:0;color:inherit"
ALERT = "border-left:4px solid #d33;background:#d3333322;padding:.3em .6em;margin:.3em 0"


class Line(NamedTuple):
    text: str
    alert: bool = False  # shown in red


@dataclass(frozen=True)
class Sheet:
    """Columns after the first are numbers, aligned to the right."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    lines: list[Line] = field(default_factory=list)

    def print(self, console: Console | None = None) -> None:
        """Print to stdout, as wide as the terminal."""
        console = console or plain_console()
        console.print(make_table(*self.columns, title=self.title, rows=self.rows))
        for line in self.lines:
            console.print(line.text, style="red" if line.alert else None)

    def text(self) -> str:
        file = io.StringIO()
        self.print(plain_console(file))
        return file.getvalue().rstrip("\n")

    def html(self) -> str:
        def row(tag: str, cells: tuple[str, ...]) -> str:
            sides = ["left", *["right"] * (len(cells) - 1)]
            styled = (f'<{tag} style="{CELL.format(side)}">' for side in sides)
            return "".join(f"{start}{escape(cell)}</{tag}>" for start, cell in zip(styled, cells, strict=True))

        body = "".join(f"<tr>{row('td', cells)}</tr>" for cells in self.rows)
        table = f'<table style="{TABLE}"><tr>{row("th", self.columns)}</tr>{body}</table>' if self.rows else ""
        lines = (f'<div style="{ALERT}">' if line.alert else "<div>" for line in self.lines)
        below = "".join(f"{start}{escape(line.text)}</div>" for start, line in zip(lines, self.lines, strict=True))
        return f'<div style="{CARD}"><strong>{escape(self.title)}</strong>{table}{below}</div>'


def make_table(*columns: str, title: str, rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(columns[0], *(Column(name, justify="right") for name in columns[1:]), title=title)
    for row in rows:
        table.add_row(*row)
    return table


def plain_console(file: io.StringIO | None = None) -> Console:
    """On stdout, or without colours on a file. Names may contain [brackets], which are not markup."""
    colours: Literal["auto"] | None = None if file else "auto"
    return Console(file=file, color_system=colours, highlight=False, emoji=False, markup=False, force_jupyter=False)


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def percent_range(interval: list[float]) -> str:
    return "-".join(map(percent, interval))
