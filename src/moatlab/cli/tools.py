"""Commands that list and describe: `moat methods`, `data`, `env` and `completion`."""

from pathlib import Path

import click

from moatlab.cli import options as shared


def describe_stages() -> list[dict[str, str]]:
    """Every stage as text: usage, passes per epoch, source and use."""
    from moatlab.methods.stages import STAGES

    found = []
    for name, entry in STAGES.items():
        argument = entry.argument
        given = [argument.symbol if argument.default is None else f"[{argument.symbol}]"] if argument else []
        given += [f"[{one}={'' if value.default is None else value.default}]" for one, value in entry.named.items()]
        usage = name + (":" + ",".join(given) if given else "")
        first, second = (entry.cost(value).passes for value in (4, 5))  # linear in the argument
        passes, rest = f"{first:g}", first - 4 * (second - first)
        if argument and second != first:
            factor = "" if second - first == 1 else f"{second - first:g} "
            passes = f"{factor}{argument.symbol}" + (f" + {rest:g}" if rest else "")
        found.append({"name": name, "usage": usage, "passes": passes, "source": entry.source, "use": entry.use})
    return found


@click.command("methods")
@shared.json_option
def methods_command(as_json: bool) -> None:
    """List every stage: arguments, passes per epoch, source, and its use.

    \b
    moat methods --json
    moat train "mixup | liet | pgd:2"       a cycle, one stage per epoch
    moat train "nfgsm > nfgsm > pgd:5"      a stage for each third of the run
    moat train trades:10,beta=6             arguments by name
    """
    stages = describe_stages()
    if as_json:
        shared.print_json({"stages": stages})
        return
    for stage in stages:
        click.echo(f"{stage['usage']:<28}{stage['passes']:>11} passes  {stage['source']}\n{'':<28}{stage['use']}")
    click.echo("moat:K is mixup | fast | pgd:K, and imoat:K1,K2,K3 is mixup | fast | pgd:K1>K2>K3")


@click.group("data")
def data_group() -> None:
    """List and download data sets."""


@data_group.command("list")
@shared.data_dir_option
def data_list_command(data_dir: Path | None) -> None:
    """List data sets and where they are."""
    from moatlab.data.loading import available

    for name, description, where in available(data_dir):
        click.echo(f"{name:<10}{description}\n{'':<10}{where or f'not downloaded: moat data get {name}'}")
    click.echo(f"{'FOLDER':<10}your own images: FOLDER/train/CLASS/IMAGE, FOLDER/test/CLASS/IMAGE,")
    click.echo(f"{'':<10}or FOLDER/CLASS/IMAGE, with a tenth held out for testing")


@data_group.command("get")
@click.argument("name", shell_complete=shared.completing(["cifar10", "cifar100"]))
@shared.data_dir_option
def data_get_command(name: str, data_dir: Path | None) -> None:
    """Download the data set NAME if needed; print its folder."""
    from moatlab.data.loading import get_images_folder

    click.echo(get_images_folder(name, data_dir))


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion_command(context: click.Context, shell: str) -> None:
    """Print a shell completion script.

    \b
    eval "$(moat completion bash)"                in ~/.bashrc
    eval "$(moat completion zsh)"                 in ~/.zshrc
    moat completion fish | source                 in ~/.config/fish/config.fish
    """
    from click.shell_completion import get_completion_class

    completion = get_completion_class(shell)
    assert completion is not None
    if shell == "bash":
        click.echo("COMP_WORDBREAKS=${COMP_WORDBREAKS//:}  # else bash splits moat:2")
    click.echo(completion(context.find_root().command, {}, "moat", "_MOAT_COMPLETE").source())


@click.command("env")
@shared.json_option
def env_command(as_json: bool) -> None:
    """Print versions and hardware, for bug reports and results."""
    from moatlab.runtime.environment import describe_environment

    facts = describe_environment()
    if as_json:
        shared.print_json(facts)
    else:
        for name, value in facts.items():
            click.echo(f"{name:<10}{value}")
