"""Compare the losses of two trials step by step, to show that they train the same model. Pure.

Belongs here: the bound and the verdict. Does not belong here: figures of time or memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from hpctrain.trials.documents import LossAgreement, TrialResult

# Largest effect of rounding, relative to the loss. bf16 has 8 significant bits (2**-8 = 0.0039).
# Losses of engines that round differently were measured 0.004 apart at a loss of 5.5, those of one
# that drifts 0.11 (`hpctrain.spec.engines.deepspeed`). fp32: 2**-23 per number, growing over tens
# of steps.
_BOUNDS = {"fp32": 1e-4}
_COARSE_BOUND = 4e-3


def bound_of(precision: str, other: str) -> float:
    """Find the largest relative difference of losses that rounding explains."""
    return max(_BOUNDS.get(precision, _COARSE_BOUND), _BOUNDS.get(other, _COARSE_BOUND))


def agreement_of(first: TrialResult, other: TrialResult) -> LossAgreement | None:
    """Compare the losses of `other` with those of `first`; None without a common step."""
    bound = bound_of(first.record.precision, other.record.precision)
    same = first.record.training == other.record.training
    return agreement(first.name, dict(first.losses), dict(other.losses), bound, same=same)


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
