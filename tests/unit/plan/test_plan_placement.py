from __future__ import annotations

import pytest
from specimens import cluster

from hpctrain.plan.documents import Layout
from hpctrain.plan.mesh.placement import place_axes, stays_inside


def placed(
    tp: int, pp: int, dp: int, cp: int = 1, ep: int = 1, **shape: int
) -> dict[str, tuple[int, str]]:
    layout = Layout(tp=tp, pp=pp, vpp=1, cp=cp, dp=dp, ep=ep, sequence_parallel=False)
    return {
        placement.axis: (placement.stride, placement.span)
        for placement in place_axes(layout, cluster(**shape))
    }


def test_strides_follow_the_rank_order_tp_cp_dp_pp() -> None:
    assert placed(tp=4, cp=2, dp=8, pp=2) == {
        "tp": (1, "inside a node"),
        "cp": (4, "inside a node"),
        "dp": (8, "across nodes"),
        "pp": (64, "across nodes"),
    }


@pytest.mark.parametrize(("ep", "span"), [(8, "inside a node"), (16, "across nodes")])
def test_experts_are_nearest_in_a_mesh_of_their_own(ep: int, span: str) -> None:
    """Not tp inside of experts, hence neighbours: mesh.py hands 1 to megatron-core with ep."""
    found = placed(tp=2, dp=16, pp=2, ep=ep)
    assert list(found) == ["tp", "cp", "ep", "dp", "pp"]
    assert found["ep"] == (1, span)
    assert "ep" not in placed(tp=2, dp=16, pp=2)


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "shape", "spans"),
    [
        (1, 1, 1, {}, ("one GPU", "one GPU", "one GPU")),
        (2, 2, 2, {}, ("inside a node", "inside a node", "inside a node")),
        (8, 2, 1, {}, ("inside a node", "one GPU", "across nodes")),
        (16, 1, 2, {}, ("across nodes", "across nodes", "one GPU")),
        # NVL72: 18 nodes of 4 GPUs are one NVLink domain
        (
            8,
            9,
            2,
            dict(nodes=36, per_node=4, domain=72),
            ("inside an NVLink domain", "across nodes", "across nodes"),
        ),
        # pairs of GPUs with NVLink inside nodes of 8
        (
            2,
            1,
            4,
            dict(domain=2),
            ("inside an NVLink domain", "inside a node", "one GPU"),
        ),
        (4, 1, 2, dict(domain=2), ("inside a node", "inside a node", "one GPU")),
        # groups of 4 do not tile nodes of 6
        (4, 1, 3, dict(per_node=6, domain=6), ("across nodes", "across nodes", "one GPU")),
    ],
)
def test_spans(tp: int, pp: int, dp: int, shape: dict[str, int], spans: tuple[str, ...]) -> None:
    found = placed(tp, pp, dp, **shape)
    assert tuple(found[axis][1] for axis in ("tp", "dp", "pp")) == spans


def test_stays_inside_agrees_with_listing_the_groups() -> None:
    for domain in (2, 3, 4, 6, 8, 72):
        for stride in (1, 2, 3, 4, 8):
            for size in (2, 3, 4, 8):
                for blocks in (1, 2, 3, 9):
                    world = stride * size * blocks
                    if world > domain and world % domain:
                        continue  # whole domains only, as nodes are
                    groups = [
                        [start + offset + stride * member for member in range(size)]
                        for start in range(0, world, stride * size)
                        for offset in range(stride)
                    ]
                    inside = all(len({rank // domain for rank in group}) == 1 for group in groups)
                    assert stays_inside(stride, size, world, domain) == inside
