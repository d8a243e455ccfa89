"""Bytes that add a microbatch's weight gradients to earlier ones, by engine, and their seconds."""

from __future__ import annotations

import numpy as np
import pytest
from cost_specimens import NEVER, case

from hpctrain.plan.cost.blocks import linear
from hpctrain.plan.cost.from_spec import added_bytes
from hpctrain.spec.engines.abilities import GradientAddition


@pytest.mark.parametrize(
    ("way", "kept", "expected"),
    [
        ("product", 4, 0),
        ("main", 4, 2 + 4 + 4),  # reads the new one, reads and writes the sum
        ("main", 2, 2 + 2 + 2),
        ("autograd", 2, 3 / 4 * (2 + 2 + 2)),  # the first of four is assigned
        ("block", 4, 2 + 4),
        ("joined", 4, 2 + 2 + 2 + 4 + 4 + 4),  # joined, changed, divided
        ("joined", 2, 2 + 2 + 2 + 2),
    ],
)
def test_bytes_of_each_way(way: GradientAddition, kept: float, expected: float) -> None:
    assert added_bytes(way, 2, kept, 4) == pytest.approx(expected)


def test_a_single_microbatch_adds_to_nothing() -> None:
    found = added_bytes("autograd", 2, 2, np.array([1.0, 2.0]))
    assert list(np.asarray(found)) == [0, 3]


def test_a_linear_layer_adds_behind_its_weight_gradient() -> None:
    quick = dict(peak=NEVER, nvlink_bandwidth=NEVER)
    plain, adding = (linear(case(added_bytes=n, **quick), 100, 300, 200) for n in (0, 10))
    assert adding.forward == plain.forward
    assert adding.backward - plain.backward == pytest.approx(10 * 300 * 200 / 1e12)
    frozen = [linear(case(added_bytes=n, trainable=0.1), 100, 300, 200).backward for n in (0, 10)]
    assert frozen[0] == frozen[1]
