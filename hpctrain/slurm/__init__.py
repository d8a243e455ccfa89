"""The only room that knows Slurm's commands and texts: client, parsers, meanings, and a fake.

Belongs here: everything that depends on the text or the quirks of a Slurm command. Does not belong
here: run directories, verdicts, policy. `FakeSlurm` lives in `hpctrain.slurm.fake`.
"""

from __future__ import annotations

from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.reasons import JobEnd, JobHold, WaitReason
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
    "JobEnd",
    "JobHold",
    "JobRecord",
    "JobState",
    "RequeueAnswer",
    "RequeueResult",
    "SlurmClient",
    "SlurmConfig",
    "StepRecord",
    "SubmittedJob",
    "TestOnlyAnswer",
    "WaitReason",
]
