"""A result of `moat reproduce` as text: Markdown, LaTeX, the parts of its page, and the terminal."""

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment
from rich.console import Console
from rich.table import Table

from moatlab.report.plots import seeds_text
from moatlab.reproduce.paper import experiment

Result = dict[str, Any]
ENDS = ("outcome", "passes")
COSTS = ("passes", "/ fgsm", "TFLOP", "/ fgsm", "seconds", "/ fgsm", "paper: minutes", "/ fgsm")
TITLES = {"rows": "Last epoch, as in the paper", "best_rows": "Best epoch on held-out images"}
RADIUS_TITLE = "PGD-7 at the radius trained for, last epoch"
MARKS = {"holds": "holds", "does not hold": "does not hold", "not decided": "not decided"}
STYLES = {"holds": "green", "does not hold": "red"}
NOTES = {
    "accuracy": "Accuracy in %: mean ± standard deviation over seeds; 95 % interval over seeds and test images.",
    "outcome": (
        "Outcome: only *collapsed* means catastrophic overfitting; *overfitted* runs lost their robustness slowly, "
        "*untrained* ones never learned."
    ),
    "costs": (
        "FLOPs: two per multiply-add of convolutions and linear layers; an input backward counts like a forward, a "
        "weight backward twice, a double backward 4.1 times. Times relative to fgsm count each epoch at the median "
        "time of its stage, so pauses do not count."
    ),
    "claims": (
        "± is half of the 95 % interval of a paired difference over images and seeds; a verdict needs three seeds and "
        "Holm's correction for all comparisons of the table. Rates of collapse have one-sided exact 95 % bounds. Runs "
        "that are untrained, and accuracies of overfitted ones, decide nothing."
    ),
}
RADIUS_NOTE = (
    "This figure is not in the paper; it is like figure 1 of Andriushchenko and Flammarion (2020). FGSM and PGD-7 "
    "attack each run at the radius that it was trained for, on all test images."
)
THEIR_TIME = "The paper's minutes are from another machine: compare only their ratios with ours."


class Line(NamedTuple):
    """A row of a table; `below` marks those that are printed small, under the row they belong to."""

    name: str
    cells: list[str]
    below: bool = False


def columns_of(result: Result) -> dict[str, str]:
    """The names of the accuracies that it has, each with its heading."""
    return {name: "Clean" if name == "clean" else name.upper() for name in experiment(result["experiment"]).columns}


def accuracy_lines(rows: list[dict[str, Any]]) -> list[Line]:
    lines = []
    for row in rows:
        columns = row["columns"].values()
        spreads = ["" if one["sd"] is None else f" ± {100 * one['sd']:.1f}" for one in columns]
        ours = [f"{100 * one['mean']:.1f}{spread}" for one, spread in zip(columns, spreads, strict=True)]
        extra = [] if row["clean_of_aa"] is None else [f"{100 * row['clean_of_aa']:.1f}"]
        ends = [outcomes_text(row["outcomes"]), f"{row['cost']['passes']:g}"]
        lines.append(Line(row["row"], ours + extra + ends))
        bounds = ["-".join(f"{100 * bound:.1f}" for bound in one["interval"]) for one in columns]
        lines.append(Line("95 % interval", bounds + [""] * (len(extra) + len(ENDS)), below=True))
    return lines


def outcomes_text(outcomes: list[str]) -> str:
    """`robust` if all seeds are, otherwise such as `1 collapsed, 2 robust`."""
    counts = Counter(sorted(outcomes))
    return ", ".join(name if len(outcomes) == 1 else f"{count} {name}" for name, count in counts.items())


def cost_table(rows: list[dict[str, Any]]) -> tuple[list[str], list[Line]]:
    """Its columns and lines, without columns that are empty."""
    lines = []
    for row in rows:
        cost = row["cost"]
        amounts = {
            "passes": f"{cost['passes']:g}",
            "flops": f"{cost['flops'] / 1e12:,.1f}",
            "seconds": f"{cost['seconds']:.0f}",
            "paper": f"{cost['paper_minutes']:.0f}" if cost["paper_minutes"] else "",
        }
        cells = [cell for name, amount in amounts.items() for cell in (amount, ratio(cost[f"{name}_to_fgsm"]))]
        lines.append(Line(row["row"], cells))
    used = [number for number in range(len(COSTS)) if any(line.cells[number] for line in lines)]
    return [COSTS[i] for i in used], [line._replace(cells=[line.cells[i] for i in used]) for line in lines]


def paper_lines(result: Result) -> list[Line]:
    """The paper's numbers, and below them how far ours are from them."""
    best = {row["row"]: row for row in result["best_rows"] or []}
    lines = []
    for row in in_paper(result):
        columns = row["columns"].values()
        lines.append(Line(row["row"], [f"{100 * one['paper']:.1f}" for one in columns]))
        for name, ours in (("last epoch", row), ("best epoch", best.get(row["row"]))):
            if ours:
                cells = [f"{100 * one['difference']:+.1f}" for one in ours["columns"].values()]
                lines.append(Line(name, cells, below=True))
    return lines


def in_paper(result: Result) -> list[dict[str, Any]]:
    """The rows that have numbers in the paper."""
    return [row for row in result["rows"] if row["columns"]["clean"]["paper"] is not None]


def tables_of(result: Result) -> list[dict[str, Any]]:
    """Each with its title, the headings of its columns, and its lines."""
    names = list(columns_of(result).values())
    shown = [*names, *([f"Clean of AA's {result['images']['aa']}"] if _differs(result) else []), *ENDS]
    titles = TITLES | ({"rows": RADIUS_TITLE} if result["kind"] == "radius" else {})
    tables = [
        *((title, shown, accuracy_lines(result[key] or [])) for key, title in titles.items()),
        ("Training cost", *cost_table(result["rows"])),
        ("The paper's accuracies, and ours minus the paper's", names, paper_lines(result)),
    ]
    return [{"title": title, "columns": columns, "lines": lines} for title, columns, lines in tables if lines]


def _differs(result: Result) -> bool:
    """Whether AutoAttack has fewer images than the other columns."""
    return any(row["clean_of_aa"] is not None for row in result["rows"])


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def conditions(result: Result) -> str:
    images, data = result["images"], result["data"]
    most = max(images.values()) if images else 0
    counts = f"; first {most:,} test images" if images else ""
    fewer = f" (AutoAttack: first {images['aa']:,})" if images and images.get("aa", most) != most else ""
    note = f"; NOT the whole data set: {data['note']}" if data and data["note"] else ""
    note += f"; {result['note']}" if result.get("note") else ""  # older results have no such key
    return f"Preset {result['preset']}: {result['setting']}; {seeds_text(result)}{counts}{fewer}{note}."


def limitations_of(result: Result) -> list[str]:
    """What a reader must know before using the numbers."""
    limits = []
    if few := [row["row"] for row in result["rows"] if len(row["seeds"]) == 1]:
        rows = "" if len(few) == len(result["rows"]) else f" of {', '.join(few)}"
        undecided = f", and no claim{' about them' if rows else ''} is decided" if result["claims"] else ""
        limits.append(f"One seed{rows}: intervals cover the test images only{undecided}.")
    if any(line.get("alignment") is None for run in result["runs"] for line in run["history"] if line["comparable"]):
        limits.append(
            "Some runs were made before the alignment of gradients was kept: their outcomes go by the gap alone."
        )
    if any("mim50" in row["columns"] for row in result["rows"]):
        limits.append("MIM-50, with steps of eps/50 from the image itself, is a weak attack.")
    if in_paper(result):
        limits.append(THEIR_TIME)
        if not result["preset"].startswith("paper"):
            limits.append(f"Preset {result['preset']} is not the paper's setting: its accuracies are not comparable.")
    if len(result["machines"]) > 1:
        limits.append("The runs are from different machines, so their times are not compared.")
    limits += [f"Red flags of {flag}" for flag in flags_of(result)]
    return limits + [f"Failed: {failure}" for failure in failures_of(result)]


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
    in_paper = {claim["name"]: claim for claim in result["claims_in_paper"]}
    claims = []
    for claim in result["claims"]:
        theirs = in_paper.get(claim["name"])
        verdict = theirs["verdict"] if theirs else "the paper prints no numbers"
        if theirs and verdict == "disagrees":
            verdict += f" ({theirs['numbers']})"
        claims.append({**claim, "in_paper": verdict})
    return claims


def failures_of(result: Result) -> list[str]:
    return [f"{one['run']}: {one['message']}" for one in result["failures"]]


def for_page(result: Result) -> dict[str, Any]:
    """The parts of a page about a sweep, and of its Markdown and LaTeX."""
    return {
        "paper_tables": tables_of(result),
        "conditions": conditions(result),
        "explained": " ".join(explained(result)),
        "claims": claims_of(result),
        "flags": flags_of(result),
        "failures": failures_of(result),
    }


def explained(result: Result) -> list[str]:
    notes = [note for name, note in NOTES.items() if name != "claims" or result["claims"]]
    notes += [RADIUS_NOTE] if result["kind"] == "radius" else []
    return notes + ([THEIR_TIME] if in_paper(result) else [])


def as_text(result: Result, kind: str, picture: str | None = None) -> str:
    """As Markdown with its `picture` (a file beside it), or as LaTeX with intervals and differences in grey."""
    template = (Path(__file__).parent / f"result.{kind}.jinja").read_text(encoding="utf-8")
    rules: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    environment = Environment(variable_start_string="<<", variable_end_string=">>", **rules)  # as LaTeX has braces
    return environment.from_string(template).render(
        for_page(result),
        result=result,
        marks=MARKS,
        notes=NOTES | {"radius": RADIUS_NOTE},
        limitations=limitations_of(result),
        picture=picture or f"{result['experiment']}.png",
    )


def print_reproduction(result: Result) -> None:
    """Accuracies in percent beside the paper's, then the claims, in 80 columns."""
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
    console.print(f"{conditions(result)} Accuracy in %; time relative to fgsm.", markup=False)
    if result["claims"]:
        console.print("\nThe paper's claims:")
    for claim in claims_of(result):
        style = STYLES.get(claim["verdict"])
        where = f"(section {claim['section']})"
        console.print(f"{MARKS[claim['verdict']]}: {claim['claim']} {where}", markup=False, style=style)
        console.print(f"    {claim['numbers']}", markup=False)
        if claim["in_paper"].startswith("disagrees"):
            console.print("    (the paper's own table disagrees)", markup=False)
    for failure in failures_of(result):
        console.print(f"FAILED {failure}", markup=False, style="red")
