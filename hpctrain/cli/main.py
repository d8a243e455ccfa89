"""Runs the command line: finds commands, and reports errors with one message and exit code.

Commands are imported when they are used, so that `--help` stays fast on a login node. Only this
package prints and exits. stdout carries what can be piped, stderr everything else.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys

import click

from hpctrain.errors import HpctrainError, InvalidInputError
from hpctrain.version import __version__

# command -> (module, one line for `hpctrain --help`)
COMMANDS: dict[str, tuple[str, str]] = {
    "validate": ("inspect", "Check a run spec or a cluster profile"),
    "plan": ("plan", "Choose a layout; predict memory, time and cost, without Slurm"),
    "footprint": ("footprint", "Count files, metadata operations and Slurm RPCs before submitting"),
    "submit": ("submit", "Plan, render and submit a run"),
    "resubmit": ("submit", "Submit a stopped run again; it continues from its newest checkpoint"),
    "status": ("runs", "Show what runs are doing"),
    "describe": ("runs", "Show the history of a run: attempts, causes, actions"),
    "goodput": ("goodput", "Show where the time of a run went, and what causes have cost"),
    "compare": ("compare", "Run variants of a spec for a few steps each, and recommend one"),
    "scale": ("compare", "Run a spec on several numbers of GPUs: speed-up, shares of the time"),
    "diagnose": ("diagnose", "Explain why a run is as fast as it is, and what to change first"),
    "simulate": ("simulate", "Simulate a run with failures: choose interval, spares and budgets"),
    "calibrate": ("calibrate", "Turn measurements of a cluster into constants of the planner"),
    "logs": ("runs", "Show or follow the logs of a run"),
    "why": ("why", "Explain the state of a run, and what happens next"),
    "checkpoints": ("checkpoints", "List a run's checkpoints, verify them, assess the interval"),
    "stop": ("control", "Make a run save, release its nodes and stop"),
    "save": ("control", "Make a run save a checkpoint and continue"),
    "hold": ("control", "Make a run save, release its nodes and wait in the queue"),
    "resume": ("control", "Continue a held, stopped or failed run"),
    "cancel": ("runs", "Cancel a run for good"),
    "watch": ("watch", "Check all runs once, from cron: find and revive lost ones"),
    "nodes": ("nodes", "Show evidence against nodes, and hints for administrators"),
    "clean": ("files", "Remove what runs do not need: remains of saves, old logs, stacks"),
    "archive": ("files", "Pack a run into one tar file, with or without its checkpoints"),
    "rm": ("files", "Remove a run for good"),
    "profiles": ("inspect", "List cluster profiles, or show one"),
    "profile": ("site", "Make a profile by asking the cluster, or compare one with it"),
    "doctor": ("site", "Say what will work at this site, and what will not"),
    "schema": ("inspect", "Print the JSON Schema of specs or profiles, for editors"),
    "sandbox": ("sandbox", "A real multi-node Slurm in a directory"),
    "convert": ("convert", "Convert weights: Hugging Face, megatron-core, checkpoints of runs"),
    "data": ("data", "Prepare datasets from text, conversations and images"),
}

EXIT_CODES = """\b
Exit codes: 0 ok · 1 unexpected error · 2 usage · 3 invalid spec or profile
4 does not fit or violates limits · 5 Slurm refused or unreachable
6 no such run · 7 run failed · 130 interrupted
"""


class LazyGroup(click.Group):
    """A group whose commands live in modules that are imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"hpctrain.cli.{COMMANDS[cmd_name][0]}")
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Short help from the table above, so that listing imports nothing."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if name not in COMMANDS and not name.startswith("-"):
            import difflib

            near = difflib.get_close_matches(name, COMMANDS, n=1)
            suggestion = f" Did you mean '{near[0]}'?" if near else ""
            ctx.fail(f"No such command '{name}'.{suggestion}")
        return super().resolve_command(ctx, args)


@click.group(
    cls=LazyGroup,
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="hpctrain")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Plan, generate and supervise the training of large models on Slurm.

    \b
    Examples:
      hpctrain plan --profile a100x64 examples/gpt175b.yaml
      hpctrain submit --profile a100x64 examples/gpt175b.yaml --dry-run
      hpctrain submit --profile a100x64 examples/gpt175b.yaml
      hpctrain status
    """


def main() -> None:
    """Entry point of the `hpctrain` program."""
    # Looking for plugins of pydantic reads the metadata of every installed package.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    # Imports make hundreds of thousands of objects that stay; Python would look through them often.
    gc.set_threshold(50_000, 20, 20)
    debug = "--debug" in sys.argv or bool(os.environ.get("HPCTRAIN_DEBUG"))
    sys.exit(run(sys.argv[1:], debug=debug))


def run(arguments: list[str], *, debug: bool = False) -> int:
    """Run one command line; returns the exit code. `debug` shows the traceback of an error."""
    try:
        cli.main(args=arguments, prog_name="hpctrain", standalone_mode=False)
        sys.stdout.flush()
        return 0
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return 130
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (BrokenPipeError, SystemExit):
        # No command exits by itself, but click and rich do so when the reader of a pipe has gone.
        # Without this, Python would complain about the closed pipe while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except HpctrainError as error:
        if debug:
            _show_traceback()
        show_error(error)
        return error.exit_code
    except Exception as error:
        if debug:
            _show_traceback()
        red, cyan = click.style("error: ", fg="red"), click.style("hint: ", fg="cyan")
        click.echo(f"{red}unexpected {type(error).__name__}: {error}\n", err=True)
        report = "run again with `--debug` and report the traceback"
        click.echo(f"{cyan}this is a bug of hpctrain; {report}", err=True)
        return 1


def _show_traceback() -> None:
    import traceback

    traceback.print_exc()


def show_error(error: HpctrainError) -> None:
    """Print `error: ...`, one line per problem, then the hints after a blank line."""
    hints: list[str]
    if isinstance(error, InvalidInputError):
        lines = [str(problem) for problem in error.problems]
        hints = [problem.hint for problem in error.problems if problem.hint]
    else:
        lines, hints = str(error).splitlines(), [error.hint] if error.hint else []
    for line in lines:
        click.echo(click.style("error: ", fg="red") + line, err=True)
    if hints:
        click.echo(err=True)
    for hint in dict.fromkeys(hints):
        click.echo(click.style("hint: ", fg="cyan") + hint, err=True)
