"""Chooses the options of sbatch and srun: nodes, GPUs, memory, place, continuation. Pure.

The job may hold spare nodes, and may start with fewer nodes than planned if the spec allows it.
Belongs here: these options, and where Slurm cannot provide them. Does not belong here: which nodes
a launch then uses (`hpctrain.judge.launch_nodes`), how much memory a run needs
(`hpctrain.plan.cost`).
"""

from __future__ import annotations

from hpctrain.base.units import Duration
from hpctrain.plan.job import Job
from hpctrain.plan.mesh.placement import eligible_islands
from hpctrain.spec.notify import NoticeName, NotifySpec
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profile.slurm import PartitionProfile
from hpctrain.spec.slurm_options import OptionValue


def node_options(job: Job) -> dict[str, str | None]:
    """Choose `--nodes`, and the tasks and CPUs per node.

    With a range of nodes there is no `--ntasks-per-node`: with it Slurm 22.05.8 may allocate the
    least number although more nodes are free. Then only srun gets the number of tasks, and sbatch
    requests one task per node with the CPUs of all.
    """
    least, most, cpus_per_gpu = job.least_nodes, job.most_nodes, job.cpus_per_gpu
    per_node, allocated = job.plan.nodes.gpus_per_node, job.profile.allocated_cpus
    if least < most:
        cpus = allocated(cpus_per_gpu * per_node)
        return {"nodes": f"{least}-{most}", "cpus-per-task": str(cpus)}
    tasks = per_node if job.spec.launcher == "srun" else 1
    # A job without GPUs has the CPUs of one: `resources.cpus_per_gpu` is all that it asks for.
    number = {"nodes": str(most)}
    if "nodes" in job.profile.slurm.directives.omit:
        number = {"ntasks": str(most * tasks)}
    return {
        **number,
        "ntasks-per-node": str(tasks),
        "cpus-per-task": str(allocated(cpus_per_gpu * max(1, per_node) // tasks)),
    }


def survives_node_failure(job: Job) -> bool:
    """Return True if the job continues when a node fails (sbatch(1), --no-kill).

    A spare node replaces it, or the next launch is smaller.
    """
    return job.spec.resources.spare_nodes > 0 or job.least_nodes < job.most_nodes


def node_problems(job: Job, constraint: str | None) -> list[str]:
    """List where spare nodes or a range of nodes meet options that need exact numbers.

    Segments divide all of them: the planner chooses no other (`plan.mesh.nvlink_domain`).
    """
    if job.least_nodes < job.most_nodes and "nodes" in job.profile.slurm.directives.omit:
        return [
            f"resources.min_nodes needs `--nodes`, which {job.profile.name} leaves out "
            "(slurm.directives.omit): remove it"
        ]
    if not survives_node_failure(job):
        return []
    if constraint and "*" in constraint:
        return [
            f"resources.spare_nodes and min_nodes do not go together with the numbers of nodes in "
            f"`--constraint={constraint}`: plan the run on one island"
        ]
    return []


def exclusive_option(job: Job) -> tuple[str, ...]:
    """Return the option that keeps others away; plain --exclusive would cost more than a part."""
    wanted = job.profile.slurm.exclusive
    if isinstance(wanted, str):
        return (f"--exclusive={wanted}",)
    return ("--exclusive",) if wanted and job.has_whole_nodes else ()


def gpu_request(job: Job, *, counts_tasks: bool) -> dict[str, str | None]:
    """Choose the site's option that requests GPUs; `--gpus-per-task` needs a number of tasks.

    A job without GPUs, such as a router's, asks for none.
    """
    count, kind = job.plan.nodes.gpus_per_node, job.profile.gpu.gres_type
    if count == 0:
        return {}
    way = job.profile.slurm.gpu_request
    per_task = way == "gpus-per-task"
    per_node = {"gpus-per-node": f"{count}", "gpus-per-node-typed": f"{kind}:{count}"}.get(
        way, str(count) if per_task and not counts_tasks else None
    )
    return {
        "gres": {"gres": f"gpu:{count}", "gres-typed": f"gpu:{kind}:{count}"}.get(way),
        "gpus-per-node": per_node,
        "gpus-per-task": "1" if per_task and counts_tasks else None,
    }


def memory_options(job: Job) -> dict[str, str | None]:
    """Choose `--mem` or `--mem-per-gpu`, None where the site wants neither; a spec's number counts.

    sbatch(1), --mem: 0 is all memory of each node. In a part of a node it would leave the other
    GPUs without any, so such a job asks for the share of its GPUs.
    """
    profile, wanted = job.profile, job.spec.resources.memory_per_node
    per_gpu = profile.slurm.memory_per_gpu
    kind, mebibyte = profile.slurm.memory, 2**20
    memory = None
    if wanted is not None:
        memory = f"{int(wanted) // mebibyte}M"
    elif per_gpu is None and kind != "none":
        share = int(profile.nodes.memory) * job.plan.nodes.gpus_per_node // profile.gpu.per_node
        whole = kind != "share" and job.has_whole_nodes
        memory = "0" if whole else f"{share // mebibyte}M"
    asked_per_gpu = per_gpu is not None and wanted is None
    return {
        "mem": memory,
        "mem-per-gpu": f"{int(per_gpu or 0) // mebibyte}M" if asked_per_gpu else None,
    }


def step_resources(job: Job, *, counts_tasks: bool) -> list[str]:
    """List the requests of the job that its site wants on the line of srun, too."""
    if not job.profile.slurm.srun_resources:
        return []
    wanted = {**gpu_request(job, counts_tasks=counts_tasks), **memory_options(job)}
    return [f"--{name}={value}" for name, value in wanted.items() if value is not None]


def job_comment(job: Job, own: str | None = None) -> str | None:
    """Return the comment that the site wants, `own` where it leaves that to hpctrain."""
    wanted = job.profile.slurm.comment
    return wanted if isinstance(wanted, str) else own if wanted else None


def memory_problems(job: Job) -> list[str]:
    """List why the run cannot have all memory of its nodes where the site wants that."""
    profile, wanted = job.profile, job.spec.resources.memory_per_node
    if profile.slurm.memory != "all" or wanted is not None or job.has_whole_nodes:
        return []
    return [
        f"jobs take all memory of a node at {profile.name} (slurm.memory all), and this run has "
        f"{job.plan.nodes.gpus_per_node} of its {profile.gpu.per_node} GPUs: ask for whole nodes, "
        "or for a part of the memory by resources.memory_per_node"
    ]


# -- Joins the options of Slurm that a site adds with those that a spec asks for. Pure ----------


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
    options, own = job.profile.slurm.options.used("sbatch"), job.spec.resources
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
    chosen |= job.profile.slurm.options.used("srun")
    if job.spec.resources.gpu_bind:
        chosen["gpu-bind"] = job.spec.resources.gpu_bind.replace("$", "$$")
    return chosen


# -- Chooses the options that give the job nodes as close together as the plan assumes. Pure ----
# Rank order needs no option: Slurm numbers the ranks of `--distribution=block` along the nodes in
# the order of their names, whatever slurm.conf and topology.conf say (22.05.8, tests/slurm/
# test_rank_order.py), or along leaves and blocks where a site sets TopologyParam=SwitchAsNodeRank
# (23.02) or BlockAsNodeRank. Where names cross leaves, the supervisor orders the nodes
# (`hpctrain.judge.launch_nodes`). Which segment of blocks is requested, the planner decides
# (`hpctrain.plan.mesh.placement`).


# slurm.conf(5), SchedulerParameters: max_switch_wait is 300 s unless the site raises it.
_SWITCH_WAIT = Duration(300)


def topology_options(job: Job) -> dict[str, str | None]:
    """Choose `--constraint`, `--switches` and `--segment`; None where the job does not need one."""
    names, segment = (job.profile.slurm.constraint, island_constraint(job)), job.plan.nodes.segment
    return {
        "constraint": "&".join(name for name in names if name) or None,
        "switches": switch_request(job),
        "segment": None if segment is None else str(segment),
    }


def island_constraint(job: Job) -> str | None:
    """Select islands by feature: `[a|b]` for all nodes on either, `[a*4&b*4]` for some of each.

    sbatch(1), --constraint: Matching OR, and Multiple Counts. None when the islands have no
    features, or when it makes no difference: all nodes of the cluster, or any single one.
    """
    profile, nodes = job.profile, job.plan.nodes.nodes
    islands, shares = profile.network.islands, job.plan.nodes.island_nodes
    features = [island.feature or "" for island in islands]
    if not any(shares) or not all(features) or nodes == profile.nodes.count:
        return None
    if sum(share > 0 for share in shares) == 1:
        alone = [features[i] for i in sorted(eligible_islands(nodes, profile))]
        if nodes == 1 and len(alone) == len(features):
            return None
        return alone[0] if len(alone) == 1 else f"[{'|'.join(alone)}]"
    counted = [f"{name}*{share}" for name, share in zip(features, shares, strict=True) if share]
    return f"[{'&'.join(counted)}]"


def switch_request(job: Job) -> str | None:
    """Request the fewest leaves that can hold the job, and the longest wait for them.

    sbatch(1), --switches: the job is pending until that many leaves can hold it, or until the time
    is over. None where any choice of nodes has so few leaves.
    """
    switches, planned = job.profile.network.switches, job.plan.nodes
    leaf = switches.usable_nodes
    if switches.plugin != "tree" or not switches.request or leaf is None or planned.nodes == 1:
        return None
    parts = [nodes for nodes in planned.island_nodes if nodes] or [planned.nodes]
    leaves = sum(-(-nodes // leaf) for nodes in parts)
    leaves = max(leaves, -(-job.most_nodes // leaf))
    if leaves >= -(-job.profile.nodes.count // (switches.nodes_per_leaf or leaf)):
        return None
    return f"{leaves}@{(switches.wait or _SWITCH_WAIT).slurm()}"


# -- Decides how a run continues after preemption, time limit and node failure. Pure ------------
#   requeue    one job, which Slurm starts again under the same id
#   chain      each job submits its successor (`hpctrain.supervise.act.successor`)
#   singleton  several jobs of one name, of which Slurm runs one at a time (sbatch(1), --dependency)
#   array      one job array of which one element runs at a time (sbatch(1), --array=1-N%1)
#   none       one job; a person, or `hpctrain watch --act`, submits the run again


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


def cancel_waiting(profile: ClusterProfile, job_name: str) -> tuple[str, ...]:
    """Return the command that cancels the jobs behind this one; empty where there are none yet.

    Singletons and elements of an array are in the queue before the first one starts, and would end
    as it does where its environment cannot be made. `$NAME` is put in by the job.
    """
    behind = {
        "singleton": ("--me", f"--name={job_name}"),
        "array": ("$SLURM_ARRAY_JOB_ID",),
    }.get(profile.continuation)
    return () if behind is None else ("scancel", "--state=PENDING", *behind)


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
