"""Replace SlurmClient in tests, those of users and our own, by a Slurm in memory.

Belongs here: the same public methods over a dictionary. Does not belong here: scheduling; a test
moves a job by replacing its record: `fake.records[1] = replace(fake.records[1], state=RUNNING)`.
The behaviour of Slurm itself is tested with `hpctrain.sandbox`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from hpctrain.base.errors import SlurmRefusedError, SlurmUnreachableError
from hpctrain.slurm.job_changes import requested_job
from hpctrain.slurm.parse import node_state
from hpctrain.slurm.process import refusal
from hpctrain.slurm.records import (
    JobRecord,
    NodeState,
    RequeueAnswer,
    RequeueResult,
    SlurmConfig,
    StepRecord,
    SubmittedJob,
    TestOnlyAnswer,
)
from hpctrain.slurm.states import JobState


class FakeSlurm:
    """Plain attributes: `records`; `scripts`, `options` and `inherited` variables of sbatch, by job
    id; `live_steps`, `signals` (job, step, name), the settings.
    `away = True` makes every call fail as without a controller; `refusal` is the message of an
    sbatch that refuses the next script. `makes` are settings that jobs get otherwise than they ask
    for, `messages` what sbatch prints beside the id. `commands` are the words that submit, of each
    client that `at` gave; `clusters` are others by name.
    """

    def __init__(self) -> None:
        self.records: dict[int, JobRecord] = {}
        self.scripts: dict[int, str] = {}
        self.live_steps: dict[int, tuple[StepRecord, ...]] = {}
        self.signals: list[tuple[int, str, str]] = []
        self.settings = {"SLURM_VERSION": "22.05.8", "JobRequeue": "1", "ClusterName": "fake"}
        self.node_words: dict[str, str] = {}
        self.booted: dict[str, float] = {}
        self.options: dict[int, list[str]] = {}
        self.inherited: dict[int, tuple[str, ...] | None] = {}
        self.arguments: dict[int, tuple[str, ...]] = {}
        self.dependencies: dict[int, str] = {}
        self.leaf_of: dict[str, str] = {}
        self.refusal = ""
        self.messages: tuple[str, ...] = ()
        self.makes: dict[str, Any] = {}
        self.commands: list[tuple[str, ...]] = []
        self.clusters: dict[str, FakeSlurm] = {}
        self.away = False

    def at(self, *, cluster: str | None = None, submit_command: Sequence[str] = ()) -> Self:
        """Return that of `clusters`, or this one."""
        self.commands += [tuple(submit_command)] if submit_command else []
        return self.clusters.get(cluster or "", self)  # type: ignore[return-value]

    def submit(
        self,
        script: Path | str,
        extra_args: Sequence[str] = (),
        *,
        variables: Collection[str] | None = None,
    ) -> SubmittedJob:
        self.test_only(script, extra_args)
        job_id = max(self.records, default=0) + 1
        self.scripts[job_id] = script.read_text() if isinstance(script, Path) else script
        self.options[job_id] = list(extra_args)
        self.inherited[job_id] = None if variables is None else tuple(variables)
        places = [one for one in extra_args if one.startswith("--chdir=")]
        made: dict[str, Any] = {
            "job_id": job_id,
            "state": JobState.PENDING,
            "restart_count": 0,
            "requeue": True,
            "work_directory": places[-1].partition("=")[2] if places else None,
            "cluster": self.cluster_name(),
            "source": "fake",
            **self.makes,
        }
        self.records[job_id] = replace(requested_job(self.scripts[job_id], extra_args), **made)
        return SubmittedJob(job_id, messages=self.messages)

    def submit_with(
        self,
        script: Path,
        arguments: Sequence[str],
        extra_args: Sequence[str] = (),
        *,
        variables: Collection[str] | None = None,
    ) -> SubmittedJob:
        job = FakeSlurm.submit(self, script, extra_args, variables=variables)
        self.arguments[job.job_id] = tuple(arguments)
        return job

    def test_only(self, script: Path | str, extra_args: Sequence[str] = ()) -> TestOnlyAnswer:
        self._present()
        if self.refusal:
            raise refusal(self.refusal)
        return TestOnlyAnswer("Job would start")

    def jobs(self, ids: Collection[int]) -> dict[int, JobRecord]:
        self._present()
        return {i: record for i, record in self.records.items() if record.belongs_to(ids)}

    def jobs_of_users(self, user_ids: Collection[int]) -> dict[int, JobRecord]:
        """Return all jobs: there is one user only."""
        self._present()
        return dict(self.records)

    def live_jobs_named(self, name: str) -> tuple[int, ...]:
        self._present()
        live = (record for record in self.records.values() if not record.state.is_ended)
        return tuple(record.job_id for record in live if record.name == name)

    def show_job(self, job_id: int) -> JobRecord | None:
        record = self.jobs([job_id]).get(job_id)
        if record is None:
            return None
        waits_for = tuple(filter(None, self.dependencies.get(job_id, "").split(",")))
        return replace(record, dependencies=waits_for)

    def history(self, ids: Collection[int]) -> dict[int, JobRecord]:
        return self.jobs(ids)

    def past_jobs(self, ids: Collection[int]) -> dict[int, JobRecord]:
        return self.history(ids) if ids and self.accounting_enabled() else {}

    def steps(self, job_id: int) -> tuple[StepRecord, ...]:
        self._present()
        return self.live_steps.get(job_id, ())

    def hostnames(self, node_list: str) -> tuple[str, ...]:
        """Expand one range at most: `n[0-2]`, or names joined by commas."""
        match = re.fullmatch(r"([^\[,]+)\[(\d+)-(\d+)\]", node_list)
        if match is None:
            return tuple(filter(None, node_list.split(",")))
        numbers = range(int(match[2]), int(match[3]) + 1)
        return tuple(f"{match[1]}{number:0{len(match[2])}d}" for number in numbers)

    def node_states(self, nodes: Collection[str]) -> dict[str, NodeState]:
        self._present()
        return {node: node_state(node, self.node_words.get(node, "allocated")) for node in nodes}

    def boot_times(self, nodes: Collection[str]) -> dict[str, float]:
        self._present()
        return {node: self.booted[node] for node in nodes if node in self.booted}

    def leaves(self) -> dict[str, str]:
        self._present()
        return dict(self.leaf_of)

    def node_address(self, node: str) -> str:
        self._present()
        return node

    def config(self) -> SlurmConfig:
        self._present()
        return SlurmConfig(self.settings)

    def accounting_enabled(self) -> bool:
        return self.config().accounting_enabled

    def cluster_name(self) -> str | None:
        return self.config().cluster_name or None

    def requeue(self, job_id: int, *, shielded: bool = False) -> RequeueAnswer:
        if self.away:
            return RequeueAnswer(RequeueResult.UNREACHABLE, "Unexpected message received")
        record = self.records.get(job_id)
        if record is None:
            return RequeueAnswer(RequeueResult.UNKNOWN_JOB, "Invalid job id specified")
        if not record.requeue:
            return RequeueAnswer(RequeueResult.DISABLED, "Requested operation is disabled")
        if record.state.is_pending:
            return RequeueAnswer(RequeueResult.ALREADY_PENDING, "Job is pending execution")
        count = (record.restart_count or 0) + 1
        self._change(job_id, state=JobState.PENDING, reason="BeginTime", restart_count=count)
        return RequeueAnswer(RequeueResult.DONE)

    def requeue_hold(self, job_id: int, *, shielded: bool = False) -> RequeueAnswer:
        answer = self.requeue(job_id, shielded=shielded)
        if answer.result is RequeueResult.DONE:
            self.hold(job_id)
        return answer

    def hold(self, job_id: int) -> None:
        self._change(job_id, reason="JobHeldUser")

    def release(self, job_id: int) -> None:
        self._change(job_id, reason="None")

    def update_job(
        self,
        job_id: int,
        *,
        start_now: bool = False,
        exclude_nodes: Sequence[str] | None = None,
        requeue: bool | None = None,
        nodes: tuple[int, int] | None = None,
        dependency: str | None = None,
    ) -> None:
        if dependency is not None:
            self._change(job_id)
            self.dependencies[job_id] = dependency
        if start_now:
            self._change(job_id, reason="Resources")
        if exclude_nodes is not None:
            self._change(job_id, exclude_nodes=",".join(exclude_nodes))
        if requeue is not None:
            self._change(job_id, requeue=requeue)
        if nodes is not None:
            self._change(job_id, node_count=nodes[0])

    def cancel(self, job_id: int) -> None:
        record = self.show_job(job_id)
        if record and not record.state.is_ended:
            self._change(job_id, state=JobState.CANCELLED)

    def cancel_all(self, ids: Collection[int], *, pending_only: bool = False) -> None:
        for job_id, record in self.jobs(ids).items():
            if record.state.is_pending or not pending_only:
                self.cancel(job_id)

    def cancel_waiting(self, job_id: int) -> None:
        record = self.show_job(job_id)
        if record and record.state.is_pending:
            self.cancel(job_id)

    def signal_step(self, job_id: int, step_id: str, signal_name: str) -> None:
        self._present()
        self.signals.append((job_id, step_id, signal_name))

    def signal_batch(self, job_id: int, signal_name: str) -> None:
        self.signal_step(job_id, "batch", signal_name)

    def run_on_node(self, job_id: int, node: str, step_name: str, words: Sequence[str]) -> str:
        """Refuse, because nothing runs here."""
        self._present()
        raise SlurmRefusedError(f"srun: error: Unable to create step for job {job_id}")

    def kill_step(self, job_id: int, step_id: str) -> None:
        self.signal_step(job_id, step_id, "KILL")

    def _change(self, job_id: int, **changes: object) -> None:
        self._present()
        if job_id not in self.records:
            raise SlurmRefusedError(f"Invalid job id specified for job {job_id}")
        self.records[job_id] = replace(self.records[job_id], **changes)  # type: ignore[arg-type]

    def _present(self) -> None:
        if self.away:
            raise SlurmUnreachableError("Unable to contact slurm controller (connect failure)")
