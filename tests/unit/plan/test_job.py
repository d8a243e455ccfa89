"""What follows from the three documents of a job together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planned_job import planned_job
from planner_knowledge import knowledge_of
from specimens import LLAMA7B, LLAMA405B, cluster, run_spec
from test_search import GPU, MOE, SMALL

from hpctrain.base.errors import LimitError
from hpctrain.base.units import Duration
from hpctrain.job.prepare import smaller_sizes
from hpctrain.plan.documents import Plan
from hpctrain.plan.job import Job, TrainingJob, spec_as_planned
from hpctrain.plan.planner import make_plan
from hpctrain.spec.engines.registry import ENGINES
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec

JOB = planned_job(run_spec(gpus=8, batch=32), cluster())


def asking(**resources: object) -> Job:
    own = JOB.spec.resources.model_copy(update=resources)
    return replace(JOB, spec=JOB.spec.model_copy(update={"resources": own}))


def test_a_partition_that_is_not_there_is_refused() -> None:
    assert asking(partition=JOB.partition.name).partition == JOB.partition
    with pytest.raises(LimitError, match="has no partition nowhere") as caught:
        _ = asking(partition="nowhere").partition
    assert [one.field for one in caught.value.refusals] == ["resources.partition"]


@pytest.mark.parametrize(
    ("spec", "partition", "site", "hours"),
    [(1, 2, 3, 1), (None, 2, 3, 2), (None, 3, 2, 2), (None, None, 3, 3), (None, None, None, 24)],
)
def test_the_time_limit_is_the_spec_s_or_the_tightest(
    spec: int | None, partition: int | None, site: int | None, hours: int
) -> None:
    def limit(count: int | None) -> Duration | None:
        return None if count is None else Duration(count * 3600)

    profile, own = JOB.profile, JOB.partition
    own = own.model_copy(update={"max_walltime": limit(partition)})
    slurm = profile.slurm.model_copy(update={"partitions": (own,)})
    limits = profile.limits.model_copy(update={"max_walltime": limit(site)})
    changed = profile.model_copy(update={"slurm": slurm, "limits": limits})
    assert replace(asking(walltime=limit(spec)), profile=changed).walltime == hours * 3600


# -- A spec that was written as it was planned is planned the same again ------------------------


AUTO: dict[str, Any] = dict(gpus=16, batch=64, micro="auto")
ENDS = dict(pp=8, tp=4, vpp=2, count_embedding=True, count_loss=True)
TE = {"name": "megatron", "implementation": "transformer_engine"}
GIVEN = dict(pp=2, stages=(4, 2))
ONE_REPLICA = dict(model=LLAMA7B, gpus=8, batch=64, parallel=dict(tp=1), engine=TE)
NEEDED = {"megatron-lm": {"checkout": "/sw/Megatron-LM"}}
# spec, memory of a GPU, and what the plan has that has to stay
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "MLPs again, ends counted as layers": (
        dict(model=LLAMA405B, gpus=512, batch=512, micro=1, parallel=ENDS),
        "150GiB",
        dict(recompute="selective", recompute_modules=("mlp",)),
    ),
    "stages of the spec": (dict(AUTO, model=SMALL, parallel=GIVEN), "40GiB", {}),
    "some layers again": (ONE_REPLICA, "63GiB", dict(recompute="full", recompute_layers=16)),
    "activations on the host": (
        dict(ONE_REPLICA, recompute="none", activation_offload_layers="auto"),
        "60GiB",
        dict(activation_offload_layers=24),
    ),
    "a small micro-batch": (
        dict(AUTO, model=LLAMA7B, gpus=8, parallel=dict(tp=1), recompute="full"),
        "57GiB",
        {},
    ),
    "experts": (dict(AUTO, model=MOE), "3GiB", {}),
    "sharded": (dict(AUTO, model=SMALL, engine={"name": "fsdp"}), "6GiB", {}),
    **{
        f"engine {name}": (
            dict(AUTO, model=SMALL, engine={"name": name, **NEEDED.get(name, {})}),
            "300GiB",
            {},
        )
        for name in ENGINES
    },
}

DECIDED = (
    *("layout", "stages", "batch", "recompute", "recompute_modules", "recompute_layers"),
    *("activation_offload_layers", "zero", "shard_gpus", "offload"),
)


def planned(spec: RunSpec, profile: ClusterProfile) -> Plan:
    return make_plan(spec, profile, knowledge_of(profile))


@pytest.mark.parametrize("name", CASES)
def test_what_a_plan_has_decided_is_planned_again(name: str) -> None:
    """Also where there is so much memory that something else would be chosen."""
    fields, memory, expected = CASES[name]
    spec, profile = run_spec(**fields), cluster(gpu={**GPU, "memory": memory})
    plan = planned(spec, profile)
    assert {field: getattr(plan, field) for field in expected} == expected
    written = spec_as_planned(spec, plan).model_dump_json(by_alias=True)
    roomy = cluster(gpu={**GPU, "memory": "300GiB"})
    again = planned(RunSpec.model_validate_json(written, strict=True), roomy)
    for field in DECIDED:
        assert getattr(again, field) == getattr(plan, field), field


def test_a_run_with_uneven_stages_can_shrink() -> None:
    """Seven layers on two stages, as the planner has split them."""
    model = {**SMALL, "layers": 7}
    resources = dict(min_nodes=1)
    axes = dict(model=model, gpus=16, batch=64, resources=resources)
    profile = cluster()
    spec = run_spec(**axes, parallel=dict(pp=2, tp=2, count_loss=True))
    job = TrainingJob(spec, profile, planned(spec, profile))
    (smaller,) = smaller_sizes(job, knowledge_of(profile))
    split = tuple(stage.chunk_layers for stage in job.plan.stages)
    assert split == ((4,), (3,))
    assert smaller.train.pipeline_layer_split == split  # type: ignore[attr-defined]
