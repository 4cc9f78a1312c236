"""A result of `moat reproduce` for people: as Markdown, as LaTeX, for the page, and for a terminal."""

from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment
from rich.console import Console
from rich.table import Table

from moatlab.reproduce.paper import experiment

Result = dict[str, Any]
COST = ("collapsed", "passes", "training", "time / fgsm")
TITLES = {"rows": "The last epoch, as in the paper", "best_rows": "The best epoch on held-out images"}
MARKS = {"holds": "holds", "does not hold": "does not hold", "not decided": "not decided at this scale"}
STYLES = {"holds": "green", "does not hold": "red"}
EXPLAINED = (
    "Accuracy in %: the mean and, behind ±, the standard deviation over seeds; below, the 95 % interval, then the "
    "paper's and the difference. Time / fgsm goes by the median epoch of each stage, so that pauses do not count; the "
    "paper's minutes come from another machine, and only their ratios can be compared with ours. In the claims, ± is "
    "half of the 95 % interval of a difference."
)


class Line(NamedTuple):
    """A line of a table: ours, or what is printed small below it."""

    name: str
    cells: list[str]
    below: bool = False


def columns_of(result: Result) -> dict[str, str]:
    """The names of the accuracies that it has, each with its heading."""
    return {name: "Clean" if name == "clean" else name.upper() for name in experiment(result["experiment"]).columns}


def lines_of(rows: list[dict[str, Any]]) -> list[Line]:
    lines = []
    for row in rows:
        cost, columns = row["cost"], list(row["columns"].values())
        collapsed = sum(epoch is not None for epoch in row["collapsed_at"])
        spent = [f"{collapsed} of {len(row['seeds'])}", f"{cost['passes']:g}", f"{cost['seconds']:.0f} s"]
        spreads = ["" if one["sd"] is None else f" ± {100 * one['sd']:.1f}" for one in columns]
        ours = [f"{100 * one['mean']:.1f}{spread}" for one, spread in zip(columns, spreads, strict=True)]
        lines.append(Line(row["row"], [*ours, *spent, ratio(cost["seconds_to_fgsm"])]))
        bounds = ["-".join(f"{100 * bound:.1f}" for bound in one["interval"]) for one in columns]
        lines.append(Line("95 % interval", bounds + [""] * len(COST), below=True))
        if columns[0]["paper"] is not None:
            theirs = [f"{100 * one['paper']:.1f} ({100 * one['difference']:+.1f})" for one in columns]
            spent = ["", "", f"{cost['paper_minutes']:.0f} min", ratio(cost["paper_to_fgsm"])]
            lines.append(Line("paper (difference)", theirs + spent, below=True))
    return lines


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def conditions(result: Result) -> str:
    images, data = result["images"], result["data"]
    seeds = f"{len(result['seeds'])} seed" + "s" * (len(result["seeds"]) != 1)
    most = max(images.values()) if images else 0
    counts = f"; the first {most:,} test images" if images else ""
    fewer = f" (AutoAttack: the first {images['aa']:,})" if images and images.get("aa", most) != most else ""
    note = f"; NOT the whole data set: {data['note']}" if data and data["note"] else ""
    return f"Preset {result['preset']}: {result['setting']}; {seeds}{counts}{fewer}{note}."


def flags_of(result: Result) -> list[str]:
    """The red flags of all seeds and of both tables."""
    return [
        f"{row['row']}{' (best epoch)' if key == 'best_rows' else ''}: {', '.join(row['flags'])}"
        for key in TITLES
        for row in result[key] or []
        if row["flags"]
    ]


def claims_of(result: Result) -> list[dict[str, str]]:
    """Each claim with its verdict in the paper's own table."""
    claims = []
    for claim, theirs in zip(result["claims"], result["claims_in_paper"], strict=True):
        in_paper = theirs["verdict"] if result["kind"] == "table" else "the paper prints no numbers"
        if in_paper == "does not hold":
            in_paper += f" ({theirs['numbers']})"
        claims.append({**claim, "in_paper": in_paper})
    return claims


def for_page(result: Result) -> dict[str, Any]:
    """What a page about a sweep, and its Markdown and LaTeX, are made of."""
    headings = [*columns_of(result).values(), *COST]
    return {
        "paper_tables": [
            {"title": title, "columns": headings, "lines": lines_of(result[key])}
            for key, title in TITLES.items()
            if result[key]
        ],
        "conditions": conditions(result),
        "explained": EXPLAINED,
        "claims": claims_of(result),
        "flags": flags_of(result),
        "failures": [f"{one['run']}: {one['message']}" for one in result["failures"]],
    }


def as_text(result: Result, kind: str) -> str:
    """As Markdown, or as LaTeX: our numbers, and in grey below them the intervals and the paper's."""
    template = (Path(__file__).parent / f"result.{kind}.jinja").read_text(encoding="utf-8")
    rules: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    environment = Environment(variable_start_string="<<", variable_end_string=">>", **rules)  # as LaTeX has braces
    return environment.from_string(template).render(for_page(result), result=result, marks=MARKS)


def print_reproduction(result: Result) -> None:
    """Ours (and the paper's) in percent, then the claims, in 80 columns."""
    console, names = Console(highlight=False, emoji=False), columns_of(result)
    table = Table("method", *names.values(), "passes", "time", title=f"{result['experiment']}: {result['title']}")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in result["rows"]:
        columns, cost = row["columns"], row["cost"]
        ours, theirs = ([columns[name][key] for name in names] for key in ("mean", "paper"))
        passes = f"{cost['passes']:g}"
        table.add_row(row["row"], *(f"{100 * one:.1f}" for one in ours), passes, ratio(cost["seconds_to_fgsm"]))
        if theirs[0] is not None:
            percent = [f"{100 * one:.1f}" for one in theirs]
            table.add_row("  paper", *percent, "", ratio(cost["paper_to_fgsm"]), style="dim")
    console.print(table)
    console.print(f"{conditions(result)} Accuracy in %; time: against fgsm.", markup=False)
    console.print("\nThe paper's claims:")
    for claim in claims_of(result):
        style = STYLES.get(claim["verdict"])
        console.print(f"{MARKS[claim['verdict']]}: {claim['sentence']}", markup=False, style=style)
        console.print(f"    {claim['numbers']}", markup=False)
        if claim["in_paper"].startswith("does not hold"):
            console.print("    (in the paper's own table it does not hold)", markup=False)
    for failure in for_page(result)["failures"]:
        console.print(f"FAILED {failure}", markup=False, style="red")
