"""Lists what a run loses away from Slurm: the supervisor, and settings that only Slurm knows. Pure.

Belongs here: each loss with its reason, and what the other cluster does instead. Does not belong
here: variables (see `exported_run`), the files themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hpctrain.plan.job import TrainingJob
from hpctrain.spec.run import ResourcesSpec
from hpctrain.version import __version__

Destination = Literal["kubernetes", "hosts"]

# Fields of `resources` that are in the files.
CARRIED_RESOURCES = frozenset({"gpus", "cpus_per_gpu", "memory_per_node"})
# The others: why each is lost, and what people can do in its place on Kubernetes.
_QUEUE = "`--queue` names a queue of Kueue"
LOST_RESOURCES: dict[str, tuple[str, str]] = {
    "walltime": ("no time limit ends an attempt, and none has to be survived", ""),
    "partition": ("partitions are Slurm's", f"{_QUEUE}, `--node-selector` the kind of node"),
    "account": ("accounts are Slurm's", "the namespace has the quota"),
    "qos": ("a QOS is Slurm's", _QUEUE),
    "reservation": ("reservations are Slurm's", ""),
    "constraint": ("features of nodes are Slurm's", "`--node-selector` takes labels of nodes"),
    "exclude": ("names of nodes are Slurm's", "cordon the nodes, or taint them"),
    "nodelist": ("names of nodes are Slurm's", "`--node-selector` takes labels of nodes"),
    "licenses": ("licenses are counted by Slurm", ""),
    "gpu_bind": ("srun binds ranks to GPUs; here each rank takes the GPU of its local rank", ""),
    "spare_nodes": ("nobody puts a spare node in the place of a failed one", ""),
    "min_nodes": ("a launch has the planned number of nodes, or waits for them", ""),
    "segment": ("blocks of nodes are Slurm's", "topology-aware scheduling of Kueue"),
}


@dataclass(frozen=True)
class LostSetting:
    """Something that does not leave Slurm; `instead` is empty where nothing takes its place."""

    name: str
    reason: str
    instead: str = ""

    @property
    def sentence(self) -> str:
        return f"{self.name}: {self.reason}" + (
            f"; instead: {self.instead}" if self.instead else ""
        )


def lost_settings(job: TrainingJob, destination: Destination) -> Iterator[LostSetting]:
    """List the losses of this run: those of every run first, then those of its own settings."""
    spec, profile, pods = job.spec, job.profile, destination == "kubernetes"
    yield LostSetting(
        "supervisor",
        "nobody finds out why a launch ended, so causes, budgets and the wait between launches "
        "(`supervise`) have no effect, and `hpctrain status`, `why` and `goodput` do not know it",
        "JobSet starts all pods again after any failure, at most `maxRestarts` times in all; exit "
        "code 78 (wrong settings) ends it at once"
        if pods
        else "start the commands again: the run goes on from its newest verified checkpoint",
    )
    yield LostSetting(
        "supervise.stall, supervise.rollback",
        "a hang is not noticed, and no loss is rolled back",
        "`engine.collective_timeout` ends ranks that wait for a lost one",
    )
    yield LostSetting(
        "node ledger",
        "no node is probed before a launch, and none avoided after it has failed",
        "cordon bad nodes; a health check of the cluster may do that" if pods else "",
    )
    yield LostSetting(
        "kept code",
        f"the run does not keep the hpctrain that it was planned with, {__version__}",
        "the image has to have it" if pods else "the interpreter of each host has to have it",
    )

    # Settings of the spec.
    for name, field in ResourcesSpec.model_fields.items():
        value = getattr(spec.resources, name)
        if name in CARRIED_RESOURCES or value == field.default:
            continue
        reason, instead = LOST_RESOURCES[name]
        yield LostSetting(f"resources.{name} {value}", reason, instead if pods else "")
    if spec.evaluation.jobs:
        names = ", ".join(job.name for job in spec.evaluation.jobs)
        yield LostSetting("evaluation.jobs", f"the supervisor submits them to Slurm: {names}")
    if spec.tracking.wanted:
        yield LostSetting(
            "tracking", "a process beside the supervisor copies metrics; `metrics.jsonl` has them"
        )
    if spec.metrics.endpoint:
        yield LostSetting("metrics.endpoint", "a process beside the supervisor exports metrics")
    if spec.after is not None:
        yield LostSetting(f"after {spec.after}", "Slurm waits for the other run")
    if spec.data.stage:
        yield LostSetting("data.stage", "copies lie below the scratch directory of a Slurm job")
    if spec.optimizer.offload == "nvme":
        yield LostSetting(
            "optimizer.offload nvme", "the files name a directory of the site's nodes", "mount one"
        )

    # Settings of the site.
    software, options = profile.software, profile.slurm.options
    given = [*(f"sbatch --{name}" for name in options.sbatch)]
    given += [f"srun --{name}" for name in options.srun]
    if given:
        yield LostSetting("slurm.options", f"options of Slurm's commands: {', '.join(given)}")
    if job.notify is not None:
        yield LostSetting("notify", "the supervisor tells people about events")
    if profile.metrics.textfile is not None and spec.metrics.textfile:
        yield LostSetting("metrics.textfile", "a process beside the supervisor exports metrics")
    if any((software.modules, software.activate, software.setup, software.prologue)):
        what = "an image has no modules" if pods else "hosts may differ"
        yield LostSetting(
            "software.modules, activate, setup, prologue",
            f"commands of the job script, which is not used: {what}",
            "build the software into the image" if pods else "",
        )
    if software.container is not None and not pods:
        yield LostSetting("software.container", "the commands start no container around ranks")
    elif spec.container is not None and spec.container.mounts:
        yield LostSetting("container.mounts", "directories of the site's nodes", "`--volume`")
    placed = profile.network.switches.plugin != "none" or bool(profile.network.islands)
    if placed and job.plan.nodes.nodes > 1:
        yield LostSetting(
            "network.switches, network.islands",
            "Slurm places neighbouring ranks near each other, and nobody does so here",
            "topology-aware scheduling of Kueue"
            if pods
            else "the order of `--hosts` is the order of the nodes",
        )
