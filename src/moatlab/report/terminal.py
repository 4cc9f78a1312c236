"""Results as text for a terminal of 80 columns, on stdout."""

from typing import Any

import click
from rich.console import Console
from rich.table import Column, Table

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
    console = _console()
    console.print(table)
    for row in result["rows"]:
        if row["collapsed_at"] and not row["kept_epoch"] and row["fgsm"] > row["pgd7"] + 0.1:
            console.print(f"{row['method']} is only robust to FGSM: {100 * row['pgd7']:.1f} % under PGD-7.")
    console.print(f"setting: {result['setting']}")
    console.print(f"plot: {result['plot']}\nreport: {result['report']}", soft_wrap=True)


def print_card(card: Card) -> None:
    settings, data, whole = card.settings, card.data, card.all_attacks
    title = f"{card.subject.name}: {data.images:,} test images of {data.name}, {settings.threat}"
    title += f", in {settings.precision}" if settings.precision != "fp32" else ""
    table = _table("attack", "accuracy %", "95 %", "forwards", "gradients", "seconds", title=title)
    low, high = (f"{100 * bound:.1f}" for bound in whole.interval)
    for name, result in card.results.items():
        bounds = "-".join(f"{100 * bound:.1f}" for bound in result.interval)
        work = f"{result.forwards:,}", f"{result.gradients:,}", f"{result.seconds:.1f}"
        table.add_row(f"{name} *" if result.note else name, f"{100 * result.accuracy:.1f}", bounds, *work)
    if len(card.results) > 2:
        table.add_row("all", f"{100 * whole.accuracy:.1f}", f"{low}-{high}", "", "", "")
    console = _console()
    console.print(table)
    for name, result in card.results.items():
        if result.note:
            console.print(f"* {name} is {result.note}")
    if card.audit:
        console.print(f"audit: {card.audit.broken} of {card.audit.attacked} robust images were broken")
    for flag in card.flags:
        console.print(f"RED FLAG {flag.name} ({flag.evidence}): {flag.meaning}", style="red")
    if not card.flags:
        console.print("no red flags")
    if any(name in CATALOG and CATALOG[name].thorough for name in card.results):
        share = f"{100 * whole.accuracy:.1f} % ({low}-{high})"
        console.print(f"robust accuracy: {share} of {data.images:,} images, under all attacks")


def _console() -> Console:
    return Console(highlight=False, emoji=False, markup=False)  # names may contain [brackets]


def _table(*columns: str, title: str) -> Table:
    return Table(columns[0], *(Column(name, justify="right") for name in columns[1:]), title=title)


def print_bench(result: dict[str, Any]) -> None:
    environment, limit, memory = result["environment"], result["limit"], result["memory"]
    click.echo(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in result["setting"].items()))
    machine = f"{environment['cpu']}, {limit['threads']} threads, {environment['device']}"
    click.echo(f"{machine}, torch {environment['torch']}")
    click.echo(f"limit: {limit['gemm_gflops']:.0f} GFLOP/s, the best of 20 float32 products of 2048x2048 matrices")
    if limit["median_gemm_gflops"] < 0.9 * limit["gemm_gflops"]:
        click.echo(f"(median {limit['median_gemm_gflops']:.0f}: the machine is busy or its speed varies)")
    for name in ("inference", "attack_step", "training_step"):
        row = result[name]
        speed = f"{row['images_per_second']:>8.1f} images/s {row['gflops']:>7.1f} GFLOP/s"
        click.echo(f"{name.replace('_', ' '):<14}{speed} {_bar(row['share_of_limit'], '>4.0%')}")
    click.echo("an epoch of mini (width 16, batch 128), and its overhead beyond its passes:")
    for method, row in result["epochs"].items():
        click.echo(f"{method:<14}{row['seconds']:>8.1f} s {_bar(row['overhead'], '>+8.1%')}")
    click.echo(f"memory: peak {memory['training_step_gib']:.2f} GiB, {memory['start_gib']:.2f} before the first step")


def _bar(share: float, form: str) -> str:
    """The share and its bar: 20 characters for 100 %, at most the 26 that fit."""
    return f"{share:{form}} {'█' * min(round(20 * max(share, 0)), 26)}"
