"""Commands that steer a run: `stop`, `save`, `hold`, `resume`, `cancel`, `control`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.page.options import Decorated, RunName, confirm, runs_option, yes_option
from hpctrain.page.output import busy, say
from hpctrain.page.text import paragraph
from hpctrain.records.find import RunFiles, find_run, runs_directory

if TYPE_CHECKING:
    from hpctrain.runs.control import ControlResult
    from hpctrain.slurm.client import SlurmClient


def reason_option(function: Decorated) -> Decorated:
    return click.option(
        "--reason", default="", metavar="TEXT", help="Why; kept in the history of the run."
    )(function)


@click.command()
@click.argument("run", type=RunName())
@click.option(
    "--graceful/--now",
    default=True,
    help="Save at the next step boundary first, or lose the steps since the newest checkpoint."
    "  [default: graceful]",
)
@reason_option
@runs_option
@yes_option
def stop(run: str, graceful: bool, reason: str, runs: Path | None, yes: bool) -> None:
    """Make a run save, release its nodes and stop; `hpctrain resume` continues it.

    A job that waits leaves the queue. For a run that trains, creating the file has the
    same effect: touch RUN/control/stop (or stop-now).

    \b
    Examples:
      hpctrain stop gpt175b-7f3a --reason "maintenance at noon"
      hpctrain stop gpt175b-7f3a --now -y
    """
    from hpctrain.runs import control

    found = _found(run, runs)
    question = f"Stop run `{found.run_id}` without a save?"
    if not graceful:
        confirm(question, yes=yes)
    _tell(control.stop(found, _slurm(), now=not graceful, reason=reason))


@click.command()
@click.argument("run", type=RunName())
@click.option("--wait", is_flag=True, help="Wait until the checkpoint is published.")
@click.option("--timeout", type=click.FloatRange(0), metavar="SECONDS", help="Of --wait.")
@reason_option
@runs_option
def save(run: str, wait: bool, timeout: float | None, reason: str, runs: Path | None) -> None:
    """Make a run save a checkpoint at the next step boundary; training continues.

    Creating the file has the same effect: touch RUN/control/save

    \b
    Examples:
      hpctrain save gpt175b-7f3a
      hpctrain save gpt175b-7f3a --wait --timeout 600
    """
    from hpctrain.runs import control

    if timeout is not None and not wait:
        raise click.UsageError("--timeout goes with --wait")
    found = _found(run, runs)
    after_step = control.step_now(found.layout)
    _tell(control.save(found, _slurm(), reason=reason))
    if wait:
        from hpctrain.base.errors import RunFailedError

        try:
            step = control.wait_for_save(found, _slurm(), after_step, timeout)
        except TimeoutError as error:
            hint = f"the request stands; `{found.command('checkpoints')}` shows when it is done"
            raise RunFailedError(str(error), hint=hint) from error
        say(f"Checkpoint of step {step:,} is published")
        click.echo(step)


@click.command()
@click.argument("run", type=RunName())
@reason_option
@runs_option
def hold(run: str, reason: str, runs: Path | None) -> None:
    """Make a run save, release its nodes and wait in the queue until `hpctrain resume`.

    Where the site does not requeue, the run stops instead. For a run that trains,
    creating the file has the same effect: touch RUN/control/hold

    \b
    Examples:
      hpctrain hold gpt175b-7f3a --reason "evaluation first"
    """
    from hpctrain.runs import control

    _tell(control.hold(_found(run, runs), _slurm(), reason=reason))


@click.command()
@click.argument("run", type=RunName())
@click.option(
    "--from-scratch",
    is_flag=True,
    help="Checkpoints are lost or unusable: give up all steps and start at step 0.",
)
@click.option("--accept-data", is_flag=True, help="Continue although the data have changed.")
@reason_option
@runs_option
def resume(run: str, from_scratch: bool, accept_data: bool, reason: str, runs: Path | None) -> None:
    """Continue a held, stopped or failed run from its newest checkpoint.

    A held job is released, a run that is over is submitted again. If it is just leaving its
    nodes, this waits until it has left, at most a minute. Pending requests are withdrawn.
    What is accepted goes into the ledger.

    \b
    Examples:
      hpctrain resume gpt175b-7f3a
      hpctrain resume gpt175b-7f3a --accept-data --reason "typos corrected"
      hpctrain resume gpt175b-7f3a --from-scratch --reason "scratch was purged"
    """
    from hpctrain.runs import control
    from hpctrain.runs.control import Acceptance

    acceptance = Acceptance(from_scratch=from_scratch, data=accept_data)
    found = _found(run, runs)
    with busy("checking what would end the run again, and asking Slurm ..."):
        answer = control.resume(found, _slurm(), reason=reason, acceptance=acceptance)
    _tell(answer)


@click.command()
@click.argument("run", type=RunName())
@runs_option
@yes_option
def cancel(run: str, runs: Path | None, yes: bool) -> None:
    """Cancel a run; it stays cancelled until somebody resumes it.

    \b
    Examples:
      hpctrain cancel gpt175b-7f3a -y
    """
    from hpctrain.runs import control

    found = _found(run, runs)
    confirm(f"Cancel run `{found.run_id}`?", yes=yes)
    cancelled = control.cancel(found, _slurm())
    if cancelled.already or cancelled.job_id is None:
        say(f"Run `{cancelled.run_id}` was cancelled already")
        return
    others = len(cancelled.job_ids) - 1
    jobs = f"job {cancelled.job_id}" + (f" and {others} more of it" if others >= 1 else "")
    if cancelled.still:
        say(f"Slurm accepted to cancel run `{cancelled.run_id}` ({jobs}), which has not ended yet:")
        say(f"`{found.command('status')}` shows when it has ended")
        return
    say(f"Cancelled run `{cancelled.run_id}` ({jobs})")


def _found(run: str, runs: Path | None) -> RunFiles:
    return find_run(runs_directory(runs), run)


def _slurm() -> SlurmClient:
    from hpctrain.slurm.client import SlurmClient as Client

    return Client()


def _tell(answer: ControlResult) -> None:
    say("\n".join(paragraph(answer.message, hang=2)) if sys.stderr.isatty() else answer.message)


@click.command()
@click.argument("run", type=RunName())
@reason_option
@runs_option
@yes_option
def upgrade(run: str, reason: str, runs: Path | None, yes: bool) -> None:
    """Move a run to the hpctrain that is installed, and accept the software it then finds.

    A run keeps the hpctrain with which it was submitted, whatever is installed meanwhile. After
    this its next attempt imports the installed one, and what that attempt finds (Python, packages,
    driver, image) becomes the software of the run (`supervise.software`). The attempt that runs
    goes on as it began.

    \b
    Examples:
      hpctrain upgrade gpt175b-7f3a
      hpctrain upgrade gpt175b-7f3a -y --reason "new driver on all nodes"
    """
    from hpctrain.runs import control

    found = _found(run, runs)
    confirm(f"Move run `{found.run_id}` to the installed hpctrain?", yes=yes)
    done = control.upgrade(found, reason)
    if done.moved:
        say(f"Run `{done.run_id}`: its next attempt imports {done.after} instead of {done.before}")
    else:
        say(f"Run `{done.run_id}` has {done.after} already")
    say("What its next launch finds installed becomes the software of the run")
