"""Rates and costs of single events: failures, preemptions, restarts, saves.

The profile's figures, else published ones, whose every use is printed as assumed. Does not belong
here: the work that events cost a run (`predict`), how often to save (`intervals`).
"""

from __future__ import annotations

from typing import Final

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.base.units import short_duration
from hpctrain.plan.forecast.documents import (
    Assumption,
    AssumptionKind,
    CheckpointCost,
    Interruptions,
    RunFacts,
    TrainerSaves,
)
from hpctrain.plan.job import JobSpec
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profile.hardware import FilesystemProfile
from hpctrain.spec.run import RunSpec

# -- Published figures for what a profile does not give -----------------------------------------


SECONDS_PER_DAY: Final = 86400.0

# Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters",
# HPCA 2025, arXiv 2410.21680: 6.50 failures per 1000 node-days on RSC-1 (nodes of eight
# A100, Slurm, 11 months, 4 million jobs). These are failures of the infrastructure; the same
# paper measures 7.9 h between failures of jobs with 1024 GPUs where this rate gives 28.8 h,
# because jobs of that size die of software as well.
RSC1_FAILURES_PER_NODE_DAY: Final = 6.50e-3
RSC_GPUS_PER_NODE: Final = 8

NODE_FAILURES_SOURCE: Final = "6.5 per 1000 node-days, Meta RSC-1, arXiv 2410.21680"

# From a failure to the first new step. Kokolis et al. take 5 to 20 minutes for it (u0).
RESTART_SECONDS: Final = 600.0
RESTART_SOURCE: Final = "5 to 20 min in arXiv 2410.21680"

# Means over the four one-node traces of preemption/1-node/aws-04-22-2023 in
# github.com/skypilot-org/spot-traces (V100 on AWS, 7 days; data of Wu et al., "Can't Be Late",
# NSDI 2024): 432 h up and 202 times taken away, 278 h until there was a node again.
SPOT_PREEMPTION_SECONDS: Final = 432 / 202 * 3600
SPOT_WAIT_SECONDS: Final = 278 / 202 * 3600
SPOT_SOURCE: Final = "V100 on AWS spot, traces of NSDI 2024 `Can't Be Late`"

# Rate at which one GPU copies its share of a checkpoint to main memory. Links: PCIe 4.0 x16
# carries 32 GB/s; copies into memory that is not pinned reach about a third of that (assumed).
STAGING_BYTES_PER_SECOND: Final = 10e9

# What one save stops training for besides the copy: planning, agreement of all ranks, forking the
# writer. Assumed, between 6.3 s for a 7B model (pytorch.org/blog/reducing-checkpointing-times) and
# under 0.5 s for an 8B one with cached plans on 512 H100 (PyTorch's later report).
SAVE_OVERHEAD_SECONDS: Final = 2.0
STAGING_SOURCE: Final = "2 s and 10 GB/s per GPU for the copy to main memory"

# Bytes of a checkpoint per parameter. Megatron (torch_dist, distributed optimizer) and DeepSpeed:
# the model as it computes, 2 or 4, and 4 + 4 + 4 for master weights and two moments of Adam
# (BLOOM-176B: 2.3 TB, of which weights 329 GB; bigscience/bloom model card). The keys `model`,
# `optimizer.state.{param,exp_avg,exp_avg_sq}` of this trainer's checkpoints say the same, in fp32
# too, where the master copy is redundant but written. FSDP and DDP keep one fp32 copy of weights.
MIXED_PRECISION_CHECKPOINT_BYTES: Final = 14.0
FP32_CHECKPOINT_BYTES: Final = 16.0
ONE_COPY_CHECKPOINT_BYTES: Final = 12.0

# A forward pass costs a third of forward + backward (2 of 6 floating-point operations per weight
# and token: Kaplan et al. 2020, arXiv 2001.08361, section 2.1); evaluation runs forward only.
FORWARD_SHARE: Final = 1 / 3


# -- The cost of one checkpoint: bytes, seconds until it is durable, seconds of stall -------------


def bytes_per_parameter(spec: RunSpec) -> float:
    """Return bytes per parameter of a full checkpoint with Adam, by engine and precision."""
    if spec.engine.abilities.one_copy_checkpoints:
        return ONE_COPY_CHECKPOINT_BYTES
    if spec.precision == "fp32":
        return FP32_CHECKPOINT_BYTES
    return MIXED_PRECISION_CHECKPOINT_BYTES


# One save of a trainer of which nothing is known: between seconds of a small model and minutes.
UNKNOWN_SAVE_SECONDS: Final = 60.0


def checkpoint_cost(spec: RunSpec, profile: ClusterProfile, facts: RunFacts) -> CheckpointCost:
    """Compute size and times of one save.

    Write rate: the slower of the file system and the network cards of the run's nodes (a node's
    own disk needs no cards). All GPUs copy equal shares to main memory first; an asynchronous save
    waits for that only. At most one save is under way (`hpctrain.train.saving.saver`).
    """
    assert facts.parameters is not None, "a model of hpctrain's engines has parameters"
    each = facts.checkpoint_bytes_per_parameter or bytes_per_parameter(spec)
    total = facts.parameters * each
    filesystem = _filesystem(profile, facts.filesystem)
    write, limit = _write_seconds(profile, filesystem, facts.nodes, total)
    staging = _staging_seconds(facts.gpus, total)
    in_background = spec.checkpoint.asynchronous
    return CheckpointCost(
        total_bytes=round(total),
        write_seconds=write,
        stall_seconds=staging if in_background else staging + write,
        last_save_seconds=staging + write,
        write_limit=limit,
        asynchronous=in_background,
    )


def trainer_save_cost(saves: TrainerSaves) -> CheckpointCost:
    """Return the cost of one save of a trainer of its own, which stands still meanwhile.

    Nothing is saved where no checkpoint of it is found.
    """
    known = saves.seconds if saves.seconds is not None else UNKNOWN_SAVE_SECONDS
    seconds = known if saves.resumes else 0.0
    return CheckpointCost(
        total_bytes=None,
        write_seconds=seconds,
        stall_seconds=seconds,
        last_save_seconds=seconds,
        write_limit="the trainer",
        asynchronous=False,
    )


def longest_save_seconds(
    spec: RunSpec, profile: ClusterProfile, *, parameters: int, gpus: int, nodes: int
) -> float:
    """Compute the time until a save is durable on the slowest file system of the site.

    Where a run directory will be is known only when it is made. `parameters`: those that learn.
    """
    total = parameters * bytes_per_parameter(spec)
    writes = (_write_seconds(profile, one, nodes, total)[0] for one in profile.filesystems)
    return _staging_seconds(gpus, total) + max(writes)


def load_seconds(profile: ClusterProfile, facts: RunFacts, total_bytes: float) -> float:
    """Compute the time to read a checkpoint, limited like the write."""
    filesystem = _filesystem(profile, facts.filesystem)
    rate = float(filesystem.read_bandwidth)
    if filesystem.kind != "local":
        rate = min(rate, _cards_bytes_per_second(profile, facts.nodes))
    return total_bytes / rate


def _filesystem(profile: ClusterProfile, name: str | None) -> FilesystemProfile:
    for filesystem in profile.filesystems:
        if name in (None, filesystem.name):
            return filesystem
    names = ", ".join(filesystem.name for filesystem in profile.filesystems)
    message = f"cluster {profile.name} has no file system `{name}`"
    raise InvalidInputError([Problem(message, hint=f"it has {names}")])


def _cards_bytes_per_second(profile: ClusterProfile, nodes: int) -> float:
    network = profile.network
    return nodes * network.nics_per_node * float(network.nic_bandwidth)


def _staging_seconds(gpus: int, total_bytes: float) -> float:
    """The copy to main memory, and what one save takes besides it."""
    return SAVE_OVERHEAD_SECONDS + total_bytes / gpus / STAGING_BYTES_PER_SECOND


def _write_seconds(
    profile: ClusterProfile, filesystem: FilesystemProfile, nodes: int, total_bytes: float
) -> tuple[float, str]:
    """The time to write, and what limits it."""
    rate, limit = float(filesystem.write_bandwidth), f"file system {filesystem.name}"
    cards = _cards_bytes_per_second(profile, nodes)
    if filesystem.kind != "local" and cards < rate:
        rate, limit = cards, f"network cards of {nodes} node{'s' if nodes > 1 else ''}"
    return total_bytes / rate, limit


# -- Mean times between failures and preemptions of a job -----------------------------------------


def is_spot(spec: JobSpec, profile: ClusterProfile, facts: RunFacts) -> bool:
    """Tell whether nodes can be preempted: from the facts, else from the partition."""
    if facts.spot is not None:
        return facts.spot
    partition = profile.slurm.partition(spec.resources.partition)
    return partition is not None and partition.preemption.mode != "off"


def interruptions(
    spec: JobSpec, profile: ClusterProfile, facts: RunFacts, checkpoint: CheckpointCost
) -> Interruptions:
    """Compute mean times between failures (of any of the nodes) and preemptions of this job.

    Failures of nodes are taken as independent, so their rates add up (Kokolis et al.:
    MTTF = 1 / (N r_f)). A restart is never shorter than reading the checkpoint. The job survives
    a preemption without loss if the grace time lasts for the running step and a save.
    """
    assumptions, reliability = [], profile.reliability

    def assume(kind: AssumptionKind, text: str) -> None:
        assumptions.append(Assumption(kind=kind, text=text))

    loading = load_seconds(profile, facts, checkpoint.total_bytes or 0)
    if reliability is None:
        scaled = "" if profile.gpu.per_node == RSC_GPUS_PER_NODE else ", by GPUs per node"
        assume("node failures", f"{NODE_FAILURES_SOURCE}{scaled}")
    if facts.start_seconds is not None:
        restart = facts.start_seconds
    elif reliability is not None:
        restart = max(float(reliability.restart), loading)
    else:
        restart = max(RESTART_SECONDS, loading)
        assume("restart", f"{short_duration(restart)} ({RESTART_SOURCE})")
    preemption = None
    if is_spot(spec, profile, facts):
        if reliability is not None and reliability.preemption_mtbf is not None:
            preemption = float(reliability.preemption_mtbf)
            if facts.preemption_wait_seconds is None:
                assume("preemptions", "replacement nodes are available immediately")
        else:
            preemption = SPOT_PREEMPTION_SECONDS
            every, without = short_duration(preemption), short_duration(SPOT_WAIT_SECONDS)
            assume("preemptions", f"every {every}, then {without} without nodes ({SPOT_SOURCE})")
    # the spec's partition if it is preemptible, else the first one that is
    chosen = profile.slurm.partition(spec.resources.partition)
    partitions = (*([chosen] if chosen else []), *profile.slurm.partitions)
    graces = [float(p.preemption.grace) for p in partitions if p.preemption.mode != "off"]
    grace = graces[0] if graces else 0.0
    return Interruptions(
        failure_mtbf_seconds=node_mtbf_seconds(profile) / facts.nodes,
        preemption_mtbf_seconds=preemption,
        restart_seconds=restart,
        warned=facts.saves_when_stopped
        and grace >= facts.step_seconds + checkpoint.last_save_seconds,
        assumptions=tuple(assumptions),
    )


def preemption_wait_seconds(profile: ClusterProfile, facts: RunFacts) -> float:
    """Return the mean wait for nodes after a preemption.

    The published wait belongs to the published rate: it is used only together with it.
    """
    if facts.preemption_wait_seconds is not None:
        return facts.preemption_wait_seconds
    known = profile.reliability is not None and profile.reliability.preemption_mtbf is not None
    return 0.0 if known else SPOT_WAIT_SECONDS


def node_mtbf_seconds(profile: ClusterProfile) -> float:
    """Return the mean time between failures of one node: the site's, else the published one."""
    if profile.reliability is not None:
        return float(profile.reliability.node_mtbf)
    rate = RSC1_FAILURES_PER_NODE_DAY * profile.gpu.per_node / RSC_GPUS_PER_NODE
    return SECONDS_PER_DAY / rate
