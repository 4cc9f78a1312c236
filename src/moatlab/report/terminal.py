"""Results as text for a terminal of 80 columns, on stdout."""

from typing import Any

import click

from moatlab.attacks.catalog import WATCHED
from moatlab.report.fronts import last_runs
from moatlab.runtime.console import counted, rounded
from moatlab.runtime.sheet import make_table, plain_console


def print_comparison(result: dict[str, Any]) -> None:
    columns = ("method", *(f"{name} %" for name in WATCHED), "passes", "train s", "outcome")
    rows = []
    for row in result["rows"]:
        percent = [f"{100 * row[name]:.1f}" for name in WATCHED]
        outcome = f"{row['outcome']} at {row['collapsed_at']}" if row["collapsed_at"] else row["outcome"]
        outcome = f"kept epoch {row['kept_epoch']}" if row["kept_epoch"] else outcome
        rows.append((row["method"], *percent, rounded(row["passes"]), f"{row['train_seconds']:.0f}", outcome))
    console, title = plain_console(), f"accuracy on {counted(result['rows'][0]['images'], 'test image')}"
    console.print(make_table(*columns, title=title, rows=rows))
    for row in result["rows"]:
        if row["collapsed_at"] and not row["kept_epoch"] and row["fgsm"] > row["pgd7"] + 0.1:
            console.print(f"{row['method']} is only robust to FGSM: {100 * row['pgd7']:.1f} % under PGD-7.")
    console.print(f"setting: {result['setting']}")
    console.print(f"plot: {result['plot']}\nreport: {result['report']}", soft_wrap=True)


def print_search(result: dict[str, Any]) -> None:
    runs, fields = last_runs(result["trials"]), {one["trial"]: one["fields"] for one in result["trials"]}
    rows = []
    for one in result["ranking"]:
        run = runs[one["trial"]]
        numbers = (f"{100 * run['robust']:.1f}", f"{100 * run['clean']:.1f}", rounded(run["passes"]))
        rows.append((str(fields[one["trial"]].get("method", one["trial"])), *numbers))
    title = "trials at the last rung, on held-out images"
    plain_console().print(make_table("method", "robust %", "clean %", "passes", title=title, rows=rows))


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
