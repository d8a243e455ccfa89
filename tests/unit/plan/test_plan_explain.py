"""Predictions, explanations and refusals of whole plans."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from planner_knowledge import knowledge_of
from specimens import GPT175B, GPT_TINY, LLAMA7B, cluster, run_spec

from hpctrain.base.errors import DoesNotFitError, HpctrainError
from hpctrain.plan.abilities.trainable import untrainable
from hpctrain.plan.alternatives import explain
from hpctrain.plan.cost.case import RECOMPUTE_FULL, RECOMPUTE_NONE, RECOMPUTE_SELECTIVE
from hpctrain.plan.cost.from_spec import resnet_shape, shape_of
from hpctrain.plan.cost.prediction import recomputed_flops
from hpctrain.plan.cost.step import StepTime
from hpctrain.plan.documents import RECOMPUTES, Explanation, Plan, Prediction, RunnerUp, StepParts
from hpctrain.plan.model.vision import resnet_multiplications, resnet_parameters
from hpctrain.plan.planner import Decision, decide, make_plan
from hpctrain.plan.request import PlanRequest
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import ModelSpec, RunSpec

SMALL = {**LLAMA7B, "layers": 8, "hidden": 2048, "heads": 16, "ffn": 5632, "seq": 2048}


def decision(spec: RunSpec, profile: ClusterProfile | None = None) -> Decision:
    profile = profile or cluster()
    return decide(PlanRequest(spec, profile, knowledge_of(profile)))


def predicted(spec: RunSpec, profile: ClusterProfile | None = None) -> tuple[Plan, Prediction]:
    plan = decision(spec, profile).plan
    assert plan.prediction is not None
    return plan, plan.prediction


def auto(**changes: Any) -> RunSpec:
    usual: dict[str, Any] = dict(model=SMALL, gpus=16, batch=64, micro="auto")
    return run_spec(**{**usual, **changes})


def test_positions_of_recomputation_are_those_of_the_cost_model() -> None:
    assert RECOMPUTES.index("none") == RECOMPUTE_NONE
    assert RECOMPUTES.index("selective") == RECOMPUTE_SELECTIVE
    assert RECOMPUTES.index("full") == RECOMPUTE_FULL


def test_no_part_of_the_cost_model_is_lost() -> None:
    names = [name.removesuffix("_seconds") for name in StepParts.model_fields]
    assert names == [*StepTime.__dataclass_fields__, "islands"]


def test_the_rates_follow_from_the_step() -> None:
    plan, prediction = predicted(auto())
    seconds, gpus = plan.step_seconds, plan.layout.world_size
    assert seconds == prediction.parts.total_seconds
    assert prediction.peak_flops_per_gpu == 312e12
    assert prediction.mfu == pytest.approx(plan.model_flops_per_step / (seconds * gpus * 312e12))
    assert 0.1 < prediction.mfu < 0.8
    tokens = plan.batch.tokens_per_step
    assert prediction.tokens_per_second_per_gpu == pytest.approx(tokens / seconds / gpus)
    assert prediction.days == pytest.approx(seconds * 10 / 86400)
    assert prediction.gpu_hours == pytest.approx(prediction.days * 24 * gpus)


def test_hardware_flops_count_recomputation() -> None:
    """Korthikanti et al. 2022, appendix A: 72 B s L h^2 (1 + s/6h + V/12Lh) model FLOPs, and a
    third of those of the layers more with full recomputation."""
    model = ModelSpec.model_validate(GPT175B)
    batch, s, h, layers = 64, 2048, 12288, 96
    unit = 24 * batch * s * layers * h**2
    full = recomputed_flops(model, batch, "full")
    assert full == pytest.approx(unit * (1 + s / (6 * h)))
    assert recomputed_flops(model, batch, "selective") == pytest.approx(unit * s / (6 * h))
    assert recomputed_flops(model, batch, "none") == 0
    # two of the twelve h^2 of a layer's weights are attention's projections; the MLP has eight
    mlp = recomputed_flops(model, batch, "selective", ("mlp",))
    assert mlp == pytest.approx(unit * 8 / 12)
    every = recomputed_flops(model, batch, "selective", ("core_attn", "mlp", "layernorm"))
    assert every == pytest.approx(unit * (8 / 12 + s / (6 * h)))
    assert recomputed_flops(model, batch, "selective", ("moe", "layernorm")) == 0
    none, some = (
        predicted(auto(recompute=how, parallel=dict(tp=2)))[1] for how in ("none", "full")
    )
    assert none.hfu == none.mfu
    assert some.hfu > 1.2 * some.mfu


def test_an_explicit_layout_is_predicted_like_the_same_one_found() -> None:
    chosen = decision(auto())
    found = chosen.found.candidate(chosen.row)
    spec = auto(
        parallel=found.parallel.model_dump(),
        micro=found.micro_batch,
        recompute=found.mode,
    )
    plan = decision(spec).plan
    assert plan.layout_origin == "spec"
    assert (plan.layout, plan.step_seconds) == (chosen.plan.layout, chosen.plan.step_seconds)
    assert plan.memory == chosen.plan.memory


def test_recompute_auto_recomputes_only_where_that_pays() -> None:
    usual: dict[str, Any] = dict(parallel=dict(tp=1), micro=4)
    assert decision(auto(**usual)).plan.recompute == "none"
    lean = decision(auto(recompute="full", **usual)).plan
    need = int(max(stage.total_bytes for stage in lean.memory) / 0.93)
    small = {"type": "a100", "per_node": 8, "model": "A100-80GB SXM", "memory": f"{need}B"}
    assert decision(auto(**usual), cluster(gpu=small)).plan.recompute == "full"


def test_without_a_known_gpu_no_time_is_predicted_and_that_is_said() -> None:
    profile = cluster()
    known = knowledge_of(profile)
    nobody = type(known)(gpu=None, calibration=known.calibration)
    plan = make_plan(auto(), profile, nobody)
    assert plan.step_seconds is None and plan.prediction is None
    assert any("time is not predicted" in reason for reason in plan.reasons)
    assert any("Step time is not predicted" in reason for reason in plan.reasons)
    assert (plan.layout.tp, plan.layout.pp) == (1, 1)


def told(spec: RunSpec, top: int = 8) -> tuple[Decision, Explanation]:
    chosen = decision(spec)
    return chosen, explain(chosen, top)


def everyone(explanation: Explanation) -> list[RunnerUp]:
    return [explanation.winner, *explanation.others, *explanation.variants]


def test_the_changes_of_every_runner_up_add_up() -> None:
    chosen, explanation = told(run_spec(GPT175B, gpus=128, batch=256, micro="auto"))
    winner = chosen.plan.step_seconds
    assert winner is not None
    assert explanation.winner.step_seconds == winner and explanation.winner.slower == 0
    for one in everyone(explanation):
        assert one.step_seconds is not None and one.slower is not None
        assert one.slower == pytest.approx(one.step_seconds / winner - 1)
        assert sum(change.share for change in one.changes) == pytest.approx(one.slower, abs=1e-12)
        sizes = [abs(change.share) for change in one.changes]
        assert sizes == sorted(sizes, reverse=True)


def test_other_meshes_differ_and_are_the_best_of_their_kind() -> None:
    chosen, explanation = told(auto())
    meshes = [
        (one.layout.tp, one.layout.pp, one.layout.cp, one.layout.ep)
        for one in (explanation.winner, *explanation.others)
    ]
    assert len(set(meshes)) == len(meshes) == 9
    slower = [one.slower or 0.0 for one in explanation.others if not one.shortage]
    assert all(later >= earlier - 0.011 for earlier, later in pairwise(slower))
    found = chosen.found
    for one, (tp, pp, cp, _) in zip(explanation.others, meshes[1:], strict=True):
        columns = found.columns
        same = (columns.tp == tp) & (columns.pp == pp) & (columns.cp == cp) & found.roomy
        if one.shortage is None and not one.tight:
            assert one.step_seconds == pytest.approx(found.step_seconds[same].min(), rel=0.01)


def again(one: RunnerUp) -> str:
    (words,) = [part for part in one.description.split(", ") if part.startswith("recompute")]
    return words


def test_another_recomputation_is_one_change() -> None:
    """Whatever is computed again, from nothing to some layers."""
    _, explanation = told(auto(micro=1, parallel=dict(tp=2, pp=2)), top=9)
    shown = {one.differs for one in explanation.variants if one.differs.startswith("recompute")}
    shown |= {again(explanation.winner)}
    assert {
        *("recompute none", "recompute selective", "recompute selective (mlp)"),
        *("recompute full", "recompute full of 3 layers a chunk"),
    } <= shown


def test_variants_change_one_thing() -> None:
    _, explanation = told(auto())
    assert explanation.variants
    winner = explanation.winner
    for one in explanation.variants:
        assert one.layout.model_copy(update={"vpp": 1, "order": winner.layout.order}) == (
            winner.layout.model_copy(update={"vpp": 1})
        )
        changed = [
            one.layout.vpp != winner.layout.vpp,
            one.layout.order != winner.layout.order,
            one.micro_batch != winner.micro_batch,
            again(one) != again(winner),
        ]
        assert sum(changed) == 1
        assert one.differs in one.description or one.differs.endswith(" 1")


SMALL_GPU = {"type": "a100", "per_node": 8, "model": "A100-80GB SXM", "memory": "30GiB"}


def test_what_does_not_fit_says_by_how_much_and_where() -> None:
    spec = run_spec(GPT175B, gpus=128, batch=256, micro="auto")
    profile = cluster(gpu=SMALL_GPU)
    chosen = decision(spec, profile)
    explanation = explain(chosen)
    large = [one for one in explanation.others if one.shortage is not None]
    assert 1 <= len(large) <= 3 and any(one.layout.pp > 1 for one in large)
    for one in large:
        assert one.shortage is not None
        assert one.shortage.missing_bytes == one.peak_bytes - chosen.found.capacity_bytes > 0
        parallel = dict(tp=one.layout.tp, pp=one.layout.pp, cp=one.layout.cp)
        same = auto(
            model=GPT175B, gpus=128, batch=256, micro=one.micro_batch,
            recompute=one.recompute, parallel={**parallel, "vpp": one.layout.vpp},
        )  # fmt: skip
        with pytest.raises(DoesNotFitError) as caught:
            decision(same, profile)
        assert f"in stage {one.shortage.stage} ({one.shortage.component} " in str(caught.value)


@pytest.mark.parametrize("top", [0, 1, 3])
def test_top_limits_what_is_shown(top: int) -> None:
    _, explanation = told(auto(), top)
    assert len(explanation.others) == top and len(explanation.variants) == top


def test_an_explanation_survives_json() -> None:
    _, explanation = told(auto(), 2)
    assert Explanation.model_validate_json(explanation.model_dump_json()) == explanation


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(parallel=dict(ep=2)), ["ep 2 needs a model with experts"]),
        (dict(engine={"name": "fsdp"}, parallel=dict(pp=2)), ["engine fsdp has no pp"]),
        (dict(engine={"name": "ddp"}, parallel=dict(tp=2)), ["engine ddp has no tp"]),
        (
            dict(model={**GPT_TINY, "mtp_layers": 1}, parallel=dict(pp=2)),
            ["mtp_layers behind pp 2"],
        ),
        (
            dict(model={**GPT_TINY, "moe": dict(experts=4, top_k=1, ffn=64)}, parallel=dict(tp=2)),
            ["experts with biases cannot be split over tp 2"],
        ),
        (dict(optimizer={"lr": 1e-3, "zero": 3}), ["no ZeRO stage 3"]),
        (
            dict(
                engine={"name": "fsdp"},
                parallel={},
                optimizer={"lr": 1e-3, "shard_gpus": 5},
            ),
            ["shards of 5 GPUs do not divide the 16 replicas"],
        ),
        (
            dict(
                model=dict(family="vit", layers=4, hidden=192, heads=4, vocab=10),
                engine={"name": "ddp"},
                parallel=dict(tp=2),
            ),
            ["vit", "data parallelism only", "has no tp"],
        ),
    ],
)
def test_impossible_plans_are_refused_in_words(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(HpctrainError) as caught:
        decision(auto(**changes))
    assert caught.value.exit_code == 4
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(engine={"name": "fsdp"}, recompute="selective"), "recomputes whole blocks"),
        (dict(engine={"name": "ddp", "implementation": "local"}), "has one implementation"),
        (
            dict(engine={"name": "fsdp"}, optimizer={"lr": 1e-3, "overlap_grad_reduce": False}),
            "always hides the gradient reduction",
        ),
        (
            dict(
                engine={"name": "deepspeed"}, optimizer={"lr": 1e-3, "overlap_param_gather": False}
            ),
            "decides itself when",
        ),
        (dict(precision="fp16"), "not in fp16"),
        (dict(model={**GPT_TINY, "family": "distilbert"}), "its encoder is BERT's"),
        (dict(model={**GPT_TINY, "family": "bert", "classes": 3}), "whole models from tokens"),
        (dict(model={**GPT_TINY, "family": "bert", "pretrained": "/x"}), "converts no BERT"),
        (
            dict(model={**GPT_TINY, "family": "bert"}, gpus=2, parallel={"cp": 2}),
            "no context parallelism",
        ),
        (
            dict(
                model={**SMALL, "attention": dict(soft_cap=30)},
                engine={"implementation": "transformer_engine"},
            ),
            "no attention.soft_cap: say local",
        ),
        (dict(optimizer={"lr": 1e-3, "offload": "cpu"}), "optimizer's state on cpu"),
    ],
)
def test_what_cannot_be_trained_is_planned_with_a_warning(
    changes: dict[str, Any], words: str
) -> None:
    spec = auto(**changes)
    (line,) = untrainable(spec)
    assert words in line
    plan, _ = predicted(spec)
    assert line in plan.warnings
    assert untrainable(auto()) == ()


@pytest.mark.parametrize("layers", [18, 34, 50, 101, 152])
def test_a_resnet_is_blocks_with_its_weights_and_multiplications(layers: int) -> None:
    model = ModelSpec.model_validate(dict(family="resnet", layers=layers, vocab=1000))
    shape = resnet_shape(model)
    weights = 2 * shape.mlp_blocks * shape.hidden * shape.ffn
    assert weights == pytest.approx(resnet_parameters(model))
    assert weights * shape.seq == pytest.approx(resnet_multiplications(model))
    assert shape_of(model) == shape


@pytest.mark.parametrize("family", ["vit", "bert"])
def test_other_families_are_planned(family: str) -> None:
    model: dict[str, Any] = dict(family=family, layers=12, hidden=768, heads=12, vocab=1000)
    engine = "ddp" if family == "vit" else "megatron"
    model = model if family == "vit" else {**model, "seq": 512}
    plan, prediction = predicted(auto(model=model, engine={"name": engine}))
    assert plan.unit == ("images" if family == "vit" else "tokens")
    assert 0 < prediction.mfu < 1


def test_offload_is_used_only_where_it_is_needed() -> None:
    offload = {"lr": 1e-3, "offload": "cpu"}
    usual = decision(auto(optimizer=offload)).plan
    assert usual.offload == "none"
    gpu = {"type": "a100", "per_node": 8, "model": "A100-80GB SXM"}
    known = auto(model=LLAMA7B, gpus=1, batch=8, optimizer=offload)
    forced = decision(known, cluster(gpu={**gpu, "memory": "60GiB"})).plan
    assert forced.offload == "cpu"
    with pytest.raises(DoesNotFitError):
        decision(auto(model=LLAMA7B, gpus=1, batch=8), cluster(gpu={**gpu, "memory": "60GiB"}))
