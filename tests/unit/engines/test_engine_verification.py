"""A plan beside what was built: when they agree, and what is left open."""

from __future__ import annotations

import pytest

from hpctrain.engines.verification import BuiltModel, BuiltStage, Verification, compare
from hpctrain.plan.documents import (
    BatchSplit,
    Layout,
    NodeRequest,
    Plan,
    Stage,
)

PLAN = Plan(
    run_name="tiny",
    profile_name="none",
    engine="megatron",
    layout=Layout(tp=1, pp=2, vpp=1, cp=1, dp=1, sequence_parallel=False),
    layout_origin="spec",
    nodes=NodeRequest(nodes=1, gpus_per_node=2),
    batch=BatchSplit(
        global_batch=2, micro_batch=1, accumulation=2, train_steps=1, tokens_per_step=2
    ),
    recompute="none",
    precision="bf16",
    padded_vocab=128,
    parameters=30,
    stages=(
        Stage(index=0, chunk_layers=(1,), embedding=True, loss=False, parameters_per_gpu=20),
        Stage(index=1, chunk_layers=(1,), embedding=False, loss=True, parameters_per_gpu=10),
    ),
    memory=(),
    gpu_memory_bytes=1,
    placements=(),
    model_flops_per_step=1.0,
    reasons=(),
)


def found(
    parameters: tuple[int, int], kept: tuple[int | None, int | None] = (None, None)
) -> BuiltModel:
    stages = tuple(
        BuiltStage(index=n, rank=n, parameters=parameters[n], kept_bytes=kept[n]) for n in (0, 1)
    )
    return BuiltModel(megatron_core_version="0", torch_version="0", stages=stages, remarks=("so",))


@pytest.mark.parametrize(
    ("parameters", "equal"),
    [((20, 10), [True, True]), ((20, 11), [True, False]), ((10, 20), [False, False])],
)
def test_stages_are_compared_one_by_one(parameters: tuple[int, int], equal: list[bool]) -> None:
    verification = compare(PLAN, (1, 1), found(parameters))
    assert [stage.equal for stage in verification.stages] == equal
    assert verification.equal == all(equal)
    assert [stage.built_parameters for stage in verification.stages] == list(parameters)
    assert verification.remarks == ("so",)


def test_bytes_are_compared_where_they_were_measured() -> None:
    first, second = compare(PLAN, (90, 90), found((20, 10), (100, None))).stages
    assert first.kept_error == pytest.approx(-0.1)
    assert (second.kept_error, second.planned_kept_bytes) == (None, None)


def test_a_stage_that_keeps_nothing_has_no_relative_error() -> None:
    first, _ = compare(PLAN, (0, 0), found((20, 10), (0, 0))).stages
    assert first.kept_error is None


def test_a_stage_too_few_is_not_overlooked() -> None:
    built = found((20, 10))
    with pytest.raises(ValueError, match="shorter"):
        compare(PLAN, (1, 1), built.model_copy(update={"stages": built.stages[:1]}))


def test_the_document_survives_its_file() -> None:
    verification = compare(PLAN, (1, 1), found((20, 10), (2, 3)))
    assert Verification.model_validate_json(verification.model_dump_json()) == verification
