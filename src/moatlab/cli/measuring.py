"""Commands that measure: `moat eval`, `verify` and `bench`."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from moatlab.attacks.catalog import PAPER, REQUESTS, check_names
from moatlab.attacks.norms import NORM_NAMES
from moatlab.cli import options as shared
from moatlab.runtime import distributed
from moatlab.runtime.console import counted
from moatlab.runtime.errors import RunFailed, UserError
from moatlab.runtime.files import RunFile


@click.command("eval", cls=shared.Grouped, short_help="Measure accuracy under attack, of a run or any model.")
@click.argument("run", metavar="[RUN|FILE|FOLDER|NAME]", required=False, type=shared.FILE)
@click.option("--attacks", metavar="NAMES", help=f"Comma-separated: {' '.join(REQUESTS)}  [default: {','.join(PAPER)}]")
@click.option("--eps", help="Radius, such as 8/255  [default: the run's, else 8/255, in l2 128/255, in l1 12]")
@click.option("--norm", type=click.Choice(list(NORM_NAMES)), help="Norm  [default: the run's; linf for a bare model]")
@click.option("--n", "count", type=click.IntRange(min=1), help="Use the first N test images  [default: all]")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of all random draws.")
@click.option("--batch-size", type=click.IntRange(min=1), help="Images per forward  [default: 256, fewer if large]")
@shared.which_option
@shared.model_option(help="package.module:factory, or the architecture of a bare weights file.")
@click.option("--data", help="mini, cifar10, cifar100, a folder or .npz file  [default: the run's]")
@shared.data_dir_option
@shared.device_option
@shared.threads_option
@shared.trust_option
@click.option("--save-adversarial", is_flag=True, help="Save adversarial examples, for `moat verify`.")
@click.option("--precision", type=click.Choice(["fp32", "bf16", "fp16"]), default="fp32", help="Model precision.")
@click.option("--audit", is_flag=True, help="Attack robust images again with another seed, more restarts.")
@shared.json_option
def eval_command(run: Path | None, attacks: str | None, as_json: bool, threads: int | None, **options: Any) -> None:
    """Measure accuracy under attack of a run folder, of weights, or of any model.

    \b
    moat eval runs/moat-2_mini_s0
    moat eval runs/moat-2_mini_s0 --attacks aa --n 200 --save-adversarial
    moat eval weights.pt --model mymodule:factory --data cifar10 --attacks all
    moat eval robustbench.pt --model wide_resnet28_10 --data cifar10
    moat eval hf_hub:USER/NAME --data photos
    moat eval model.onnx --data cifar10

    --attacks all runs each attack once: those that are parts of aa in aa only, and aa-rand only on a randomised model.

    Also a folder in the layout of a hub, timm:NAME, torchvision:NAME and, with --trust-model-code, a TorchScript file.
    Writes a card: eval.json in the run, or FILE.eval.json beside a file. After an interruption, the same command
    resumes.
    """
    names = None if attacks is None else ["clean", *check_names(attacks)]
    import torch

    from moatlab.evaluation.card import evaluate_target
    from moatlab.evaluation.target import load_target
    from moatlab.models.graphs import has_gradients
    from moatlab.runtime.device import Machine

    if distributed.launched() > 1:
        torch.set_num_threads(distributed.cores())  # torchrun sets it to one
    loading = ("model", "which", "data", "data_dir", "device", "trust_model_code")
    device = options["device"]
    target = load_target(run, **{name: options.pop(name) for name in loading})
    if names is None and has_gradients(target.model):
        names = list(PAPER)
    distributed.connect()
    with Machine(device, threads).in_use() if threads else nullcontext():
        card = evaluate_target(target, attacks=names, **options)
    if not distributed.is_first():
        return
    if as_json:
        shared.print_file(target.card)
        return
    card.summary().print()
    click.echo(f"card: {target.card}")


@click.command("verify", cls=shared.Grouped, short_help="Verify the saved adversarial examples of a card.")
@click.argument("card", metavar="CARD|RUN", type=shared.FILE)
@shared.data_dir_option
@shared.device_option
@shared.trust_option
@shared.json_option
def verify_command(card: Path, as_json: bool, **options: Any) -> None:
    """Verify that the saved adversarial examples of CARD are in the ball, in [0, 1] and misclassified.

    \b
    moat eval runs/moat-2_mini_s0 --attacks aa --save-adversarial
    moat verify runs/moat-2_mini_s0/eval.json

    Needs a card made with --save-adversarial, beside its model. Exit code 1 if an example fails.
    """
    from moatlab.evaluation.verify import verify_card

    card = card / RunFile.CARD if card.is_dir() else card
    report = verify_card(card, **options)
    failures = report["failures"]
    if as_json:
        shared.print_json({**report})
    elif not failures:
        largest = f"largest distance {report['largest_distance']:.6g}"
        click.echo(f"{counted(report['checked'], 'example')} verified; {largest}")
    else:
        click.echo("\n".join(failures[:10]))
    if failures:
        raise RunFailed(f"{card} could not be verified: {counted(len(failures), 'failure')}")


@click.command("bench", cls=shared.Grouped)
@shared.model_option(default="preact_resnet18", help="Built-in name or package.module:factory.")
@click.option("--width", type=click.IntRange(8, 1024), default=64, help="Channels of the first block.")
@click.option("--batch-size", type=click.IntRange(min=2), default=128)
@click.option("--image-size", type=click.IntRange(min=8), default=32, help="Pixels per side.")
@shared.threads_option
@shared.device_option
@click.option("--out", type=shared.FILE, default=Path("runs/bench"), help="Output folder.")
@shared.json_option
def bench_command(out: Path, as_json: bool, **options: Any) -> None:
    """Compare this machine's training speed with its limit.

    Takes about two minutes. The limit is the speed of a float32 matrix product. Measured against it, on random images:
    inference, an attack step (forward, backward to the input) and a training step (forward, backward, SGD). Then epochs
    of some methods on mini, against the sum of their passes: the overhead of data, random draws, counting and saving.
    """
    from moatlab.reproduce.benchmark import bench
    from moatlab.runtime.files import write_json

    for folder in (out, *out.parents):
        if folder.exists() and not folder.is_dir():
            raise UserError(f"--out {out}: {folder} is a file, not a folder")
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
