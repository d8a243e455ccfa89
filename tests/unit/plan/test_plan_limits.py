from __future__ import annotations

from typing import Any

import pytest
from specimens import cluster, run_spec

from hpctrain.base.errors import LimitError
from hpctrain.plan.limits import (
    gpu_hour_problems,
    node_request,
    sets_field,
    size_problems,
    usable_gpus,
)
from hpctrain.plan.planner import make_plan


@pytest.mark.parametrize(
    ("gpus", "nodes", "gpus_per_node"),
    [(1, 1, 1), (3, 1, 3), (8, 1, 8), (16, 2, 8), (512, 64, 8)],
)
def test_node_request(gpus: int, nodes: int, gpus_per_node: int) -> None:
    request = node_request(gpus, 8)
    assert (request.nodes, request.gpus_per_node) == (nodes, gpus_per_node)


def test_more_than_a_node_must_be_whole_nodes() -> None:
    (problem,) = size_problems(100, cluster())
    assert "nodes of 8 GPUs" in problem and "96 or 104" in problem
    assert size_problems(5, cluster()) == []
    (problem,) = size_problems(20, cluster(nodes=2, domain=8))[1:]
    assert "20 GPUs are more than the 16" in problem and "nodes 2 x 8" in problem


TWO_PARTITIONS = {
    "partitions": [
        {"name": "long", "default": True, "max_walltime": "2-00:00:00"},
        {"name": "short", "max_walltime": "01:00:00", "max_nodes": 2},
    ]
}


@pytest.mark.parametrize(
    ("resources", "profile", "words"),
    [
        (dict(partition="shrt"), {}, ["no partition `shrt`", "did you mean `short`?", "long"]),
        (dict(walltime="72:00:00"), {}, ["3-00:00:00", "2-00:00:00", "partition long"]),
        (dict(partition="short", walltime="02:00:00"), {}, ["01:00:00", "partition short"]),
        (dict(gpus=64, partition="short"), {}, ["64 GPUs are 8 nodes", "allows 2 (16 GPUs)"]),
        (dict(gpus=64), dict(limits={"max_nodes": 4}), ["8 nodes", "this site allows 4 (32"]),
        (
            dict(walltime="10:00:00"),
            dict(limits={"max_walltime": "08:00:00"}),
            ["10:00:00", "08:00:00", "this site"],
        ),
        (dict(account="mine"), dict(limits={"accounts": ["a", "b"]}), ["`mine`", "a, b"]),
        (dict(), dict(limits={"accounts": ["a", "b"]}), ["there is none", "a, b"]),
        (dict(), dict(limits={"account_required": True}), ["`resources.account`"]),
        (dict(qos="high"), dict(limits={"qos": ["low", "normal"]}), ["`high`", "low, normal"]),
        (dict(gpus=16), dict(limits={"grp_gpus": 8}), ["16 GPUs", "the 8 that", "for ever"]),
        (dict(), dict(limits={"max_submit": 4}, continuation="singleton"), ["8 jobs", "takes 4"]),
        (dict(), dict(limits={"max_submit": 1}, continuation="chain"), ["2 jobs", "takes 1"]),
        (
            dict(walltime="10:00:00"),
            dict(limits={"max_gpu_hours": 39.0}),
            ["40 GPU-hours (of one attempt)", "the 39 that"],
        ),
        (dict(cpus_per_gpu=64), {}, ["256 per node", "has 128", "at most 32"]),
        (dict(memory_per_node="2TiB"), {}, ["2.0 TiB", "1.0 TiB"]),
        (dict(qos="high"), dict(locked=["resources.qos"]), ["`resources.qos`"]),
        (dict(), dict(locked=["batch.global"]), ["`batch.global`"]),
    ],
)
def test_limits_name_numbers(
    resources: dict[str, Any], profile: dict[str, Any], words: list[str]
) -> None:
    resources = {"gpus": 4, **resources}
    with pytest.raises(LimitError) as caught:
        make_plan(run_spec(batch=64, resources=resources), cluster(slurm=TWO_PARTITIONS, **profile))
    assert caught.value.exit_code == 4
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("resources", "profile"),
    [
        (dict(walltime="2-00:00:00"), {}),
        (dict(account="a"), dict(limits={"accounts": ["a"]})),
        (dict(qos="low"), dict(limits={"qos": ["low"], "account_required": False})),
        (dict(), dict(limits={"qos": ["low"], "max_submit": 1, "grp_gpus": 64})),
        (dict(walltime="10:00:00"), dict(limits={"max_gpu_hours": 40.0})),
        (dict(account="anything"), {}),
        (dict(cpus_per_gpu=32), {}),
        (dict(), dict(locked=["resources.qos", "environment.variables", "seed"])),
    ],
)
def test_what_is_allowed_passes(resources: dict[str, Any], profile: dict[str, Any]) -> None:
    make_plan(run_spec(resources=resources), cluster(slurm=TWO_PARTITIONS, **profile))


def test_the_predicted_hours_of_the_whole_run_count() -> None:
    profile, spec = cluster(limits={"max_gpu_hours": 10.0}), run_spec(resources={"gpus": 4})
    training_seconds = 10.0 * 3600 / 4
    assert gpu_hour_problems(spec, profile, training_seconds * 0.999) == []
    (problem,) = gpu_hour_problems(spec, profile, training_seconds * 2)
    assert "20 GPU-hours (predicted for the run)" in problem


def test_locked_means_written_in_the_file_not_having_a_value() -> None:
    spec = run_spec(seed=7)
    assert sets_field(spec, "seed")
    assert sets_field(spec, "optimizer")
    assert sets_field(spec, "optimizer.lr")
    assert not sets_field(spec, "optimizer.beta1")
    assert not sets_field(spec, "recompute")
    assert not sets_field(spec, "parallel.tp")  # `parallel: auto` sets no tp
    assert not sets_field(spec, "no.such.field")


def test_all_problems_come_in_one_message() -> None:
    spec = run_spec(
        gpus=20,
        batch=7,
        micro=2,
        parallel=dict(tp=3, pp=3),
        resources=dict(partition="nowhere", cpus_per_gpu=1000),
    )
    with pytest.raises(LimitError) as caught:
        make_plan(spec, cluster())
    lines = str(caught.value).splitlines()
    for word in ("partition", "CPUs", "nodes of 8", "heads 4", "ffn 512", "4 layers", "groups of"):
        assert any(word in line for line in lines), word


def test_usable_gpus_is_the_least_of_all_limits() -> None:
    assert usable_gpus(run_spec(), cluster(nodes=64)) == 512
    assert usable_gpus(run_spec(), cluster(partition={"max_nodes": 4})) == 32
    assert usable_gpus(run_spec(), cluster(limits={"max_nodes": 2})) == 16
