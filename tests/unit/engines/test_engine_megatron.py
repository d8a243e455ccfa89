"""What megatron-core's trainer is told, and a plan beside the model that was built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from planned_job import planned_job

from hpctrain.engines.megatron import MegatronConfig, megatron_config, megatron_model
from hpctrain.engines.train_json import parse_train_config
from hpctrain.engines.verification import BuiltModel, BuiltStage, Verification, compare
from hpctrain.plan.documents import (
    BatchSplit,
    Layout,
    NodeRequest,
    Plan,
    Stage,
)
from hpctrain.spec.loader import find_profile, load_profile, load_run_spec
from hpctrain.spec.run import RunSpec

ROOT = Path(__file__).resolve().parents[3]


def planned(spec: RunSpec, profile: str) -> MegatronConfig:
    return megatron_config(planned_job(spec, load_profile(find_profile(profile)).document))


def told(example: str, profile: str, *overrides: str) -> MegatronConfig:
    return planned(
        load_run_spec(ROOT / "examples" / f"{example}.yaml", overrides).document, profile
    )


def told_model(parallel: dict[str, Any] | None = None, **model: Any) -> MegatronConfig:
    """The example llama7b with `model` changed, on one node of 8 GPUs."""
    base = load_run_spec(ROOT / "examples" / "llama7b.yaml", ()).document
    document = base.model_dump(mode="json", by_alias=True)
    document["model"] |= {"layers": 4, **model}
    document["parallel"] = parallel or {}
    document["resources"]["gpus"] = 8
    return planned(RunSpec.model_validate(document), "a100x1")


def test_gpt() -> None:
    config = told("gpt175b", "a100x64")
    assert (config.num_layers, config.hidden_size, config.ffn_hidden_size) == (96, 12288, 49152)
    assert (config.activation, config.normalization) == ("gelu", "LayerNorm")
    assert config.position_embedding_type == "learned_absolute"
    assert config.share_embeddings_and_output_weights and config.add_bias_linear
    assert config.padded_vocab_size % (128 * config.tensor_model_parallel_size) == 0
    assert config.virtual_pipeline_model_parallel_size == 3
    assert config.pipeline_layer_split == ((4, 4, 4),) * 8
    assert (config.train_steps, config.lr_decay_steps) == (95368, 82650)
    assert config.save_interval_seconds == 1800.0 and config.save_interval_steps == 100


def test_llama() -> None:
    config = told("llama7b", "a100x1")
    assert (config.activation, config.normalization) == ("swiglu", "RMSNorm")
    assert (config.position_embedding_type, config.ffn_hidden_size) == ("rope", 11008)
    assert not config.share_embeddings_and_output_weights and not config.add_bias_linear
    assert config.data_parallel_size == 8 and config.virtual_pipeline_model_parallel_size is None
    assert config.lr_decay_steps == config.train_steps, "the decay takes the whole budget"


@pytest.mark.parametrize(("recompute", "told_as"), [("none", None), ("full", "full")])
def test_recompute(recompute: str, told_as: str | None) -> None:
    config = told("llama7b", "a100x64", f"recompute={recompute}", "resources.gpus=16")
    assert config.recompute_granularity == told_as


def test_overlap_only_where_there_is_something_to_hide() -> None:
    """megatron-core refuses to overlap the gather without the overlapped reduction."""
    alone = told("gpt-tiny", "sandbox")
    assert not alone.overlap_grad_reduce and not alone.overlap_param_gather, "dp is 1"
    both = told("llama7b", "a100x1")
    assert both.overlap_grad_reduce and both.overlap_param_gather
    reduced = told("llama7b", "a100x64", "optimizer.overlap_grad_reduce=false")
    assert not reduced.overlap_param_gather


def test_sizes_of_a_run_that_may_shrink_have_the_same_buckets() -> None:
    """Each rank saves its own part, which ranks of another dp can load."""
    plain, elastic = (
        told("gpt175b", "a100x64", *more) for more in ((), ("resources.min_nodes=32",))
    )
    assert plain.optimizer_sharding == elastic.optimizer_sharding == "dp_reshardable"
    assert (plain.ddp_bucket_size, elastic.ddp_bucket_size) == (None, 40_000_000)
    alone = told("gpt-tiny", "sandbox", "resources.min_nodes=1")
    assert alone.overlap_grad_reduce and alone.overlap_param_gather, "also with dp 1"


def test_rank_grid_covers_all_gpus() -> None:
    for config, gpus in ((told("gpt175b", "a100x64"), 512), (told("gpt-tiny", "sandbox"), 4)):
        assert gpus == (
            config.tensor_model_parallel_size
            * config.pipeline_model_parallel_size
            * config.context_parallel_size
            * config.data_parallel_size
        )


def test_the_document_survives_its_file() -> None:
    config = told("gpt175b", "a100x64")
    assert MegatronConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(("steps", "interval"), [(60, 20), (12, 10), (2, 1)])
def test_short_runs_tell_the_times_of_their_ranks_too(steps: int, interval: int) -> None:
    """The first step is in no window, and a window is told a step after its last."""
    config = told("gpt-tiny", "sandbox", f"budget.steps={steps}", "schedule.warmup_steps=0")
    assert config.rank_times_interval_steps == interval


# -- What the trainer is told about experts, latent attention and prediction layers -------

EXPERTS = dict(experts=8, top_k=2, ffn=1024, shared_ffn=2048, dense_layers=1)
LATENT = dict(kv_rank=512, nope_dim=64, rope_dim=32, value_dim=96)


def test_a_dense_model_has_none_of_it() -> None:
    config = told_model()
    assert config.num_moe_experts is None and config.mtp_num_layers is None
    assert not config.multi_latent_attention and config.expert_model_parallel_size == 1


def test_experts() -> None:
    config = told_model(moe=EXPERTS)
    assert (config.num_moe_experts, config.moe_router_topk) == (8, 2)
    assert (config.moe_ffn_hidden_size, config.moe_shared_expert_intermediate_size) == (1024, 2048)
    assert config.moe_first_dense_layers == 1
    assert told_model(moe={**EXPERTS, "shared_ffn": 0}).moe_shared_expert_intermediate_size is None


@pytest.mark.parametrize(("ep", "expert_tp"), [(1, 2), (4, 1)])
def test_experts_are_split_over_tp_or_spread_whole(ep: int, expert_tp: int) -> None:
    config = told_model(dict(tp=2, ep=ep), moe=EXPERTS)
    assert config.expert_model_parallel_size == ep
    assert config.expert_tensor_ranks == expert_tp
    assert config.data_parallel_size == 4, "ep takes no GPUs from dp"


def test_latent_attention() -> None:
    config = told_model(mla=LATENT)
    assert config.multi_latent_attention and config.q_lora_rank is None
    sizes = (config.kv_lora_rank, config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim)
    assert sizes == (512, 64, 32, 96)
    assert told_model(mla={**LATENT, "q_rank": 768}).q_lora_rank == 768


def test_prediction_layers() -> None:
    assert told_model(mtp_layers=2).mtp_num_layers == 2


@pytest.mark.parametrize(
    "model",
    [
        {},
        dict(moe=EXPERTS),
        dict(moe={**EXPERTS, "shared_ffn": 0, "dense_layers": 0}, kv_heads=8),
        dict(mla=LATENT),
        dict(mla={**LATENT, "q_rank": 768}, mtp_layers=1),
        dict(family="gpt", **dict.fromkeys(("activation", "norm", "positions", "tied", "bias"))),
        dict(family="bert", **dict.fromkeys(("activation", "norm", "positions", "tied", "bias"))),
    ],
    ids=["llama", "experts", "grouped", "latent", "prediction", "gpt", "bert"],
)
def test_the_model_comes_back_from_megatrons_names(model: dict[str, Any]) -> None:
    config = told_model(**model)
    again = megatron_model(config.model, config.padded_vocab_size, config.transformer_impl)
    assert dict(again) == {name: getattr(config, name) for name in dict(again)}
    assert config.model.family == model.get("family", "llama")
    assert parse_train_config(config.model_dump_json()) == config


# -- A plan beside what was built: when they agree, and what is left open -----------------------

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


def test_a_verification_survives_its_file() -> None:
    verification = compare(PLAN, (1, 1), found((20, 10), (2, 3)))
    assert Verification.model_validate_json(verification.model_dump_json()) == verification
