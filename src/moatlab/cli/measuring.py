"""The commands that measure: `moat eval`, `moat verify` and `moat bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from moatlab.cli.options import FILE, Grouped, data_dir_option, json_option, print_file, print_json, trust_option
from moatlab.runtime import distributed
from moatlab.runtime.console import warn
from moatlab.runtime.errors import RunFailed, UserError


@click.command("eval", cls=Grouped, short_help="Accuracy under attack, of a run or of any model.")
@click.argument("target", metavar="[RUN|FILE]", required=False, type=FILE)
@click.option("--attacks", metavar="NAMES", help="of: clean fgsm pgd7 pgd50 cw50 mim50 apgd-ce apgd-t fab-t square aa "
              "aa-fast  [default: clean,fgsm,pgd50,cw50,mim50,aa]")  # fmt: skip
@click.option("--eps", help="The radius, such as 8/255  [default: the run's own; 8/255 for a bare model]")
@click.option("--norm", type=click.Choice(["linf", "l2"]), help="  [default: the run's own; linf for a bare model]")
@click.option("--n", "count", type=click.IntRange(min=1), help="The first N test images  [default: all]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="decides every random draw")
@click.option("--batch-size", type=click.IntRange(min=1), help="Images at once  [default: 256, fewer of large images]")
@click.option("--which", type=click.Choice(["last", "best"]), default="last", show_default=True, help="epoch of a run")
@click.option("--model", help="What a bare weights file holds, or a model to evaluate as it is: package.module:factory")
@click.option("--data", help="mini, cifar10, cifar100 or a folder of images  [default: the run's own]")
@data_dir_option
@click.option("--device", default="auto", show_default=True)
@trust_option
@click.option("--save-adversarial", is_flag=True, help="Keep what was found, for `moat verify`.")
@click.option("--precision", type=click.Choice(["fp32", "bf16", "fp16"]), default="fp32", show_default=True,
              help="what the model computes in; other than fp32 it is another model")  # fmt: skip
@click.option("--audit", is_flag=True, help="Attack what stands once more, with another seed and more restarts.")
@json_option
def eval_command(
    target: Path | None, attacks: str | None, eps: str | None, norm: Any, count: int | None, seed: int,
    batch_size: int | None, which: str, model: str | None, data: str | None, data_dir: Path | None, device: str,
    trust_model_code: bool, save_adversarial: bool, precision: str, audit: bool, as_json: bool,
) -> None:  # fmt: skip
    """Accuracy under attack: of a run folder, of a .safetensors or .pt file, or of --model package.module:factory.

    \b
    moat eval runs/moat-2_mini_s0
    moat eval runs/moat-2_mini_s0 --attacks aa --n 200 --save-adversarial
    moat eval weights.pt --model mymodule:factory --data cifar10

    Writes a card (eval.json in the run, FILE.eval.json beside a file). Stopped, it goes on where it was when it is
    started again.
    """
    from moatlab.attacks.ensemble import check_names, usual_attacks

    names = [] if attacks is None else check_names(attacks)
    from moatlab.evaluation.card import evaluate_subject
    from moatlab.evaluation.target import load_subject

    subject = load_subject(
        target, model=model, which=which, data=data, data_dir=data_dir, device=device,
        trust_model_code=trust_model_code,
    )  # fmt: skip
    if attacks is None:
        names = usual_attacks(len(subject.images.classes))
        if "aa" not in names:
            warn(f"AutoAttack needs four classes: of its parts, {', '.join(names[4:])} take its place")
    distributed.connect()
    card = evaluate_subject(
        subject, attacks=["clean", *names], eps=eps, norm=norm, count=count, seed=seed, batch_size=batch_size,
        audit=audit, save_adversarial=save_adversarial, precision=precision,
    )  # fmt: skip
    if not distributed.is_first():
        return
    if as_json:
        print_file(subject.card)
        return
    from moatlab.report.terminal import print_card

    print_card(card)
    click.echo(f"card: {subject.card}")


@click.command("verify", cls=Grouped, short_help="Check a card's adversarial examples again.")
@click.argument("card", metavar="CARD|RUN", type=FILE)
@data_dir_option
@click.option("--device", default="auto", show_default=True)
@trust_option
@json_option
def verify_command(card: Path, data_dir: Path | None, device: str, trust_model_code: bool, as_json: bool) -> None:
    """Check the saved adversarial examples of CARD again: inside the ball, inside [0, 1], misclassified.

    \b
    moat eval runs/moat-2_mini_s0 --attacks aa --save-adversarial
    moat verify runs/moat-2_mini_s0/eval.json

    Needs a card made with --save-adversarial, beside its model. Ends with exit code 1 if an example fails.
    """
    from moatlab.evaluation.verify import verify

    card = card / "eval.json" if card.is_dir() else card
    report = verify(card, data_dir=data_dir, device=device, trust_model_code=trust_model_code)
    failures = report["failures"]
    if as_json:
        print_json(report)
    elif not failures:
        click.echo(f"{report['checked']:,} examples hold; the largest distance is {report['largest_distance']:.6g}")
    else:
        for failure in failures[:10]:
            click.echo(failure)
    if failures:
        raise RunFailed(f"{card} does not hold: {len(failures)} failures")


@click.command("bench", cls=Grouped)
@click.option("--model", default="preact_resnet18", show_default=True, help="or package.module:factory for your own")
@click.option(
    "--width", type=click.IntRange(8, 1024), default=64, show_default=True, help="channels of the first block"
)
@click.option("--batch-size", type=click.IntRange(min=2), default=128, show_default=True)
@click.option("--image-size", type=click.IntRange(min=8), default=32, show_default=True, help="pixels on a side")
@click.option("--threads", type=click.IntRange(1, 1024), help="CPU threads  [default: PyTorch's]")
@click.option("--device", default="auto", show_default=True)
@click.option("--out", type=FILE, default=Path("runs/bench"), show_default=True, help="The folder of the chart.")
@json_option
def bench_command(
    model: str, width: int, batch_size: int, image_size: int, threads: int | None, device: str, out: Path,
    as_json: bool,
) -> None:  # fmt: skip
    """How near this machine runs to its limit, in two minutes or so.

    The limit is a float32 matrix product. Against it: inference, an attack step (forward, and backward to the input)
    and a training step (forward, backward, SGD) on random images. Then, on mini, epochs of some methods against the sum
    of their passes: what data, draws, counting and saving cost.
    """
    from moatlab.reproduce.benchmark import bench
    from moatlab.runtime.files import write_json

    for folder in (out, *out.parents):
        if folder.exists() and not folder.is_dir():
            raise UserError(f"--out {out}: {folder} is a file; name a folder")
    result = bench(
        model=model, width=width, batch_size=batch_size, image_size=image_size, threads=threads, device=device
    )
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "bench.json", result)
    if as_json:
        print_file(out / "bench.json")
    else:
        from moatlab.report.terminal import print_bench

        print_bench(result)
    from moatlab.report.plots import plot_bench

    plot_bench(out / "bench.png", result)
    if not as_json:
        click.echo(f"chart: {out / 'bench.png'}")
