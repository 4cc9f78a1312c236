"""Results as a person reads them in a terminal of 80 columns: on stdout, unlike notes and progress."""

from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moatlab.attacks.catalog import CATALOG, WATCHED
from moatlab.evaluation.card import Card


def print_comparison(result: dict[str, Any]) -> None:
    columns = ("method", *(f"{name} %" for name in WATCHED), "passes", "train s", "collapsed")
    table = _table(*columns, title=f"accuracy on {result['rows'][0]['images']:,} test images")
    for row in result["rows"]:
        percent = [f"{100 * row[name]:.1f}" for name in WATCHED]
        collapse = f"at epoch {row['collapsed_at']}" if row["collapsed_at"] else "no"
        collapse = f"at {row['alarms'][-1]}, kept {row['kept_epoch']}" if row["kept_epoch"] else collapse
        table.add_row(row["method"], *percent, f"{row['passes']:g}", f"{row['train_seconds']:.0f}", collapse)
    console = Console(highlight=False, emoji=False)
    console.print(table)
    for row in result["rows"]:
        if row["collapsed_at"] and not row["kept_epoch"] and row["fgsm"] > row["pgd7"] + 0.1:
            single = f"{row['method']} looks robust to a single step ({100 * row['fgsm']:.1f} %), and is not"
            console.print(f"{single}: {100 * row['pgd7']:.1f} % are robust to seven small ones.", markup=False)
    console.print(f"setting: {result['setting']}", markup=False)
    console.print(f"plot: {result['plot']}\nreport: {result['report']}", markup=False, soft_wrap=True)


def print_card(card: Card) -> None:
    settings, data, whole = card.settings, card.data, card.all_attacks
    title = f"{card.subject.name}: {data.images:,} test images of {data.name}, {settings.threat}"
    title += f", in {settings.precision}" if settings.precision != "fp32" else ""
    table = _table("attack", "accuracy %", "95 %", "forwards", "gradients", "seconds", title=Text(title))
    low, high = (f"{100 * bound:.1f}" for bound in whole.interval)
    for name, result in card.results.items():
        bounds = "-".join(f"{100 * bound:.1f}" for bound in result.interval)
        work = f"{result.forwards:,}", f"{result.gradients:,}", f"{result.seconds:.1f}"
        table.add_row(f"{name} *" if result.note else name, f"{100 * result.accuracy:.1f}", bounds, *work)
    if len(card.results) > 2:
        table.add_row("all", f"{100 * whole.accuracy:.1f}", f"{low}-{high}", "", "", "")
    console = Console(highlight=False, emoji=False)
    console.print(table)
    for name, result in card.results.items():
        if result.note:
            console.print(f"* {name} is {result.note}", markup=False)
    if card.audit:
        console.print(f"audit: {card.audit.broken} of {card.audit.attacked} robust images were broken", markup=False)
    for flag in card.flags:
        console.print(f"RED FLAG {flag.name} ({flag.evidence}): {flag.meaning}", markup=False, style="red")
    if not card.flags:
        console.print("no red flags", markup=False)
    if any(name in CATALOG and CATALOG[name].thorough for name in card.results):
        share = f"{100 * whole.accuracy:.1f} % ({low}-{high})"
        console.print(f"robust accuracy: {share} of {data.images:,} images are robust to all of it", markup=False)


def _table(*columns: str, title: str | Text) -> Table:
    table = Table(*columns, title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def print_bench(result: dict[str, Any]) -> None:
    environment, limit, memory = result["environment"], result["limit"], result["memory"]
    click.echo(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in result["setting"].items()))
    machine = f"{environment['cpu']}, {limit['threads']} threads, {environment['device']}"
    click.echo(f"{machine}, torch {environment['torch']}")
    click.echo(f"limit: {limit['gemm_gflops']:.0f} GFLOP/s, the best of 20 float32 products of 2048x2048 matrices")
    if limit["median_gemm_gflops"] < 0.9 * limit["gemm_gflops"]:
        click.echo(f"(their median was {limit['median_gemm_gflops']:.0f}: this machine is busy, or its speed varies)")
    for name in ("inference", "attack_step", "training_step"):
        row = result[name]
        speed = f"{row['images_per_second']:>8.1f} images/s {row['gflops']:>7.1f} GFLOP/s"
        share = f"{row['share_of_limit']:>4.0%} {stroke(row['share_of_limit'])}"
        click.echo(f"{name.replace('_', ' '):<14}{speed} {share}")
    click.echo("an epoch of mini (width 16, batch 128), and what it takes beyond its passes:")
    for method, row in result["epochs"].items():
        click.echo(f"{method:<14}{row['seconds']:>8.1f} s {row['overhead']:>+8.1%} {stroke(row['overhead'])}")
    most, before = memory["training_step_gib"], memory["start_gib"]
    click.echo(f"memory: {most:.2f} GiB at most, {before:.2f} of it before the first step")


def stroke(share: float) -> str:
    """A bar of a chart: 20 characters are the whole, and 26 the most there is room for."""
    return "█" * min(round(20 * max(share, 0)), 26)
