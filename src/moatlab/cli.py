"""The command line: thin. It parses, calls, prints; torch is imported by the commands that need it."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import click

from moatlab import processes
from moatlab.errors import Interrupted, RunFailed, UserError
from moatlab.options import (
    data_dir_option,
    json_option,
    on_option,
    print_file,
    print_json,
    recipe_options,
    running_options,
    trust_option,
)
from moatlab.publishing import report_command, reproduce_command
from moatlab.recipe import Recipe, default_name, make_recipe

COST_NAMES = ("forwards", "input_backwards", "weight_backwards", "double_backwards")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(version("moatlab"), prog_name="moat")
@click.option("--debug", is_flag=True, expose_value=False, help="Show a traceback where something goes wrong.")
@click.pass_context
def cli(context: click.Context) -> None:
    """Train robust image classifiers at single-step cost.

    \b
    moat demo                 see FGSM training collapse, and MOAT at the same cost not
    moat train moat:2         train one model
    moat plan imoat:2,5,8     what a run costs, before it runs
    moat eval RUN             its accuracy under every attack of the paper
    moat report RUN ...       a page to look at
    moat reproduce table2a    a table or figure of the paper
    """
    if processes.launched() > 1 and context.invoked_subcommand not in ("train", "eval"):
        raise UserError(f"torchrun is for moat train and moat eval; start moat {context.invoked_subcommand} by itself")


@cli.command("train")
@click.argument("method", required=False)
@recipe_options()
@running_options
@click.option("--max-steps", type=click.IntRange(min=0), help="Stop after so many steps of the whole run.")
@click.option("--checkpoint-every", type=click.FloatRange(min=0), default=600.0, show_default=True, metavar="SECONDS")
@click.option("--stream/--no-stream", default=None, help="Leave the images of a folder on the disk, and decode them "
              "batch by batch  [default: where they would fill a quarter of the memory]")  # fmt: skip
def train_command(
    method: str | None, preset: str | None, recipe_file: Path | None, out: Path | None, resume: bool, as_json: bool,
    data_dir: Path | None, trust_model_code: bool, max_steps: int | None, checkpoint_every: float,
    stream: bool | None, **options: Any,
) -> None:  # fmt: skip
    """Train METHOD: fgsm, fast, nfgsm, pgd:K, gradalign, kim, standard, moat:K, imoat:K1,K2,K3, or a cycle of stages
    such as "cutmix | fast | pgd:2>5>8".

    \b
    moat train moat:2                             on the embedded data, in minutes
    moat train imoat:2,5,8 --data cifar10         at the paper's size
    moat train fgsm --epochs 3 --out runs/short
    """
    recipe = make_recipe(method, preset=preset, file=recipe_file, trust_model_code=trust_model_code, **options)
    out = out or Path("runs") / default_name(recipe, preset)
    from moatlab.training import train

    record = train(
        recipe, out, data_dir=data_dir, resume=resume, max_steps=max_steps, checkpoint_every=checkpoint_every,
        stream=stream,
    )  # fmt: skip
    if not processes.is_first():
        return
    page = out / "report.html"
    if record.final and not (page.exists() and page.stat().st_mtime >= (out / "run.json").stat().st_mtime):
        from moatlab.report.page import publish

        publish([out], page, data_dir=data_dir, trust_model_code=recipe.names_code)
    if as_json:
        print_file(out / "run.json")
    elif record.final:
        accuracy = "  ".join(f"{name} {100 * record.final[name]:.1f} %" for name in ("clean", "fgsm", "pgd7"))
        collapse = f"  COLLAPSED at epoch {record.collapsed_at}" if record.collapsed_at else ""
        if record.kept_epoch:
            collapse = f"  (of epoch {record.kept_epoch}: collapsed at epoch {record.alarms[-1]})"
        click.echo(f"{record.method} on {record.final['images']:,} test images: {accuracy}{collapse}")
        healing = record.healing["passes"]
        extra = f" ({healing:+g} beyond the plan, for healing)" if healing else ""
        click.echo(f"{record.counted['passes']:g} passes{extra}; the run is in {out}")
        if page.exists():
            click.echo(f"report: {page}")


@cli.command("plan")
@click.argument("method", required=False)
@recipe_options()
@json_option
def plan_command(
    method: str | None, preset: str | None, recipe_file: Path | None, as_json: bool, **options: Any
) -> None:
    """The cost of a run, before it runs. Touches no data.

    One pass is a forward and a backward over the training set.
    """
    recipe = make_recipe(method, preset=preset, file=recipe_file, trust_model_code=True, **options)  # imports nothing
    parsed, epochs = recipe.parsed_method, recipe.epochs
    cost = parsed.cost(epochs).as_dict()
    from moatlab.data import KNOWN_SIZES

    steps = None  # unknown for a folder, which is not looked at
    if recipe.data in KNOWN_SIZES:
        count = KNOWN_SIZES[recipe.data][0] - recipe.holdout
        steps = count // recipe.batch_size
        if steps < 1:
            raise UserError(f"--batch-size {recipe.batch_size} is larger than the {count} images to train on")
    if as_json:
        print_json({"method": recipe.method, "epochs": epochs, "steps_per_epoch": steps, **cost})
        return
    click.echo(f"{recipe.method}" + (f" = {parsed}" if str(parsed) != recipe.method else ""))
    click.echo(recipe.setting)
    click.echo(f"{epochs} epochs of {steps or 'unknown'} steps")
    for name in ("passes", *COST_NAMES):
        click.echo(f"{name.replace('_', '-'):<18}{cost[name]:>8g}  x the training set")
    counts: dict[str, int] = {}
    for epoch in range(epochs):
        stage = parsed.stage_at(epoch, epochs)
        counts[str(stage)] = counts.get(str(stage), 0) + 1
    click.echo("stages: " + ", ".join(f"{count} x {stage}" for stage, count in counts.items()))


@cli.command("compare")
@click.argument("methods", nargs=-1, required=True)
@recipe_options()
@running_options
@on_option
def compare_command(
    methods: tuple[str, ...], preset: str | None, recipe_file: Path | None, out: Path | None, resume: bool,
    as_json: bool, data_dir: Path | None, trust_model_code: bool, on: str | None, **options: Any,
) -> None:  # fmt: skip
    """Train several METHODS by the same recipe: one table on the test images, one plot of PGD-7 accuracy."""
    options |= {"preset": preset, "file": recipe_file, "trust_model_code": trust_model_code}
    recipes = [make_recipe(method, **options) for method in methods]
    epochs = max(recipe.epochs for recipe in recipes)  # step-wise, a cycle's default is 201 where others have 200
    recipes = [recipe.model_copy(update={"epochs": epochs}) for recipe in recipes]
    out = out or Path("runs") / f"compare_{default_name(recipes[0], preset, ' '.join(methods))}"
    run_comparison(recipes, out, data_dir=data_dir, resume=resume, as_json=as_json, on=on)


@cli.command("demo")
@click.option("--seed", type=int, default=0, show_default=True, help="decides every random draw")
@click.option("--out", type=Path, help="The folder of the two runs  [default: runs/demo_sSEED]")
@json_option
def demo_command(seed: int, out: Path | None, as_json: bool) -> None:
    """The paper's point in minutes: FGSM training collapses, MOAT at the same cost does not.

    Started again, it continues where it was, or shows its table.
    """
    recipes = [make_recipe(method, preset="mini", seed=seed) for method in ("fgsm", "moat:2")]
    out = out or Path("runs") / f"demo_s{seed}"
    run_comparison(recipes, out, data_dir=None, resume=True, as_json=as_json)


def run_comparison(
    recipes: list[Recipe], out: Path, *, data_dir: Path | None, resume: bool, as_json: bool, on: str | None = None
) -> None:
    from moatlab.sweep import compare

    result = compare(recipes, out, data_dir=data_dir, resume=resume, on=on)
    if as_json:
        print_file(out / "compare.json")
        return
    from moatlab.report.terminal import print_comparison

    print_comparison(result)


@cli.command("eval")
@click.argument("target", metavar="[RUN|FILE]", required=False, type=Path)
@click.option("--attacks", default="clean,fgsm,pgd50,cw50,mim50,aa", show_default=True, metavar="NAMES",
              help="of: clean fgsm pgd7 pgd50 cw50 mim50 apgd-ce apgd-t fab-t square aa aa-fast")  # fmt: skip
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
    target: Path | None, attacks: str, eps: str | None, norm: Any, count: int | None, seed: int,
    batch_size: int | None, which: str, model: str | None, data: str | None, data_dir: Path | None, device: str,
    trust_model_code: bool, save_adversarial: bool, precision: str, audit: bool, as_json: bool,
) -> None:  # fmt: skip
    """Accuracy under attack: of a run folder, of a .safetensors or .pt file, or of --model package.module:factory.

    \b
    moat eval runs/moat-2_mini_s0
    moat eval runs/moat-2_mini_s0 --attacks aa --n 200 --save-adversarial
    moat eval weights.pt --model mymodule:factory --data cifar10 --attacks pgd50,aa

    Writes a card (eval.json in the run, FILE.eval.json beside a file). Stopped, it goes on where it was when it is
    started again.
    """
    from moatlab.attacks.ensemble import check_names

    names = check_names(attacks.split(","))
    from moatlab.card import evaluate_subject
    from moatlab.subject import load_subject

    subject = load_subject(
        target, model=model, which=which, data=data, data_dir=data_dir, device=device,
        trust_model_code=trust_model_code,
    )  # fmt: skip
    processes.connect()
    card = evaluate_subject(
        subject, attacks=["clean", *names], eps=eps, norm=norm, count=count, seed=seed, batch_size=batch_size,
        audit=audit, save_adversarial=save_adversarial, precision=precision,
    )  # fmt: skip
    if not processes.is_first():
        return
    if as_json:
        print_file(subject.card)
        return
    from moatlab.report.terminal import print_card

    print_card(card)
    click.echo(f"card: {subject.card}")


@cli.command("verify")
@click.argument("card", type=Path)
@data_dir_option
@click.option("--device", default="auto", show_default=True)
@trust_option
@json_option
def verify_command(card: Path, data_dir: Path | None, device: str, trust_model_code: bool, as_json: bool) -> None:
    """Check the saved adversarial examples of CARD again: inside the ball, inside [0, 1], misclassified.

    Needs a card made with --save-adversarial, beside its model. Ends with exit code 1 if an example fails.
    """
    from moatlab.card import verify

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


@cli.command("export")
@click.argument("run", type=Path)
@click.option("--format", "kind", type=click.Choice(["safetensors", "robustbench", "onnx"]), required=True)
@click.option(
    "--which", type=click.Choice(["last", "best"]), default="last", show_default=True, help="epoch of the run"
)
@click.option("--out", type=Path, help="The folder to write to  [default: RUN/export-FORMAT]")
@trust_option
@json_option
def export_command(
    run: Path, kind: str, which: str, out: Path | None, trust_model_code: bool, as_json: bool
) -> None:  # fmt: skip
    """The model of RUN for other tools, with a model card (README.md).

    \b
    moat export runs/moat-2_mini_s0 --format safetensors    to share, or to put on a model hub
    moat export runs/moat-2_cifar10_s0 --format robustbench
    moat export runs/moat-2_mini_s0 --format onnx           checked with onnxruntime before it is kept
    """
    from moatlab.export import export

    files = export(run, kind, out, which=which, trust_model_code=trust_model_code)
    if as_json:
        print_json({"format": kind, "files": [str(path) for path in files]})
        return
    for path in files:
        click.echo(path)


@cli.command("bench")
@click.option("--model", default="preact_resnet18", show_default=True, help="or package.module:factory for your own")
@click.option(
    "--width", type=click.IntRange(8, 1024), default=64, show_default=True, help="channels of the first block"
)
@click.option("--batch-size", type=click.IntRange(min=2), default=128, show_default=True)
@click.option("--image-size", type=click.IntRange(min=8), default=32, show_default=True, help="pixels on a side")
@click.option("--threads", type=click.IntRange(1, 1024), help="CPU threads  [default: PyTorch's]")
@click.option("--device", default="auto", show_default=True)
@click.option("--out", type=Path, default=Path("runs/bench"), show_default=True, help="The folder of the chart.")
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
    from moatlab.bench import bench
    from moatlab.files import write_json

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


@cli.group("data")
def data_group() -> None:
    """The data sets: which there are, and how to get them."""


@data_group.command("list")
@data_dir_option
def data_list_command(data_dir: Path | None) -> None:
    """The data sets by name, and where each one is."""
    from moatlab.data import available

    for name, description, where in available(data_dir):
        click.echo(f"{name:<10}{description}")
        click.echo(f"{'':<10}{where or f'not here yet: moat data get {name}'}")
    click.echo(f"{'FOLDER':<10}your own images: FOLDER/train/CLASS/*.png, FOLDER/test/CLASS/*.png")


@data_group.command("get")
@click.argument("name")
@data_dir_option
def data_get_command(name: str, data_dir: Path | None) -> None:
    """Fetch the data set NAME, unless it is here already, and say where it is."""
    from moatlab.data import get_images_folder

    click.echo(get_images_folder(name, data_dir))


@cli.command("env")
@json_option
def env_command(as_json: bool) -> None:
    """Versions and hardware, for a bug report or a results table."""
    from moatlab.environment import describe_environment

    facts = describe_environment()
    if as_json:
        print_json(facts)
    else:
        for name, value in facts.items():
            click.echo(f"{name:<10}{value}")


cli.add_command(reproduce_command)
cli.add_command(report_command)


def main() -> NoReturn:
    """Run the command line and turn every ending into an exit code and at most one sentence."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        cli.main(arguments, standalone_mode=False)
        sys.stdout.flush()  # here a full disk can still be told of
        processes.disconnect()
        sys.exit(0)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        sys.exit(0)
    except (UserError, RunFailed, Interrupted, click.ClickException, OSError) as error:
        if "--debug" in sys.argv:
            raise
        if isinstance(error, OSError):
            abandon_stdout()
        message = sentence(error)
        if isinstance(error, Interrupted):
            message += ", continue by starting it again" + (
                " with --resume" if {"train", "compare"} & {*arguments[:1]} else ""
            )
        if processes.may_speak():
            with suppress(OSError):
                click.echo(f"moat: {' '.join(message.split())}", err=True)
        code = 2 if isinstance(error, UserError | click.ClickException) else 1
        end(128 + error.signal_number if isinstance(error, Interrupted) else code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("moat: interrupted", err=True)
        sys.exit(130)


def end(code: int) -> NoReturn:
    """One of several processes ends at once: to take leave of the others, it would have to wait for them."""
    if processes.launched() == 1:
        sys.exit(code)
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def sentence(error: Exception) -> str:
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else f"output can't be written: {error.strerror}"
    return str(error)


def abandon_stdout() -> None:
    """What could not be written (a full disk, a reader that is gone) must not be tried again when Python ends."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
