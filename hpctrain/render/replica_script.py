"""Builds the script of a replica's job: the site's job script around the program of a replica.

Software, limits, environment and container are those of a run, from the same template. Belongs
here: what is started, and the words about it. Does not belong here: the settings of the replica
(`hpctrain.actions.replica_prototype`), the engine's own command line (`hpctrain.serving.engines`).
"""

from __future__ import annotations

import textwrap

from hpctrain.plan.job import Job
from hpctrain.plan.serving.documents import ReplicaPlan
from hpctrain.plan.serving.leaving import LeaveTimes
from hpctrain.printable_text import printable_line
from hpctrain.render.continuation import continuation_clause
from hpctrain.render.script import JobTask
from hpctrain.render.srun_tasks import SrunTasks

MODULE, SETTINGS = "hpctrain.serving.replica", "replica.json"


def replica_task(job: Job, plan: ReplicaPlan, times: LeaveTimes) -> JobTask:
    """Describe what the job of a replica starts."""
    limit_seconds, profile = float(job.walltime), job.profile
    return JobTask(
        title=f"a replica of {printable_line(job.spec.name)} on {profile.name}: {job.plan.nodes}, "
        f"{job.spec.engine.name}",
        layout=_layout(plan),
        settings=SETTINGS,
        tasks=_tasks(job),
        warning_seconds=times.warning_seconds(limit_seconds),
        warning_note=times.warning_sentence(limit_seconds),
        continuation_note=(
            f"Continuation {profile.continuation}, from profile {profile.name}: after preemption "
            f"and node failure {continuation_clause(profile)}; before the time limit the "
            "controller starts a successor"
        ),
    )


def _tasks(job: Job) -> SrunTasks:
    nodes, gpus = job.plan.nodes.nodes, job.plan.nodes.gpus_per_node
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
