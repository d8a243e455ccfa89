"""Judge what will work at a site: one sentence per question, and what will not work.

Settings are those of slurm.conf(5) of 22.05 to 26.05; what follows from them was seen on a real
Slurm where docs/your-site.md says so. Belongs here: questions, thresholds, sentences. Does not
belong here: reading facts, comparing a profile value by value (`differences`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from hpctrain.base.frozen import Frozen
from hpctrain.base.units import short_bytes, short_duration
from hpctrain.site.detected_slurm import PARTITION_SHOWN, preemption_of, refusal
from hpctrain.site.facts import LoginFacts
from hpctrain.slurm.cluster_records import ClusterFacts, PartitionFacts
from hpctrain.slurm.settings import (
    minutes_beyond_limit,
    plugins,
    requeue_delay_seconds,
    seconds_of,
    words_of,
)
from hpctrain.spec.profile import ClusterProfile, profile_remarks

State = Literal["works", "limited", "fails", "unknown"]
# The supervisor keeps half of KillWait, 8 s at most, for its verdict and the requeue
# (hpctrain.supervise.evidence.launch_watch).
LEAST_KILL_WAIT_SECONDS = 10
# So long a slurmstepd waits for one below it in Slurm's tree that was lost (Slurm's
# src/slurmd/slurmstepd, REVERSE_TREE_CHILDREN_TIMEOUT).
TREE_WAIT_SECONDS = 60
LEAST_PYTHON = (3, 11)
# A checkpoint of a billion parameters with Adam has 14 GB; less than ten of them is soon full.
LEAST_FREE_BYTES = 150e9
LEAST_FREE_INODES = 100_000
# munge credentials expire after 300 s (munge(7)); evidence of nodes is joined by the second.
MOST_CLOCK_SECONDS = 5.0
SLOW_CONTROLLER_SECONDS = 2.0
_OLDEST = (22, 5)


class SiteFinding(Frozen):
    """The answer to one question about a site, as a sentence, and where it comes from.

    `field` of the profile is behind what fails, `change` is what to do about it, where that is
    known.
    """

    topic: str
    state: State
    sentence: str
    source: str
    field: str | None = None
    change: str | None = None


def _finding(topic: str, state: State, sentence: str, source: str) -> SiteFinding:
    return SiteFinding(topic=topic, state=state, sentence=sentence, source=source)


def judge_site(
    cluster: ClusterFacts | None, login: LoginFacts, profile: ClusterProfile | None = None
) -> tuple[SiteFinding, ...]:
    """Answer all questions; without a cluster only those about this machine."""
    if cluster is None:
        return tuple(_machine(login))
    default = profile.slurm.partition(None) if profile is not None else None
    partition = cluster.partition(default.name if default is not None else None)
    return (
        *_controller(cluster),
        *_requeue(cluster, profile),
        *_preemption(cluster, partition),
        *_time(cluster),
        *_payment(cluster, login, profile),
        *_partitions(cluster, login),
        *_successor(cluster, partition, profile),
        *_start(cluster),
        *_refusals(cluster),
        *_placement(cluster, profile),
        *_service(cluster, partition),
        *_machine(login),
        *_clock(cluster),
        *(
            _finding("profile", "limited", remark, path)
            for path, remark in (profile_remarks(profile) if profile is not None else ())
        ),
    )


def _controller(cluster: ClusterFacts) -> Iterator[SiteFinding]:
    version = cluster.config.version
    words = cluster.config.get("SLURM_VERSION") or "unknown"
    took = short_duration(cluster.config_seconds)
    slow = cluster.config_seconds > SLOW_CONTROLLER_SECONDS
    yield _finding(
        "controller",
        "limited" if slow else "works",
        f"the controller of `{cluster.config.cluster_name}` answers in {took}, and takes our "
        "munge credentials" + ("; that is slow: it is busy" if slow else ""),
        "scontrol show config",
    )
    old = bool(version) and version[:2] < _OLDEST
    yield _finding(
        "version",
        "fails" if old else "works" if version else "unknown",
        f"Slurm is {words}" + ("; hpctrain needs 22.05 or newer" if old else ""),
        "SLURM_VERSION",
    )
    for command, reason in cluster.unanswered.items():
        yield _finding("queries", "unknown", f"`{command}` did not answer: {reason}", command)


def _requeue(cluster: ClusterFacts, profile: ClusterProfile | None) -> Iterator[SiteFinding]:
    config = cluster.config
    allowed = config.get("JobRequeue") == "1"
    delay = short_duration(requeue_delay_seconds(config))
    words = "by default (JobRequeue=1)" if allowed else "only with --requeue (JobRequeue=0)"
    sentence = (
        f"requeue: yes; jobs may return {words}, and scripts of hpctrain ask for it. A requeued "
        f"job waits {delay} (cred_expire of AuthInfo)"
    )
    if profile is not None and profile.continuation != "requeue":
        sentence = f"requeue: not used; the profile continues by `{profile.continuation}`"
    yield _finding("requeue", "works", sentence, "JobRequeue, AuthInfo")
    codes = config.get("RequeueExit")
    yield _finding(
        "requeue codes",
        "works",
        f"Slurm itself requeues jobs that end with {codes} (RequeueExit)"
        if codes
        else "no exit code makes Slurm requeue a job (RequeueExit); the supervisor asks by itself",
        "RequeueExit",
    )
    if held := config.get("RequeueExitHold"):
        yield _finding(
            "requeue codes",
            "limited",
            f"jobs that end with {held} are requeued and held (RequeueExitHold)",
            "RequeueExitHold",
        )
    fixed = "" if "MaxBatchRequeue" in config.values else "5"  # before 23.02
    most = config.get("MaxBatchRequeue") or fixed
    if most:
        yield _finding(
            "requeue limit",
            "works",
            f"after {most} launches that failed in a row Slurm holds a job (MaxBatchRequeue); a "
            "requeue that the supervisor asks for does not count",
            "MaxBatchRequeue",
        )


def _preemption(cluster: ClusterFacts, partition: PartitionFacts | None) -> Iterator[SiteFinding]:
    if partition is None:
        sentence = "there is no default partition, so the profile or the spec must name one"
        yield _finding("preemption", "unknown", sentence, PARTITION_SHOWN)
        return
    taken = preemption_of(cluster, partition)
    if taken.mode == "off":
        sentence = f"jobs of partition `{partition.name}` are not preempted"
        yield _finding("preemption", "works", sentence, taken.source)
        return
    grace = f"{taken.grace_seconds} s"
    by = f" by {', '.join(taken.by)}" if taken.by else ""
    if taken.mode == "suspend":
        sentence = (
            f"jobs of partition `{partition.name}` are suspended{by}: ranks stop where they are, "
            "collectives run into their time limits, and the GPUs stay taken"
        )
        yield _finding("preemption", "fails", sentence, taken.source)
        return
    then = "and wait again" if taken.mode == "requeue" else "and end, unless the run requeues first"
    state: State = "works" if taken.grace_seconds else "limited"
    sentence = f"jobs of `{partition.name}` are preempted{by} after a grace of {grace}, {then}"
    yield _finding("preemption", state, sentence, taken.source)
    signal = (
        "user signal before preemption: yes; USR1 reaches the supervisor when the grace begins"
        if taken.user_signal
        else f"user signal before preemption: no -> the ranks get TERM only, grace {grace}"
    )
    source = "PreemptParameters, SlurmctldParameters"
    yield _finding("user signal", "works" if taken.user_signal else "limited", signal, source)


def _time(cluster: ClusterFacts) -> Iterator[SiteFinding]:
    config = cluster.config
    kill_wait = seconds_of(config, "KillWait")
    if kill_wait is not None:
        short = kill_wait < LEAST_KILL_WAIT_SECONDS
        yield _finding(
            "KillWait",
            "limited" if short else "works",
            f"between TERM and KILL lie {kill_wait} s (KillWait)"
            + ("; short: the supervisor keeps half of it for verdict and requeue" if short else ""),
            "KillWait",
        )
    yield from _unkillable(cluster)
    if over := minutes_beyond_limit(config):
        sentence = f"Slurm lets jobs run {over} min beyond their time limit"
        yield _finding("beyond the limit", "works", sentence, "slurm.conf(5)")
    yield _finding(
        "time limit",
        "works",
        "signal before the time limit: yes (--signal); it comes up to 60 s early (sbatch(1))",
        "sbatch(1)",
    )


def _unkillable(cluster: ClusterFacts) -> Iterator[SiteFinding]:
    """Say where the loss of one node drains healthy ones (seen on 22.05 with 64 nodes)."""
    config = cluster.config
    unkillable = seconds_of(config, "UnkillableStepTimeout")
    width = seconds_of(config, "TreeWidth")
    if unkillable is None or width is None:
        return
    drains = unkillable <= TREE_WAIT_SECONDS and len(cluster.nodes) > width
    yield _finding(
        "UnkillableStepTimeout",
        "limited" if drains else "works",
        f"a node whose steps do not end within {unkillable} s is drained"
        + (
            f"; short for jobs of more than {width} nodes (TreeWidth): after the loss of a node, "
            f"healthy ones wait {TREE_WAIT_SECONDS} s for it and are drained with it"
            if drains
            else ""
        ),
        "UnkillableStepTimeout, TreeWidth",
    )


def _payment(
    cluster: ClusterFacts, login: LoginFacts, profile: ClusterProfile | None
) -> Iterator[SiteFinding]:
    config, accounting = cluster.config, cluster.accounting
    enforced = config.get("AccountingStorageEnforce")
    needed = "associations" in enforced.lower()
    named = profile.for_partition(None).slurm.account if profile is not None else None
    if not config.accounting_enabled:
        sentence = "who pays: nobody; there is no accounting database, and no history of old jobs"
        yield _finding("account", "works", sentence, "AccountingStorageType")
        return
    if accounting is None:
        yield _finding("account", "unknown", "who pays: sacctmgr did not say", "sacctmgr")
        return
    mine = ", ".join(accounting.accounts)
    source = f"sacctmgr show user {login.user} withassoc"
    if not accounting.associations:
        sentence = f"who pays: {login.user} has no account" + (", and Slurm demands one"
                                                               if needed else "")  # fmt: skip
        yield _finding("account", "fails" if needed else "limited", sentence, source)
        return
    if named is not None and named not in accounting.accounts:
        sentence = f"who pays: the profile says `{named}`, and accounts of {login.user} are {mine}"
        yield _finding("account", "fails" if needed else "limited", sentence, source)
        return
    payer = named or accounting.default_account or accounting.accounts[0]
    others = f"; also possible: {mine}" if len(accounting.accounts) > 1 else ""
    limits = {
        f"{name}={value}"
        for one in accounting.associations
        if one.account == payer
        for name, value in one.limits.items()
    }
    bounded = f"; limits: {', '.join(sorted(limits))}" if limits else ""
    yield _finding("account", "works", f"who pays: account `{payer}`{others}{bounded}", source)


def _partitions(cluster: ClusterFacts, login: LoginFacts) -> Iterator[SiteFinding]:
    usable, closed = [], []
    for one in cluster.partitions:
        gpus = sum(node.gpu_count for node in cluster.nodes_of(one.name))
        reason = refusal(one, login, cluster.accounting)
        if reason is None:
            limit = "no time limit" if one.max_seconds is None else short_duration(one.max_seconds)
            usable.append(f"{one.name} ({gpus} GPUs, {limit})")
        else:
            closed.append(f"{one.name}: {reason}")
    sentence = f"partitions for {login.user}: {', '.join(usable) or 'none'}"
    yield _finding("partitions", "works" if usable else "fails", sentence, PARTITION_SHOWN)
    for words in closed:
        sentence = f"partition {words}"
        yield _finding("closed partition", "works", sentence, PARTITION_SHOWN)


def _successor(
    cluster: ClusterFacts, partition: PartitionFacts | None, profile: ClusterProfile | None
) -> Iterator[SiteFinding]:
    if partition is None:
        return
    nodes = {node.name for node in cluster.nodes_of(partition.name)}
    hosts = partition.submit_hosts
    allowed = not hosts or bool(nodes & set(hosts))
    chained = profile is not None and profile.continuation == "chain"
    sentence = f"sbatch from nodes of `{partition.name}`: allowed (AllocNodes)"
    if not allowed:
        sentence = f"sbatch from nodes of `{partition.name}`: not allowed, only from " + (
            ", ".join(hosts[:5]) + "; continuation `chain` cannot work"
        )
    state: State = "works" if allowed else "fails" if chained else "limited"
    yield _finding("sbatch on nodes", state, sentence, f"AllocNodes of {PARTITION_SHOWN}")
    most = cluster.config.get("MaxArraySize")
    if most:
        largest = max(0, int(most) - 1) if most.isdecimal() else 0
        sentence = f"job arrays: up to index {largest} (MaxArraySize={most})"
        few = profile is not None and profile.continuation == "array"
        short = few and profile is not None and largest < profile.continuation_jobs - 1
        if not largest:
            sentence = f"job arrays: none (MaxArraySize={most}); `data prepare --slurm` needs them"
        state = "fails" if short else "works" if largest else "limited"
        yield _finding("arrays", state, sentence, "MaxArraySize")


def _start(cluster: ClusterFacts) -> Iterator[SiteFinding]:
    """What can hold a job or a node up at its start."""
    config = cluster.config
    scheduler = words_of(config, "SchedulerParameters")
    strict = [name for name in ("no_env_cache", "requeue_setup_env_fail") if name in scheduler]
    if strict:
        yield _finding(
            "login shell",
            "limited",
            f"{', '.join(strict)}: a job whose --export list needs a login shell is held, and its "
            "node drained, when your shell's profile is slow or fails",
            "SchedulerParameters",
        )
    limits = config.get("PropagateResourceLimits")
    if limits not in ("NONE", ""):
        kept = config.get("PropagateResourceLimitsExcept")
        exceptions = f" but {kept}" if kept else ""
        yield _finding(
            "limits",
            "works",
            f"limits of this shell go into jobs ({limits}{exceptions}): a `ulimit -l` or `-c` set "
            "here holds there",
            "PropagateResourceLimits",
        )
    tasks = config.get("TaskPlugin", "none")
    bound = "affinity" in tasks or "cgroup" in tasks
    yield _finding(
        "binding",
        "works" if bound else "limited",
        f"ranks are {'bound to their CPUs' if bound else 'not bound to CPUs'} (TaskPlugin={tasks})",
        "TaskPlugin",
    )
    for key in ("DefMemPerGPU", "DefMemPerCPU", "DefMemPerNode"):
        value = config.get(key)
        if value and value not in ("UNLIMITED", "0"):
            sentence = f"a job that asks for no memory gets {value} MB ({key})"
            yield _finding("memory", "works", sentence, key)


def _refusals(cluster: ClusterFacts) -> Iterator[SiteFinding]:
    config = cluster.config
    for key, where in (
        ("JobSubmitPlugins", "the controller"),
        ("CliFilterPlugins", "this machine"),
    ):
        found = plugins(config, key)
        if found:
            scripted = "; a script of the site decides what is refused" if "lua" in found else ""
            sentence = (
                f"jobs pass {', '.join(found)} on {where} ({key}){scripted}: `hpctrain submit "
                "--check` asks it without submitting"
            )
            yield _finding("refusals", "limited", sentence, key)
    if "rl_enable" in words_of(config, "SlurmctldParameters"):
        rate = words_of(config, "SlurmctldParameters")
        bucket, refill = rate.get("rl_bucket_size", "30"), rate.get("rl_refill_rate", "2")
        yield _finding(
            "rate limit",
            "works",
            f"the controller takes {bucket} calls of a user at once and {refill} a second after "
            "that (rl_enable): watch runs with one `status -f`, not many",
            "SlurmctldParameters",
        )


def _placement(cluster: ClusterFacts, profile: ClusterProfile | None) -> Iterator[SiteFinding]:
    wait = words_of(cluster.config, "SchedulerParameters").get("max_switch_wait", "300")
    told = profile.network.switches.plugin if profile is not None else cluster.topology
    if cluster.topology == "tree":
        sentence = f"few leaves can be asked for, with a wait of up to {wait} s (max_switch_wait)"
        yield _finding("placement", "works", sentence, "TopologyPlugin, SchedulerParameters")
    elif cluster.topology == "block":
        yield _finding("placement", "works", "whole blocks can be asked for", "TopologyPlugin")
    else:
        state: State = "fails" if told == "block" else "limited"
        sentence = "Slurm knows no switches: jobs get any nodes"
        yield _finding("placement", state, sentence, "TopologyPlugin")
    switch = cluster.config.get("SwitchType").rpartition("/")[2]
    if switch not in ("", "none"):
        yield _finding("switch", "works", f"SwitchType is {switch}", "SwitchType")


def _service(cluster: ClusterFacts, partition: PartitionFacts | None) -> Iterator[SiteFinding]:
    nodes = cluster.nodes_of(partition.name) if partition is not None else cluster.nodes
    away = [node.name for node in nodes if node.is_out_of_service]
    if nodes and away:
        all_away = len(away) == len(nodes)
        sentence = f"{len(away)} of {len(nodes)} nodes are out of service: {', '.join(away[:3])}"
        yield _finding("nodes", "fails" if all_away else "limited", sentence, "scontrol show node")
    for one in cluster.reservations:
        if one.is_maintenance:
            sentence = f"maintenance `{one.name}` is planned on {one.node_count} nodes"
            yield _finding("maintenance", "limited", sentence, "scontrol show reservation")
    if cluster.licenses:
        names = ", ".join(one.name for one in cluster.licenses)
        sentence = f"there are licenses, which some sites demand: {names}"
        yield _finding("licenses", "works", sentence, "scontrol show licenses")


def _machine(login: LoginFacts) -> Iterator[SiteFinding]:
    version = ".".join(map(str, login.python))
    old = login.python[:2] < LEAST_PYTHON
    sentence = f"Python of {login.host} is {version}" + ("; 3.11 or newer is needed" if old else "")
    yield _finding("python", "fails" if old else "works", sentence, "this machine")
    runs = login.runs
    where = runs.path if runs.exists else f"{runs.path} (not there yet)"
    if runs.free_bytes is None:
        yield _finding("disk", "unknown", f"{where} could not be looked at", "statvfs")
        return
    little = runs.free_bytes < LEAST_FREE_BYTES
    sentence = f"{where} has {short_bytes(runs.free_bytes)} left" + (
        "; checkpoints of a billion parameters take 14 GB each" if little else ""
    )
    yield _finding("disk", "limited" if little else "works", sentence, "statvfs(3), as `df`")
    if runs.inodes and runs.free_inodes is not None:
        few = runs.free_inodes < LEAST_FREE_INODES
        sentence = f"{where} takes {runs.free_inodes:,} more files" + (
            "; every launch writes some for each rank" if few else ""
        )
        state: State = "fails" if not runs.free_inodes else "limited" if few else "works"
        yield _finding("files", state, sentence, "statvfs(3), as `df -i`")


def _clock(cluster: ClusterFacts) -> Iterator[SiteFinding]:
    ahead = cluster.clock_ahead_seconds
    if ahead is None:
        yield _finding("clock", "unknown", "the controller's clock is not known", "scontrol")
        return
    off = abs(ahead) > MOST_CLOCK_SECONDS
    sentence = "the clocks of this machine and the controller agree"
    if off:
        side = "ahead of" if ahead > 0 else "behind"
        sentence = f"the controller's clock is {short_duration(abs(ahead))} {side} this machine's"
    yield _finding("clock", "limited" if off else "works", sentence, "scontrol show config")
