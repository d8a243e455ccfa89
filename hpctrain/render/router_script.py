"""Builds the script of the router's job of a service: one task, no GPU. Pure.

Belongs here: what is started, and the words about it. Does not belong here: the settings of the
router (`hpctrain.actions.serve_settings`), what a script has for every job (`script`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpctrain.printable_text import printable_line
from hpctrain.render.continuation import continuation_clause
from hpctrain.render.job_request import ServicePart
from hpctrain.render.script import JobTask, Script, ScriptFacts, job_script
from hpctrain.render.srun_tasks import SrunTasks
from hpctrain.render.template import PACKAGED, render_template
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.service import RouterSpec
from hpctrain.units import short_duration

TEMPLATE = "router.sbatch.j2"
MODULE, SETTINGS = "hpctrain.serving.router", "router.json"


@dataclass(frozen=True)
class RouterWords:
    """What the template says beside the words of every job."""

    service_id: str
    progress_words: str


def router_job(
    part: ServicePart,
    profile: ClusterProfile,
    router: RouterSpec,
    facts: ScriptFacts,
    warning_seconds: int,
    failures_without_progress: int,
) -> Script:
    """Build the values of the script. Raises InvalidInputError for what sbatch cannot take."""
    layout = f"{router.name} · {router.policy} · {router.cpus} CPUs"
    layout += " · TLS" if router.tls is not None else ""
    layout += " · a token is needed" if router.token_file is not None else ""
    task = JobTask(
        title=f"the router of {printable_line(part.name)} on {profile.name}",
        layout=layout,
        words=("-m", MODULE, SETTINGS),
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
        continuation_note=(
            f"Continuation {profile.continuation}, from profile {profile.name}: after preemption, "
            f"time limit and node failure {continuation_clause(profile)}"
        ),
        failures_without_progress=failures_without_progress,
    )
    return job_script(part, profile, part, facts, task)


def render_router_script(
    script: Script, service_id: str, progress_seconds: float, templates: Path | None
) -> str:
    """Render the script, from the site's templates where there are any."""
    words = RouterWords(service_id, short_duration(progress_seconds))
    return render_template(f"{PACKAGED}/{TEMPLATE}", templates, script, router=words)
