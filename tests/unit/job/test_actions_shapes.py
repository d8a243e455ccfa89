"""Sizes of a launch: planned when the run is submitted, with the same samples per step."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.base.errors import LimitError
from hpctrain.job.prepare import Prepared, prepare

SPEC = Path(__file__).parents[3] / "examples" / "gpt-tiny.yaml"


def prepared(tmp_path: Path, *overrides: str) -> Prepared:
    return prepare(SPEC, "sandbox", overrides, runs=tmp_path)


def test_a_run_that_keeps_its_size_has_one_shape(tmp_path: Path) -> None:
    found = prepared(tmp_path)
    assert found.smaller == ()
    (shape,) = found.supervise.shapes
    assert shape.nodes == found.plan.nodes.nodes
    assert shape.tasks == found.plan.layout.world_size
    assert shape.train_config == "train.json"


def test_fewer_nodes_keep_the_batch_and_the_model_parallel_layout(tmp_path: Path) -> None:
    four_nodes = ("parallel.pp=1", "resources.gpus=8")
    found = prepared(tmp_path, *four_nodes, "resources.min_nodes=1")
    # 8 sequences do not divide over the 3 replicas of 3 nodes
    assert [shape.nodes for shape in found.supervise.shapes] == [4, 2, 1]
    for size in found.smaller:
        planned, small = found.train, size.train
        assert small.global_batch_size == planned.global_batch_size
        assert small.train_steps == planned.train_steps
        assert small.seed == planned.seed
        for axis in ("tensor", "pipeline"):
            name = f"{axis}_model_parallel_size"
            assert getattr(small, name) == getattr(planned, name)
        assert small.data_parallel_size < planned.data_parallel_size
        assert size.shape.tasks == size.shape.nodes * found.plan.nodes.gpus_per_node


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("resources.min_nodes=99",), "min_nodes 99 is above"),
        (("resources.spare_nodes=99",), "with 99 spare"),
    ],
)
def test_sizes_that_the_cluster_cannot_give(
    tmp_path: Path, overrides: tuple[str, ...], words: str
) -> None:
    with pytest.raises(LimitError, match=words):
        prepared(tmp_path, *overrides)
