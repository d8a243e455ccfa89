"""Failures of ranks where srun's tasks are torchelastic agents (`launcher: torchrun`). Pure.

srun numbers agents, not ranks, and an agent leaves with a code whatever has killed its rank. So
what agents say about their ranks takes the place of what srun says about agents. Belongs here: that
translation. Does not belong here: reading the records (`store.signs`), what follows from a failure
(`rank_verdict`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hpctrain.slurm.messages import TaskFailure
from hpctrain.store.run_records import AgentRecord

# In the place of a rank's number, which a failure of an agent must not seem to have.
AGENT = "agent"
# Less than the supervisor lets ranks live that survive a failed one (`watch`).
_SRUN_IS_LATE_SECONDS = 3.0


def failures_below_agents(
    records: Sequence[AgentRecord], said_by_srun: Sequence[TaskFailure]
) -> tuple[TaskFailure, ...]:
    """In the order of death. An agent that has told of its ranks has told what there is."""
    told = {record.node for record in records}
    agents = [replace(one, tasks=AGENT) for one in said_by_srun if one.node not in told]
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
    return tuple(sorted([*agents, *ranks], key=_order))


def _order(failure: TaskFailure) -> float:
    """srun's word about an agent that was killed comes a little after what the death of its ranks
    does to others; the supervisor's own kill comes much later."""
    killed = failure.tasks == AGENT and failure.code is None
    return failure.at - (_SRUN_IS_LATE_SECONDS if killed else 0.0)
