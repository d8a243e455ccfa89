"""Count the bytes that move to add the weight gradients of a microbatch to those before.

Belongs here: bytes of each way. Does not belong here: the ways, and which engine takes which
(`hpctrain.spec.engines.abilities`), seconds (`blocks`).
"""

from __future__ import annotations

import numpy as np

from hpctrain.plan.cost.case import Array
from hpctrain.spec.engines.abilities import GradientAddition


def added_bytes(
    way: GradientAddition, gradient_bytes: float, kept_bytes: float, accumulation: Array
) -> Array:
    """Bytes per weight and microbatch, besides the gradient that its product writes.

    `gradient_bytes` has that product's result, `kept_bytes` what is added to and reduced. The
    first of `accumulation` microbatches has nothing to add to.
    """
    if way == "product":
        return 0.0
    if way == "main":
        return gradient_bytes + 2 * kept_bytes
    if way == "autograd":
        return 3 * kept_bytes * (1 - 1 / np.asarray(accumulation))
    copied = gradient_bytes + kept_bytes
    if way == "block":
        return copied
    changed = copied if kept_bytes != gradient_bytes else 0.0
    return 2 * gradient_bytes + changed + 2 * kept_bytes
