"""Submit the evaluation jobs of kept checkpoints, from the training job or from a login node.

Each submission is announced in `evaluations.jsonl` before sbatch. Whoever finds an announcement
without an answer looks for the job by its name, which is unique for checkpoint and attempt, and
submits only if Slurm knows none. A job records its own start and end (`evaluation_result`); one
that ended without a word is recorded as lost. Nothing here may harm the training: it runs in a
thread, and every error is logged and left to the next pass.

Belongs here: one pass, the supervisor's thread. Does not belong here: the records
(`hpctrain.records.evaluations`), the script (`hpctrain.job.render.evaluation_script`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hpctrain.base import clock
from hpctrain.base.errors import AccessDeniedError, HpctrainError, SlurmError, SlurmRefusedError
from hpctrain.checkpoints.discover import saving_epochs
from hpctrain.records.evaluations import (
    Evaluation,
    EvaluationEvent,
    EvaluationJob,
    EvaluationSettings,
    Kind,
    append_event,
    read_evaluations_of,
    read_history,
    read_settings,
    submission_lock,
    waiting_evaluations,
)
from hpctrain.records.jobs import sbatch_options
from hpctrain.records.layout import RunLayout
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.records import JobRecord
from hpctrain.supervise.context import log_message
from hpctrain.supervise.timeouts import run_with_timeout

# The last line of a job may reach this host late (nfs(5): attributes are cached for up to 60 s).
_SILENT_SECONDS = 90.0
_LEAST_PAUSE_SECONDS = 1.0
_LAST_PASS_SECONDS = 30.0
Submitter = Literal["supervisor", "watch"]


@dataclass
class EvaluationPass:
    """One look at a run; `lines`: what was submitted, what Slurm has refused, in words.

    A refused job is left alone for a while, by the name of the job: others may have another
    partition. `forbidden` are jobs that nobody may submit from this host. `cluster` is the one that
    Slurm's client asks, `home` that of the run, None if not known: evaluations of another cluster
    are left alone, whose jobs this one does not know.
    """

    run: RunLayout
    slurm: SlurmClient
    by: Submitter
    silent_seconds: float = _SILENT_SECONDS
    cluster: str | None = None
    home: str | None = None
    forbidden: set[str] = field(default_factory=set)
    lines: list[str] = field(default_factory=list)
    _refused: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        # Slurm resolves a relative log below `--chdir`, which is the run directory itself.
        self.run = RunLayout(Path(os.path.abspath(self.run.directory)))

    def make(self) -> None:
        """Submit what is wanted and has no job; record jobs that are lost.

        Raises SlurmError when Slurm does not answer, OSError when the run directory does not.
        """
        settings = read_settings(self.run)
        if settings is None:
            return
        with submission_lock(self.run) as mine:
            if not mine:
                return
            known, refusals = read_history(self.run)
            self._refused = {
                name
                for (name, by), those in refusals.items()
                if by == self.by and clock.now() < those.next_time
            }
            waiting = waiting_evaluations(settings, known, saving_epochs(self.run.checkpoints))
            jobs: list[JobRecord] = []
            if any(one.open and not self._is_elsewhere(one) for _, one in waiting):
                jobs = list(self.slurm.jobs_of_users({os.getuid()}).values())
            for job, one in waiting:
                if self._is_elsewhere(one):
                    continue
                self._look_at(settings, job, one, jobs)

    def _is_elsewhere(self, one: Evaluation) -> bool:
        """Return True if its job is on another cluster, or is to be submitted there."""
        where = (one.cluster if one.open else None) or self.home
        return None not in (where, self.cluster) and where != self.cluster

    def _look_at(
        self,
        settings: EvaluationSettings,
        job: EvaluationJob,
        one: Evaluation,
        jobs: Iterable[JobRecord],
    ) -> None:
        if one.state == "submitting":
            # Whoever announced it died: this process has the lock.
            name = self._job_name(one, one.attempt)
            own = [record for record in jobs if self._is(record, name)]
            found = max(own, key=lambda record: record.job_id, default=None)
            if found is not None:
                self._note("submitted", one, one.attempt, job_id=found.submitted_id)
            else:
                self._submit(settings, job, one, one.attempt)
        elif one.open:
            self._look_for_end(one, jobs)
        elif one.state == "refused":
            self._submit(settings, job, one, max(1, one.attempt))
        else:
            self._submit(settings, job, one, one.attempt + 1)

    def _look_for_end(self, one: Evaluation, jobs: Iterable[JobRecord]) -> None:
        record = next((record for record in jobs if record.job_id == one.job_id), None)
        if record is not None and not record.state.is_ended:
            return
        if clock.now() - one.since_time < self.silent_seconds:
            return
        newest = read_evaluations_of(self.run).get((one.name, one.step, one.epoch), one)
        if not newest.open:
            return
        state = "and Slurm no longer knows it" if record is None else f"as {record.state.name}"
        reason = f"job {one.job_id} ended {state}, without a result"
        self._note("lost", one, one.attempt, job_id=one.job_id, reason=reason)

    def _submit(
        self, settings: EvaluationSettings, job: EvaluationJob, one: Evaluation, attempt: int
    ) -> None:
        if job.name in self._refused | self.forbidden:
            return
        self._note("submitting", one, attempt)
        directory = self.run.directory
        log = str(self.run.evaluation_log(one.name, one.step, attempt, "JOB")).replace("%", "%%")
        options = [
            *sbatch_options(directory)[:1],
            f"--job-name={self._job_name(one, attempt)}",
            f"--output={log.removesuffix('JOB.out')}%j.out",
        ]
        arguments = (str(one.step), str(one.epoch), str(attempt))
        try:
            slurm = self.slurm.at(submit_command=settings.submission.words)
            job_id = slurm.submit_with(
                self.run.evaluation_script(job.name),
                arguments,
                options,
                variables=settings.submit_variables,
            ).job_id
        except SlurmRefusedError as error:
            self._refused.add(job.name)
            if isinstance(error, AccessDeniedError):
                self.forbidden.add(job.name)
            self._note("refused", one, attempt, reason=str(error))
            self.lines.append(f"evaluation {one.name} of step {one.step} refused: {error}")
            return
        self._note("submitted", one, attempt, job_id=job_id)
        again = f", attempt {attempt}" if attempt > 1 else ""
        self.lines.append(f"evaluation {one.name} of step {one.step}{again}: job {job_id}")

    def _job_name(self, one: Evaluation, attempt: int) -> str:
        return f"{self.run.run_id}-{one.name}-s{one.step}e{one.epoch}a{attempt}"

    def _is(self, record: JobRecord, name: str) -> bool:
        directory = record.work_directory
        here = os.path.realpath(self.run.directory)
        return record.name == name and (directory is None or os.path.realpath(directory) == here)

    def _note(self, kind: Kind, one: Evaluation, attempt: int, **more: object) -> None:
        event = {
            "kind": kind,
            "name": one.name,
            "step": one.step,
            "epoch": one.epoch,
            "attempt": attempt,
            "time": clock.now(),
            "by": self.by,
            "cluster": self.cluster if kind in ("submitting", "submitted") else None,
            **more,
        }
        append_event(self.run, EvaluationEvent.model_validate(event))


class EvaluationThread:
    """Makes passes beside the training, in a thread that the end of the process does not wait for.

    A job that sbatch does not take from this host (a site may forbid it on compute nodes) is not
    tried again in this attempt: `hpctrain watch` submits from a login node.
    """

    def __init__(
        self,
        run: RunLayout,
        slurm: SlurmClient,
        pause_seconds: float,
        log: Callable[[str], None] = log_message,
        cluster: str | None = None,
    ) -> None:
        self._run, self._slurm, self._log, self._cluster = run, slurm, log, cluster
        self._pause_seconds = max(_LEAST_PAUSE_SECONDS, pause_seconds)
        self._stopping = threading.Event()
        self._forbidden: set[str] = set()
        self._broken = False
        self._said = ""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, if the run has evaluation jobs."""
        if self._run.evaluation_config.exists():
            self._thread = threading.Thread(target=self._loop, name="evaluations", daemon=True)
            self._thread.start()

    def stop(self, *, last_pass: bool) -> None:
        """End the passes; `last_pass`: after one more, for the checkpoint of the end."""
        if self._thread is None:
            return
        self._stopping.set()
        if not last_pass:
            return
        thread = self._thread

        def finish() -> None:
            thread.join(_LAST_PASS_SECONDS)
            if not thread.is_alive():
                self._pass()

        run_with_timeout(finish, _LAST_PASS_SECONDS)

    def _loop(self) -> None:
        while not clock.wait(self._stopping, self._pause_seconds):
            self._pass()

    def _pass(self) -> None:
        if self._broken:
            return
        forbidden = set(self._forbidden)
        one = EvaluationPass(
            self._run,
            self._slurm,
            "supervisor",
            cluster=self._cluster,
            forbidden=self._forbidden,
        )
        problem = ""
        try:
            one.make()
        except (SlurmError, HpctrainError, OSError) as error:
            problem = f"evaluations: {error}"
        except Exception as error:  # a bug of ours, which must not harm the training
            self._broken = True
            problem = f"evaluations: unexpected {type(error).__name__}: {error}"
        for line in one.lines:
            self._log(line)
        if problem and problem != self._said:
            self._log(problem)
        self._said = problem
        for name in sorted(self._forbidden - forbidden):
            self._log(
                f"not from this host: `hpctrain watch --act` submits evaluations {name} instead"
            )
