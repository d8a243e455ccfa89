"""Builds the script of the router's job of a service: one task, no GPU. Pure.

Belongs here: what is started, and the words about it. Does not belong here: the settings of the
router (`hpctrain.actions.serve_settings`), what a script has for every job (`script`).
"""

from __future__ import annotations

from hpctrain.plan.job import Job
from hpctrain.printable_text import printable_line
from hpctrain.render.continuation import continuation_sentence
from hpctrain.render.script import JobTask
from hpctrain.render.srun_tasks import SrunTasks
from hpctrain.spec.service import RouterSpec

MODULE, SETTINGS = "hpctrain.serving.router", "router.json"


def router_task(job: Job, router: RouterSpec, warning_seconds: int) -> JobTask:
    """Describe what the router's job starts."""
    layout = f"{router.name} · {router.policy} · {router.cpus} CPUs"
    layout += " · TLS" if router.tls is not None else ""
    layout += " · a token is needed" if router.token_file is not None else ""
    return JobTask(
        title=f"the router of {printable_line(job.spec.name)} on {job.profile.name}",
        layout=layout,
        settings=SETTINGS,
        tasks=SrunTasks(
            tasks=1,
            tasks_per_node=1,
            gpus_per_task=1,  # the CPUs of one: it has no GPU
            module=(MODULE,),
            task_kind="rank",
            log_number="%4t",
            labelled=False,
            note="One task. Logs of each attempt are kept apart.",
        ),
        warning_seconds=warning_seconds,
        warning_note=(
            f"USR1 comes {warning_seconds} s before the time limit: no more requests are taken, "
            "and those that have begun end"
        ),
        continuation_note=continuation_sentence(job.profile),
    )
