"""Decides how a run continues after preemption, time limit and node failure. Pure.

requeue    one job, which Slurm starts again under the same id
chain      each job submits its successor (`hpctrain.supervise.act.successor`)
singleton  several jobs of one name, of which Slurm runs one at a time (sbatch(1), --dependency)
array      one job array of which one element runs at a time (sbatch(1), --array=1-N%1)
none       one job; a person, or `hpctrain watch --act`, submits the run again

Belongs here: options, sentences and contradictions that follow from the profile's `continuation`.
Does not belong here: other options.
"""

from __future__ import annotations

from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profile.slurm import PartitionProfile


def continuation_options(profile: ClusterProfile) -> dict[str, str | None]:
    """Return the options of sbatch that take a value, None where the mode does not need them."""
    jobs = profile.continuation_jobs
    return {
        "dependency": "singleton" if profile.continuation == "singleton" else None,
        "array": f"1-{jobs}%1" if profile.continuation == "array" else None,
    }


def requeue_flag(profile: ClusterProfile) -> str:
    """Return `--requeue` for mode requeue only: in the others Slurm would start a second writer."""
    return "--requeue" if profile.continuation == "requeue" else "--no-requeue"


def continuation_clause(profile: ClusterProfile) -> str:
    """Describe what happens after an attempt has ended early, as a clause."""
    jobs = profile.continuation_jobs
    return {
        "requeue": "Slurm restarts the same job",
        "chain": "each job submits the next one, which waits until it has ended",
        "singleton": f"{jobs} jobs of one name are submitted, and Slurm runs one at a time",
        "array": f"an array of {jobs} jobs is submitted, and Slurm runs one at a time",
        "none": "the run stops, and `hpctrain resume` goes on",
    }[profile.continuation]


def continuation_sentence(profile: ClusterProfile) -> str:
    """Describe the mode in one sentence, for a comment of the script."""
    return (
        f"Continuation {profile.continuation}, from profile {profile.name}: after preemption, "
        f"time limit and node failure {continuation_clause(profile)}"
    )


def continuation_line(profile: ClusterProfile, partition: PartitionProfile) -> str:
    """Describe the mode in one line for `plan` and `submit`, with the profile that sets it."""
    line = f"{profile.continuation}: {continuation_clause(profile)}"
    preemption = partition.preemption
    if profile.continuation == "requeue" and preemption.mode == "cancel":
        line += (
            f"; partition {partition.name} cancels preempted jobs, so the supervisor requeues "
            f"itself within the grace of {float(preemption.grace):g} s"
        )
    return f"{line}; profile {profile.name}"


def continuation_problems(profile: ClusterProfile, partition: PartitionProfile) -> list[str]:
    """List what cannot work in this partition, each with a remedy."""
    preemption = partition.preemption
    problems = []
    if profile.continuation == "requeue" and preemption.mode == "cancel" and not preemption.grace:
        problems.append(
            f"continuation requeue cannot work in partition {partition.name}: it cancels preempted "
            "jobs (preemption.mode cancel), which Slurm never requeues, and without a grace the "
            "supervisor has no time to do it: use chain, singleton or array"
        )
    return problems
