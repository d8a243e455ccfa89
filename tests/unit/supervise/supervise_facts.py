"""What a launch may leave behind, in short words, for the tests of this directory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from hpctrain.judge.documents import JobFacts, LaunchEvidence
from hpctrain.records.run_records import ExitRecord
from hpctrain.records.supervise_config import SuperviseConfig
from hpctrain.slurm.states import JobState

NOTHING = LaunchEvidence(
    srun_exit_code=1,
    job=JobFacts(JobState.RUNNING, "None", 0, preempt_time=False),
    started=True,
)
SILENT = replace(NOTHING, job=None)


def job(
    state: str = "RUNNING", reason: str = "None", restarts: int = 0, *, preempt: bool = False
) -> JobFacts:
    return JobFacts(JobState(state), reason, restarts, preempt)


def exit_record(rank: int, outcome: str, message: str, **fields: Any) -> ExitRecord:
    """The record of a rank on node n<rank>, of no known time."""
    return ExitRecord(
        **{
            "epoch": 1,
            "rank": rank,
            "node": f"n{rank}",
            "outcome": outcome,
            "step": 0,
            "exit_code": 1,
            "time": 0.0,
            "message": message,
            **fields,
        }
    )


def exits(*words: str) -> tuple[ExitRecord, ...]:
    """`outcome message` per rank, in the order of their ends; rank i is on node n<i // 2>."""
    pairs = (word.partition(" ") for word in words)
    return tuple(
        exit_record(rank, outcome, message, node=f"n{rank // 2}")
        for rank, (outcome, _, message) in enumerate(pairs)
    )


def config(
    continuation: Literal["requeue", "none"] = "requeue", failures_without_progress: int = 3
) -> SuperviseConfig:
    return SuperviseConfig(
        run_id="r1",
        target_step=100,
        continuation=continuation,
        failures_without_progress=failures_without_progress,
        stall_seconds=60,
        setup_stall_seconds=600,
        kill_wait_seconds=3,
        verify="sha256",
    )
