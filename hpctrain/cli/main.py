"""Runs the command line: finds commands, and reports errors with one message and exit code.

Commands are imported when they are used, so that `--help` stays fast on a login node. Only this
package prints and exits. stdout carries what can be piped, stderr everything else.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from keyword import iskeyword

import click

from hpctrain.version import __version__

# heading -> command -> (module, one line for `hpctrain --help`), in the order of a run's life
GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "Before a run": {
        "init": ("adopt.init", "Write a run spec: a published model, another tool's configuration"),
        "adopt": ("adopt", "Make a spec of a batch script that you have, line by line"),
        "validate": ("job.inspect", "Check specs and profiles; with -p, all that could end a run"),
        "plan": ("job.plan", "Choose a layout; predict memory, time and cost, without Slurm"),
        "footprint": (
            "job.footprint",
            "Count files, metadata operations and RPCs before submitting",
        ),
        "compare": (
            "trials",
            "Run variants of a spec for a few steps each, and recommend one",
        ),
        "scale": (
            "trials",
            "Run a spec on several numbers of GPUs: speed-up, shares of time",
        ),
        "simulate": ("job.simulate", "Play a run with failures: choose interval, spares, budgets"),
        "try": ("trials.try", "Rehearse a run in minutes: signal, resume, killed rank, losses"),
    },
    "Run": {
        "submit": ("job", "Plan, render and submit a run"),
        "sweep": ("trials", "Submit a run for each point of a grid; compare their results"),
        "status": ("runs", "Show what runs are doing; with a name, a page about it"),
        "top": ("observe", "Show runs live on a terminal; keys explain, save and stop"),
        "logs": ("runs", "Show or follow the logs of a run, or only its errors"),
        "watch": ("runs.watch", "Look after all runs once, from cron: revive lost ones"),
        "exporter": ("observe", "Export metrics of runs for Prometheus"),
        "notify": ("runs", "Show whom a run tells about which events; send a test"),
    },
    "Serve": {
        "serve": ("serve", "Plan, start, watch, change and measure a service of a model"),
    },
    "Steer": {
        "save": ("runs.control", "Make a run save a checkpoint and continue"),
        "stop": ("runs.control", "Make a run save, release its nodes and stop"),
        "hold": ("runs.control", "Make a run save, release its nodes and wait in the queue"),
        "resume": ("runs.control", "Continue a held, stopped, failed or cancelled run"),
        "upgrade": ("runs.control", "Move a run to the hpctrain that is installed"),
        "cancel": ("runs.control", "Cancel a run for good"),
    },
    "Understand": {
        "why": ("runs", "Explain the state of a run, and what happens next"),
        "describe": ("runs", "Show the history of a run: attempts, causes, actions"),
        "goodput": ("runs", "Show where the time of a run went, and what causes have cost"),
        "diagnose": ("diagnose", "Explain why a run is as fast as it is, and what to change"),
        "checkpoints": ("runs.files", "List checkpoints, verify them, assess the interval"),
        "report": ("report", "Write one HTML page about a run, or several side by side"),
        "export": ("export", "Write a run's metrics for other programs, or a spec for Kubernetes"),
        "nodes": ("runs", "Show evidence against nodes, and hints for administrators"),
    },
    "Tidy up": {
        "clean": ("runs.files", "Remove what runs do not need: remains of saves, logs, stacks"),
        "archive": ("runs.files", "Pack a run into one tar file, with or without its checkpoints"),
        "rm": ("runs.files", "Remove a run for good"),
    },
    "Site": {
        "profiles": ("job.inspect", "List cluster profiles, or show one"),
        "profile": ("site", "Make a profile by asking the cluster, or compare one with it"),
        "doctor": ("site", "Say what will work at this site, and what will not"),
        "calibrate": (
            "site.calibrate",
            "Turn measurements of a cluster into constants of the planner",
        ),
        "monitoring": ("observe", "Write alert rules, Grafana dashboards and examples"),
        "sandbox": ("sandbox", "A real multi-node Slurm in a directory"),
    },
    "Make": {
        "examples": ("job.reference", "List run specs to start from, or print one"),
        "explain": ("job.reference", "Explain a field of specs and profiles"),
        "adapters": ("job.inspect", "List frameworks whose trainers are known, or show one"),
        "data": ("data", "Prepare datasets from text, conversations and images"),
        "convert": ("convert", "Convert weights: Hugging Face, megatron-core, checkpoints"),
        "schema": ("cli", "Print JSON Schemas: of YAML files, and of what `--json` prints"),
    },
}
# Former names, which scripts may have.
_HIDDEN = {"resubmit": ("job", "Submit a stopped run again, as `resume` does")}
COMMANDS = {name: entry for group in GROUPS.values() for name, entry in group.items()} | _HIDDEN

EXIT_CODES = """\b
Exit codes: 0 ok · 1 unexpected error · 2 usage, or a package is missing
3 invalid spec or profile · 4 does not fit or violates limits
5 Slurm refused or unreachable · 6 no such run
7 the run has failed, a promise is broken, or a file cannot be read or written
8 not confirmed · 130 interrupted
"""


class LazyGroup(click.Group):
    """A group whose commands live in modules that are imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in COMMANDS if name not in _HIDDEN]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        where = COMMANDS[cmd_name][0]
        module = importlib.import_module(f"hpctrain.{where}{'_' if '.' in where else '.'}command")
        # PEP 8 on names that Python keeps for itself: `try_`
        command = getattr(module, f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Short help from the table above, so that listing imports nothing."""
        width = max(map(len, COMMANDS))
        for heading, group in GROUPS.items():
            with formatter.section(heading):
                rows = [(f"{name:<{width}}", text) for name, (_, text) in group.items()]
                formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if name not in COMMANDS and not name.startswith("-"):
            import difflib

            near = difflib.get_close_matches(name, self.list_commands(ctx), n=1)
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
      hpctrain examples gpt175b > gpt175b.yaml
      hpctrain plan --profile a100x64 gpt175b.yaml
      hpctrain submit --profile a100x64 gpt175b.yaml --dry-run
      hpctrain submit --profile a100x64 gpt175b.yaml
      hpctrain status
    """


def main() -> None:
    """Run the command line of this process, and exit (`start` calls it)."""
    # Looking for plugins of pydantic reads the metadata of every installed package.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    # Imports make hundreds of thousands of objects that stay; Python would look through them often.
    gc.set_threshold(50_000, 20, 20)
    # Python has None for a stream that was closed when it began.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    debug = "--debug" in sys.argv or bool(os.environ.get("HPCTRAIN_DEBUG"))
    sys.exit(run(sys.argv[1:], debug=debug))


def run(arguments: list[str], *, debug: bool = False) -> int:
    """Run one command line; returns the exit code. `debug` shows the traceback of an error.

    `printed` gets the names of the JSON documents that are on standard output: an error is one only
    where there is no other.
    """
    printed: set[str] = set()
    try:
        cli.main(args=arguments, prog_name="hpctrain", standalone_mode=False, obj=printed)
        sys.stdout.flush()
        return 0
    except (BrokenPipeError, SystemExit):
        # No command exits by itself, but click and rich do so when the reader of a pipe has gone.
        from hpctrain.cli.failures import silence_stdout

        silence_stdout()
        return 0
    except (Exception, KeyboardInterrupt) as error:
        from hpctrain.cli.failures import report

        return report(error, debug=debug, as_json="--json" in arguments and not printed)
