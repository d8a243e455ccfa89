"""What megatron-core's trainer is told, and a plan beside the model that was built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from planned_job import planned_job

from hpctrain.engines.megatron import MegatronConfig, core_fields, megatron_config
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
from hpctrain.spec.model import ModelSpec
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
    model = config.model
    assert (model.layers, model.hidden, model.ffn_size) == (96, 12288, 49152)
    assert (model.activation, model.norm, model.positions) == ("gelu", "layernorm", "learned")
    assert model.tied and model.bias is True
    assert config.padded_vocab_size % (128 * config.tensor_model_parallel_size) == 0
    assert config.virtual_pipeline_model_parallel_size == 3
    assert config.pipeline_layer_split == ((4, 4, 4),) * 8
    assert (config.train_steps, config.lr_decay_steps) == (95368, 82650)
    assert config.save_interval_seconds == 1800.0 and config.save_interval_steps == 100


def test_llama() -> None:
    config = told("llama7b", "a100x1")
    model = config.model
    assert (model.activation, model.norm, model.positions) == ("swiglu", "rmsnorm", "rope")
    assert model.ffn == 11008 and not model.tied and not model.bias
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


def fields_of(**model: Any) -> dict[str, Any]:
    return core_fields(told_model(**model).model)


def test_a_dense_model_has_none_of_it() -> None:
    fields = fields_of()
    assert fields["mtp_num_layers"] is None and fields["softmax_scale"] is None
    assert not {"num_moe_experts", "multi_latent_attention", "window_size", "no_rope_freq"} & {
        *fields
    }
    assert told_model().expert_model_parallel_size == 1


def test_experts() -> None:
    fields = fields_of(moe=EXPERTS)
    assert (fields["num_moe_experts"], fields["moe_router_topk"]) == (8, 2)
    assert fields["moe_ffn_hidden_size"] == 1024
    assert fields["moe_shared_expert_intermediate_size"] == 2048
    assert fields["moe_layer_freq"] == [0, 1, 1, 1]
    alone = fields_of(moe={**EXPERTS, "shared_ffn": 0, "every": 2, "dense_layers": 0})
    assert alone["moe_shared_expert_intermediate_size"] is None
    assert alone["moe_layer_freq"] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("part", "fields"),
    [
        (dict(bias="qkv"), dict(add_bias_linear=False, add_qkv_bias=True)),
        (dict(bias=True), dict(add_bias_linear=True, add_qkv_bias=False)),
        (dict(activation="geglu_tanh"), dict(gated_linear_unit=True)),
        (dict(norm_zero_centered=True), dict(layernorm_zero_centered_gamma=True)),
        (
            dict(attention=dict(window=128), pattern=["window", "full"]),
            dict(window_size=(127, 0), window_attn_skip_freq=[1, 0, 1, 0]),
        ),
        (
            dict(attention=dict(qk_norm="head", scale=0.5)),
            dict(qk_layernorm=True, softmax_scale=0.5),
        ),
        (dict(attention=dict(sinks=True)), dict(softmax_type="learnable")),
        (dict(rope=dict(without=[False, True])), dict(no_rope_freq=[0, 1, 0, 1])),
        (dict(rope=dict(interleaved=True)), dict(rotary_interleaved=True)),
        (
            dict(moe={**EXPERTS, "score": "sigmoid", "expert_bias": True, "scale": 2.5}),
            dict(
                moe_router_score_function="sigmoid",
                moe_router_enable_expert_bias=True,
                moe_router_topk_scaling_factor=2.5,
            ),
        ),
        (dict(moe={**EXPERTS, "normalize": False}), dict(moe_router_pre_softmax=True)),
        (
            dict(moe={**EXPERTS, "groups": 4, "top_groups": 2, "balance_loss": 0.0}),
            dict(
                moe_router_num_groups=4,
                moe_router_group_topk=2,
                moe_router_load_balancing_type="none",
            ),
        ),
        (
            dict(mla=LATENT, rope=dict(scaling=dict(kind="yarn", factor=40, original_seq=4096))),
            dict(rope_type="yarn", rotary_scaling_factor=40, beta_fast=32, mscale_all_dim=0.0),
        ),
    ],
    ids=lambda value: next(iter(value)),
)
def test_parts_are_fields_of_megatron_core(part: dict[str, Any], fields: dict[str, Any]) -> None:
    found = fields_of(**part)
    assert {name: found[name] for name in fields} == fields


@pytest.mark.parametrize(("ep", "expert_tp"), [(1, 2), (4, 1)])
def test_experts_are_split_over_tp_or_spread_whole(ep: int, expert_tp: int) -> None:
    config = told_model(dict(tp=2, ep=ep), moe=EXPERTS)
    assert config.expert_model_parallel_size == ep
    assert config.expert_tensor_ranks == expert_tp
    assert config.data_parallel_size == 4, "ep takes no GPUs from dp"


def test_latent_attention() -> None:
    fields = fields_of(mla=LATENT)
    assert fields["multi_latent_attention"] and fields["q_lora_rank"] is None
    names = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    assert [fields[name] for name in names] == [512, 64, 32, 96]
    assert fields_of(mla={**LATENT, "q_rank": 768})["q_lora_rank"] == 768


def test_prediction_layers() -> None:
    assert fields_of(mtp_layers=2)["mtp_num_layers"] == 2


# A train.json of earlier versions, with the model in megatron-core's names.
FORMER: dict[str, Any] = dict(
    num_layers=4, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, num_query_groups=2,
    kv_channels=16, activation="swiglu", normalization="RMSNorm", layernorm_epsilon=1e-5,
    position_embedding_type="rope", rotary_base=10000, share_embeddings_and_output_weights=False,
    add_bias_linear=False, dropout=0.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("former", "model"),
    [
        ({}, dict(family="llama", kv_heads=2, head_dim=16)),
        (
            dict(num_moe_experts=4, moe_ffn_hidden_size=48, moe_first_dense_layers=1),
            dict(moe=dict(experts=4, top_k=2, ffn=48, dense_layers=1), kv_heads=2, head_dim=16),
        ),
        (
            dict(multi_latent_attention=True, q_lora_rank=24, kv_lora_rank=16, mtp_num_layers=1),
            dict(mla=dict(q_rank=24, kv_rank=16), mtp_layers=1),
        ),
        (
            dict(
                model_type="bert", activation="gelu", normalization="LayerNorm",
                position_embedding_type="learned_absolute", add_bias_linear=True,
                share_embeddings_and_output_weights=True,
            ),
            dict(
                family="bert", kv_heads=2, head_dim=16, activation="gelu", norm="layernorm",
                positions="learned", tied=True, bias=True, norm_epsilon=1e-5,
            ),
        ),
    ],
    ids=["llama", "experts", "latent", "bert"],
)  # fmt: skip
def test_a_document_of_earlier_versions_is_read(
    former: dict[str, Any], model: dict[str, Any]
) -> None:
    """Runs that wait in the queue have one."""
    now = told_model().model_dump(mode="json", exclude={"model"})
    config = parse_train_config(json.dumps({**now, **FORMER, **former}))
    assert isinstance(config, MegatronConfig)
    shape = dict(layers=4, hidden=64, ffn=128, heads=4, vocab=now["vocab_size"])
    expected = dict(family="llama", seq=now["seq_length"]) | shape | model
    assert config.model == ModelSpec.model_validate(expected)
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
