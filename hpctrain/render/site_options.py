"""Joins the options of Slurm that a site adds with those that a spec asks for. Pure.

Belongs here: which of the two counts, or how they are joined. Does not belong here: which options
a site may add (`hpctrain.spec.slurm_options`), options that follow from the plan (`script`).
"""

from __future__ import annotations

from hpctrain.render.job_request import JobPlan, JobSpec
from hpctrain.render.topology import topology_options
from hpctrain.spec.notify import NoticeName, NotifySpec, joined_notify
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.slurm_options import OptionValue

# Slurm's types of mail, and the events of a run at which one is sent.
_MAIL_TYPES: dict[str, frozenset[NoticeName]] = {
    "BEGIN": frozenset({"started"}),
    "END": frozenset({"done", "stopped"}),
    "FAIL": frozenset({"failed"}),
    "REQUEUE": frozenset({"requeued"}),
    "INVALID_DEPEND": frozenset({"waiting"}),
}


def job_constraint(spec: JobSpec, profile: ClusterProfile, plan: JobPlan) -> str | None:
    """Return the features that all nodes of the job must have: the profile's and the spec's."""
    site = topology_options(profile, plan, spec.resources.spare_nodes)["constraint"]
    return "&".join(name for name in (site, spec.resources.constraint) if name) or None


def sbatch_options(spec: JobSpec, profile: ClusterProfile) -> dict[str, OptionValue]:
    """Return the site's options of sbatch; nodes and licenses of the spec are added to its own."""
    options = dict(profile.slurm.options.sbatch)
    wanted_lists = {
        "exclude": spec.resources.exclude,
        "nodelist": spec.resources.nodelist,
        "licenses": spec.resources.licenses,
    }
    for name, wanted in wanted_lists.items():
        if wanted:
            site = options.get(name, ())
            names = site if isinstance(site, tuple) else (site,)
            options[name] = ",".join(map(str, (*names, wanted)))
    return options | mail_options(joined_notify(spec.notify, profile.notify))


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


def srun_options(spec: JobSpec, profile: ClusterProfile) -> dict[str, OptionValue]:
    """Return the site's options of srun, after hpctrain's own choices that it may replace.

    `--gpus-per-task` without `--gpu-bind=none` shows each task its own GPU only, and CUDA reaches
    no peer of the same node.
    """
    chosen: dict[str, OptionValue] = {"mpi": "none"}
    if profile.slurm.gpu_request == "gpus-per-task":
        chosen["gpu-bind"] = "none"
    chosen |= profile.slurm.options.srun
    if spec.resources.gpu_bind:
        chosen["gpu-bind"] = spec.resources.gpu_bind.replace("$", "$$")
    return chosen
