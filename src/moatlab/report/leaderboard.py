"""The leaderboard as a sortable HTML page, as Markdown and as JSON, with the same numbers."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moatlab.evaluation.red_flags import RAISED_IF
from moatlab.report.board import Board, Row, Table, find_cards, make_board
from moatlab.report.charts import COLOURS, pareto, scatter
from moatlab.report.template import fill, refuse_folder, write_text
from moatlab.runtime.console import rounded
from moatlab.runtime.errors import UserError
from moatlab.runtime.files import remove_leftovers, write_json
from moatlab.runtime.sheet import percent, percent_range

DEFAULT = "leaderboard.html"
UNKNOWN = "unknown"


def write_leaderboard(cards: str | Path | Sequence[str | Path], out: str | Path | None = None) -> list[Path]:
    """Write a leaderboard of evaluated models and return its files: the page `out` (default: leaderboard.html in the
    current folder), and the same as .json and .md beside it.

    `cards`: files that `moat eval` wrote, or folders that contain some. Models are compared only if data, number of
    images, threat and precision are the same; each such setting has a table.
    """
    each = [cards] if isinstance(cards, str | Path) else cards
    paths = find_cards([Path(one) for one in each])
    if not paths:
        raise UserError("give at least one card, such as runs/moat-2_mini_s0/eval.json")
    page = Path(out or DEFAULT)
    refuse_folder(page, DEFAULT)
    if page.suffix != ".html":
        raise UserError(f"{page} must end in .html; a .json and a .md file are written beside it")
    data, text = page.with_suffix(".json"), page.with_suffix(".md")
    if data.resolve() in [path.resolve() for path in paths]:
        raise UserError(f"{data}, written beside {page}, would replace a card; choose another name")
    board = make_board(paths)
    write_text(page, as_page(board))
    write_text(text, as_markdown(board))
    remove_leftovers(data)
    write_json(data, board.model_dump())
    return [page, data, text]


def columns(table: Table) -> list[str]:
    """After the name: rank, the main attack with its interval, clean accuracy, the other attacks, costs."""
    main, others = table.attacks[:1], table.attacks[1:]
    shown = [f"{name} %" for name in (*main, "clean", *others)]
    return ["rank", *shown[:1], "95 %", *shown[1:], "passes", "TFLOP"] if main else ["clean %", "passes", "TFLOP"]


def cells(row: Row, table: Table) -> list[tuple[str, float | None]]:
    """The text in each of these columns, and its value to sort by."""
    main, others = table.attacks[:1], table.attacks[1:]

    def shares(names: Sequence[str]) -> list[tuple[str, float | None]]:
        found = [row.results[name].accuracy if name in row.results else None for name in names]
        return [("-", None) if one is None else (percent(one), one) for one in found]

    costs = [
        (UNKNOWN if row.passes is None else rounded(row.passes), row.passes),
        (UNKNOWN if row.flops is None else rounded(row.flops / 1e12), row.flops),
    ]
    if not main:
        return [*shares(["clean"]), *costs]
    range_ = row.results.get(main[0])
    interval = ("-", None) if range_ is None else (percent_range(range_.interval), range_.interval[0])
    rank = ("-" if row.rank is None else str(row.rank), row.rank)
    return [rank, *shares(main), interval, *shares(["clean", *others]), *costs]


def as_page(board: Board) -> str:
    rows = [row for table in board.tables for row in table.rows]
    return fill(
        "leaderboard",
        title="Leaderboard",
        board=board,
        tables=[_shown(table) for table in board.tables],
        data=sorted({table.data for table in board.tables}),
        threats=sorted({table.threat for table in board.tables}),
        attacks=list(dict.fromkeys(name for table in board.tables for name in table.attacks)),
        rules={name: RAISED_IF.get(name, "") for name in sorted({flag.name for row in rows for flag in row.flags})},
    )


def _shown(table: Table) -> dict[str, Any]:
    rows = [
        {"row": row, "colour": number % COLOURS, "cells": cells(row, table)} for number, row in enumerate(table.rows)
    ]
    tried = Counter(name for row in table.rows for name in row.results)
    charts = [(name, _chart(table, name)) for name in table.attacks if tried[name] > 1]
    return {"table": table, "columns": columns(table), "rows": rows, "charts": charts}


def _chart(table: Table, attack: str) -> Any:
    """Robust against clean accuracy, with the models that no other beats in both."""
    found = [(number, row) for number, row in enumerate(table.rows) if attack in row.results]
    places = [tuple(100 * row.results[name].accuracy for name in ("clean", attack)) for _, row in found]
    front = [(-x, y) for x, y in pareto([(-x, y) for x, y in places])]
    points = [(row.name, number, x, y) for (number, row), (x, y) in zip(found, places, strict=True)]
    labels = {"x_label": "clean accuracy (%)", "y_label": f"accuracy under {attack} (%)", "unit": "% clean"}
    return scatter(points, **labels, front=front, from_zero=False)


def as_markdown(board: Board) -> str:
    lines = ["# Leaderboard", "", *(f"**{warning}**\n" for warning in map(_plain, board.warnings))]
    for table in board.tables:
        lines += [f"## {_plain(table.title)}", ""]
        lines += [f"**{_plain(warning)}**\n" for warning in table.warnings]
        names = ["model", *columns(table), "red flags"]
        lines += [_line(names), _line(["---", *["---:"] * len(columns(table)), "---"])]
        for row in table.rows:
            flags = ", ".join(flag.name for flag in row.flags) or "-"
            lines.append(_line([_plain(row.name), *(text for text, _ in cells(row, table)), _plain(flags)]))
        lines.append("")
        for row in table.rows:
            for flag in row.flags:
                lines.append(_plain(f"- {row.name}: {flag.name}: {flag.meaning} ({flag.evidence})"))
        lines += [""] if any(row.flags for row in table.rows) else []
    return "\n".join(lines)


def _line(values: Sequence[str]) -> str:
    return f"| {' | '.join(values)} |"


def _plain(text: str) -> str:
    """Text of a card, without a meaning in Markdown."""
    return re.sub(r"([\\|<`*\[])", r"\\\1", " ".join(text.split()))
