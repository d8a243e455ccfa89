"""Which variant to take, in plain sentences. Pure.

The fastest of those that are sound: they fit with room, did not fail, and train the same model.
Ties are called ties, and what a slower one buys is said. Belongs here: the order and the words.
Does not belong here: measuring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hpctrain.comparison.documents import Recommendation, Trial
from hpctrain.units import short_bytes

# Above this a GPU has no room for a longer batch or a fragmented allocator; the planner calls such
# layouts tight at the same place (plan.documents.SearchCounts).
ROOM = 0.94
_TIE = 0.02
_TIE_OF_PREDICTIONS = 0.05  # about the planner's median error (docs/planner.md)
_WORTH_TELLING = 0.05  # of the memory that the choice takes


def recommend(trials: Sequence[Trial], gpu_memory_bytes: int, *, measured: bool) -> Recommendation:
    """Choose a variant, with reasons; no choice where nothing has worked or time is not known."""
    able = [trial for trial in trials if trial.succeeded or not measured]
    able = [trial for trial in able if trial.peak_bytes is not None]
    timed = [trial for trial in able if trial.samples_per_second is not None]
    if not timed:
        return _without_times(able, measured)
    flaws = {trial.name: flaw(trial, gpu_memory_bytes) for trial in timed}
    sound = [trial for trial in timed if not flaws[trial.name]]
    best = max(sound or timed, key=_pace)
    sentences = [_why(best, sound or timed, gpu_memory_bytes, flaws[best.name])]
    sentences += [_flawed(trial, best, flaws[trial.name]) for trial in timed if flaws[trial.name]]
    sentences += _others([trial for trial in sound if trial is not best], best)
    return Recommendation(choice=best.name, sentences=tuple(one for one in sentences if one))


def flaw(trial: Trial, gpu_memory_bytes: int) -> str:
    """Say why a trial that has worked should not be taken; empty where nothing is wrong."""
    share = (trial.peak_bytes or 0) / gpu_memory_bytes
    if share > ROOM:
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


def _without_times(able: Sequence[Trial], measured: bool) -> Recommendation:
    if not able:
        words = "no variant has worked" if measured else "no variant can be planned"
        return Recommendation(choice=None, sentences=(f"{words}: the reasons are above.",))
    least = min(able, key=_peak)
    words = (
        f"No times are predicted for this profile. {least.name} needs the least memory: "
        f"{short_bytes(_peak(least))} a GPU."
    )
    return Recommendation(choice=None, sentences=(words,))


def _why(best: Trial, among: Sequence[Trial], gpu_memory_bytes: int, own_flaw: str) -> str:
    pace = f"{short_number(_pace(best))} samples/s"
    room = f"{short_bytes(_peak(best))} of {short_bytes(gpu_memory_bytes)} a GPU"
    if own_flaw:
        return f"None is without a flaw. {best.name} is the fastest, {pace}, but {own_flaw}."
    rank = "the only one that works" if len(among) == 1 else f"the fastest of {len(among)}"
    return f"{best.name}: {rank}, with room: {pace}, {room}."


def _flawed(trial: Trial, best: Trial, what: str) -> str:
    """Describe a variant that was left out only because of its flaw."""
    if trial is best or _pace(trial) <= _pace(best):
        return ""
    return f"{trial.name} is faster ({short_number(_pace(trial))} samples/s), but {what}."


def _others(others: Sequence[Trial], best: Trial) -> list[str]:
    """Describe ties first, then the slower one that saves most memory."""
    ties = [trial for trial in others if is_tie(best, trial)]
    sentences = []
    if ties:
        within = "what the steps differ by" if best.measured else "the planner's error"
        named = ", ".join(f"{trial.name} ({_memory_against(trial, best)})" for trial in ties)
        sentences.append(f"As fast within {within}: {named}.")
    slower = [trial for trial in others if trial not in ties]
    least = min(slower, key=_peak, default=best)
    if _peak(best) - _peak(least) > _WORTH_TELLING * _peak(best):
        loss = 100 * (1 - _pace(least) / _pace(best))
        saved = short_bytes(_peak(best) - _peak(least))
        sentences.append(f"{least.name} is {loss:.0f} % slower and needs {saved} less a GPU.")
    return sentences


def is_tie(best: Trial, other: Trial) -> bool:
    """Tell whether the difference is smaller than what the steps of either differ by."""
    if best.measured is None or other.measured is None:
        return _pace(best) / _pace(other) - 1 <= _TIE_OF_PREDICTIONS
    noise = sum(_noise(trial) for trial in (best, other))
    return _pace(best) / _pace(other) - 1 <= max(_TIE, noise)


def _noise(trial: Trial) -> float:
    """Relative error of the mean step, about: eight of ten steps lie within 2.6 deviations."""
    assert trial.measured is not None
    spread = trial.measured.step_seconds
    return (spread.p90 - spread.p10) / 2.6 / spread.mean / math.sqrt(trial.measured.steps)


def _memory_against(trial: Trial, best: Trial) -> str:
    difference = _peak(trial) - _peak(best)
    if abs(difference) <= _WORTH_TELLING * _peak(best):
        return "about the same memory"
    return f"{short_bytes(abs(difference))} {'more' if difference > 0 else 'less'} a GPU"


def short_number(value: float) -> str:
    """Write three digits, or all of a large number."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _pace(trial: Trial) -> float:
    return trial.samples_per_second or 0.0


def _peak(trial: Trial) -> int:
    return trial.peak_bytes or 0
