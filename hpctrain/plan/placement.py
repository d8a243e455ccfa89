"""Where the ranks of one axis are relative to each other: in a node, in an NVLink domain, apart.

Rank order is tp fastest, then cp, dp, pp (Megatron's default order `tp-cp-ep-dp-pp`,
megatron/core/parallel_state.py, initialize_model_parallel), and Slurm fills node after node.
Belongs here: strides and spans. Does not belong here: bandwidths or times.
"""

from __future__ import annotations

from hpctrain.plan.documents import Axis, AxisPlacement, Layout, Span
from hpctrain.spec.profile import ClusterProfile


def place_axes(layout: Layout, profile: ClusterProfile) -> tuple[AxisPlacement, ...]:
    """Placement of tp, cp, dp and pp, fastest first."""
    sizes: tuple[tuple[Axis, int], ...] = (
        ("tp", layout.tp),
        ("cp", layout.cp),
        ("dp", layout.dp),
        ("pp", layout.pp),
    )
    placements, stride = [], 1
    for axis, size in sizes:
        span = _span(stride, size, layout.world_size, profile)
        placements.append(AxisPlacement(axis=axis, size=size, stride=stride, span=span))
        stride *= size
    return tuple(placements)


def stays_inside(stride: int, size: int, world_size: int, domain: int) -> bool:
    """True when every group of `size` ranks, `stride` apart, is inside one block of `domain` ranks.

    Groups tile blocks of stride x size consecutive ranks. If such blocks do not tile the domain,
    one of them lies across a border, and then some group in it has members on both sides.
    """
    return size == 1 or world_size <= domain or domain % (stride * size) == 0


def _span(stride: int, size: int, world_size: int, profile: ClusterProfile) -> Span:
    if size == 1:
        return "one GPU"
    blocks: tuple[tuple[int, Span], ...] = (
        (profile.gpu.per_node, "inside a node"),
        (profile.nvlink.domain, "inside an NVLink domain"),
    )
    for ranks, span in sorted(blocks, key=lambda block: block[0]):
        if stays_inside(stride, size, world_size, ranks):
            return span
    return "across nodes"
