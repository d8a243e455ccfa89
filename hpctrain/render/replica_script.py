"""Builds the script of a replica's job: the site's job script around the program of a replica.

Software, limits, environment and container are those of a run, from the same template. Belongs
here: what is started, and the words about it. Does not belong here: the settings of the replica
(`hpctrain.actions.replica_prototype`), the engine's own command line (`hpctrain.serving.engines`).
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path

from hpctrain.plan.serving.documents import ReplicaPlan
from hpctrain.plan.serving.leaving import LeaveTimes
from hpctrain.printable_text import printable_line
from hpctrain.render.continuation import continuation_clause
from hpctrain.render.job_request import ServicePart
from hpctrain.render.script import JobTask, Script, ScriptFacts, job_script, walltime
from hpctrain.render.srun_tasks import SrunTasks
from hpctrain.render.template import PACKAGED, render_template
from hpctrain.spec.profile import ClusterProfile
from hpctrain.units import short_duration

TEMPLATE = "replica.sbatch.j2"
MODULE, SETTINGS = "hpctrain.serving.replica", "replica.json"


@dataclass(frozen=True)
class ReplicaWords:
    """What the template says beside the words of every job."""

    service_id: str
    progress_words: str


def replica_job(
    part: ServicePart,
    profile: ClusterProfile,
    plan: ReplicaPlan,
    facts: ScriptFacts,
    times: LeaveTimes,
    failures_without_progress: int,
) -> Script:
    """Build the values of the script. Raises InvalidInputError for what sbatch cannot take."""
    partition = profile.slurm.partition(part.resources.partition)
    assert partition is not None, "the planner has checked the partition"
    limit_seconds = float(walltime(part, profile, partition))
    task = JobTask(
        title=f"a replica of {printable_line(part.name)} on {profile.name}: {part.nodes}, "
        f"{part.engine.name}",
        layout=_layout(plan),
        words=("-m", MODULE, SETTINGS),
        tasks=_tasks(part),
        warning_seconds=times.warning_seconds(limit_seconds),
        warning_note=times.warning_sentence(limit_seconds),
        continuation_note=(
            f"Continuation {profile.continuation}, from profile {profile.name}: after preemption "
            f"and node failure {continuation_clause(profile)}; before the time limit the "
            "controller starts a successor"
        ),
        failures_without_progress=failures_without_progress,
    )
    return job_script(part, profile, part, facts, task)


def render_replica_script(
    script: Script, service_id: str, progress_seconds: float, templates: Path | None
) -> str:
    """Render the script, from the site's templates where there are any."""
    words = ReplicaWords(service_id, short_duration(progress_seconds))
    return render_template(f"{PACKAGED}/{TEMPLATE}", templates, script, replica=words)


def _tasks(part: ServicePart) -> SrunTasks:
    nodes, gpus = part.nodes.nodes, part.nodes.gpus_per_node
    first = (
        "One task per node, which starts the engine behind a shield: Slurm's signals reach the "
        "task only. "
    )
    several = (
        "The first task answers requests, and the others run their part of the engine. "
        if nodes > 1
        else ""
    )
    note = f"{first}{several}Logs of each attempt and task are kept apart."
    return SrunTasks(
        tasks=nodes,
        tasks_per_node=1,
        gpus_per_task=gpus,
        module=(MODULE,),
        task_kind="rank",
        log_number="%4t",
        labelled=False,
        note="\n# ".join(textwrap.wrap(note, 98)),
    )


def _layout(plan: ReplicaPlan) -> str:
    parts = [f"tp {plan.tp}", f"pp {plan.pp}", f"weights {plan.precision}"]
    parts.append(f"keys and values {plan.kv_precision}")
    parts.append(f"{plan.max_sequences} requests at a time")
    return " · ".join(parts)
