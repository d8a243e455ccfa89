"""Collects the metrics of one run from its directory, and from what Slurm said about its job.

Whoever asks Slurm does so for all runs at once (`status.observe`); nothing here does. What rarely
changes is kept between two calls. Belongs here: which file has which metric. Does not belong here:
the table of metrics (`hpctrain.observe.families`), text, serving (`exporter`).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import statistics
from collections import Counter
from collections.abc import Sequence

from hpctrain.base import clock
from hpctrain.base.errors import InvalidInputError
from hpctrain.base.formats import NewerFormatError
from hpctrain.diagnose.facts import fullest_of_stages, stage_of
from hpctrain.engines.training import TrainConfig
from hpctrain.job.prepare import load_any_inputs
from hpctrain.judge.attempts import ends, launch_starts
from hpctrain.judge.launch_history import history
from hpctrain.judge.policy_preview import budgets
from hpctrain.observe.samples import Sample, Samples
from hpctrain.plan.documents import Plan
from hpctrain.plan.job import gpu_price
from hpctrain.records.find import RunFiles
from hpctrain.records.jobs import cluster_of
from hpctrain.records.run_records import (
    Progress,
    RankTimes,
    read_communication,
    read_record,
    read_saves,
    tail_metrics,
)
from hpctrain.records.supervise_config import SuperviseConfig, known_supervise_config
from hpctrain.runs.goodput import goodput, gpus_held
from hpctrain.runs.run_documents import AnyPlan, known_any_plan, known_train_config
from hpctrain.runs.state import RunState
from hpctrain.runs.status import ObservedRun
from hpctrain.slurm.parse import expand_hosts
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec
from hpctrain.spec.trainer import TrainerRunSpec
from hpctrain.telemetry.goodput import OF_STEPS, Goodput

# More rows than steps between two evaluations are not looked through for the newest one.
_RECENT_STEPS = 200
_SAVES_FOR_INTERVAL = 4
_UNKNOWN_CAUSE = "unknown"


class _Submitted:
    """What does not change while a run lives; None for what cannot be read."""

    def __init__(self, run: RunFiles) -> None:
        layout = run.layout
        self.spec: RunSpec | TrainerRunSpec | None = None
        self.profile: ClusterProfile | None = None
        self.any_plan: AnyPlan | None = None
        self.config: SuperviseConfig | None = None
        self.trainer: TrainConfig | None = None
        with contextlib.suppress(OSError, InvalidInputError):
            spec, profile = load_any_inputs(layout.spec, str(layout.profile.absolute()))
            self.spec, self.profile = spec.document, profile.document
        with contextlib.suppress(NewerFormatError):
            self.any_plan = known_any_plan(layout)
            self.config = known_supervise_config(layout.supervise_config)
            self.trainer = known_train_config(layout)

    @property
    def plan(self) -> Plan | None:
        """What was predicted; None for a trainer of its own."""
        return self.any_plan if isinstance(self.any_plan, Plan) else None


class RunMetrics:
    """Collects the samples of one run, again and again."""

    def __init__(self, run: RunFiles) -> None:
        self.run = run
        self._submitted: _Submitted | None = None
        self._account: Goodput | None = None
        self._account_due_at = 0.0
        self._stamp: object = None
        self._samples: tuple[Sample, ...] = ()

    def samples(
        self, observed: ObservedRun, now: float, account_share: float = 0.02
    ) -> tuple[Sample, ...]:
        """Collect the samples at the time `now` (seconds since the epoch).

        An account reads all steps of the run: it is made so rarely that it takes `account_share` of
        the time. A run that is over and has not been written to since the last call is not read
        again. Raises OSError or NewerFormatError if the run cannot be read.
        """
        stamp: object = None  # what changes when a run that is over is written to
        if observed.row.state.over:
            with contextlib.suppress(OSError):
                found = self.run.layout.ledger.stat()
                stamp = observed.row.state, found.st_mtime_ns, found.st_size
        if stamp is not None and stamp == self._stamp:
            return self._samples
        if self._submitted is None:
            self._submitted = _Submitted(self.run)
        if clock.monotonic() >= self._account_due_at or stamp is not None:
            began = clock.monotonic()
            self._account = goodput(self.run, now)
            took_seconds = clock.monotonic() - began
            self._account_due_at = clock.monotonic() + took_seconds / account_share
        self._samples = tuple(_collected(observed, self._submitted, self._account, now))
        self._stamp = stamp
        return self._samples


def _collected(
    observed: ObservedRun, submitted: _Submitted, account: Goodput | None, now: float
) -> Sequence[Sample]:
    layout, row, events = observed.run.layout, observed.row, observed.events
    spec, profile = submitted.spec, submitted.profile
    plan, any_plan, config = submitted.plan, submitted.any_plan, submitted.config
    is_running = row.state is RunState.RUNNING
    out = Samples("run", observed.run.run_id)

    # -- which run
    job = None  # the one that has nodes, or else the first that waits for some
    if observed.jobs is not None:
        job = observed.jobs.active or next(iter(observed.jobs.waiting), None)
    slurm_account = job.account if job is not None else None
    if slurm_account is None and spec is not None and profile is not None:
        slurm_account = spec.resources.account or profile.slurm.account
    out.put_info(
        user=row.owner,
        account=slurm_account,
        cluster=cluster_of(events) or (config.cluster if config else None),
        engine=any_plan.engine if any_plan else None,
        model=plan.run_name if plan else None,
        layout=str(plan.layout) if plan else None,
        gpu=profile.gpu.type if profile else None,
    )
    out.put_state(row.state, RunState)
    if job is not None:
        out.put_info("job", job=str(job.job_id))
    if job is not None and job.state.is_active:
        with contextlib.suppress(ValueError):
            nodes = expand_hosts(job.node_list or "")
            for node in nodes:
                out.put_info("node", job=str(job.job_id), node=node)
            out.put("nodes", len(nodes) or None)
        out.put("gpus", gpus_held(any_plan, config))

    # -- progress: a sign of life comes at most once a second, a row with each step
    rows = tail_metrics(layout, _RECENT_STEPS)
    progress = read_record(layout.progress, Progress)
    newest = rows[-1] if rows else None
    epoch = progress.epoch if progress is not None else 0
    out.put("step", row.step if newest is None or newest.epoch < epoch else newest.step)
    out.put("target_step", row.target_step)
    out.put("eta_seconds", row.eta_seconds)
    if newest is not None:
        out.put("last_step_timestamp_seconds", newest.time)
    if progress is not None and is_running:
        out.put("sign_of_life_timestamp_seconds", progress.time)
        if config is not None:
            trains = progress.phase not in ("starting", "loading")
            limit = config.stall_seconds if trains else config.setup_stall_seconds
            out.put("stall_limit_seconds", limit)

    # -- learning
    if newest is not None:
        diverged = newest.loss is None and newest.exact_loss is not None
        out.put("loss", math.nan if diverged else newest.loss)
        out.put("gradient_norm", newest.grad_norm)
        out.put("learning_rate", newest.learning_rate)
        evaluated = (row.eval_loss for row in reversed(rows) if row.eval_loss is not None)
        out.put("evaluation_loss", next(evaluated, None))

    # -- speed
    if is_running:
        out.put("step_seconds", row.step_seconds)
        out.put("tokens_per_second", row.tokens_per_second)
        out.put("mfu_ratio", row.mfu)
    if plan is not None and plan.step_seconds is not None:
        out.put("planned_step_seconds", plan.step_seconds)
        if plan.prediction is not None:
            out.put("planned_mfu_ratio", plan.prediction.mfu)
            for axis_name, seconds in plan.prediction.parts.message_seconds.items():
                if seconds:
                    out.put("planned_message_seconds", seconds, axis=axis_name)
    times = read_record(layout.rank_times, RankTimes)
    if times is not None and is_running:
        _put_ranks(out, times, submitted)
    messages = read_communication(layout)
    if messages is not None and is_running:
        for axis in messages.axes:
            if ranks := axis.members:
                seconds = statistics.fmean(axis.seconds[rank] for rank in ranks)
                out.put("message_seconds", seconds, axis=axis.axis)
                size = statistics.fmean(axis.bytes[rank] for rank in ranks)
                out.put("message_bytes", size, axis=axis.axis)

    # -- checkpoints
    saves = read_saves(layout)
    out.put("checkpoint_step", row.checkpoint_step)
    out.put("checkpoints", len(saves))
    out.put("at_risk_seconds", row.at_risk_seconds)
    if saves:
        out.put("checkpoint_timestamp_seconds", saves[-1].time)
        out.put("checkpoint_bytes", saves[-1].size_bytes)
        out.put("checkpoint_stall_seconds", saves[-1].stall_seconds)
        out.put("checkpoint_publish_seconds", saves[-1].publish_seconds)
    if (trainer := submitted.trainer) is not None:
        # The interval as it is set, or for `auto` as the last checkpoints had it.
        step_seconds = row.step_seconds or (plan and plan.step_seconds)
        intervals = [trainer.save_interval_seconds]
        if trainer.save_interval_steps and step_seconds:
            intervals.append(trainer.save_interval_steps * step_seconds)
        if trainer.save_interval_auto:
            intervals += [
                later.time - earlier.time
                for earlier, later in itertools.pairwise(saves[-_SAVES_FOR_INTERVAL:])
                if later.epoch == earlier.epoch
            ]
        known = [one for one in intervals if one is not None]
        out.put("checkpoint_interval_seconds", max(known, default=None))
    with contextlib.suppress(OSError):
        found = os.statvfs(layout.checkpoints)
        out.put("disk_free_bytes", found.f_bavail * found.f_frsize)

    # -- attempts, and how they have ended
    out.put("attempts", row.attempts)
    out.put("launches", len(launch_starts(events)))
    ended = ends(events)
    counts = Counter(event.cause or _UNKNOWN_CAUSE for event in ended)
    out.put_each("launch_ends", "cause", counts)
    last = {event.cause or _UNKNOWN_CAUSE: event.time for event in ended}
    out.put_each("last_end_timestamp_seconds", "cause", last)
    if config is not None:
        for budget in budgets(history(events, config.storm_window_seconds), config):
            if budget.cause in counts and budget.allowed is not None:
                left = max(0, budget.allowed - budget.used)
                out.put("retries_left", left, cause=budget.cause)

    # -- time and money
    if account is not None:
        for category, seconds in account.seconds.items():
            if account.kept_steps is not None or category not in OF_STEPS:
                out.put("time_seconds", seconds, category=category)
        for loss in account.causes:
            out.put("lost_seconds", loss.lost_seconds, cause=loss.cause)
            out.put("lost_steps", loss.lost_steps, cause=loss.cause)
        out.put("goodput_ratio", account.ettr, window="run")
        out.put("goodput_ratio", account.hour.last, window="hour")
        out.put("goodput_ratio", account.day.last, window="day")
    if account is not None and account.gpu_hours is not None:
        out.put("gpu_seconds", account.gpu_hours * 3600)
        if plan is not None and plan.training_seconds is not None:
            gpu_seconds = plan.training_seconds * plan.layout.world_size
            out.put("planned_gpu_seconds", gpu_seconds)
        if isinstance(spec, RunSpec) and spec.budget.gpu_hours is not None:
            out.put("budget_used_ratio", account.gpu_hours / spec.budget.gpu_hours)
        price = gpu_price(spec, profile) if profile and spec else None
        if price is not None:
            out.put("cost", account.gpu_hours * price.per_gpu_hour, currency=price.currency)
    if job is not None and job.state.is_pending and job.submit_time is not None:
        out.put("pending_seconds", max(0.0, now - job.submit_time))

    # -- who looks after it
    out.put("supervisor_timestamp_seconds", observed.newest_sign_time)
    return out.samples


def _put_ranks(out: Samples, times: RankTimes, submitted: _Submitted) -> None:
    """Add means over ranks, the slowdown of nodes, and the memory of pipeline stages."""
    out.put_each("step_part_seconds", "part", times.mean_parts)
    passes, layout = times.pass_seconds, submitted.plan.layout if submitted.plan else None
    stages = [stage_of(layout, rank) for rank in range(len(passes))]
    # Stages have different layers: a rank is compared with those of its own.
    medians = {
        stage: statistics.median(p for p, of in zip(passes, stages, strict=True) if of == stage)
        for stage in set(stages)
    }
    slowest: dict[str, float] = {}
    for node, stage, seconds in zip(times.nodes, stages, passes, strict=False):
        if medians[stage] > 0:
            slowest[node] = max(slowest.get(node, 0.0), seconds / medians[stage])
    out.put_each("node_slowdown_ratio", "node", slowest)
    if submitted.config is not None and submitted.config.slow_rank:
        out.put("slow_rank_limit_ratio", submitted.config.slow_rank)
    peaks = fullest_of_stages(layout, times.peak_memory_bytes)
    out.put_each("peak_memory_bytes", "stage", {str(stage): peak for stage, peak in peaks.items()})
    if submitted.plan is not None:
        planned = {str(n): m.total_bytes for n, m in enumerate(submitted.plan.memory)}
        out.put_each("planned_memory_bytes", "stage", planned)
