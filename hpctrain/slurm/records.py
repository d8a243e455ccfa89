"""Records of jobs, steps, nodes and partitions, as Slurm's commands report them.

All times are seconds since the epoch (UTC), all durations are seconds. None means that the query
did not report the value. Belongs here: records. Does not belong here: parsing (`parse`), queries
(`client`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum

from hpctrain.slurm.reasons import JobEnd, JobHold, WaitReason, job_end, job_hold, wait_reason
from hpctrain.slurm.states import JobState


@dataclass(frozen=True)
class JobTerms:
    """Under which terms a job runs: its QOS and reservation, and what it asks for.

    `cpu_count` of a pending job is the least it asks for, `gpus_per_node` what it asks of a node
    (0: none by that option).
    """

    qos: str | None = None
    reservation: str | None = None
    cpu_count: int | None = None
    gpus_per_node: int | None = None


@dataclass(frozen=True)
class JobRecord:
    """One job. For a pending job `start_time` is the earliest or expected start.

    `exit_code` and `exit_signal` belong to the batch script and are set for ended jobs only.
    `time_limit_seconds` is infinite for UNLIMITED. `exclude_nodes` is Slurm's hostlist, "" for
    none. `array_job_id` is the id that sbatch has printed: that of the whole array for an element
    of one, else `job_id`. `node_count` of a pending job is the least it asks for. `cluster` is
    Slurm's ClusterName, `work_directory` where the script runs (sbatch(1), --chdir). `source` names
    the command that reported it. `dependencies` are what it still waits for, such as `afterok:12`.
    """

    job_id: int
    name: str | None = None
    state: JobState = JobState.UNKNOWN
    reason: str | None = None
    node_list: str | None = None
    restart_count: int | None = None
    preempt_time: float | None = None
    start_time: float | None = None
    end_time: float | None = None
    submit_time: float | None = None
    time_limit_seconds: float | None = None
    partition: str | None = None
    account: str | None = None
    exit_code: int | None = None
    exit_signal: int | None = None
    requeue: bool | None = None
    exclude_nodes: str | None = None
    dependencies: tuple[str, ...] = ()
    comment: str | None = None
    array_job_id: int | None = None
    node_count: int | None = None
    terms: JobTerms = JobTerms()
    cluster: str | None = None
    work_directory: str | None = None
    source: str = ""

    @property
    def submitted_id(self) -> int:
        """The id that sbatch printed."""
        return self.array_job_id or self.job_id

    @property
    def hold(self) -> JobHold | None:
        """Who keeps the job from starting until it is released; None if nobody does."""
        return job_hold(self.state, self.reason)

    @property
    def wait(self) -> WaitReason | None:
        """Why the scheduler does not start the job, if its reason is a known one."""
        return wait_reason(self.reason)

    @property
    def end(self) -> JobEnd | None:
        """Why Slurm ends or ended the job; None if neither state nor reason names that."""
        return job_end(self.state, self.reason)

    def belongs_to(self, ids: Collection[int]) -> bool:
        """True for one of these jobs, and for an element of one that is an array."""
        return self.job_id in ids or self.submitted_id in ids


@dataclass(frozen=True)
class JobIdentity:
    """Identifies the jobs of one run by the options that their script gives to sbatch.

    `name` and `comment` are those of the script; `directories` are spellings of the run directory.
    """

    name: str
    comment: str
    directories: frozenset[str] = frozenset()

    def confirms(self, job: JobRecord) -> bool:
        """True if a job whose id is in the ledger has the name or the comment of the run.

        A controller that lost its state gives an id away again, and another cluster has a job of
        that id, too. Sites may add words to a comment (job_submit plugins), and accounting may not
        keep it. A record without name and comment is taken for the run's.
        """
        if job.name is None and job.comment is None:
            return True
        return job.name == self.name or self._is_marked(job)

    def finds(self, job: JobRecord) -> bool:
        """True if a job whose id is in no ledger has the comment and the directory of the run.

        Two directories of runs may contain runs of the same id. Where sites own the comment, name
        and directory together prove as much.
        """
        directory = job.work_directory
        if directory is None:
            return self._is_marked(job)
        here = not self.directories.isdisjoint({directory, os.path.realpath(directory)})
        return here and (job.name == self.name or self._is_marked(job))

    def _is_marked(self, job: JobRecord) -> bool:
        return self.comment in (job.comment or "").split()


@dataclass(frozen=True)
class SubmittedJob:
    """The result of sbatch; `messages` are lines of the site (job_submit plugin), often none."""

    job_id: int
    cluster: str | None = None
    messages: tuple[str, ...] = ()


@dataclass(frozen=True)
class TestOnlyAnswer:
    """The result of `sbatch --test-only`: an estimate; `text` is Slurm's sentence verbatim."""

    __test__ = False  # the name begins with Test, but it is no test of pytest

    text: str
    start_time_text: str | None = None
    processors: int | None = None
    nodes: str | None = None
    partition: str | None = None


class RequeueResult(Enum):
    """The result of a requeue; only UNREACHABLE is worth a retry."""

    DONE = "done"
    ALREADY_PENDING = "already pending"
    DISABLED = "disabled"
    UNKNOWN_JOB = "unknown job"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True)
class RequeueAnswer:
    """The result of a requeue and Slurm's own message."""

    result: RequeueResult
    text: str = ""

    @property
    def will_run_again(self) -> bool:
        """True if the job is in the queue, by this request or an earlier one."""
        return self.result in (RequeueResult.DONE, RequeueResult.ALREADY_PENDING)


@dataclass(frozen=True)
class StepRecord:
    """A live step; `step_id` is `0`, `1`, ... or `batch`, `extern`, `interactive`.

    `name` is the step's `--job-name`, by default that of the program it runs.
    """

    step_id: str
    state: JobState
    name: str = ""


@dataclass(frozen=True)
class NodeState:
    """The controller's state of a node: `allocated`, `down`, `draining`, ... (sinfo(1)).

    `responding` is False while its slurmd does not answer (the `*` of sinfo). `planned`: it is on
    its way out of service or being rebooted because an administrator, or Slurm, wants it so.
    `leaving`: somebody has it rebooted or powered down (`@`, `^`, `%`, `!`).
    """

    node: str
    state: str
    responding: bool = True
    planned: bool = False
    leaving: bool = False

    @property
    def is_down(self) -> bool:
        """True if nothing can start on it. A drained node continues until its jobs have ended."""
        return self.state in ("down", "fail", "error", "powered_down", "powering_down", "unknown")

    @property
    def is_drained(self) -> bool:
        """True if it takes no new jobs, because an administrator or a health check drains it."""
        return "drain" in self.state


@dataclass(frozen=True)
class SlurmConfig:
    """`scontrol show config`, with the values that decisions depend on as typed properties."""

    values: Mapping[str, str] = field(default_factory=dict)

    def get(self, key: str, default: str = "") -> str:
        """The raw value; Slurm's `(null)` reads as the default."""
        value = self.values.get(key, "(null)")
        return default if value in ("(null)", "") else value

    @property
    def version(self) -> tuple[int, ...]:
        """`22.05.8` as (22, 5, 8)."""
        match = re.search(r"\d+(?:\.\d+)+", self.get("SLURM_VERSION"))
        return tuple(int(part) for part in match[0].split(".")) if match else ()

    @property
    def cluster_name(self) -> str:
        return self.get("ClusterName")

    @property
    def accounting_enabled(self) -> bool:
        """True if sacct has a database to query."""
        return self.get("AccountingStorageType").rpartition("/")[2] not in ("", "none")
