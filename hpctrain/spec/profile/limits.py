"""What a run may ask for at a site of a cluster profile, what it costs, and how often it fails.

Belongs here: rules and rates of a site. Does not belong here: facts about machines (`hardware`).
"""

from __future__ import annotations

from pydantic import Field

from hpctrain.base.units import ByteSize, Duration
from hpctrain.spec.document import Document


class LimitsProfile(Document):
    """What the site allows a run to ask for; checked at plan time, exit code 4.

    `max_inodes`, `max_bytes` and `max_rpc_per_hour` are compared with a prediction (`footprint`):
    `submit` only warns of them.
    """

    max_nodes: int | None = Field(None, ge=1, description="Most nodes of one run")
    max_gpus: int | None = Field(None, ge=1, description="Most GPUs of one run")
    max_walltime: Duration | None = Field(None, description="Longest time limit of one attempt")
    max_gpu_hours: float | None = Field(
        None,
        gt=0,
        description="Most GPU-hours of one run: those that the plan predicts, or of one attempt of "
        "`resources.walltime` where no time is predicted",
    )
    max_submit: int | None = Field(
        None, ge=1, description="MaxSubmitJobs of one user; singleton and array submit many at once"
    )
    grp_gpus: int | None = Field(
        None, ge=1, description="GPUs that an account may have at once (GrpTRES); others would wait"
    )
    accounts: tuple[str, ...] = Field(
        (), description="Accounts that may be charged, and one must be given; empty: any"
    )
    account_required: bool = Field(False, description="Refuse runs without an account")
    qos: tuple[str, ...] = Field((), description="QOS that runs may ask for; empty: any")
    poll: Duration = Field(
        Duration(10),
        gt=0,
        description="Least time between two queries of Slurm by a command that waits",
    )
    max_inodes: int | None = Field(
        None, ge=1, description="Most files and directories in one run directory"
    )
    max_bytes: ByteSize | None = Field(
        None, gt=0, description="Most bytes of checkpoints of one run at a time"
    )
    max_rpc_per_hour: int | None = Field(
        None, ge=1, description="Most RPCs of one run to slurmctld in any hour"
    )


class PriceProfile(Document):
    """What a GPU-hour costs. Currency is the site's; messages print it as given."""

    currency: str = Field("USD", pattern=r"^[A-Z]{3}$", description="ISO 4217 code")
    on_demand: float = Field(gt=0, description="Per GPU-hour that is not taken away")
    spot: float | None = Field(None, gt=0, description="Per GPU-hour of preemptible partitions")


class ReliabilityProfile(Document):
    """How often things fail; used for the forecast and the checkpoint interval."""

    node_mtbf: Duration = Field(gt=0, description="Mean time between failures of one node")
    restart: Duration = Field(
        Duration(600), description="From a failure to the first new step, without queueing"
    )
    repair: Duration | None = Field(
        None,
        gt=0,
        description="From the loss of a node until it works again, for which a run on all nodes "
        "waits; absent: a day is assumed",
    )
    preemption_mtbf: Duration | None = Field(
        None, gt=0, description="Mean time between preemptions of one job on preemptible nodes"
    )
