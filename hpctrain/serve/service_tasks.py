"""Describes what the jobs of a service start: a replica's, and the router's. Pure.

Software, limits, environment and container of these jobs are those of a run, from the same
template. Belongs here: what is started, and the words about it. Does not belong here: the settings
of these programs (`hpctrain.serve.replica_prototype`, `hpctrain.serve.settings`), the
engine's own command line (`hpctrain.serve.engines`).
"""

from __future__ import annotations

import textwrap

from hpctrain.base.printable_text import printable_line
from hpctrain.job.render.job_options import continuation_clause, continuation_sentence
from hpctrain.job.render.script import JobTask, SrunTasks
from hpctrain.plan.job import Job
from hpctrain.serve.plan.documents import ReplicaPlan
from hpctrain.serve.plan.leaving import LeaveTimes
from hpctrain.spec.service import RouterSpec


def replica_task(job: Job, plan: ReplicaPlan, times: LeaveTimes) -> JobTask:
    """Describe what the job of a replica starts."""
    limit_seconds, profile = float(job.walltime), job.profile
    first = (
        "One task per node, which starts the engine behind a shield: Slurm's signals reach the "
        "task only. "
    )
    several = (
        "The first task answers requests, and the others run their part of the engine. "
        if job.plan.nodes.nodes > 1
        else ""
    )
    note = f"{first}{several}Logs of each attempt and task are kept apart."
    return JobTask(
        title=f"a replica of {printable_line(job.spec.name)} on {profile.name}: {job.plan.nodes}, "
        f"{job.spec.engine.name}",
        layout=_layout(plan),
        settings="replica.json",
        tasks=_one_per_node(job, "hpctrain.serve.replica", note),
        warning_seconds=times.warning_seconds(limit_seconds),
        warning_note=times.warning_sentence(limit_seconds),
        continuation_note=(
            f"Continuation {profile.continuation}, from profile {profile.name}: after preemption "
            f"and node failure {continuation_clause(profile)}; before the time limit the "
            "controller starts a successor"
        ),
    )


def router_task(job: Job, router: RouterSpec, warning_seconds: int) -> JobTask:
    """Describe what the router's job starts."""
    layout = f"{router.name} · {router.policy} · {router.cpus} CPUs"
    layout += " · TLS" if router.tls is not None else ""
    layout += " · a token is needed" if router.token_file is not None else ""
    return JobTask(
        title=f"the router of {printable_line(job.spec.name)} on {job.profile.name}",
        layout=layout,
        settings="router.json",
        tasks=_one_per_node(
            job, "hpctrain.serve.router", "One task. Logs of each attempt are kept apart."
        ),
        warning_seconds=warning_seconds,
        warning_note=(
            f"USR1 comes {warning_seconds} s before the time limit: no more requests are taken, "
            "and those that have begun end"
        ),
        continuation_note=continuation_sentence(job.profile),
    )


def _one_per_node(job: Job, module: str, note: str) -> SrunTasks:
    """Choose one task on each node, with its GPUs; one that has none gets the CPUs of a GPU."""
    return SrunTasks(
        tasks=job.plan.nodes.nodes,
        tasks_per_node=1,
        gpus_per_task=max(1, job.plan.nodes.gpus_per_node),
        module=(module,),
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
