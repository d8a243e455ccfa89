"""Recommend a variant, with reasons as sentences. Pure.

It is the fastest variant that fits with room, did not fail, and trains the same model. Ties are
reported, and so is a slower variant that saves memory. Belongs here: the order and the sentences.
Does not belong here: measuring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

from hpctrain.base.units import short_bytes
from hpctrain.trials.documents import Recommendation, TrialResult

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
    """Choose a variant, with reasons; none if no variant worked or has a time."""
    able = [trial for trial in trials if trial.succeeded or not measured]
    able = [trial for trial in able if trial.peak_bytes is not None]
    timed = [trial for trial in able if trial.samples_per_second is not None]
    if not timed:
        return _without_times(able, measured)
    flaws = {trial.name: flaw(trial, gpu_memory_bytes) for trial in timed}
    sound = [trial for trial in timed if not flaws[trial.name]]
    best = max(sound or timed, key=_pace)
    sentences = [_why(best, sound or timed, gpu_memory_bytes, flaws[best.name])]
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


def _without_times(able: Sequence[TrialResult], measured: bool) -> Recommendation:
    if not able:
        words = "no variant has worked" if measured else "no variant can be planned"
        return Recommendation(choice=None, sentences=(f"{words}: the reasons are above.",))
    least = min(able, key=_peak)
    words = (
        f"No times are predicted for this profile. {least.name} needs the least memory: "
        f"{short_bytes(_peak(least))} a GPU."
    )
    return Recommendation(choice=None, sentences=(words,))


def _why(
    best: TrialResult, among: Sequence[TrialResult], gpu_memory_bytes: int, own_flaw: str
) -> str:
    pace = f"{short_number(_pace(best))} samples/s"
    room = f"{short_bytes(_peak(best))} of {short_bytes(gpu_memory_bytes)} a GPU"
    if own_flaw:
        return f"None is without a flaw. {best.name} is the fastest, {pace}, but {own_flaw}."
    rank = "the only one that works" if len(among) == 1 else f"the fastest of {len(among)}"
    return f"{best.name}: {rank}, with room: {pace}, {room}."


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
    """Decide whether two variants differ by less than the noise of their step times."""
    if best.measured is None or other.measured is None:
        return _pace(best) / _pace(other) - 1 <= _tie_of_predictions(best, other)
    noise = 0.0
    for measured in (best.measured, other.measured):
        # relative error of the mean step: eight of ten steps lie within about 2.6 deviations
        spread = measured.step_seconds
        noise += (spread.p90 - spread.p10) / 2.6 / spread.mean / math.sqrt(measured.steps)
    return _pace(best) / _pace(other) - 1 <= max(_TIE, noise)


def _tie_of_predictions(best: TrialResult, other: TrialResult) -> float:
    """Compute by how much two predictions have to differ to tell them apart, as a share.

    They err together in what is alike. What one knows less than the other is its own: an engine
    without own runs beside one with them.
    """
    one, two = best.record.predicted, other.record.predicted
    if not (one and two and one.layout_deviation and two.layout_deviation):
        return _TIE_OF_PREDICTIONS
    own = abs((one.step_deviation or 0.0) ** 2 - (two.step_deviation or 0.0) ** 2)
    alike = max(one.layout_deviation, two.layout_deviation)
    return math.expm1(_TOLD_APART * math.sqrt(alike**2 + own))


def short_number(value: float) -> str:
    """Format three digits, or all of a large number."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _pace(trial: TrialResult) -> float:
    return trial.samples_per_second or 0.0


def _peak(trial: TrialResult) -> int:
    return trial.peak_bytes or 0
