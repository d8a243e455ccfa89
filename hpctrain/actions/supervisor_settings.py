"""Collect the supervisor's settings (`supervise.json`) from spec, profile and plan.

Belongs here: which field becomes which setting, and what follows from several of them. Does not
belong here: the document (`hpctrain.store.supervise_config`), the trainer's settings
(`hpctrain.engines.documents`), writing files (`hpctrain.actions.run_directory`).
"""

from __future__ import annotations

import os
from pathlib import Path

from hpctrain.actions.elastic_sizes import SizedConfig, shapes_of
from hpctrain.engines.speed_check import speed_check_mode
from hpctrain.plan.documents import Plan
from hpctrain.render.containers import container_words, run_container
from hpctrain.render.job_environment import submit_variables
from hpctrain.render.script import walltime
from hpctrain.render.warning_lead import warning_lead
from hpctrain.spec.notify import NotifySpec, joined_notify
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profile.network import port_range
from hpctrain.spec.run import RunSpec
from hpctrain.store.supervise_config import (
    ChannelSettings,
    GroupSettings,
    MetricsSettings,
    NotifySettings,
    RollbackSettings,
    SuperviseConfig,
    TopologySettings,
)

NODE_LEDGER_NAME = "nodes.jsonl"


def supervisor_settings(
    run_id: str,
    spec: RunSpec,
    profile: ClusterProfile,
    plan: Plan,
    runs: Path,
    smaller: tuple[SizedConfig, ...],
) -> SuperviseConfig:
    """Collect the supervisor's settings from spec, profile and plan."""
    from hpctrain.plan.forecast.interruptions import node_mtbf_seconds

    partition = profile.slurm.partition(spec.resources.partition)
    assert partition is not None, "the planner has checked the partition"
    limit, rollback = walltime(spec, profile, partition), spec.supervise.rollback
    return SuperviseConfig(
        run_id=run_id,
        target_step=plan.batch.train_steps,
        launcher=spec.launcher,
        continuation=profile.continuation,
        continuation_jobs=profile.continuation_jobs,
        failures_without_progress=spec.supervise.failures_without_progress,
        stall_seconds=float(spec.supervise.stall),
        setup_stall_seconds=float(spec.supervise.setup_stall),
        kill_wait_seconds=float(profile.slurm.kill_wait),
        poll_seconds=float(profile.limits.poll),
        warning_seconds=float(warning_lead(spec, profile, plan, limit).seconds),
        verify=spec.checkpoint.verify,
        cluster=profile.name,
        budgets={str(cause): count for cause, count in spec.supervise.budgets.items()},
        storm_failures=spec.supervise.storm_failures,
        storm_window_seconds=float(spec.supervise.storm_window),
        learn_stalls=spec.supervise.learn_stalls,
        slow_rank=spec.supervise.slow_rank,
        speed_check=speed_check_mode(spec, profile),
        exclude_nodes=spec.supervise.exclude_nodes,
        rollback=RollbackSettings(
            act=rollback.mode == "act",
            checkpoints=rollback.checkpoints,
            skip_steps=rollback.skip_steps,
            other_nodes=rollback.other_nodes,
        ),
        shapes=shapes_of(plan, smaller),
        spare_nodes=spec.resources.spare_nodes,
        cluster_nodes=profile.nodes.count,
        node_ledger=str(runs.absolute() / NODE_LEDGER_NAME),
        mttf_seconds=node_mtbf_seconds(profile) / plan.nodes.nodes,
        submit_variables=submit_variables(spec, profile),
        master_address=profile.network.master_address,
        master_ports=port_range(profile.network.ports) if profile.network.ports else None,
        keep_launches=spec.logging.keep_launches,
        topology=topology_settings(profile, plan),
        image=_image_file(spec, profile),
        notify=notify_settings(joined_notify(spec.notify, profile.notify)),
        tracking=spec.tracking.wanted,
        metrics=metrics_settings(spec, profile),
    )


def metrics_settings(spec: RunSpec, profile: ClusterProfile) -> MetricsSettings | None:
    """Collect where the job exports metrics; None where it does not."""
    textfile = profile.metrics.textfile if spec.metrics.textfile else None
    if textfile is None and not spec.metrics.endpoint:
        return None
    return MetricsSettings(
        textfile=textfile,
        endpoint=spec.metrics.endpoint,
        ports=port_range(profile.metrics.ports) if profile.metrics.ports else None,
        address=profile.metrics.address,
    )


def notify_settings(notify: NotifySpec | None) -> NotifySettings | None:
    """Collect what the supervisor and `hpctrain watch` send; None where they send nothing.

    Files are named by absolute paths. Mail of Slurm is an option of sbatch and no channel here.
    """
    if notify is None:
        return None
    channels: list[ChannelSettings] = []
    for one in notify.channels:
        if one.kind == "slurm":
            continue
        number = 1 + sum(channel.kind == one.kind for channel in channels)
        files = {name: getattr(one, name) for name in ("url_file", "token_file")}
        channels.append(
            ChannelSettings(
                name=one.kind if number == 1 else f"{one.kind}-{number}",
                kind=one.kind,
                **{
                    name: os.path.abspath(os.path.expanduser(path))
                    for name, path in files.items()
                    if path is not None
                },
                url_env=one.url_env,
                token_env=one.token_env,
                to=one.to,
                sendmail=one.sendmail,
            )
        )
    if not channels:
        return None
    most_messages, window_seconds = notify.rate
    limit = notify.queue_limit
    return NotifySettings(
        channels=tuple(channels),
        on=notify.on,
        quiet_minutes=notify.quiet_minutes,
        time_zone=notify.time_zone or "UTC",
        even_at_night=notify.even_at_night,
        most_messages=most_messages,
        window_seconds=window_seconds,
        queue_limit_seconds=None if limit is None else float(limit),
    )


def _image_file(spec: RunSpec, profile: ClusterProfile) -> str | None:
    """Name the image that the ranks start from: the imported file, where there is one."""
    container = run_container(spec, profile)
    if container is None:
        return None
    words = container_words(container, profile, ())
    return container.image if words.image_import is None else words.image_import[-1]


def topology_settings(profile: ClusterProfile, plan: Plan) -> TopologySettings | None:
    """Collect what the supervisor compares with the nodes of its job; None where Slurm cannot say.

    In blocks the axes that the plan has inside an NVLink domain; under leaf switches those whose
    groups fit below one.
    """
    switches, nodes = profile.network.switches, plan.nodes
    if switches.plugin == "none" or switches.usable_nodes is None or nodes.nodes == 1:
        return None
    per_node = nodes.gpus_per_node
    largest = switches.usable_nodes * per_node
    groups = []
    for one in plan.placements:
        block = one.stride * one.size
        inside = one.span == "inside an NVLink domain"
        fits = inside if switches.plugin == "block" else block <= largest
        if one.size > 1 and block > per_node and fits:
            groups.append(GroupSettings(axis=one.axis, stride=one.stride, ranks=one.size))
    return TopologySettings(
        plugin=switches.plugin,
        gpus_per_node=per_node,
        groups=tuple(groups),
        thin_uplinks=switches.oversubscription > 1,
        step_seconds=plan.step_seconds,
        scattered_step_seconds=plan.scattered_step_seconds,
    )
