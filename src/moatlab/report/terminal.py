"""Results as a person reads them in a terminal of 80 columns: on stdout, unlike what `display` shows on the way."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moatlab.training.recipe import NORM_NAMES

THOROUGH = {"pgd50", "cw50", "apgd-ce", "apgd-t", "aa-fast", "aa"}  # without one of them nothing is said of robustness


def print_comparison(result: dict[str, Any]) -> None:
    columns = ("method", "clean %", "fgsm %", "pgd7 %", "passes", "train s", "collapsed")
    table = Table(*columns, title=f"accuracy on {result['rows'][0]['images']:,} test images")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in result["rows"]:
        percent = [f"{100 * row[name]:.1f}" for name in ("clean", "fgsm", "pgd7")]
        collapse = f"at epoch {row['collapsed_at']}" if row["collapsed_at"] else "no"
        collapse = f"at {row['alarms'][-1]}, kept {row['kept_epoch']}" if row["kept_epoch"] else collapse
        table.add_row(row["method"], *percent, f"{row['passes']:g}", f"{row['train_seconds']:.0f}", collapse)
    console = Console(highlight=False, emoji=False)
    console.print(table)
    for row in result["rows"]:
        if row["collapsed_at"] and not row["kept_epoch"] and row["fgsm"] > row["pgd7"] + 0.1:
            told = f"{row['method']} looks robust to a single step ({100 * row['fgsm']:.1f} %), and is not"
            console.print(f"{told}: {100 * row['pgd7']:.1f} % withstand seven small ones.", markup=False)
    console.print(f"setting: {result['setting']}", markup=False)
    console.print(f"plot: {result['plot']}\nreport: {result['report']}", markup=False, soft_wrap=True)


def print_card(card: dict[str, Any]) -> None:
    settings, data = card["settings"], card["data"]
    ball = NORM_NAMES[settings["norm"]]
    title = f"{card['subject']['name']}: {data['images']:,} test images of {data['name']}, {ball} eps {settings['eps']}"
    title += f", in {settings['precision']}" if "precision" in settings else ""
    table = Table("attack", "accuracy %", "95 %", "forwards", "gradients", "seconds", title=Text(title))
    for column in table.columns[1:]:
        column.justify = "right"
    rows = dict(card["results"])
    if len(rows) > 2:
        rows["all"] = card["all_attacks"]
    for name, result in rows.items():
        low, high = (f"{100 * bound:.1f}" for bound in result["interval"])
        work = [f"{result[kind]:,}" if kind in result else "" for kind in ("forwards", "gradients")]
        seconds = f"{result['seconds']:.1f}" if "seconds" in result else ""
        label = f"{name} *" if "note" in result else name
        table.add_row(label, f"{100 * result['accuracy']:.1f}", f"{low}-{high}", *work, seconds)
    console = Console(highlight=False, emoji=False)
    console.print(table)
    for name, result in rows.items():
        if "note" in result:
            console.print(f"* {name} is {result['note']}", markup=False)
    if "audit" in card:
        broken, attacked = card["audit"]["broken"], card["audit"]["attacked"]
        console.print(f"audit: {broken} of {attacked} images that stood were broken", markup=False)
    for flag in card["flags"]:
        console.print(f"RED FLAG {flag['name']} ({flag['evidence']}): {flag['meaning']}", markup=False, style="red")
    if not card["flags"]:
        console.print("no red flags", markup=False)
    if len(card["results"]) > 1 and not THOROUGH.isdisjoint(card["results"]):
        low, high = (f"{100 * bound:.1f}" for bound in card["all_attacks"]["interval"])
        share = f"{100 * card['all_attacks']['accuracy']:.1f} % ({low}-{high})"
        console.print(f"robust accuracy: {share} of {data['images']:,} images withstand all of it", markup=False)


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
