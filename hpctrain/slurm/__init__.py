"""The only room that speaks Slurm: client, parsers, states, and a fake for tests of users.

Belongs here: everything that depends on the text or the quirks of a Slurm command. Does not belong
here: run directories, verdicts, policy. `FakeSlurm` lives in `hpctrain.slurm.fake`.
"""

from __future__ import annotations

from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.records import (
    JobRecord,
    RequeueAnswer,
    RequeueResult,
    SlurmConfig,
    StepRecord,
    SubmittedJob,
    TestOnlyAnswer,
)
from hpctrain.slurm.states import JobState

__all__ = [
    "JobRecord",
    "JobState",
    "RequeueAnswer",
    "RequeueResult",
    "SlurmClient",
    "SlurmConfig",
    "StepRecord",
    "SubmittedJob",
    "TestOnlyAnswer",
]
