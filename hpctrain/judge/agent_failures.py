"""Replace failures of torchelastic agents by those of their ranks (`launcher: torchrun`). Pure.

srun numbers agents, not ranks, and an agent exits with a code even if a signal killed its rank. So
the record of an agent about its ranks replaces srun's report on the agent. Belongs here: that
replacement. Does not belong here: reading the records (`records.run_records`), what follows from a
failure (`rank_verdict`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hpctrain.records.run_records import AgentRecord
from hpctrain.slurm.messages import TaskFailure

# Instead of a rank's number, which the failure of an agent does not have.
AGENT = "agent"
# Less than the time for which the supervisor lets ranks survive a failed one (`launch_watch`).
_SRUN_IS_LATE_SECONDS = 3.0


def failures_below_agents(
    records: Sequence[AgentRecord], reported_by_srun: Sequence[TaskFailure]
) -> tuple[TaskFailure, ...]:
    """List failures of ranks, and of agents without a record, in the order of their ends."""
    recorded = {record.node for record in records}
    agents = [replace(one, tasks=AGENT) for one in reported_by_srun if one.node not in recorded]
    ranks = [
        TaskFailure(
            record.node,
            str(end.rank),
            code=end.code if end.code >= 0 else None,
            signal=-end.code if end.code < 0 else None,
            at=record.time,
        )
        for record in records
        for end in record.ended
    ]

    def order(failure: TaskFailure) -> float:
        # srun reports a killed agent a little after the end of its ranks has affected others. A
        # kill by the supervisor comes much later.
        killed = failure.tasks == AGENT and failure.code is None
        return failure.at - (_SRUN_IS_LATE_SECONDS if killed else 0.0)

    return tuple(sorted([*agents, *ranks], key=order))
