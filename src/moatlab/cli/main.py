"""The command line: thin. It parses, calls, prints; torch is imported by the commands that need it."""

import os
import sys
import traceback
from contextlib import suppress
from importlib.metadata import version
from typing import NoReturn

import click

from moatlab.cli.measuring import bench_command, eval_command, verify_command
from moatlab.cli.publishing import export_command, report_command, reproduce_command
from moatlab.cli.tools import completion_command, data_group, env_command
from moatlab.cli.training import compare_command, demo_command, plan_command, train_command
from moatlab.runtime import console, distributed
from moatlab.runtime.environment import keep_freed_memory
from moatlab.runtime.errors import Interrupted, RunFailed, UserError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(version("moatlab"), prog_name="moat")
@click.option("--debug", is_flag=True, expose_value=False, help="Show a traceback where something goes wrong.")
@click.pass_context
def cli(context: click.Context) -> None:
    """Train robust image classifiers at single-step cost.

    \b
    moat demo                 FGSM training collapses, MOAT at its cost does not
    moat train moat:2         train one model
    moat plan imoat:2,5,8     what a run costs, before it runs
    moat eval RUN             its accuracy under every attack of the paper
    moat report RUN ...       a page to look at
    moat reproduce table2a    a table or figure of the paper
    """
    if distributed.launched() > 1 and context.invoked_subcommand not in ("train", "eval"):
        raise UserError(f"torchrun is for moat train and moat eval; start moat {context.invoked_subcommand} by itself")
    keep_freed_memory()


for command in (
    train_command,
    plan_command,
    compare_command,
    demo_command,
    data_group,
    completion_command,
    env_command,
    eval_command,
    verify_command,
    report_command,
    export_command,
    reproduce_command,
    bench_command,
):
    cli.add_command(command)


def run() -> NoReturn:
    """Run the command line and turn every ending into an exit code and at most one sentence."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        with console.verbosity(True):
            cli.main(arguments, standalone_mode=False)
        sys.stdout.flush()  # here a full disk can still be reported
        distributed.disconnect()
        end(0)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        sys.exit(0)
    except (UserError, RunFailed, Interrupted, click.ClickException, OSError) as error:
        if "--debug" in sys.argv:
            traceback.print_exc()
        if isinstance(error, OSError):
            abandon_stdout()
        message = sentence(error)
        if isinstance(error, Interrupted):
            message += ", continue by starting it again" + (
                " with --resume" if {"train", "compare"} & {*arguments[:1]} else ""
            )
        if distributed.may_speak():
            with suppress(OSError):
                click.echo(f"moat: {' '.join(message.split())}", err=True)
        code = 2 if isinstance(error, UserError | click.ClickException) else 1
        end(128 + error.signal_number if isinstance(error, Interrupted) else code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("moat: interrupted", err=True)
        sys.exit(130)


def end(code: int) -> NoReturn:
    """One of several processes ends at once, without destructors: after a failure it would have to wait for the others
    to take leave of them, and after a good end a thread of gloo may still run, which C++ answers with SIGABRT."""
    if distributed.launched() == 1:
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
