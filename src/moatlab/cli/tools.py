"""Commands about the machine: `moat data`, `env` and `completion`."""

from pathlib import Path

import click

from moatlab.cli import options as shared


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
