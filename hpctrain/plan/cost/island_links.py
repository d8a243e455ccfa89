"""Add the time of slow links between islands to the step time.

The cost model has one network for all nodes. Where the nodes of a run are in several islands, the
rings and messages that cross a border share an uplink. Belongs here: the seconds this adds, for
many candidates. Does not belong here: which groups cross (`islands`, `rank_order`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpctrain.plan.cost.case import Software
from hpctrain.plan.limits import node_request
from hpctrain.plan.mesh.columns import Columns
from hpctrain.plan.mesh.islands import Island, on_islands, slow_links, used_islands
from hpctrain.plan.mesh.rank_order import busiest_uplink
from hpctrain.plan.request import PlanRequest
from hpctrain.spec.profile import ClusterProfile

Floats = NDArray[np.float64]
# What decides which ranks talk over a border and how much they send in a step; the microbatch
# does not, because a step sends the same number of tokens in any number of messages.
STRUCTURE = (
    *("tp", "pp", "vpp", "cp", "ep", "dp", "order", "sequence_parallel"),
    *("count_embedding", "count_loss", "uneven"),
)


def crossed_islands(gpus: int, profile: ClusterProfile) -> tuple[Island, ...]:
    """Return the islands of a run on `gpus` GPUs; empty where one island holds them all.

    Over-subscribed leaf switches are not islands here: the cost model covers them.
    """
    request = on_islands(node_request(gpus, profile.gpu.per_node), profile)
    return slow_links(request, profile) if len(used_islands(request, profile)) > 1 else ()


def uplink_seconds(
    request: PlanRequest, columns: Columns, islands: tuple[Island, ...]
) -> tuple[Floats, Floats]:
    """Compute the seconds per step for which each row keeps its busiest uplink busy.

    Returns (gradients and weights, activations), arrays of shape [candidates].
    """
    table = np.stack([getattr(columns, name) for name in STRUCTURE], axis=1)
    _, first, inverse = np.unique(table, axis=0, return_index=True, return_inverse=True)
    loads = []
    for row in first:
        candidate = columns.candidate(int(row))
        load = busiest_uplink(request, candidate, candidate.layout.order, islands)
        loads.append((load.gradients_bytes / load.uplink, load.activations_bytes / load.uplink))
    rows = np.array(loads, dtype=float).reshape(len(first), 2)[inverse.ravel()]
    return rows[:, 0], rows[:, 1]


def shown_seconds(
    columns: Columns,
    software: Software,
    step: Floats,
    data_messages: Floats,
    loads: tuple[Floats, Floats],
) -> Floats:
    """Compute the seconds that islands add to the step time of the cost model.

    Gradients and weights hide behind one microbatch (the last backward, the first forward pass)
    as far as data parallel traffic of this software does; what the cost model has charged for them
    already is subtracted. Activations delay the pipeline like all its messages. No step is shorter
    than its uplink is busy.
    """
    gradients, activations = loads
    hidden = software.dp_overlap * software.overlaps_gradients * step / columns.accumulation
    late = np.maximum(0.0, gradients - hidden - data_messages)
    between_chunks = software.pp_overlap * software.overlaps_stages * (columns.vpp > 1)
    waiting = (1 - between_chunks) * activations
    return np.asarray(np.maximum(late + waiting, gradients + activations - step), dtype=float)
