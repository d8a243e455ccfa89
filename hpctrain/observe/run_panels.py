"""The dashboard of one run: progress, learning, speed, checkpoints, interruptions, money. Pure.

Belongs here: its panels and queries. Does not belong here: JSON (`grafana`), drawing.
"""

from __future__ import annotations

from hpctrain.observe.panel_queries import (
    NEUTRAL,
    STATES,
    age,
    better_from,
    of,
    ratio,
    recent_goodput,
    state_number,
    worse_from,
)
from hpctrain.observe.panel_shapes import (
    NEEDS_BUDGET,
    NEEDS_LOSS_OF_TIME,
    NEEDS_PLAN,
    ONE_RUN,
    USER,
    bars,
    lines,
    stat,
)
from hpctrain.observe.panel_types import DashboardPlan, Marks, PanelRow, Query

# Seconds between the points at which marks are looked for.
MARK_SECONDS = 60

_NOW = PanelRow(
    "Now",
    (
        stat(
            "State",
            "What the run is doing.",
            state_number(),
            thresholds=(),
            shown=STATES,
        ),
        stat("Step", "The last finished optimizer step.", of("step")),
        stat(
            "Done",
            "Steps that are finished, of all.",
            ratio(of("step"), of("target_step")),
            "percentunit",
        ),
        stat(
            "Time left",
            "Time of the steps that are left, without the queue.",
            of("eta_seconds"),
            "s",
        ),
        stat(
            "Last step",
            "Since the newest launch finished its last step.",
            age("last_step_timestamp_seconds"),
            "s",
        ),
        stat(
            "At risk",
            "Training since the newest checkpoint, which a failure now would lose.",
            of("at_risk_seconds"),
            "s",
        ),
        stat(
            "MFU of plan",
            "Measured model FLOPs utilization over the planned one.",
            ratio(of("mfu_ratio"), of("planned_mfu_ratio")),
            "percentunit",
            better_from(0.7, 0.85),
            needs=NEEDS_PLAN,
        ),
        stat(
            "Goodput, last day",
            "Productive share of the wall time of the last 24 hours, or since the submission.",
            recent_goodput("day"),
            "percentunit",
            better_from(0.7, 0.85),
        ),
    ),
)

_LEARNING = PanelRow(
    "Learning",
    (
        lines(
            "Loss",
            "Training loss of the last step, and of the newest evaluation. Vertical lines: "
            "launches began (blue) or ended (red).",
            Query(of("loss"), "training"),
            Query(of("evaluation_loss"), "evaluation", dashed=True),
            width=12,
        ),
        lines(
            "Gradient norm",
            "Norm of the gradients in the last step, before clipping.",
            Query(of("gradient_norm"), "gradient norm"),
            width=6,
            from_zero=True,
        ),
        lines(
            "Learning rate",
            "Learning rate of the last step.",
            Query(of("learning_rate"), "learning rate"),
            unit="sci",
            width=6,
            from_zero=True,
        ),
    ),
)

_SPEED = PanelRow(
    "Speed",
    (
        lines(
            "Tokens per second and GPU",
            "Median of the last steps over the GPUs that the run holds, spares included. Images "
            "for models of images.",
            Query(ratio(of("tokens_per_second"), of("gpus")), "tokens/s per GPU"),
            width=6,
            from_zero=True,
        ),
        lines(
            "Model FLOPs utilization",
            "Median of the last steps, and what the plan predicts.",
            Query(of("mfu_ratio"), "measured"),
            Query(of("planned_mfu_ratio"), "planned", dashed=True),
            unit="percentunit",
            width=6,
            from_zero=True,
            needs=NEEDS_PLAN,
        ),
        lines(
            "Time of a step",
            "Median of the last steps, and what the plan predicts.",
            Query(of("step_seconds"), "measured"),
            Query(of("planned_step_seconds"), "planned", dashed=True),
            unit="s",
            width=6,
            from_zero=True,
        ),
        lines(
            "Parts of a step",
            "Mean of all ranks: forward and backward passes, waiting for data, optimizer, rest.",
            Query(of("step_part_seconds", "part"), "{{part}}"),
            unit="s",
            width=6,
            stacked=True,
            from_zero=True,
        ),
    ),
)

_CHECKPOINTS = PanelRow(
    "Checkpoints",
    (
        stat("Published", "Checkpoints that count.", of("checkpoints_total"), width=6),
        stat("Size", "Size of the newest checkpoint.", of("checkpoint_bytes"), "bytes", width=6),
        stat(
            "Planned interval",
            "Planned time between checkpoints.",
            of("checkpoint_interval_seconds"),
            "s",
            width=6,
        ),
        stat(
            "Free space",
            "Free space where the checkpoints are, in checkpoints.",
            ratio(of("disk_free_bytes"), of("checkpoint_bytes")),
            thresholds=better_from(3, 10),
            width=6,
        ),
        lines(
            "Age of the newest checkpoint",
            "Since it was published, and the planned time between two.",
            Query(age("checkpoint_timestamp_seconds"), "age"),
            Query(of("checkpoint_interval_seconds"), "planned interval", dashed=True),
            unit="s",
            width=12,
            from_zero=True,
        ),
        lines(
            "Cost of a checkpoint",
            "How long training stood still for the newest one, and how long it took until it "
            "counted.",
            Query(of("checkpoint_stall_seconds"), "training stood still"),
            Query(of("checkpoint_publish_seconds"), "until it counted"),
            unit="s",
            width=12,
            from_zero=True,
        ),
    ),
)

_INTERRUPTIONS = PanelRow(
    "Interruptions",
    (
        bars(
            "Ends of launches, by cause",
            "How often launches and attempts ended. A preemption is no failure.",
            of("launch_ends_total", "cause"),
            "{{cause}}",
            width=6,
            needs=NEEDS_LOSS_OF_TIME,
        ),
        bars(
            "Time lost, by cause",
            "Wall time that each cause has cost: detecting, restarting, steps trained again.",
            of("lost_seconds", "cause"),
            "{{cause}}",
            "s",
            width=6,
            needs=NEEDS_LOSS_OF_TIME,
        ),
        bars(
            "Retries left, by cause",
            "Failures of a cause that the supervisor would still retry.",
            of("retries_left", "cause"),
            "{{cause}}",
            width=6,
            needs=NEEDS_LOSS_OF_TIME,
        ),
        lines(
            "Attempts, launches and steps lost",
            "Starts by Slurm, starts of the trainer, and steps that were trained again.",
            Query(of("attempts_total"), "attempts"),
            Query(of("launches_total"), "launches"),
            Query(f"sum by (run) ({of('lost_steps_total', 'cause')})", "steps trained again"),
            width=6,
            from_zero=True,
        ),
    ),
)

_TIME_AND_MONEY = PanelRow(
    "Time and money",
    (
        bars(
            "Wall time, by category",
            "Every second since the run was submitted. Steps that are lost move from productive to "
            "redone.",
            of("time_seconds", "category"),
            "{{category}}",
            "s",
        ),
        lines(
            "Goodput",
            "Productive share of the wall time: of the whole run with its queue, of the last day, "
            "of the last hour.",
            Query(of("goodput_ratio", "window"), "{{window}}"),
            unit="percentunit",
            from_zero=True,
        ),
        lines(
            "GPU-hours",
            "GPU time so far, and that of all steps as planned without any loss.",
            Query(f"{of('gpu_seconds_total')} / 3600", "used"),
            Query(f"{of('planned_gpu_seconds')} / 3600", "planned", dashed=True),
            from_zero=True,
        ),
        stat(
            "Money so far",
            "GPU time by the prices of the profile.",
            of("cost_total", "currency"),
            width=4,
            legend="{{currency}}",
            needs=NEEDS_BUDGET,
        ),
        stat(
            "Budget used",
            "GPU time over that of the budget, else of the plan.",
            of("budget_used_ratio"),
            "percentunit",
            worse_from(0.9, 1),
            width=4,
            needs=NEEDS_BUDGET,
        ),
        stat(
            "Waiting in the queue",
            "How long the job has been waiting for nodes; nothing while it runs.",
            f"{of('pending_seconds')} or 0 * {of('launches_total')}",
            "s",
            width=4,
        ),
        stat(
            "Time in the queue",
            "All waiting for nodes since the run was submitted.",
            of("time_seconds", where='category="queueing"'),
            "s",
            width=4,
        ),
        stat(
            "GPUs",
            "GPUs that the run holds, spares included.",
            of("gpus"),
            thresholds=NEUTRAL,
            width=4,
        ),
        stat(
            "Supervisor",
            "Since the newest line that supervisor or trainer wrote.",
            age("supervisor_timestamp_seconds"),
            "s",
            width=4,
        ),
    ),
)

RUN = DashboardPlan(
    uid="hpctrain-run",
    title="hpctrain: one run",
    description="Progress, learning, speed against plan, checkpoints, interruptions and money.",
    variables=(USER, ONE_RUN),
    rows=(_NOW, _LEARNING, _SPEED, _CHECKPOINTS, _INTERRUPTIONS, _TIME_AND_MONEY),
    marks=(
        Marks(
            "Launches",
            f"{of('launches_total')} - {of('launches_total', ago=f'{MARK_SECONDS}s')} > 0",
            "A launch began",
            "blue",
        ),
        Marks(
            "Ends",
            f"{of('last_end_timestamp_seconds', 'cause')} > time() - {MARK_SECONDS}",
            "A launch ended: {{cause}}",
            "red",
        ),
    ),
)
