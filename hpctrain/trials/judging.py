"""Judge trials by their steps: figures, agreement of losses, what to take, how a run scales. Pure.

Belongs here: which steps count, the sums over them, bounds, and sentences with reasons. Does not
belong here: reading runs (`run_trials`), columns (`compare_text`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Literal

from hpctrain.base.units import short_bytes
from hpctrain.records.run_records import RankTimes, StepMetrics
from hpctrain.trials.documents import (
    LossAgreement,
    LostTime,
    Measured,
    Recommendation,
    ScalePoint,
    StepShares,
    StepSpread,
    TrialResult,
)


def warm_up_steps(steps: int) -> int:
    """Count the warm-up steps of a launch, in which memory and kernels are set up."""
    return max(1, steps // 10)


def counted_steps(rows: Sequence[StepMetrics], warm_up: int) -> list[StepMetrics]:
    """Drop the warm-up steps of every launch; only the very first if no other would be left."""
    seen: dict[int, int] = {}
    counted = []
    for row in rows:
        seen[row.epoch] = seen.get(row.epoch, 0) + 1
        if seen[row.epoch] > warm_up:
            counted.append(row)
    return counted or list(rows[1:])


def measure(
    rows: Sequence[StepMetrics], warm_up: int, global_batch: int, ranks: RankTimes | None
) -> Measured | None:
    """Compute the figures of a trial; None until a step counts."""
    counted = counted_steps(rows, warm_up)
    if not counted:
        return None
    seconds = [row.step_seconds for row in counted if row.step_seconds is not None]
    if not seconds:
        return None
    spread = spread_of(seconds)
    own_peak = max(row.memory_bytes or 0 for row in rows)
    peaks = ranks.peak_memory_bytes if ranks else ()
    evaluated = [row for row in rows if row.eval_loss is not None]
    return Measured(
        steps=len(counted),
        step_seconds=spread,
        samples_per_second=global_batch / spread.mean,
        peak_bytes=max((own_peak, *peaks)),
        peak_of_all_ranks=bool(peaks),
        shares=shares_of(spread.mean, ranks) if ranks else None,
        eval_loss=evaluated[-1].eval_loss if evaluated else None,
        eval_accuracy=evaluated[-1].eval_accuracy if evaluated else None,
    )


def spread_of(seconds: Sequence[float]) -> StepSpread:
    """Compute quantiles by the nearest rank, so that each is a measured value."""
    ordered = sorted(seconds)

    def quantile(share: float) -> float:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    return StepSpread(
        median=statistics.median(ordered),
        p10=quantile(0.1),
        p90=quantile(0.9),
        mean=statistics.fmean(ordered),
    )


def shares_of(step_seconds: float, ranks: RankTimes) -> StepShares | None:
    """Divide the step into its parts; None if no rank reported."""
    if not ranks.compute_seconds:
        return None
    own = statistics.fmean(ranks.compute_seconds)
    compute = own + (_mean(ranks.backward_seconds) or 0.0)
    data, update = _mean(ranks.data_seconds), _mean(ranks.optimizer_seconds)
    # step time of the same window, if the ranks reported it
    rest = (_mean(ranks.step_seconds) or step_seconds) - compute - (data or 0.0) - (update or 0.0)
    return StepShares(
        data=data,
        compute=compute,
        update=update,
        other=max(0.0, rest),
        imbalance=max(ranks.compute_seconds) - own,
    )


def _mean(seconds: Sequence[float]) -> float | None:
    return statistics.fmean(seconds) if seconds else None


# -- Compare the losses of two trials step by step, to show that they train the same model ------


# Largest effect of rounding, relative to the loss. bf16 has 8 significant bits (2**-8 = 0.0039).
# Losses of engines that round differently were measured 0.004 apart at a loss of 5.5, those of one
# that drifts 0.11 (`hpctrain.spec.engines.deepspeed`). fp32: 2**-23 per number, growing over tens
# of steps.
_BOUNDS = {"fp32": 1e-4}
_COARSE_BOUND = 4e-3


def bound_of(precision: str, other: str) -> float:
    """Find the largest relative difference of losses that rounding explains."""
    return max(_BOUNDS.get(precision, _COARSE_BOUND), _BOUNDS.get(other, _COARSE_BOUND))


def agreement(
    name: str,
    reference: Mapping[int, float],
    losses: Mapping[int, float],
    bound: float,
    *,
    same: bool = True,
) -> LossAgreement | None:
    """Compare losses by step; `same`: both train the same model, so they should agree."""
    common = sorted(reference.keys() & losses.keys())
    if not common:
        return None
    differences = [
        abs(losses[step] - reference[step]) / max(abs(reference[step]), 1e-12) for step in common
    ]
    verdict: Literal["same", "other run", "other start", "drifts"] = "same"
    if max(differences) > bound:
        verdict = "drifts" if differences[0] <= bound else "other start"
        verdict = verdict if same else "other run"
    return LossAgreement(
        reference=name,
        steps=len(common),
        largest=max(differences),
        bound=bound,
        verdict=verdict,
    )


# -- Recommend a variant, with reasons as sentences ---------------------------------------------


# Above this share a GPU that was measured has no room for a longer batch or a fragmented allocator.
ROOM = 0.94
_SURE = 0.9  # probability of fitting from which on `plan` says yes
_TIE = 0.02
_TIE_OF_PREDICTIONS = 0.05  # where nothing is known of their errors
# Deviations beyond which one of two predictions is the faster one with 80 %, as `plan` has it.
_TOLD_APART = NormalDist().inv_cdf(0.8)
_WORTH_TELLING = 0.05  # of the memory of the choice


def recommend(
    trials: Sequence[TrialResult], gpu_memory_bytes: int, *, measured: bool
) -> Recommendation:
    """Choose the fastest variant that fits with room, did not fail, and trains the same model.

    Ties are reported, and so is a slower variant that saves memory. None is chosen if no variant
    worked or has a time.
    """
    able = [trial for trial in trials if trial.succeeded or not measured]
    able = [trial for trial in able if trial.peak_bytes is not None]
    timed = [trial for trial in able if trial.samples_per_second is not None]
    if not able:
        words = "no variant has worked" if measured else "no variant can be planned"
        return Recommendation(choice=None, sentences=(f"{words}: the reasons are above.",))
    if not timed:
        least = min(able, key=_peak)
        words = (
            f"No times are predicted for this profile. {least.name} needs the least memory: "
            f"{short_bytes(_peak(least))} a GPU."
        )
        return Recommendation(choice=None, sentences=(words,))
    flaws = {trial.name: flaw(trial, gpu_memory_bytes) for trial in timed}
    sound = [trial for trial in timed if not flaws[trial.name]]
    among = sound or timed
    best = max(among, key=_pace)
    pace = f"{short_number(_pace(best))} samples/s"
    if flaws[best.name]:
        sentences = [
            f"None is without a flaw. {best.name} is the fastest, {pace}, but {flaws[best.name]}."
        ]
    else:
        room = f"{short_bytes(_peak(best))} of {short_bytes(gpu_memory_bytes)} a GPU"
        rank = "the only one that works" if len(among) == 1 else f"the fastest of {len(among)}"
        sentences = [f"{best.name}: {rank}, with room: {pace}, {room}."]
    sentences += [
        f"{trial.name} is faster ({short_number(_pace(trial))} samples/s), but {reason}."
        for trial in timed
        if (reason := flaws[trial.name]) and trial is not best and _pace(trial) > _pace(best)
    ]
    sentences += _others([trial for trial in sound if trial is not best], best)
    return Recommendation(choice=best.name, sentences=tuple(sentences))


def flaw(trial: TrialResult, gpu_memory_bytes: int) -> str:
    """Explain why a successful trial should not be chosen; empty if nothing is wrong."""
    share = (trial.peak_bytes or 0) / gpu_memory_bytes
    odds = trial.record.predicted.fit_probability if trial.record.predicted else None
    if trial.measured is None and odds is not None:
        if odds < _SURE:
            return f"fits with {odds:.0%} only"
    elif share > ROOM:
        return f"fills {100 * share:.0f} % of the memory"
    if trial.stability is not None and trial.stability.failures:
        return f"has failed on the way ({', '.join(trial.stability.failures)})"
    agreed = trial.agreement
    if agreed is not None and agreed.verdict == "drifts":
        return (
            f"drifts from the losses of {agreed.reference} by {100 * agreed.largest:.2g} %, "
            f"where rounding explains {100 * agreed.bound:.2g} %"
        )
    return ""


def _others(others: Sequence[TrialResult], best: TrialResult) -> list[str]:
    """Describe ties first, then the slower variant that saves most memory."""
    ties, described = [trial for trial in others if is_tie(best, trial)], []
    for trial in ties:
        difference = _peak(trial) - _peak(best)
        memory = f"{short_bytes(abs(difference))} {'more' if difference > 0 else 'less'} a GPU"
        if abs(difference) <= _WORTH_TELLING * _peak(best):
            memory = "about the same memory"
        described.append(f"{trial.name} ({memory})")
    sentences = []
    if ties:
        within = "what the steps differ by" if best.measured else "the planner's error"
        sentences.append(f"As fast within {within}: {', '.join(described)}.")
    slower = [trial for trial in others if trial not in ties]
    least = min(slower, key=_peak, default=best)
    if _peak(best) - _peak(least) > _WORTH_TELLING * _peak(best):
        loss = 100 * (1 - _pace(least) / _pace(best))
        saved = short_bytes(_peak(best) - _peak(least))
        sentences.append(f"{least.name} is {loss:.0f} % slower and needs {saved} less a GPU.")
    return sentences


def is_tie(best: TrialResult, other: TrialResult) -> bool:
    """Decide whether two variants differ by less than the noise of their step times.

    Predictions err together in what is alike. What one knows less than the other is its own: an
    engine without own runs beside one with them.
    """
    if best.measured is not None and other.measured is not None:
        deviation = 0.0
        for measured in (best.measured, other.measured):
            # relative error of the mean step: eight of ten steps lie within about 2.6 deviations
            spread = measured.step_seconds
            deviation += (spread.p90 - spread.p10) / 2.6 / spread.mean / math.sqrt(measured.steps)
        noise = max(_TIE, deviation)
    else:
        one, two = best.record.predicted, other.record.predicted
        noise = _TIE_OF_PREDICTIONS
        if one and two and one.layout_deviation and two.layout_deviation:
            own = abs((one.step_deviation or 0.0) ** 2 - (two.step_deviation or 0.0) ** 2)
            alike = max(one.layout_deviation, two.layout_deviation)
            noise = math.expm1(_TOLD_APART * math.sqrt(alike**2 + own))
    return _pace(best) / _pace(other) - 1 <= noise


def short_number(value: float) -> str:
    """Format three digits, or all of a large number."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _pace(trial: TrialResult) -> float:
    return trial.samples_per_second or 0.0


def _peak(trial: TrialResult) -> int:
    return trial.peak_bytes or 0


# -- Measure how the speed of a run scales with its GPUs ----------------------------------------


_TOO_GOOD = 1.1  # caches explain a few per cent
_GOOD = 0.8  # most sites accept no lower efficiency


def scale_points(trials: Sequence[TrialResult], *, measured: bool) -> tuple[ScalePoint, ...]:
    """Compare each size with the smallest that has a pace; empty if none has."""
    paced = [
        (trial, pace)
        for trial in trials
        if (pace := trial.samples_per_second) is not None and (trial.succeeded or not measured)
    ]
    if not paced:
        return ()
    first, first_pace = min(paced, key=lambda trial: trial[0].record.gpus)
    points = []
    for trial, pace in paced:
        growth = trial.record.gpus / first.record.gpus
        predicted, base = _predicted_pace(trial), _predicted_pace(first)
        points.append(
            ScalePoint(
                gpus=trial.record.gpus,
                baseline=first.record.gpus,
                speedup=pace / first_pace,
                efficiency=pace / first_pace / growth,
                predicted_efficiency=predicted / base / growth if predicted and base else None,
                lost=lost_time(trial, first) if trial is not first else None,
                eval_loss_difference=_apart(trial, first, "eval_loss"),
                eval_accuracy_difference=_apart(trial, first, "eval_accuracy"),
            )
        )
    return tuple(points)


def gpu_count(count: int) -> str:
    """Format `1 GPU`, `2 GPUs`."""
    return f"{count} GPU" if count == 1 else f"{count} GPUs"


def lost_time(trial: TrialResult, first: TrialResult) -> LostTime | None:
    """Split the time of a step beyond its share of the work of `first`; None: unknown."""
    own, base = trial.measured, first.measured
    if own is None or base is None or own.shares is None or base.shares is None:
        return None
    share = trial.record.global_batch / trial.record.gpus
    share /= first.record.global_batch / first.record.gpus
    total = max(0.0, own.step_seconds.mean - share * base.step_seconds.mean)
    data = max(0.0, (own.shares.data or 0.0) - share * (base.shares.data or 0.0))
    data = min(data, total)
    imbalance = min(own.shares.imbalance, total - data)
    return LostTime(total=total, data=data, imbalance=imbalance, messages=total - data - imbalance)


def _predicted_pace(trial: TrialResult) -> float | None:
    predicted = trial.record.predicted
    if predicted is None or not predicted.step_seconds:
        return None
    return trial.record.global_batch / predicted.step_seconds


def _apart(trial: TrialResult, first: TrialResult, figure: str) -> float | None:
    own, base = (getattr(each.measured, figure, None) for each in (trial, first))
    return None if own is None or base is None else float(own - base)


def recommend_size(
    trials: Sequence[TrialResult], points: Sequence[ScalePoint], *, weak: bool
) -> Recommendation:
    """Recommend the largest efficient size, and report what the next one loses."""
    if not points:
        return Recommendation(choice=None, sentences=("No size has worked: see why above.",))
    good = [p for p in points if (p.efficiency or 0) >= _GOOD]
    best = max(good, key=lambda point: point.gpus)
    sentences = [
        f"{gpu_count(best.gpus)}: {best.speedup:.2f} times the pace of {best.baseline}, "
        f"{100 * (best.efficiency or 0):.0f} % efficient."
        if best.gpus != best.baseline
        else f"{gpu_count(best.gpus)}: no larger size is {100 * _GOOD:.0f} % efficient."
    ]
    if any((point.efficiency or 0) > _TOO_GOOD for point in points):
        sentences.append("More than linear: the smallest size was disturbed; run it again.")
    poor = [p for p in points if p.gpus > best.gpus]
    if poor:
        worst = min(poor, key=lambda point: point.gpus)
        efficiency = 100 * (worst.efficiency or 0)
        sentences.append(f"{gpu_count(worst.gpus)} are used to {efficiency:.0f} % only.")
    largest = max(points, key=lambda point: point.gpus)
    if (lost := largest.lost) is not None and lost.total > 0:
        named = {
            "messages and waiting for them": lost.messages,
            "imbalance between ranks": lost.imbalance,
            "waiting for data": lost.data,
        }
        parts = ", ".join(
            f"{100 * seconds / lost.total:.0f} % {name}"
            for name, seconds in sorted(named.items(), key=lambda item: -item[1])
        )
        sentences.append(
            f"{gpu_count(largest.gpus)} lose {lost.total:.2g} s a step against linear: {parts}."
        )
    if weak:
        sentences.append(
            "Weak scaling: the batch grows with the GPUs and the learning rate of the spec does "
            "not, so losses of two sizes belong to different runs."
        )
    else:
        # Strong scaling keeps the steps, so that more GPUs must train the same model.
        agreements = [(one.agreement, one.record.gpus) for one in trials if one.agreement]
        if agreements:
            agreed, gpus = max(agreements, key=lambda one: one[0].largest)
            apart = f"{100 * agreed.largest:.2g} %"
            sentences.append(
                f"All sizes learn the same: losses are at most {apart} apart."
                if all(one.verdict == "same" for one, _ in agreements)
                else f"Losses of {gpu_count(gpus)} are {apart} apart; "
                f"rounding: {100 * agreed.bound:.2g} %."
            )
        accuracies = [p.eval_accuracy_difference for p in points]
        known = [abs(one) for one in accuracies if one is not None]
        if known:
            base = gpu_count(points[0].baseline)
            sentences.append(f"Accuracies are within {100 * max(known):.2g} points of {base}.")
    names = {trial.record.gpus: trial.name for trial in trials}
    return Recommendation(choice=names[best.gpus], sentences=tuple(sentences))
