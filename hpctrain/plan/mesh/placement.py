"""Locate the ranks of each axis: inside a node, inside an NVLink domain, across nodes.

The layout's order gives the nearest axis (Megatron's `rank_order` string:
megatron/core/parallel_state.py, initialize_model_parallel), and Slurm fills node after node.
Belongs here: strides and spans. Does not belong here: bandwidths or times.
"""

from __future__ import annotations

from hpctrain.plan.documents import AxisPlacement, Layout, NodeRequest, Span
from hpctrain.plan.layout_words import Axis
from hpctrain.plan.limits import node_request
from hpctrain.plan.mesh.islands import crossing, on_islands, slow_links, used_islands
from hpctrain.plan.model.parameters import expert_tp
from hpctrain.spec.profile import ClusterProfile


def strides(layout: Layout) -> dict[Axis, int]:
    """Compute the distance of neighbouring ranks of each axis, the nearest axis first.

    `ep` in the order is where the groups of experts are built, over the ranks of tp, cp and dp;
    the dense mesh has no such axis (parallel_state.py, decoder_rank_generator with ep=1).
    """
    distances: dict[Axis, int] = {}
    stride = 1
    for axis in axes(layout):
        distances[axis] = stride
        stride *= getattr(layout, axis)
    return distances


def axes(layout: Layout) -> tuple[Axis, ...]:
    """List tp, cp, dp and pp from the nearest to the farthest."""
    known: tuple[Axis, ...] = ("tp", "cp", "dp", "pp")
    return tuple(sorted(known, key=layout.order.split("-").index))


def place_axes(
    layout: Layout,
    profile: ClusterProfile,
    request: NodeRequest | None = None,
    domain: int | None = None,
) -> tuple[AxisPlacement, ...]:
    """Locate tp, cp, dp and pp, and ep where there is one, in the order of the layout.

    `request` has the islands. `domain`: consecutive ranks in one NVLink domain (see
    `nvlink_domain`), the profile's by default.
    """
    domain = domain or profile.nvlink.domain
    if request is None:
        request = on_islands(node_request(layout.world_size, profile.gpu.per_node), profile)
    distances = strides(layout)
    if layout.ep > 1:  # the nearest of the experts' own mesh, but for tp inside of experts
        distances["ep"] = expert_tp(layout.tp, layout.ep, layout.etp)
    return tuple(
        AxisPlacement(
            axis=axis,
            size=getattr(layout, axis),
            stride=distances[axis],
            span=_span(distances[axis], getattr(layout, axis), layout, profile, request, domain),
        )
        for axis in sorted(distances, key=layout.order.split("-").index)
    )


def stays_inside(stride: int, size: int, world_size: int, domain: int) -> bool:
    """Tell whether all groups of `size` ranks, `stride` apart, are inside blocks of `domain`.

    Groups tile blocks of stride x size consecutive ranks. If such blocks do not tile the domain,
    one of them lies across a border, and then some group in it has members on both sides.
    """
    return size == 1 or world_size <= domain or domain % (stride * size) == 0


def _span(
    stride: int,
    size: int,
    layout: Layout,
    profile: ClusterProfile,
    request: NodeRequest,
    domain: int,
) -> Span:
    if size == 1:
        return "one GPU"
    blocks: tuple[tuple[int, Span], ...] = (
        (profile.gpu.per_node, "inside a node"),
        (domain, "inside an NVLink domain"),
    )
    for ranks, span in sorted(blocks, key=lambda block: block[0]):
        if stays_inside(stride, size, layout.world_size, ranks):
            return span
    several = len(used_islands(request, profile)) > 1
    if several and crossing(stride, size, slow_links(request, profile)):
        return "across islands"
    return "across nodes"
