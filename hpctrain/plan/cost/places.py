"""Where a configuration lies among others: what is alike errs alike.

What a cost model leaves out, a kernel that a shape suits or a schedule that waits, it leaves out of
neighbours too. A place counts doublings: two configurations that differ by twice the tensor
parallelism are 1 apart, and a switch that one of them has set counts like 1.4 doublings. Data
parallel ranks are no part of it, for more of the same errs the same, nor is the GPU: a cluster has
one. Belongs here: places, and how alike two of them are. Does not belong here: how much neighbours
share, and how far that reaches (`catalogue/uncertainty.yaml`), what runs teach of it
(`hpctrain.plan.uncertainty`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hpctrain.plan.cost.case import Array, Case, Floats, Mask

_SWITCH = 2.0**0.5  # doublings: as far as two categories are apart that are counted one by one
_APART = 1e-6  # variance, of 1, that places share with none: neighbours stay distinct numbers


def _doublings(size: Array) -> Array:
    return np.asarray(np.log2(np.maximum(size, 1)))


def _switch(value: Mask | Array) -> Array:
    return np.asarray(_SWITCH * np.asarray(value, dtype=float))


_AXES: dict[str, Callable[[Case], Array]] = {
    "hidden": lambda case: _doublings(case.shape.hidden),
    "layers": lambda case: _doublings(case.shape.layers),
    "experts": lambda case: _doublings(case.shape.experts),
    "seq": lambda case: _doublings(case.shape.seq),
    "tp": lambda case: _doublings(case.mesh.tp),
    "pp": lambda case: _doublings(case.mesh.pp),
    "vpp": lambda case: _doublings(case.mesh.vpp),
    "cp": lambda case: _doublings(case.mesh.cp),
    "ep": lambda case: _doublings(case.mesh.ep),
    "micro batch": lambda case: _doublings(case.mesh.micro_batch),
    "recompute": lambda case: _switch(np.asarray(case.mesh.recompute) > 0),
    "full recompute": lambda case: _switch(np.asarray(case.mesh.recompute) > 1),
    "zero": lambda case: _switch(case.mesh.zero),
    "low precision": lambda case: _switch(case.mesh.low),
    "sequence parallel": lambda case: _switch(case.mesh.sequence_parallel),
    "fused attention": lambda case: _switch(case.software.flash),
    "launches": lambda case: _switch(case.software.launched_layers),
    "overlapped experts": lambda case: _switch(case.software.overlaps_experts),
}
AXES: tuple[str, ...] = tuple(_AXES)


def places_of(case: Case, axes: Sequence[str] = AXES) -> Floats:
    """Compute the place of each case on these axes: [cases, axes]."""
    columns = [np.asarray(_AXES[name](case), dtype=float) for name in axes]
    count = np.broadcast_shapes(*(column.shape for column in columns), (1,))
    return np.column_stack([np.broadcast_to(column, count) for column in columns])


def alike(places: Floats, others: Floats, reach: float) -> Floats:
    """Compute how much of what configurations err by they share: [places, others], at most 1.

    The squared exponential of their distance over `reach` (Rasmussen and Williams 2006, Gaussian
    Processes for Machine Learning, eq. 4.9): smooth, and 0.6 at `reach` doublings.
    """
    squares = (places**2).sum(axis=1)[:, None] + (others**2).sum(axis=1) - 2 * places @ others.T
    return np.asarray(np.exp(-np.maximum(squares, 0.0) / (2 * reach**2)))


def weights_of(places: Floats, seen: Floats, reach: float) -> Floats:
    """Compute how what is left at places that were seen continues elsewhere: [places, seen].

    Interpolation between them, and nothing far from all of them: the mean of the process is 0
    (eq. 2.25 of the same book, with as good as no noise).
    """
    among = alike(seen, seen, reach) + _APART * np.eye(len(seen))
    return np.asarray(np.linalg.solve(among, alike(seen, places, reach)).T)
