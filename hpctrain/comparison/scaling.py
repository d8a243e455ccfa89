"""How a run gets faster with more GPUs. Pure.

Belongs here: speed-up, efficiency, the loss against the smallest size. Does not belong here: where
the time goes (see `measure`).
"""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.comparison.documents import LostTime, Recommendation, ScalePoint, Trial

_WEAK = [
    "Weak scaling: the batch grows with the GPUs and the learning rate of the spec does not, so "
    "losses of two sizes belong to different runs."
]
_TOO_GOOD = 1.1  # caches explain a few per cent
_GOOD = 0.8  # below that the last GPUs give less than most sites accept


def scale_points(trials: Sequence[Trial], *, measured: bool) -> tuple[ScalePoint, ...]:
    """Compare each size with the smallest that has a pace; empty where none has."""
    paced = [trial for trial in trials if _has_pace(trial, measured)]
    if not paced:
        return ()
    first = min(paced, key=lambda trial: trial.record.gpus)
    return tuple(_point(trial, first) for trial in paced)


def gpu_count(count: int) -> str:
    """`1 GPU`, `2 GPUs`."""
    return f"{count} GPU" if count == 1 else f"{count} GPUs"


def _has_pace(trial: Trial, measured: bool) -> bool:
    return trial.samples_per_second is not None and (trial.succeeded or not measured)


def _point(trial: Trial, first: Trial) -> ScalePoint:
    growth = trial.record.gpus / first.record.gpus
    assert trial.samples_per_second is not None and first.samples_per_second is not None
    speedup = trial.samples_per_second / first.samples_per_second
    predicted, base = _predicted_pace(trial), _predicted_pace(first)
    return ScalePoint(
        gpus=trial.record.gpus,
        baseline=first.record.gpus,
        speedup=speedup,
        efficiency=speedup / growth,
        predicted_efficiency=predicted / base / growth if predicted and base else None,
        lost=lost_time(trial, first) if trial is not first else None,
        eval_loss_difference=_apart(trial, first, "eval_loss"),
        eval_accuracy_difference=_apart(trial, first, "eval_accuracy"),
    )


def lost_time(trial: Trial, first: Trial) -> LostTime | None:
    """Explain why a step takes longer than its share of the work of the `first`; None: unknown."""
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


def _predicted_pace(trial: Trial) -> float | None:
    predicted = trial.record.predicted
    if predicted is None or not predicted.step_seconds:
        return None
    return trial.record.global_batch / predicted.step_seconds


def _apart(trial: Trial, first: Trial, figure: str) -> float | None:
    own, base = (getattr(one.measured, figure, None) for one in (trial, first))
    return None if own is None or base is None else float(own - base)


def recommend_size(
    trials: Sequence[Trial], points: Sequence[ScalePoint], *, weak: bool
) -> Recommendation:
    """Recommend the largest size that is still used well, and what the next one loses."""
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
    sentences += _WEAK if weak else [*_same_losses(trials), *_same_accuracy(points)]
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


def _same_losses(trials: Sequence[Trial]) -> list[str]:
    """Strong scaling trains the same steps; more GPUs must not change what is learned."""
    told = [trial for trial in trials if trial.agreement is not None]
    if not told:
        return []
    worst = max(told, key=lambda trial: trial.agreement.largest if trial.agreement else 0.0)
    agreed = worst.agreement
    assert agreed is not None
    apart = f"{100 * agreed.largest:.2g} %"
    if all(trial.agreement and trial.agreement.verdict == "same" for trial in told):
        return [f"All sizes learn the same: losses are at most {apart} apart."]
    explained = f"{100 * agreed.bound:.2g} %"
    return [f"Losses of {gpu_count(worst.record.gpus)} are {apart} apart; rounding: {explained}."]


def _same_accuracy(points: Sequence[ScalePoint]) -> list[str]:
    apart = [p.eval_accuracy_difference for p in points if p.eval_accuracy_difference is not None]
    if not apart:
        return []
    largest = 100 * max(abs(difference) for difference in apart)
    return [f"Accuracies are within {largest:.2g} points of {gpu_count(points[0].baseline)}."]
