"""Collect the supervisor's settings (`supervise.json`) of a job.

Belongs here: which field becomes which setting, and what follows from several of them. Does not
belong here: the document (`hpctrain.records.supervise_config`), the trainer's settings
(`hpctrain.engines.train_json`), writing files (`hpctrain.job.run_directory`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from hpctrain.engines.training import speed_check_mode
from hpctrain.job.render.containers import container_words, run_container
from hpctrain.job.render.environment import submit_variables
from hpctrain.job.render.shell_files import site_commands
from hpctrain.job.render.warning_lead import warning_lead
from hpctrain.plan.job import Job, TrainerJob, TrainingJob
from hpctrain.records.layout import RunLayout
from hpctrain.records.supervise_config import (
    ChannelSettings,
    CommandSettings,
    GroupSettings,
    LaunchShape,
    MetricsSettings,
    NotifySettings,
    RollbackSettings,
    SubmitSettings,
    SuperviseConfig,
    TopologySettings,
)
from hpctrain.records.tracking import MOST_ID_CHARACTERS, TrackingConfig, WandbSettings
from hpctrain.spec.notify import NotifySpec
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profile.hardware import port_range
from hpctrain.spec.run import MetricsSpec, TrackingSpec
from hpctrain.version import __version__

NODE_LEDGER_NAME = "nodes.jsonl"


def submit_settings(profile: ClusterProfile) -> SubmitSettings:
    """Collect how the site wants jobs to be submitted."""
    return SubmitSettings(words=profile.slurm.submit_command, cluster=profile.slurm.cluster)


def supervise_config(
    job: Job, run_id: str, runs: Path, shapes: tuple[LaunchShape, ...], **own: Any
) -> SuperviseConfig:
    """Collect the settings of a supervisor; `own` are the fields of one kind of job."""
    supervise, profile, rollback = job.spec.supervise, job.profile, job.spec.supervise.rollback
    return SuperviseConfig(
        run_id=run_id,
        continuation=profile.continuation,
        continuation_jobs=profile.continuation_jobs,
        failures_without_progress=supervise.failures_without_progress,
        setup_stall_seconds=float(supervise.setup_stall),
        kill_wait_seconds=float(profile.slurm.kill_wait),
        poll_seconds=float(profile.limits.poll),
        cluster=profile.name,
        budgets={str(cause): count for cause, count in supervise.budgets.items()},
        storm_failures=supervise.storm_failures,
        learn_stalls=supervise.learn_stalls,
        slow_rank=supervise.slow_rank,
        exclude_nodes=supervise.exclude_nodes,
        rollback=RollbackSettings(
            act=rollback.mode == "act",
            checkpoints=rollback.checkpoints,
            skip_steps=rollback.skip_steps,
        ),
        shapes=shapes,
        spare_nodes=job.spec.resources.spare_nodes,
        cluster_nodes=profile.nodes.count,
        node_ledger=str(runs.absolute() / NODE_LEDGER_NAME),
        submit_variables=submit_variables(job),
        submission=submit_settings(profile),
        master_address=profile.network.master_address,
        master_ports=port_range(profile.network.ports) if profile.network.ports else None,
        notify=notify_settings(job.notify),
        commands=command_settings(job),
        **({"stall_seconds": float(supervise.stall)} | own),
    )


def command_settings(job: Job) -> CommandSettings | None:
    """Count the site's commands that the supervisor runs; None where there are none."""
    commands = site_commands(job)
    counts = {part: len(getattr(commands, part)) for part in ("job", "node", "node_after")}
    if not any(counts.values()):
        return None
    return CommandSettings(limit_seconds=float(commands.time_limit), **counts)


def training_supervision(
    job: TrainingJob,
    run_id: str,
    runs: Path,
    shapes: tuple[LaunchShape, ...],
    inputs: tuple[str, ...],
) -> SuperviseConfig:
    """Collect the settings of the supervisor of a run. `inputs`: what all nodes must read."""
    return run_supervision(
        job,
        run_id,
        runs,
        shapes,
        inputs,
        target_step=job.plan.batch.train_steps,
        ramp=job.plan.batch.shares(job.plan.step_seconds),
        launcher=job.spec.launcher,
        warning_seconds=float(warning_lead(job).seconds),
        verify=job.spec.checkpoint.verify,
        speed_check=speed_check_mode(job),
        topology=topology_settings(job),
    )


def run_supervision(
    job: TrainingJob | TrainerJob,
    run_id: str,
    runs: Path,
    shapes: tuple[LaunchShape, ...],
    inputs: tuple[str, ...],
    **own: Any,
) -> SuperviseConfig:
    """Collect what any run has, whoever wrote its trainer; `own` are the fields of one kind."""
    # what the ranks start from: the imported file, where there is one
    container, image = run_container(job.spec.container, job.profile.software.container), None
    if container is not None:
        imported = container_words(container, job.profile, ()).image_import
        image = container.image if imported is None else imported[-1]
    return supervise_config(
        job,
        run_id,
        runs,
        shapes,
        mttf_seconds=mttf_seconds(job),
        inputs=inputs,
        keep_launches=job.spec.logging.keep_launches,
        image=image,
        tracking=job.spec.tracking.wanted,
        metrics=metrics_settings(job.profile, job.spec.metrics),
        **own,
    )


def mttf_seconds(job: Job) -> float:
    """Return the mean time to failure of all nodes of a job together, as the site expects it."""
    from hpctrain.plan.forecast.rates import node_mtbf_seconds

    return node_mtbf_seconds(job.profile) / job.plan.nodes.nodes


def metrics_settings(profile: ClusterProfile, wanted: MetricsSpec) -> MetricsSettings | None:
    """Collect where the job exports metrics; None where it does not."""
    site = profile.metrics
    textfile = site.textfile if wanted.textfile else None
    if textfile is None and not wanted.endpoint:
        return None
    return MetricsSettings(
        textfile=textfile,
        endpoint=wanted.endpoint,
        ports=port_range(site.ports) if site.ports else None,
        address=site.address,
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
        given = one.model_dump() | {"name": one.kind if number == 1 else f"{one.kind}-{number}"}
        for name in ("url_file", "token_file"):
            if given[name] is not None:
                given[name] = os.path.abspath(os.path.expanduser(given[name]))
        channels.append(ChannelSettings.model_validate(given))
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


def topology_settings(job: TrainingJob) -> TopologySettings | None:
    """Collect what the supervisor compares with the nodes of its job; None where Slurm cannot say.

    In blocks the axes that the plan has inside an NVLink domain; under leaf switches those whose
    groups fit below one.
    """
    switches, plan, nodes = job.profile.network.switches, job.plan, job.plan.nodes
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


# -- Collect what a run writes for TensorBoard and W&B (`tracking.json`) from spec and plan -----


_DIGEST_CHARACTERS = 8


def tracking_settings(run: RunLayout, job: TrainingJob) -> TrackingConfig | None:
    """Collect the settings of a run of hpctrain's engines; None if nothing is to be written."""
    return tracking_of(run, job.spec.tracking, _description(run, job))


def tracking_of(
    run: RunLayout, tracking: TrackingSpec, description: Mapping[str, JsonValue]
) -> TrackingConfig | None:
    """Collect the settings of a run; None if nothing is to be written."""
    wandb = tracking.wandb
    if not tracking.wanted:
        return None
    directory = None
    if tracking.tensorboard:
        directory = str(run.tensorboard.relative_to(run.directory))
    if isinstance(tracking.tensorboard, str):
        directory = os.path.join(os.path.abspath(tracking.tensorboard), run.run_id)
    settings = None
    if wandb is not None:
        named = {"run_id": wandb_id(run), "name": wandb.name or run.run_id}
        settings = WandbSettings.model_validate(wandb.model_dump() | named)
    return TrackingConfig(tensorboard=directory, wandb=settings, description=dict(description))


def wandb_id(run: RunLayout) -> str:
    """Derive W&B's id from the run's. Runs of other directories may have the same run id."""
    digest = hashlib.sha256(str(run.directory.resolve()).encode()).hexdigest()
    ending = f"-{digest[:_DIGEST_CHARACTERS]}"
    return run.run_id[: MOST_ID_CHARACTERS - len(ending)] + ending


def _description(run: RunLayout, job: TrainingJob) -> dict[str, JsonValue]:
    """What is worth comparing between runs; no path, no variable, nothing about a machine."""
    spec, plan = job.spec, job.plan
    model = spec.model.model_dump(mode="json", exclude_defaults=True, exclude={"pretrained"})
    return {
        "run_id": run.run_id,
        "hpctrain": __version__,
        "engine": plan.engine,
        "precision": plan.precision,
        "layout": str(plan.layout),
        "nodes": plan.nodes.nodes,
        "gpus": plan.layout.world_size,
        "train_steps": plan.batch.train_steps,
        "global_batch": spec.batch.global_,
        **({"batch_ramp_up": list(ramp)} if (ramp := spec.batch.megatron_ramp_up) else {}),
        "micro_batch": plan.batch.micro_batch,
        "seed": spec.seed,
        "model": model,
        "optimizer": spec.optimizer.model_dump(mode="json"),
        "schedule": spec.schedule.model_dump(mode="json"),
    }
