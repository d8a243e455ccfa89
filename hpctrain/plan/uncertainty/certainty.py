"""How sure the figures of one plan are, as the document that `plan` shows.

Belongs here: intervals and the probability of fitting of one candidate. Does not belong here:
beliefs (`site`), the arithmetic of intervals (`intervals`), text.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.plan.cost.case import Case
from hpctrain.plan.cost.from_spec import case_of
from hpctrain.plan.cost.learned import learning_of
from hpctrain.plan.documents import Certainty, DoubtPart, MemoryBreakdown, Prediction
from hpctrain.plan.mesh.candidate import Candidate
from hpctrain.plan.mesh.columns import columns_of
from hpctrain.plan.request import PlanRequest
from hpctrain.plan.uncertainty.intervals import (
    doubt_parts,
    layout_deviation,
    memory_spread,
    time_spread,
)
from hpctrain.plan.uncertainty.site import SiteBelief, belief_of
from hpctrain.spec.calibration import SiteLearning

_NAMED = 3  # of the runs that a plan leans on


def certainty_of(
    request: PlanRequest,
    candidate: Candidate,
    prediction: Prediction | None,
    memory: Sequence[MemoryBreakdown],
) -> Certainty | None:
    """Compute the intervals of one candidate; None where nothing is known of errors."""
    belief = belief_of(request)
    if belief is None:
        return None
    case = case_of(request, columns_of(candidate))
    peak = float(max(stage.total_bytes for stage in memory))
    bytes_ = memory_spread(case, belief.memory, belief.memory_doubt, belief.known_gpu, peak)
    found = Certainty(
        low_peak_bytes=round(float(bytes_.low[0])),
        high_peak_bytes=round(float(bytes_.high[0])),
        fit_probability=float(bytes_.within(float(request.profile.gpu.memory))[0]),
        calibrated=_told(learning_of(request)),
        measured=request.knowledge.measured if request.knowledge else (),
    )
    if prediction is None:
        return found
    total = prediction.parts.total_seconds
    seconds = time_spread(case, belief.time, belief.time_doubt, belief.known_gpu, total)
    return found.model_copy(
        update={
            "low_step_seconds": float(seconds.low[0]),
            "high_step_seconds": float(seconds.high[0]),
            "step_deviation": float(seconds.deviation[0]),
            "layout_deviation": layout_deviation(belief.time, belief.time_doubt),
            "doubt": _doubt(case, belief),
        }
    )


def _doubt(case: Case, belief: SiteBelief) -> tuple[DoubtPart, ...]:
    """List the parts of the doubt that are more than a hundredth of it."""
    parts = doubt_parts(case, belief.time, belief.time_doubt, belief.known_gpu)
    return tuple(
        DoubtPart(name=name, share=round(share, 3)) for name, share in parts.items() if share > 0.01
    )


def _told(learning: SiteLearning | None) -> str | None:
    """Format `6 runs of this cluster until 2026-11-20 (a, b, c, ...), error 3 %`."""
    if learning is None:
        return None
    runs = learning.runs
    names = ", ".join(run.run for run in runs[:_NAMED]) + (", ..." if len(runs) > _NAMED else "")
    count = f"{len(runs)} run{'s' if len(runs) > 1 else ''}"
    last = max(run.day for run in runs)
    until = f" until {last}" if last else ""
    return f"{count} of this cluster{until} ({names}): ±{learning.error:.0%} on the next one"
