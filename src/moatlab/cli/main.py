"""`moat`: parses options, calls the library, prints results. Commands import torch only when they need it."""

import os
import sys
import traceback
from contextlib import suppress
from importlib.metadata import version
from typing import NoReturn

import click

from moatlab.cli import options as shared
from moatlab.cli.measuring import bench_command, eval_command, verify_command
from moatlab.cli.publishing import export_command, report_command, reproduce_command
from moatlab.cli.tools import completion_command, data_group, env_command, methods_command
from moatlab.cli.training import compare_command, demo_command, plan_command, train_command
from moatlab.cli.tuning import tune_command
from moatlab.runtime import console, distributed
from moatlab.runtime.environment import keep_freed_memory
from moatlab.runtime.errors import Interrupted, RunFailed, UserError, naming_options


class Commands(click.Group):
    def invoke(self, ctx: click.Context) -> object:
        """Return an interruption, because click makes another exception of any KeyboardInterrupt."""
        try:
            return super().invoke(ctx)
        except Interrupted as error:
            return error


CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True}


@click.group(cls=Commands, context_settings=CONTEXT)
@click.version_option(version("moatlab"), prog_name="moat")
@click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")
@shared.quiet_option
@click.pass_context
def cli(context: click.Context) -> None:
    """Train robust image classifiers at single-step cost.

    \b
    moat demo                 FGSM collapses, MOAT at the same cost does not
    moat train moat:2         train one model
    moat plan imoat:2,5,8     show the cost of a run before it starts
    moat eval RUN             measure accuracy under the paper's attacks
    moat report RUN ...       write an HTML report
    moat reproduce table2a    reproduce a table or figure of the paper
    """
    if distributed.launched() > 1 and context.invoked_subcommand not in ("train", "eval"):
        raise UserError(f"torchrun is for moat train and moat eval; start moat {context.invoked_subcommand} by itself")
    keep_freed_memory()


for commands in (
    (train_command, plan_command, compare_command, demo_command, tune_command),
    (eval_command, verify_command, bench_command),
    (reproduce_command, report_command, export_command),
    (methods_command, data_group, env_command, completion_command),
):
    for command in commands:
        cli.add_command(command)
        for one in (command, *getattr(command, "commands", {}).values()):
            shared.quiet_option(one)


def run() -> NoReturn:
    """Run the command; every error becomes an exit code and one sentence on stderr."""
    with naming_options():
        _run()


def _run() -> NoReturn:
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        with console.verbosity(True):
            outcome = cli.main(arguments, standalone_mode=False)
        if isinstance(outcome, Interrupted):
            raise outcome
        sys.stdout.flush()  # here a full disk can still be reported
        distributed.disconnect()
        end(0)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        sys.exit(0)
    except (UserError, RunFailed, Interrupted, click.ClickException, OSError) as error:
        if "--debug" in sys.argv:
            traceback.print_exc()
        message, code = str(error), 2 if isinstance(error, UserError | click.ClickException) else 1
        if isinstance(error, click.ClickException):
            message = error.format_message()
        elif isinstance(error, Interrupted):
            resume = " with --resume" if arguments[0] in ("train", "compare") else ""
            message, code = f"{message}; to continue, run it again{resume}", 128 + error.signal_number
        elif isinstance(error, OSError):
            abandon_stdout()
            message = f"{error.filename or 'cannot write output'}: {error.strerror}" if error.strerror else message
        if distributed.may_speak():
            with suppress(OSError):
                click.echo(f"moat: {' '.join(message.split())}", err=True)
        end(code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("moat: interrupted", err=True)
        sys.exit(130)


def end(code: int) -> NoReturn:
    """Under torchrun, exit without destructors: after a failure they would wait for the other processes, and after
    success a gloo thread that still runs would abort the process (SIGABRT)."""
    if distributed.launched() == 1:
        sys.exit(code)
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def abandon_stdout() -> None:
    """Keep Python from flushing again at exit what could not be written (full disk, closed pipe)."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
