"""Say for what reasons the planner knows less of a case than of others.

Belongs here: the classes, each with its physical reason. Does not belong here: how much wider they
make an interval (`catalogue/uncertainty.yaml`).
"""

from __future__ import annotations

import numpy as np

from hpctrain.plan.cost.case import Case, Floats, Mask

# expert model: routing, permutation and dispatch change between releases; low precision: casts and
# scales around 8-bit and 4-bit products; new GPU: its constants are those of another one
CLASSES = ("expert model", "low precision", "new GPU")


def classes_of(case: Case, known_gpu: Mask = True) -> Floats:
    """Tell which of `CLASSES` hold: [cases, classes] of 0 and 1.

    `known_gpu`: whether constants were fitted to measurements of this kind of GPU.
    """
    columns = (
        np.asarray(case.shape.moe_blocks) > 0,
        np.asarray(case.mesh.low) > 0,
        ~np.asarray(known_gpu, dtype=bool),
    )
    shape = np.broadcast_shapes(*(np.shape(column) for column in columns), (1,))
    shape = np.broadcast_shapes(shape, np.shape(case.mesh.tp))
    return np.column_stack([np.broadcast_to(column, shape) for column in columns]).astype(float)
