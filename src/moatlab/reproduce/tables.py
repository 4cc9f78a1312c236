"""A result of `moat reproduce` for people: as Markdown, as LaTeX, and for the page."""

from __future__ import annotations

from typing import Any, NamedTuple

from moatlab.reproduce.paper import experiment

Result = dict[str, Any]
COST = ("collapsed", "passes", "training", "time / fgsm")
TITLES = {"rows": "The last epoch, as in the paper", "best_rows": "The best epoch on held-out images"}
MARKS = {"holds": "holds", "does not hold": "does not hold", "not decided": "not decided at this scale"}
EXPLAINED = (
    "Accuracy in %: the mean and, behind ±, the standard deviation over seeds; below, the 95 % interval, then the "
    "paper's and the difference. Time / fgsm goes by the median epoch of each stage, so that pauses do not count; the "
    "paper's minutes come from another machine, and only their ratios can be compared with ours. In the claims, ± is "
    "half of the 95 % interval of a difference."
)


class Line(NamedTuple):
    """A line of a table: ours, or what stands small below it."""

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
        fallen = sum(epoch is not None for epoch in row["collapsed_at"])
        spent = [f"{fallen} of {len(row['seeds'])}", f"{cost['passes']:g}", f"{cost['seconds']:.0f} s"]
        lines.append(Line(row["row"], [*map(cell, columns), *spent, ratio(cost["seconds_to_fgsm"])]))
        bounds = ["-".join(f"{100 * bound:.1f}" for bound in column["interval"]) for column in columns]
        lines.append(Line("95 % interval", bounds + [""] * len(COST), below=True))
        if columns[0]["paper"] is not None:
            theirs = [f"{100 * one['paper']:.1f} ({100 * one['difference']:+.1f})" for one in columns]
            spent = ["", "", f"{cost['paper_minutes']:.0f} min", ratio(cost["paper_to_fgsm"])]
            lines.append(Line("paper (difference)", theirs + spent, below=True))
    return lines


def cell(column: dict[str, Any]) -> str:
    """Ours in percent, with the standard deviation over seeds if there are some."""
    spread = f" ± {100 * column['sd']:.1f}" if column["sd"] is not None else ""
    return f"{100 * column['mean']:.1f}{spread}"


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
    """Each claim with what the paper's own table says to it."""
    told = {claim["name"]: claim for claim in result["claims_in_paper"]} if result["kind"] == "table" else {}
    claims = []
    for claim in result["claims"]:
        theirs = told.get(claim["name"])
        in_paper = "the paper prints no numbers" if theirs is None else theirs["verdict"]
        if theirs and theirs["verdict"] == "does not hold":
            in_paper += f" ({theirs['numbers']})"
        claims.append({**claim, "in_paper": in_paper})
    return claims


def as_markdown(result: Result) -> str:
    headings = list(columns_of(result).values())
    lines = [f"# {result['experiment']}: {result['title']}", "", conditions(result), "", EXPLAINED, ""]
    for key, title in TITLES.items():
        if not result[key]:
            continue
        lines += [f"## {title}", "", *_markdown_table(["method", *headings, *COST], [
            [f"*{line.name}*" if line.below else f"`{line.name}`", *line.cells] for line in lines_of(result[key])
        ]), ""]  # fmt: skip
    claims = [[one["sentence"], MARKS[one["verdict"]], one["numbers"], one["in_paper"]] for one in claims_of(result)]
    about = ["claim", "here", "the numbers", "in the paper's own table"]
    lines += ["## The paper's claims", "", *_markdown_table(about, claims), ""]
    for title, entries in (
        ("Red flags", flags_of(result)),
        ("Failed", [f"{one['run']}: {one['message']}" for one in result["failures"]]),
    ):
        lines += [f"## {title}", "", *(f"- {entry}" for entry in entries), ""] if entries else []
    environment = result["environment"]
    lines += [
        f"`{result['command']}`; {result['date']}, commit {environment['commit'] or 'unknown'}, torch "
        f"{environment['torch']}, moatlab {environment['moatlab']}. Its runs: {'; '.join(result['made'])}; on "
        f"{'; '.join(result['machines'])}."
    ]
    return "\n".join(lines) + "\n"


def _markdown_table(headings: list[str], rows: list[list[str]]) -> list[str]:
    written = [[text.replace("|", "\\|") for text in row] for row in [headings, *rows]]
    first, *others = ("| " + " | ".join(row) + " |" for row in written)
    return [first, "|---" * len(headings) + "|", *others]


def as_latex(result: Result) -> str:
    """Our numbers, and in grey below them the intervals and the paper's."""
    headings = ["method", *columns_of(result).values(), *COST]
    lines = [r"% needs \usepackage{booktabs,xcolor}"]
    lines += [f"% {result['experiment']}: {conditions(result)}", f"% {EXPLAINED}"]
    for key, title in TITLES.items():
        if not result[key]:
            continue
        lines += [f"% {title}", r"\begin{tabular}{l" + "r" * (len(headings) - 1) + "}", r"\toprule"]
        lines += [" & ".join(headings) + r" \\", r"\midrule"]
        for line in lines_of(result[key]):
            cells = [text.replace("±", r"$\pm$").replace("(-", "($-$") for text in line.cells]
            name = line.name.replace("%", r"\%").replace("_", r"\_").replace("|", r"\textbar{}")
            name = name if line.below else rf"\texttt{{{name}}}"
            grey = [rf"\textcolor{{gray}}{{{text}}}" for text in (name, *cells)]
            lines.append(" & ".join(grey if line.below else [name, *cells]) + r" \\")
        lines += [r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join(lines)


def for_page(result: Result) -> dict[str, Any]:
    """What stands at the top of a page about a sweep."""
    tables = [
        {"title": title, "columns": [*columns_of(result).values(), *COST], "lines": lines_of(result[key])}
        for key, title in TITLES.items()
        if result[key]
    ]
    return {
        "paper_tables": tables, "claims": claims_of(result), "conditions": conditions(result), "explained": EXPLAINED,
        "flags": flags_of(result), "failures": [f"{one['run']}: {one['message']}" for one in result["failures"]],
    }  # fmt: skip
