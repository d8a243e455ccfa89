"""Do two trials train the same model? Their losses, step by step. Pure.

Belongs here: the bound and the verdict. Does not belong here: figures of time or memory.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.comparison.documents import Agreement

# What rounding explains, relative to the loss. bf16 has 8 significant bits (2**-8 = 0.0039), and
# losses of engines that round at other places were seen 0.004 apart at a loss of 5.5, those of one
# that drifts 0.11 (`hpctrain.spec.deepspeed`). fp32: 2**-23 a number, grown over tens of steps.
_BOUNDS = {"fp32": 1e-4}
_COARSE_BOUND = 4e-3


def bound_of(precision: str, other: str) -> float:
    """Largest relative difference of losses that rounding explains."""
    return max(_BOUNDS.get(precision, _COARSE_BOUND), _BOUNDS.get(other, _COARSE_BOUND))


def agreement(
    name: str, reference: Mapping[int, float], losses: Mapping[int, float], bound: float
) -> Agreement | None:
    """How `losses` agree with those of the `reference`, by step; None without a common step."""
    common = sorted(reference.keys() & losses.keys())
    if not common:
        return None
    differences = [_relative(losses[step], reference[step]) for step in common]
    largest = max(differences)
    return Agreement(
        reference=name,
        steps=len(common),
        largest=largest,
        bound=bound,
        verdict=(
            "same" if largest <= bound else "other start" if differences[0] > bound else "drifts"
        ),
    )


def _relative(one: float, other: float) -> float:
    return abs(one - other) / max(abs(other), 1e-12)
