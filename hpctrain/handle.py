"""The Python API: `hpctrain.make_plan`, `submit`, `open_run` and the `Run` handle.

    run = hpctrain.submit("gpt175b.yaml", "a100x64")
    run.wait()
    print(run.state, run.status.loss)

It returns the same frozen objects as the command line shows, and prints nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base import clock
from hpctrain.base.errors import RunFailedError
from hpctrain.diagnose.of_run import Diagnosis, diagnose
from hpctrain.job.job_submission import resubmit
from hpctrain.job.prepare import load_inputs, load_knowledge, prepare
from hpctrain.job.submit import submit
from hpctrain.plan.documents import Plan
from hpctrain.records.find import RunFiles, find_run, runs_directory
from hpctrain.runs import control
from hpctrain.runs.checkpoint_list import CheckpointReport, report_checkpoints
from hpctrain.runs.control import Acceptance, cancel
from hpctrain.runs.describe import RunStory, describe
from hpctrain.runs.logs import logs_of
from hpctrain.runs.state import RunState
from hpctrain.runs.status import RunStatus, poll_interval, statuses
from hpctrain.runs.why import Why, why
from hpctrain.slurm.client import SlurmClient


@dataclass(frozen=True)
class Run:
    """A submitted run. Every property reads the run directory and queries Slurm at most once."""

    files: RunFiles
    slurm: SlurmClient

    @property
    def run_id(self) -> str:
        return self.files.run_id

    @property
    def directory(self) -> Path:
        return self.files.layout.directory

    @property
    def status(self) -> RunStatus:
        """State, job, step, loss, rates, age of the last progress record."""
        return statuses([self.files], self.slurm)[0]

    @property
    def state(self) -> RunState:
        return self.status.state

    @property
    def story(self) -> RunStory:
        """The history of the run, from its ledger."""
        return describe(self.files)

    def wait(
        self, timeout_seconds: float | None = None, poll_seconds: float | None = None
    ) -> RunStatus:
        """Wait until nothing more will happen by itself; ask every `poll_seconds` seconds.

        The default, and the least that is allowed, is what the profile sets (`limits.poll`).

        Raises UsageError if `poll_seconds` is less, RunFailedError if the run ended in any state
        but DONE, TimeoutError after `timeout_seconds`.
        """
        pause_seconds = poll_interval([self.files], poll_seconds)
        deadline = None if timeout_seconds is None else clock.monotonic() + timeout_seconds
        while not (row := self.status).state.over:
            if deadline is not None and clock.monotonic() >= deadline:
                raise TimeoutError(f"run {self.run_id} is {row.state} after {timeout_seconds} s")
            clock.sleep(pause_seconds)
        if row.state is not RunState.DONE:
            raise RunFailedError(f"run `{self.run_id}` is {row.state}: {row.reason}")
        return row

    def logs(self, rank: int | None = None) -> str:
        """Read the logs of the job or of one rank, of all attempts."""
        return "".join(part.text() for part in logs_of(self.files, rank))

    def why(self) -> Why:
        """Explain the last verdict and action, the budgets, and what would happen next."""
        return why(self.files, self.slurm)

    def diagnose(self, *, price: bool = True) -> Diagnosis:
        """Diagnose where time and memory go, and price changes."""
        return diagnose(self.files, price=price)

    def checkpoints(self, *, verify: bool = False) -> CheckpointReport:
        """Inspect the run's checkpoints; `verify` reads every byte of them."""
        return report_checkpoints(self.files, verify=verify)

    def stop(self, *, now: bool = False, reason: str = "") -> str:
        """Have the run save, leave and stop (`now`: without a save); returns what was done."""
        return control.stop(self.files, self.slurm, now=now, reason=reason).message

    def hold(self, *, reason: str = "") -> str:
        """Have the run save, leave its nodes and wait in the queue; returns what was done."""
        return control.hold(self.files, self.slurm, reason=reason).message

    def resume(
        self, *, reason: str = "", from_scratch: bool = False, accept_data: bool = False
    ) -> str:
        """Continue a held, stopped or failed run; returns what was done.

        `from_scratch` gives up all steps where checkpoints are gone or of no use, `accept_data`
        continues with changed data; both go into the ledger. Raises UsageError where there is
        nothing to accept.
        """
        acceptance = Acceptance(from_scratch=from_scratch, data=accept_data)
        answer = control.resume(self.files, self.slurm, reason=reason, acceptance=acceptance)
        return answer.message

    def save(self, *, reason: str = "", timeout_seconds: float | None = None) -> int:
        """Have the run save a checkpoint and wait until it counts; returns its step.

        Raises UsageError when it does not run, RunFailedError when it ends without a save,
        TimeoutError after `timeout_seconds`.
        """
        after_step = control.step_now(self.files.layout)
        control.save(self.files, self.slurm, reason=reason)
        return control.wait_for_save(self.files, self.slurm, after_step, timeout_seconds)

    def cancel(self) -> None:
        """Cancel the run for good."""
        cancel(self.files, self.slurm)

    def resubmit(self) -> int:
        """Submit a stopped run again; returns the new job id."""
        return resubmit(self.files, self.slurm).job_id


def make_plan(spec: str | Path, profile: str, overrides: Sequence[str] = ()) -> Plan:
    """Plan a spec on a profile; see `hpctrain plan` for the errors raised."""
    from hpctrain.plan import planner  # with NumPy, which only planning needs

    loaded_spec, loaded_profile = load_inputs(Path(spec), profile, overrides)
    knowledge = load_knowledge(loaded_profile)
    with loaded_spec.placing():
        return planner.make_plan(loaded_spec.document, loaded_profile.document, knowledge)


def submit_run(
    spec: str | Path,
    profile: str,
    overrides: Sequence[str] = (),
    *,
    runs: Path | None = None,
    slurm: SlurmClient | None = None,
) -> Run:
    """Plan, render and submit a run. Raises what `hpctrain submit` reports."""
    client = slurm or SlurmClient()
    directory = runs_directory(runs)
    prepared = prepare(Path(spec), profile, overrides, runs=directory)
    submitted = submit(prepared, directory, client)
    return Run(find_run(directory, submitted.run_id), client)


def open_run(name: str, *, runs: Path | None = None, slurm: SlurmClient | None = None) -> Run:
    """Open the run of that id or unique start of an id. Raises NoSuchRunError."""
    return Run(find_run(runs_directory(runs), name), slurm or SlurmClient())
