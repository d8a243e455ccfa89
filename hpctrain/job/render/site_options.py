"""Joins the options of Slurm that a site adds with those that a spec asks for. Pure.

Belongs here: which of the two counts, or how they are joined. Does not belong here: which options
a site may add (`hpctrain.spec.slurm_options`), options that follow from the plan (`script`).
"""

from __future__ import annotations

from hpctrain.job.render.topology import topology_options
from hpctrain.plan.job import Job
from hpctrain.spec.notify import NoticeName, NotifySpec
from hpctrain.spec.slurm_options import OptionValue

# Slurm's types of mail, and the events of a run at which one is sent.
_MAIL_TYPES: dict[str, frozenset[NoticeName]] = {
    "BEGIN": frozenset({"started"}),
    "END": frozenset({"done", "stopped"}),
    "FAIL": frozenset({"failed"}),
    "REQUEUE": frozenset({"requeued"}),
    "INVALID_DEPEND": frozenset({"waiting"}),
}


def job_constraint(job: Job) -> str | None:
    """Return the features that all nodes of the job must have: the profile's and the spec's."""
    both = (topology_options(job)["constraint"], job.spec.resources.constraint)
    return "&".join(filter(None, both)) or None


def sbatch_options(job: Job) -> dict[str, OptionValue]:
    """Return the site's options of sbatch; nodes and licenses of the spec are added to its own."""
    options, own = dict(job.profile.slurm.options.sbatch), job.spec.resources
    lists = {"exclude": own.exclude, "nodelist": own.nodelist, "licenses": own.licenses}
    for name, wanted in lists.items():
        if wanted:
            site = options.get(name, ())
            names = site if isinstance(site, tuple) else (site,)
            options[name] = ",".join(map(str, (*names, wanted)))
    return options | mail_options(job.notify)


def mail_options(notify: NotifySpec | None) -> dict[str, OptionValue]:
    """Return the options of the mail that Slurm sends; none without a channel of that kind.

    Slurm knows the job only: its types of mail (sbatch(1), --mail-type) are those that come nearest
    to the events of the run.
    """
    channel = (
        next((one for one in notify.channels if one.kind == "slurm"), None) if notify else None
    )
    if notify is None or channel is None:
        return {}
    chosen = [word for word, kinds in _MAIL_TYPES.items() if not kinds.isdisjoint(notify.on)]
    options: dict[str, OptionValue] = {"mail-type": ",".join(chosen or ["FAIL"])}
    return options | ({"mail-user": channel.to[0]} if channel.to else {})


def srun_options(job: Job) -> dict[str, OptionValue]:
    """Return the site's options of srun, after hpctrain's own choices that it may replace.

    `--gpus-per-task` without `--gpu-bind=none` shows each task its own GPU only, and CUDA reaches
    no peer of the same node.
    """
    chosen: dict[str, OptionValue] = {"mpi": "none"}
    if job.profile.slurm.gpu_request == "gpus-per-task":
        chosen["gpu-bind"] = "none"
    chosen |= job.profile.slurm.options.srun
    if job.spec.resources.gpu_bind:
        chosen["gpu-bind"] = job.spec.resources.gpu_bind.replace("$", "$$")
    return chosen
