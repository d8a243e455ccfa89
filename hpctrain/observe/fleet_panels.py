"""The dashboard of all runs: who runs, who is behind plan, what fires, where time goes. Pure.

Belongs here: its panels and queries. Does not belong here: JSON (`grafana`), drawing.
"""

from __future__ import annotations

from hpctrain.observe.panel_queries import (
    CHOSEN_RUNS,
    FIRING,
    NEUTRAL,
    STATES,
    age,
    better_from,
    in_state,
    increase_of,
    of,
    of_running,
    ratio,
    recent_goodput,
    state_number,
    with_user,
    worse_from,
)
from hpctrain.observe.panel_shapes import (
    NEEDS_ALERT,
    NEEDS_LOSS_OF_TIME,
    NEEDS_PLAN,
    RUNS,
    USER,
    bars,
    lines,
    stat,
)
from hpctrain.observe.panel_types import (
    Column,
    DashboardPlan,
    Panel,
    PanelRow,
    Query,
    Threshold,
)
from hpctrain.observe.service_panels import EVERY_SERVICE


def _exporter(
    title: str, description: str, name: str, thresholds: tuple[Threshold, ...], summary: str
) -> Panel:
    """One number of all exporters."""
    query = f"{summary}(hpctrain_exporter_{name})"
    return stat(title, description, query, thresholds=thresholds, width=4)


FLEET = DashboardPlan(
    uid="hpctrain-fleet",
    title="hpctrain: fleet",
    description="All runs in ten minutes: who runs, who is behind, what fires, where time goes.",
    variables=(USER, RUNS),
    hours=24,
    refresh="1m",
    rows=(
        PanelRow(
            "Now",
            (
                stat(
                    "Running",
                    "Runs whose job Slurm runs.",
                    f"count({in_state('RUNNING')}) or vector(0)",
                ),
                stat(
                    "Waiting for nodes",
                    "Runs whose job is in the queue.",
                    f"count({in_state('PENDING')}) or vector(0)",
                ),
                stat(
                    "Failed",
                    "Runs that gave up. `hpctrain why RUN` says what happened.",
                    f"count({in_state('FAILED')}) or vector(0)",
                    thresholds=worse_from(1),
                ),
                stat(
                    "Alerts",
                    "Alerts of hpctrain's rules that fire, of all runs.",
                    f"count({FIRING}) or vector(0)",
                    thresholds=worse_from(1),
                ),
                stat(
                    "GPUs held",
                    "GPUs of running runs, spares included.",
                    f"sum({of_running(of('gpus'))}) or vector(0)",
                ),
                stat(
                    "Goodput, last day",
                    "Productive share of the wall time of the last 24 hours, of younger runs since "
                    "they were submitted; runs count by GPUs.",
                    f"sum({recent_goodput('day')} * on (run) {of('gpus')})"
                    f" / sum({of('gpus')} and on (run) {recent_goodput('day')})",
                    "percentunit",
                    better_from(0.7, 0.85),
                ),
                stat(
                    "Suspect nodes",
                    "Nodes that new launches avoid, by evidence of all runs (`hpctrain nodes`).",
                    "max(hpctrain_suspect_nodes)",
                    thresholds=worse_from(1, 4),
                ),
                stat(
                    "Last watch",
                    "Since the last complete pass of `hpctrain watch --act`, which revives runs.",
                    "time() - max(hpctrain_watch_timestamp_seconds)",
                    "s",
                    worse_from(900, 3600),
                    needs="`hpctrain watch --act` from cron",
                ),
            ),
        ),
        PanelRow(
            "Runs",
            (
                Panel(
                    "Every run",
                    "One line per run. `of plan`: measured over planned. At risk: training since "
                    "the newest checkpoint, over the planned time between checkpoints.",
                    "table",
                    columns=(
                        Column(
                            f"max by (run, user, model) (hpctrain_run_info{{{CHOSEN_RUNS}}})",
                            labels=("run", "user", "model"),
                        ),
                        Column(state_number(), "State", shown_values=STATES),
                        Column(ratio(of("step"), of("target_step")), "Done", "percentunit"),
                        Column(of_running(of("eta_seconds")), "Time left", "s"),
                        Column(
                            of_running(age("last_step_timestamp_seconds")), "Last step ago", "s"
                        ),
                        Column(
                            of_running(ratio(of("step_seconds"), of("planned_step_seconds"))),
                            "Step time of plan",
                            "percentunit",
                            thresholds=worse_from(1.15, 1.4),
                        ),
                        Column(
                            of_running(ratio(of("mfu_ratio"), of("planned_mfu_ratio"))),
                            "MFU of plan",
                            "percentunit",
                            thresholds=better_from(0.7, 0.85),
                        ),
                        Column(
                            of_running(
                                ratio(of("at_risk_seconds"), of("checkpoint_interval_seconds"))
                            ),
                            "At risk",
                            "percentunit",
                            thresholds=worse_from(1.5, 3),
                        ),
                        Column(
                            recent_goodput("day"),
                            "Goodput, day",
                            "percentunit",
                            thresholds=better_from(0.7, 0.85),
                        ),
                        Column(f"{of('gpu_seconds_total')} / 3600", "GPU-hours"),
                        Column(
                            of("budget_used_ratio"),
                            "Budget used",
                            "percentunit",
                            thresholds=worse_from(0.9, 1),
                        ),
                    ),
                    width=24,
                    height=12,
                ),
                Panel(
                    "State of each run",
                    "What each run was doing.",
                    "states",
                    (Query(state_number(), "{{run}}"),),
                    shown_values=STATES,
                    width=16,
                    height=10,
                ),
                Panel(
                    "Alerts that fire",
                    "What hpctrain's rules report now, and since when it is so.",
                    "table",
                    columns=(
                        Column(
                            "time() - max by (alertname, severity, run, node) "
                            '(ALERTS_FOR_STATE{alertname=~"Hpctrain.*"}) '
                            "and on (alertname, run, node) "
                            f"max by (alertname, run, node) ({FIRING})",
                            "For",
                            "s",
                            labels=("alertname", "severity", "run"),
                        ),
                    ),
                    width=8,
                    height=10,
                    needs=NEEDS_ALERT,
                ),
            ),
        ),
        PanelRow(
            "Behind plan, running runs",
            (
                bars(
                    "Step time over plan",
                    "Median time of the last steps over what the plan predicts.",
                    of_running(ratio(of("step_seconds"), of("planned_step_seconds"))),
                    "{{run}}",
                    "percentunit",
                    worse_from(1.15, 1.4),
                    needs=NEEDS_PLAN,
                ),
                bars(
                    "Silence over its limit",
                    "Since the last sign of life of the trainer, over the silence after which the "
                    "supervisor ends a launch as hung.",
                    of_running(
                        ratio(age("sign_of_life_timestamp_seconds"), of("stall_limit_seconds"))
                    ),
                    "{{run}}",
                    "percentunit",
                    worse_from(0.5, 1),
                ),
                bars(
                    "Age of the newest checkpoint",
                    "Since the newest checkpoint was published, over the planned interval.",
                    of_running(
                        ratio(
                            age("checkpoint_timestamp_seconds"), of("checkpoint_interval_seconds")
                        )
                    ),
                    "{{run}}",
                    "percentunit",
                    worse_from(1.5, 3),
                ),
            ),
        ),
        PanelRow(
            "Where GPUs and time go",
            (
                lines(
                    "GPUs held, by user",
                    "GPUs of running runs, spares included.",
                    Query(f"sum by (user) ({with_user(of_running(of('gpus')))})", "{{user}}"),
                    stacked=True,
                    from_zero=True,
                ),
                lines(
                    "Goodput of the last hour",
                    "Productive share of the wall time of the hour before, of younger runs since "
                    "they were submitted.",
                    Query(of_running(recent_goodput("hour")), "{{run}}"),
                    unit="percentunit",
                    from_zero=True,
                ),
                lines(
                    "Runs by state",
                    "How many of the chosen runs are in which state.",
                    Query(
                        f"sum by (hpctrain_run_state) ({of('state', 'hpctrain_run_state')}) > 0",
                        "{{hpctrain_run_state}}",
                    ),
                    stacked=True,
                    from_zero=True,
                ),
                bars(
                    "GPU-hours in the chosen time",
                    "GPU time that runs occupied, by user.",
                    f"sum by (user) ({with_user(increase_of('gpu_seconds_total'))}) / 3600",
                    "{{user}}",
                ),
                bars(
                    "Time lost, by cause",
                    "Wall time that each cause has cost the chosen runs since they began.",
                    f"sum by (cause) ({of('lost_seconds', 'cause')})",
                    "{{cause}}",
                    "s",
                    needs=NEEDS_LOSS_OF_TIME,
                ),
                bars(
                    "Ends of launches, by cause",
                    "How often launches and attempts ended, since the chosen runs began.",
                    f"sum by (cause) ({of('launch_ends_total', 'cause')})",
                    "{{cause}}",
                    needs=NEEDS_LOSS_OF_TIME,
                ),
            ),
        ),
        PanelRow("Services", (EVERY_SERVICE,)),
        PanelRow(
            "Monitoring itself",
            (
                _exporter("Runs exported", "Runs that exporters read.", "runs", NEUTRAL, "sum"),
                _exporter(
                    "Unreadable runs",
                    "Runs that exporters cannot read: missing from every panel.",
                    "unreadable_runs",
                    worse_from(1),
                    "sum",
                ),
                _exporter(
                    "Slurm answers",
                    "1 if Slurm answered the last query of every exporter, else 0.",
                    "slurm_up",
                    better_from(0, 1),
                    "min",
                ),
                stat(
                    "Age of the metrics",
                    "Since the oldest of the exporters' newest complete passes.",
                    "time() - min(hpctrain_exporter_timestamp_seconds)",
                    "s",
                    worse_from(120, 600),
                    width=4,
                ),
                stat(
                    "A pass takes",
                    "Time of the longest collection of metrics.",
                    "max(hpctrain_exporter_collection_seconds)",
                    "s",
                    worse_from(10, 30),
                    width=4,
                ),
                stat(
                    "Queries of Slurm",
                    "Commands of Slurm per minute by all exporters, for all runs.",
                    "60 * sum(rate(hpctrain_exporter_slurm_queries_total[5m]))",
                    width=4,
                ),
            ),
        ),
    ),
)
