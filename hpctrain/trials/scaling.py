"""Measure how the speed of a run scales with its GPUs. Pure.

Belongs here: speed-up, efficiency, time lost against the smallest size. Does not belong here: the
shares of a step (see `measure`).
"""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.trials.documents import LostTime, Recommendation, ScalePoint, TrialResult

_WEAK = [
    "Weak scaling: the batch grows with the GPUs and the learning rate of the spec does not, so "
    "losses of two sizes belong to different runs."
]
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
    names = {trial.record.gpus: trial.name for trial in trials}
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
    sentences += [_lost(largest)] if largest.lost and largest.lost.total > 0 else []
    if weak:
        return Recommendation(choice=names[best.gpus], sentences=(*sentences, *_WEAK))
    sentences += _same_losses(trials)
    apart = [p.eval_accuracy_difference for p in points if p.eval_accuracy_difference is not None]
    if apart:
        most = 100 * max(abs(difference) for difference in apart)
        base = gpu_count(points[0].baseline)
        sentences.append(f"Accuracies are within {most:.2g} points of {base}.")
    return Recommendation(choice=names[best.gpus], sentences=tuple(sentences))


def _lost(point: ScalePoint) -> str:
    lost = point.lost
    assert lost is not None
    named = {
        "messages and waiting for them": lost.messages,
        "imbalance between ranks": lost.imbalance,
        "waiting for data": lost.data,
    }
    largest_first = sorted(named.items(), key=lambda item: -item[1])
    parts = ", ".join(
        f"{100 * seconds / lost.total:.0f} % {name}" for name, seconds in largest_first
    )
    return f"{gpu_count(point.gpus)} lose {lost.total:.2g} s a step against linear: {parts}."


def _same_losses(trials: Sequence[TrialResult]) -> list[str]:
    """Check that more GPUs train the same model: strong scaling keeps the steps."""
    compared = [trial for trial in trials if trial.agreement is not None]
    if not compared:
        return []
    worst = max(compared, key=lambda trial: trial.agreement.largest if trial.agreement else 0.0)
    agreed = worst.agreement
    assert agreed is not None
    apart = f"{100 * agreed.largest:.2g} %"
    if all(trial.agreement and trial.agreement.verdict == "same" for trial in compared):
        return [f"All sizes learn the same: losses are at most {apart} apart."]
    explained = f"{100 * agreed.bound:.2g} %"
    return [f"Losses of {gpu_count(worst.record.gpus)} are {apart} apart; rounding: {explained}."]
