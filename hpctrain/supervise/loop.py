"""The supervisor inside the job: launch, watch, judge, act, until the attempt is over.

Every action is in the ledger before it is taken. Belongs here: the order of things. Does not
belong here: reading evidence (`classify`), choosing (`policy`), processes (`process`), what the
run directory looks like (`hpctrain.store`), or how Slurm is spoken to (`hpctrain.slurm`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path

from hpctrain.checkpoints.discover import Checkpoint, checkpoints, select_for_resume
from hpctrain.checkpoints.publish import fence_off
from hpctrain.errors import CheckpointError, InvalidInputError, Problem, SlurmError
from hpctrain.slurm.client import SlurmClient
from hpctrain.store.epochs import claim_epoch, current_epoch
from hpctrain.store.layout import RunLayout
from hpctrain.store.ledger import EventKind, Ledger
from hpctrain.store.signs import Progress, read_record
from hpctrain.supervise.attempt import (
    attempt_from,
    history,
    unfinished_attempt,
    why_lost,
)
from hpctrain.supervise.causes import Cause
from hpctrain.supervise.classify import classify
from hpctrain.supervise.context import AttemptContext, say
from hpctrain.supervise.documents import (
    Action,
    ActionKind,
    SuperviseConfig,
    Verdict,
)
from hpctrain.supervise.gather import gather, job_facts
from hpctrain.supervise.policy import STOPPED_EXIT_CODE, decide
from hpctrain.supervise.process import Launch, Signals, free_port
from hpctrain.supervise.requeue import requeue
from hpctrain.supervise.watch import LaunchWatch

_SLURM_TIMEOUT_SECONDS = 8.0


class Supervisor:
    """Owns the `srun` of one attempt."""

    def __init__(
        self,
        directory: Path,
        argv: list[str],
        environment: Mapping[str, str],
        slurm: SlurmClient | None = None,
    ) -> None:
        run_layout = RunLayout(directory.resolve())
        self.context = AttemptContext(
            run_layout=run_layout,
            config=read_supervise_config(run_layout.supervise_config),
            attempt=attempt_from(environment),
            ledger=Ledger(run_layout.ledger),
            slurm=slurm or SlurmClient(timeout_seconds=_SLURM_TIMEOUT_SECONDS, shielded=True),
            signals=Signals(),
        )
        self.argv = argv
        self.environment = dict(environment)
        self.launches = 0
        self.epoch = 0

    def run(self) -> int:
        """Supervise this attempt to its end; returns the exit code of the job."""
        self.context.signals.install()
        try:
            return self._supervise()
        except Exception as error:
            reason = f"the supervisor itself failed: {type(error).__name__}: {error}"
            with contextlib.suppress(OSError):  # a full disk may be why it failed
                self._act(Action(ActionKind.STOP, reason, STOPPED_EXIT_CODE))
            raise

    def _supervise(self) -> int:
        self._open_attempt()
        if self.context.run_layout.done.exists():
            return self._act(Action(ActionKind.FINISH, "the run was done before this attempt"))
        while True:
            verdict = self._launch_once()
            action = decide(verdict, history(self.context.ledger.events()), self.context.config)
            exit_code = self._act(action)
            if action.kind is not ActionKind.RELAUNCH:
                return exit_code
            self._pause(action.delay_seconds)
            forbidden = self._why_not_again()
            if forbidden is not None:
                return self._act(forbidden)

    def _why_not_again(self) -> Action | None:
        """A supervisor that outlived its attempt must not take the run from its successor."""
        if self.context.signals.final:
            facts = job_facts(self.context, patient=False)
            if facts is None or facts.state != "RUNNING":
                return Action(ActionKind.LEAVE, "the job is being ended", STOPPED_EXIT_CODE)
            reason = f"signal {self.context.signals.names[-1]}, which did not come from Slurm"
            return Action(ActionKind.STOP, f"the supervisor got {reason}", STOPPED_EXIT_CODE)
        if current_epoch(self.context.run_layout.epochs) > self.epoch:
            return Action(ActionKind.LEAVE, "a newer launch of this run has taken over")
        return None

    def _open_attempt(self) -> None:
        events = self.context.ledger.events()
        lost = unfinished_attempt(events, self.context.attempt)
        if lost is not None:
            cause, reason = why_lost(lost, events, self.context.attempt)
            self.context.ledger.append(
                EventKind.ATTEMPT_LOST,
                job_id=lost.job_id,
                restart_count=lost.restart_count,
                cause=cause,
                reason=reason,
            )
        attempt = self.context.attempt
        self.context.note(EventKind.ATTEMPT_STARTED, nodes=attempt.nodes)
        say(f"attempt {attempt} of run {self.context.config.run_id} on {attempt.nodes}")

    # -- one launch ------------------------------------------------------------------------

    def _launch_once(self) -> Verdict:
        epoch = claim_epoch(
            self.context.run_layout.epochs, f"{self.context.attempt} on {self.context.attempt.node}"
        )
        self.epoch = epoch
        fence_off(self.context.run_layout.checkpoints, epoch)
        self.context.run_layout.stop_request.unlink(missing_ok=True)
        try:
            start = self._select_checkpoint()
        except CheckpointError as error:
            return Verdict(Cause.BAD_CHECKPOINT, str(error))
        resume_step = start.step if start else 0
        self.launches += 1
        self.context.note(
            EventKind.LAUNCH_STARTED, epoch=epoch, launch=self.launches, resume_step=resume_step
        )
        verdict, exit_code = self._watch_launch(epoch, start)
        self._note_end(verdict, epoch, resume_step, exit_code)
        return verdict

    def _watch_launch(self, epoch: int, start: Checkpoint | None) -> tuple[Verdict, int | None]:
        try:
            launch = Launch(self.argv, self._launch_environment(epoch, start))
        except OSError as error:
            return Verdict(Cause.LAUNCH_FAILURE, f"srun could not be run: {error}"), None
        watch = LaunchWatch(self.context, launch, epoch, start.step if start else 0)
        watch.wait()
        return classify(gather(self.context, launch, watch)), launch.poll()

    def _select_checkpoint(self) -> Checkpoint | None:
        selection = select_for_resume(
            self.context.run_layout.checkpoints, self.context.config.verify
        )
        for bad in selection.rejected:
            self.context.note(
                EventKind.CHECKPOINT_REJECTED, checkpoint_step=bad.step, reason=bad.problem
            )
            say(f"checkpoint of step {bad.step} rejected: {bad.problem}")
        found = selection.checkpoint
        self.context.note(
            EventKind.RESUME,
            resume_step=found.step if found else 0,
            reason=f"from verified checkpoint {found.directory.name}" if found else "fresh start",
        )
        say(f"resume from step {found.step}" if found else "fresh start from step 0")
        return found

    def _launch_environment(self, epoch: int, start: Checkpoint | None) -> dict[str, str]:
        return {
            **self.environment,
            "HPCTRAIN_EPOCH": str(epoch),
            "HPCTRAIN_RESUME": start.directory.name if start else "",
            "MASTER_ADDR": self._master_address(),
            "MASTER_PORT": str(free_port(self._launch_name(epoch))),
        }

    def _launch_name(self, epoch: int) -> str:
        return f"{self.context.run_layout.directory} {self.context.attempt} {epoch}"

    def _master_address(self) -> str:
        """The address that Slurm itself uses for the first node; its name if Slurm is silent.

        `hostname --ip-address` may be a loopback address or a replaced node's.
        """
        try:
            return self.context.slurm.node_address(self.context.attempt.node)
        except SlurmError:
            return self.context.attempt.node

    def _note_end(self, verdict: Verdict, epoch: int, resume_step: int, code: int | None) -> None:
        progress = read_record(self.context.run_layout.progress, Progress)
        good = (c.step for c in checkpoints(self.context.run_layout.checkpoints) if c.good)
        self.context.note(
            EventKind.LAUNCH_ENDED,
            epoch=epoch,
            launch=self.launches,
            cause=verdict.cause,
            reason=verdict.reason,
            evidence=verdict.evidence,
            rank=verdict.rank,
            resume_step=resume_step,
            last_step=progress.step if progress and progress.epoch == epoch else None,
            checkpoint_step=next(good, None),
            exit_code=code,
        )
        say(f"launch {self.launches} ended: {verdict.cause}: {verdict.reason}")

    # -- acting ----------------------------------------------------------------------------

    def _act(self, action: Action) -> int:
        self.context.note(EventKind.ACTION, action=action.kind, reason=action.reason)
        say(f"{action.kind}: {action.reason}")
        if action.kind is not ActionKind.REQUEUE:
            return action.exit_code
        done, answer = requeue(self.context.slurm, self.context.job_id)
        self.context.note(EventKind.ACTION_RESULT, action=action.kind, reason=answer)
        say(f"requeue: {answer}")
        return 0 if done else STOPPED_EXIT_CODE

    def _pause(self, delay_seconds: float) -> None:
        """Wait before a relaunch, but not when the job is being ended."""
        deadline = time.monotonic() + delay_seconds
        while time.monotonic() < deadline and not self.context.signals.final:
            time.sleep(0.1)


def read_supervise_config(path: Path) -> SuperviseConfig:
    """The supervisor's own file. Raises InvalidInputError when it cannot be read."""
    try:
        return SuperviseConfig.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a supervise.json"
        problem = Problem(f"cannot be read: {reason}", str(path))
        raise InvalidInputError([problem]) from error
