"""How a run gets faster with more GPUs. Pure.

Belongs here: speed-up, efficiency, the loss against the smallest size. Does not belong here: where
the time goes (see `measure`).
"""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.comparison.documents import Recommendation, ScalePoint, Trial

_GOOD = 0.8  # below that the last GPUs give less than most sites accept


def scale_points(trials: Sequence[Trial], *, measured: bool) -> tuple[ScalePoint, ...]:
    """Each size against the smallest that has a pace; none where nothing has."""
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
        eval_loss_difference=_evaluated_apart(trial, first),
    )


def _predicted_pace(trial: Trial) -> float | None:
    predicted = trial.record.predicted
    if predicted is None or not predicted.step_seconds:
        return None
    return trial.record.global_batch / predicted.step_seconds


def _evaluated_apart(trial: Trial, first: Trial) -> float | None:
    own, base = trial.measured, first.measured
    if own is None or base is None or own.eval_loss is None or base.eval_loss is None:
        return None
    return own.eval_loss - base.eval_loss


def recommend_size(
    trials: Sequence[Trial], points: Sequence[ScalePoint], *, weak: bool
) -> Recommendation:
    """The largest size that is still used well, and what the next one loses."""
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
    poor = [p for p in points if p.gpus > best.gpus]
    if poor:
        worst = min(poor, key=lambda point: point.gpus)
        efficiency = 100 * (worst.efficiency or 0)
        sentences.append(f"{gpu_count(worst.gpus)} are used to {efficiency:.0f} % only.")
    if weak:
        sentences.append(
            "Weak scaling: the batch grows with the GPUs and the learning rate of the spec does "
            "not, so losses of two sizes belong to different runs."
        )
    return Recommendation(choice=names[best.gpus], sentences=tuple(sentences))
