"""The commands that measure: `moat eval`, `moat verify` and `moat bench`."""

from pathlib import Path
from typing import Any

import click

from moatlab.attacks.catalog import NAMES, PAPER, check_names, usual_attacks
from moatlab.cli import options as shared
from moatlab.runtime import distributed
from moatlab.runtime.console import warn
from moatlab.runtime.errors import RunFailed, UserError
from moatlab.runtime.files import RunFile


@click.command("eval", cls=shared.Grouped, short_help="Accuracy under attack, of a run or of any model.")
@click.argument("run", metavar="[RUN|shared.FILE]", required=False, type=shared.FILE)
@click.option("--attacks", metavar="NAMES", help=f"of: {' '.join(NAMES)}  [default: {','.join(PAPER)}]")
@click.option("--eps", help="The radius, such as 8/255  [default: the run's own; 8/255 for a bare model]")
@click.option("--norm", type=click.Choice(["linf", "l2"]), help="  [default: the run's own; linf for a bare model]")
@click.option("--n", "count", type=click.IntRange(min=1), help="The first N test images  [default: all]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="decides every random draw")
@click.option("--batch-size", type=click.IntRange(min=1), help="Images at once  [default: 256, fewer of large images]")
@click.option("--which", type=click.Choice(["last", "best"]), default="last", show_default=True, help="epoch of a run")
@shared.model_option(help="What a bare weights file holds, or a model to evaluate as it is: package.module:factory")
@click.option("--data", help="mini, cifar10, cifar100 or a folder of images  [default: the run's own]")
@shared.data_dir_option
@shared.device_option
@shared.trust_option
@click.option("--save-adversarial", is_flag=True, help="Keep what was found, for `moat verify`.")
@click.option(
    "--precision",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    default="fp32",
    show_default=True,
    help="what the model computes in; other than fp32 it is another model",
)
@click.option("--audit", is_flag=True, help="Attack robust images once more, with another seed and more restarts.")
@shared.json_option
def eval_command(run: Path | None, attacks: str | None, as_json: bool, **options: Any) -> None:
    """Accuracy under attack: of a run folder, of a .safetensors or .pt file, or of --model package.module:factory.

    \b
    moat eval runs/moat-2_mini_s0
    moat eval runs/moat-2_mini_s0 --attacks aa --n 200 --save-adversarial
    moat eval weights.pt --model mymodule:factory --data cifar10

    Writes a card (eval.json in the run, FILE.eval.json beside a file). Stopped, it resumes where it was when it is
    started again.
    """
    names = [] if attacks is None else check_names(attacks)
    import torch

    from moatlab.evaluation.card import evaluate_target
    from moatlab.evaluation.target import load_target

    if distributed.launched() > 1:
        torch.set_num_threads(distributed.cores())  # torchrun would have it be one
    loading = ("model", "which", "data", "data_dir", "device", "trust_model_code")
    target = load_target(run, **{name: options.pop(name) for name in loading})
    if attacks is None:
        names = usual_attacks(len(target.images.classes))
        if "aa" not in names:
            warn(f"AutoAttack needs four classes: of its parts, {', '.join(names[4:])} take its place")
    distributed.connect()
    card = evaluate_target(target, attacks=["clean", *names], **options)
    if not distributed.is_first():
        return
    if as_json:
        shared.print_file(target.card)
        return
    from moatlab.report.terminal import print_card

    print_card(card)
    click.echo(f"card: {target.card}")


@click.command("verify", cls=shared.Grouped, short_help="Check a card's adversarial examples again.")
@click.argument("card", metavar="CARD|RUN", type=shared.FILE)
@shared.data_dir_option
@shared.device_option
@shared.trust_option
@shared.json_option
def verify_command(card: Path, as_json: bool, **options: Any) -> None:
    """Check the saved adversarial examples of CARD again: inside the ball, inside [0, 1], misclassified.

    \b
    moat eval runs/moat-2_mini_s0 --attacks aa --save-adversarial
    moat verify runs/moat-2_mini_s0/eval.json

    Needs a card made with --save-adversarial, beside its model. Ends with exit code 1 if an example fails.
    """
    from moatlab.evaluation.verify import verify_card

    card = card / RunFile.CARD if card.is_dir() else card
    report = verify_card(card, **options)
    failures = report["failures"]
    if as_json:
        shared.print_json({**report})
    elif not failures:
        click.echo(f"{report['checked']:,} examples verified; largest distance {report['largest_distance']:.6g}")
    else:
        for failure in failures[:10]:
            click.echo(failure)
    if failures:
        raise RunFailed(f"{card} could not be verified: {len(failures)} failures")


@click.command("bench", cls=shared.Grouped)
@shared.model_option(default="preact_resnet18", show_default=True, help="or package.module:factory for your own")
@click.option(
    "--width", type=click.IntRange(8, 1024), default=64, show_default=True, help="channels of the first block"
)
@click.option("--batch-size", type=click.IntRange(min=2), default=128, show_default=True)
@click.option("--image-size", type=click.IntRange(min=8), default=32, show_default=True, help="pixels on a side")
@shared.threads_option
@shared.device_option
@click.option("--out", type=shared.FILE, default=Path("runs/bench"), show_default=True, help="The folder of the chart.")
@shared.json_option
def bench_command(out: Path, as_json: bool, **options: Any) -> None:
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
    result = bench(**options)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "bench.json", result)
    if as_json:
        shared.print_file(out / "bench.json")
    else:
        from moatlab.report.terminal import print_bench

        print_bench(result)
    from moatlab.report.plots import plot_bench

    plot_bench(out / "bench.png", result)
    if not as_json:
        click.echo(f"chart: {out / 'bench.png'}")
