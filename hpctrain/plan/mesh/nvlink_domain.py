"""Choose the NVLink domain that a job can rely on, and the segment of nodes that Slurm keeps in it.

A domain of several nodes (the rack of a GB200 NVL72) serves only groups whose ranks Slurm puts into
one rack. topology/block does so for segments: `--segment=N` divides the job, and each N nodes
share a block (sbatch(1), 24.05). The performance scripts of Megatron-Bridge request the largest
divisor of the nodes up to 18; here the segment also has to hold whole groups of the layout.
Belongs here: segments, the domain of a layout, for one and for many. Does not belong here: spans
of axes (`placement`), the options of the script (`hpctrain.job.render.job_options`).

A group is `size` ranks, `stride` apart, and tiles blocks of stride x size consecutive ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.plan.layout_words import DEFAULT_ORDER, ORDERS
from hpctrain.plan.limits import node_request
from hpctrain.plan.mesh.candidate import Candidate, LayoutValues
from hpctrain.plan.mesh.columns import Columns
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import ResourcesSpec

Ints = NDArray[np.int64]
# The first axes of a list of blocks: tp, cp, ep, whose messages delay every layer.
_NEAR = 3


def segment_choices(resources: ResourcesSpec, profile: ClusterProfile) -> tuple[int, ...]:
    """List the segments, in nodes, that the site accepts for this job, the smallest first.

    Divisors of all its sizes (planned, with spares, fewest) up to the usable nodes of a block; the
    spec's own where it names one. Empty where Slurm knows no blocks or none may be requested.
    """
    switches = profile.network.switches
    if switches.plugin != "block" or switches.segment_policy == "forbid":
        return ()
    if resources.segment is not None:
        return (resources.segment,)
    nodes = node_request(resources.gpus, profile.gpu.per_node).nodes
    spares = resources.spare_nodes
    common = gcd(nodes, nodes + spares, resources.min_nodes or nodes)
    most = switches.usable_nodes or 1
    return tuple(size for size in range(1, min(common, most) + 1) if common % size == 0)


def nvlink_domain(layout: Candidate, resources: ResourcesSpec, profile: ClusterProfile) -> int:
    """Return how many consecutive ranks of this layout Slurm keeps in one NVLink domain.

    Of the possible segments the one that cuts the groups of tp, cp, ep, dp and pp least, in this
    order; of equal ones the largest.
    """
    return int(_best(_blocks_of(layout), possible_domains(resources, profile))[0])


def possible_domains(
    resources: ResourcesSpec, profile: ClusterProfile, gpus: int | None = None
) -> tuple[int, ...]:
    """List how many consecutive ranks can share a domain, over all segments; the largest is last.

    Without segments racks are filled one after the other. `gpus`: on another number of GPUs than
    the spec's.
    """
    if gpus is not None and gpus != resources.gpus:
        changed = {"gpus": gpus, "segment": None, "spare_nodes": 0, "min_nodes": None}
        resources = resources.model_copy(update=changed)
    whole, per_node = profile.nvlink.domain, profile.gpu.per_node
    choices = (size * per_node for size in segment_choices(resources, profile))
    return tuple(size for size in choices if size <= whole) or (whole,)


def priced_domains(
    columns: Columns, resources: ResourcesSpec, profile: ClusterProfile
) -> NDArray[np.float64] | int:
    """Return for each row how many consecutive ranks the cost model may count as neighbours.

    `nvlink_domain`, but where its border cuts a group of tp, cp or ep: then the smallest part of
    such a group, the greatest common divisor of both. One number where the domain is not larger
    than a node.
    """
    whole = profile.nvlink.domain
    if whole <= profile.gpu.per_node or not len(columns):
        return whole
    blocks = _blocks_of(columns)
    domains = _best(blocks, possible_domains(resources, profile))
    smallest = domains
    for block in blocks[:_NEAR]:
        is_cut = domains % block != 0
        smallest = np.where(is_cut, np.minimum(smallest, np.gcd(domains, block)), smallest)
    return np.where(columns.gpus <= domains, domains, smallest).astype(float)


def requested_segment(
    layout: Candidate, resources: ResourcesSpec, profile: ClusterProfile
) -> int | None:
    """Choose the segment that the script requests, in nodes; None where it requests none.

    The spec's own; with `force` always one; with `auto` where a group of several nodes is inside.
    """
    choices, per_node = segment_choices(resources, profile), profile.gpu.per_node
    if not choices or resources.segment is not None:
        return resources.segment if choices else None
    forced = profile.network.switches.segment_policy == "force"
    if profile.nvlink.domain <= per_node:
        return choices[-1] if forced else None
    domain = nvlink_domain(layout, resources, profile)
    relies = any(block > per_node and domain % block == 0 for (block,) in _blocks_of(layout))
    return domain // per_node if forced or relies else None


def _best(blocks: Sequence[Ints], sizes: Sequence[int]) -> Ints:
    """Select for each row the size that leaves the largest parts of blocks together."""
    options = np.array(sizes, dtype=np.int64)[:, None]
    alive = np.ones((len(sizes), len(blocks[0])), dtype=bool)
    for block in blocks if len(sizes) > 1 else ():
        together = np.where(alive, np.gcd(options, block), 0)
        alive &= together == together.max(axis=0)
    return np.asarray((options * alive).max(axis=0))


def _blocks_of(at: LayoutValues[Any]) -> list[Ints]:
    """Multiply stride and size of tp, cp, ep, dp and pp; 1 for an axis of one rank: [layouts]."""
    tp, cp, ep, dp, pp, etp = (
        np.array(size, dtype=np.int64, ndmin=1)
        for size in (at.tp, at.cp, at.ep, at.dp, at.pp, at.expert_tp)
    )
    usual = at.order == ORDERS.index(DEFAULT_ORDER)
    near, world = tp * cp, tp * cp * dp * pp
    return [
        tp,
        np.where(cp > 1, near, 1),
        np.where(ep > 1, etp * ep, 1),
        np.where(dp > 1, np.where(usual, near * dp, world), 1),
        np.where(pp > 1, np.where(usual, world, near * pp), 1),
    ]
