"""Formats a comparison as columns and sentences, at most 80 columns wide for short names.

Belongs here: cells and lines. Does not belong here: options (`compare`), judging
(`hpctrain.trials`).
"""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.page.text import or_dash, paragraph
from hpctrain.trials.documents import Comparison, ComparisonRecord, TrialResult
from hpctrain.trials.judging import short_number

_VERDICTS = {
    "other run": "LOSSES `other run`: another model, batch, optimizer, seed or data, or first "
    "weights that Megatron draws itself; compare where the losses go, not their digits.",
    "other start": "LOSSES `other start`: the first step differs already, as with dropout; "
    "compare where the losses go, not their digits.",
}
Rows = tuple[list[str], list[list[str]]]


def heading(found: Comparison) -> str:
    """Name the run, the cluster and the number of steps that the tables are about."""
    record = found.record
    what = f"{record.run_name} on {record.profile_name}"
    if not found.measured:
        return f"{what}, as the planner predicts it"
    return f"{what}, {record.steps} steps each ({record.comparison_id})"


def tables(found: Comparison) -> list[Rows]:
    """Tabulate trials as far as they are known: as they were predicted, or measured and ended."""
    if found.record.kind == "sizes":
        return [scale_rows(found), *([share_rows(found)] if found.measured else [])]
    return (
        [measured_rows(found), outcome_rows(found)] if found.measured else [predicted_rows(found)]
    )


def predicted_rows(found: Comparison) -> Rows:
    """Tabulate memory and time as the planner predicts them."""
    headers = ["VARIANT", "ZERO", "REC", "MICRO", "GIB", "S/STEP", "80%"]
    rows = []
    for trial in found.trials:
        prediction = trial.record.predicted
        plan = ["-"] * 3
        if prediction is not None:
            zero, recompute = str(prediction.zero), prediction.recompute[:4]
            plan = [zero, recompute, str(prediction.micro_batch)]
        interval = "-"  # where 80 of 100 sites would measure the step
        if prediction is not None and prediction.low_step_seconds is not None:
            low, high = prediction.low_step_seconds, prediction.high_step_seconds
            interval = f"{_seconds(low)}-{_seconds(high)}"
        pace = [_gib(trial.peak_bytes), _seconds(trial.step_seconds), interval]
        rows.append([trial.name, *plan, *pace, _cost(trial)])
    return [*headers, _cost_header(found.record)], rows


def measured_rows(found: Comparison) -> Rows:
    """Tabulate measured memory and time, with the predicted memory beside it."""
    headers = ["VARIANT", "GIB", "PLAN", "SAMPLES/S", "S/STEP", "P10..P90"]
    rows = []
    for trial in found.trials:
        prediction = trial.record.predicted
        planned = _gib(prediction.peak_bytes if prediction else None)
        measured = _gib(trial.measured.peak_bytes if trial.measured else None)
        rows.append([trial.name, measured, planned, *_measured_times(trial), _cost(trial)])
    return [*headers, _cost_header(found.record)], rows


def _measured_times(trial: TrialResult) -> list[str]:
    if trial.measured is None:
        return ["-", "-", "-"]
    spread = trial.measured.step_seconds
    between = f"{_seconds(spread.p10)}..{_seconds(spread.p90)}"
    return [_pace(trial), _seconds(spread.median), between]


def outcome_rows(found: Comparison) -> Rows:
    """Tabulate how each trial ended, and whether it trains the same model as the first."""
    last = last_common_step(found.trials)
    loss = "LOSS" if last is None else f"LOSS@{last}"
    headers = ["VARIANT", "STATE", "STEPS", loss, "DIFF%", "LOSSES", "STARTS", "AGAIN"]
    reference = next((trial for trial in found.trials if trial.losses), None)
    rows = []
    for trial in found.trials:
        agreed, stable, difference = trial.agreement, trial.stability, "-"
        verdict = str(agreed.verdict) if agreed else None
        if agreed is not None:
            percent = 100 * agreed.largest
            difference = f"{percent:.2g}" if percent < 10 else f"{percent:.0f}"
        rows.append(
            [
                trial.name,
                trial.state,
                str(len(trial.losses)) if trial.losses else "-",
                or_dash(_loss_at(trial, last)),
                difference,
                or_dash("reference" if trial is reference else verdict),
                "-" if stable is None else str(stable.launches),
                "-" if stable is None else str(stable.steps_again),
            ]
        )
    return headers, rows


def _loss_at(trial: TrialResult, step: int | None) -> str | None:
    loss = dict(trial.losses).get(step) if step is not None else None
    return None if loss is None else f"{loss:.4f}"


def last_common_step(trials: Sequence[TrialResult]) -> int | None:
    """Find the last step that all trials with losses have in common."""
    steps = [{step for step, _ in trial.losses} for trial in trials if trial.losses]
    common = set.intersection(*steps) if steps else set()
    return max(common, default=None)


def scale_rows(found: Comparison) -> Rows:
    """Tabulate speed-up over the smallest size, with the predicted efficiency."""
    headers = ["GPUS", "GIB", "SAMPLES/S", "S/STEP"]
    headers += ["P10..P90", "SPEED-UP", "EFF%", "PLAN%"] if found.measured else ["SPEED-UP", "EFF%"]
    rows = []
    for trial in found.trials:
        point = next((one for one in found.points if one.gpus == trial.record.gpus), None)
        times = (
            _measured_times(trial)
            if found.measured
            else [_pace(trial), _seconds(trial.step_seconds)]
        )
        shares = [_percent(point.efficiency if point else None)]
        if found.measured:
            shares.append(_percent(point.predicted_efficiency if point else None))
        speedup = "-" if point is None or point.speedup is None else f"{point.speedup:.2f}"
        row = [str(trial.record.gpus), _gib(trial.peak_bytes), *times, speedup, *shares]
        rows.append([*row, _cost(trial)])
    return [*headers, _cost_header(found.record)], rows


def share_rows(found: Comparison) -> Rows:
    """Tabulate the shares of a step, and the losses, for each size."""
    last = last_common_step(found.trials)
    loss = "LOSS" if last is None else f"LOSS@{last}"
    headers = ["GPUS", "STATE", "DATA%", "COMPUTE%", "UPDATE%", "OTHER%", "IMBALANCE%"]
    rows = []
    for trial in found.trials:
        measured = trial.measured
        parts = ["-"] * 5
        if measured is not None and measured.shares is not None:
            shares = measured.shares
            seconds = (shares.data, shares.compute, shares.update, shares.other, shares.imbalance)
            parts = [_percent(None if one is None else one / shares.step) for one in seconds]
        eval_loss, accuracy = "-", None
        if measured is not None:
            accuracy = measured.eval_accuracy
            if measured.eval_loss is not None:
                eval_loss = f"{measured.eval_loss:.4f}"
        losses = [or_dash(_loss_at(trial, last)), eval_loss, _percent(accuracy)]
        rows.append([str(trial.record.gpus), trial.state, *parts, *losses])
    return [*headers, loss, "EVAL", "ACC%"], rows


def reason_lines(found: Comparison) -> list[str]:
    """List the reasons of trials that failed."""
    lines: list[str] = []
    for trial in found.trials:
        if trial.reason and not trial.succeeded:
            lines += paragraph(f"{trial.name}: {trial.reason}", hang=2)
    return lines


def recommendation_lines(found: Comparison) -> list[str]:
    """List the sentences of the recommendation."""
    return [line for text in found.recommendation.sentences for line in paragraph(text, "- ")]


def note_lines(found: Comparison) -> list[str]:
    """Explain verdicts and measurements that the tables show."""
    notes = []
    measured = [trial.measured for trial in found.trials if trial.measured is not None]
    if measured and not all(one.peak_of_all_ranks for one in measured):
        notes.append("GIB of measured trials is the peak of rank 0.")
    verdicts = {one.agreement.verdict for one in found.trials if one.agreement}
    notes += [text for verdict, text in _VERDICTS.items() if verdict in verdicts]
    return [line for note in notes for line in paragraph(note)]


def _cost_header(record: ComparisonRecord) -> str:
    return f"COST {record.price_per_gpu_hour[1]}" if record.price_per_gpu_hour else "GPU-H"


def _cost(trial: TrialResult) -> str:
    """Cost of the whole training budget: money if the profile has prices, else GPU-hours."""
    amount = trial.cost[0] if trial.cost else trial.gpu_hours
    return "-" if amount is None else short_number(amount)


def _pace(trial: TrialResult) -> str:
    pace = trial.samples_per_second
    return "-" if pace is None else short_number(pace)


def _gib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**30:.{1 if count >= 2**30 else 3}f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}"
