"""Options of megatron-core that cannot be had with a model, a layout or each other are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_train_preflight import GOOD

from hpctrain.engines.megatron import MegatronConfig
from hpctrain.records.layout import RunLayout
from hpctrain.train.engines.megatron.preflight import engine_problems, option_problems

PLAIN = dict(
    tensor_model_parallel_size=1, pipeline_model_parallel_size=1, pipeline_layer_split=((4,),)
)
BF16 = dict(precision="bf16")
FP8 = dict(precision="bf16", fp8="hybrid", fp8_recipe="tensorwise")
SP = dict(tensor_model_parallel_size=2, sequence_parallel=True)
MOE = dict(num_moe_experts=4, moe_ffn_hidden_size=64, add_bias_linear=False)
FLEX = dict(moe_token_dispatcher_type="flex")
FULL, PARTS = dict(recompute_granularity="full"), dict(recompute_granularity="selective")


def config(**changes: Any) -> MegatronConfig:
    return MegatronConfig(**{**GOOD, **PLAIN, **changes})


REFUSED: list[tuple[dict[str, Any], str]] = [
    (dict(grad_reduce_in_fp32=False), "no effect with `precision: fp32`"),
    (dict(cross_entropy_loss_fusion=True), "rounds its gradient to bf16"),
    (
        dict(cross_entropy_loss_fusion=True, deterministic_mode=True, **BF16),
        "fused cross entropy is not deterministic",
    ),
    ({**FP8, "precision": "fp32"}, "the others in bf16"),
    (dict(fp8_param=True, **FP8), "`fp8_param_gather` is not supported"),
    (dict(fp4="e2m1", **FP8), "exclude each other"),
    (dict(transformer_impl="local", **FP8), "`precision: fp8` needs TransformerEngine's layers"),
    (
        dict(transformer_impl="local", fp4="e2m1", **BF16),
        "`precision: fp4` needs TransformerEngine's layers",
    ),
    (dict(ffn_hidden_size=120, **FP8), "ffn_hidden_size / tp divisible by 16, got 120"),
    (
        {**FP8, "fp8_recipe": "mxfp8", "hidden_size": 80, "kv_channels": 24},
        "hidden_size divisible by 32, got 80",
    ),
    (dict(seq_length=30, micro_batch_size=1, **FP8), "divisible by 8, got 30"),
    (
        {**MOE, "moe_ffn_hidden_size": 40, **FP8},
        "moe_ffn_hidden_size / etp divisible by 16, got 40",
    ),
    (
        {**FP8, "fp8_recipe": "delayed", **PARTS, "recompute_modules": ("layernorm",)},
        "`fp8_recipe: delayed` does not go with recompute_modules layernorm",
    ),
    (dict(recompute_num_layers=2), "no effect with recompute none"),
    (dict(recompute_num_layers=2, **PARTS), "no effect with recompute selective"),
    (dict(recompute_num_layers=5, **FULL), "above the 4 layers of a chunk"),
    (
        dict(transformer_impl="local", **PARTS, recompute_modules=("layernorm",)),
        "`recompute_modules: [layernorm]` needs TransformerEngine's layers",
    ),
    (dict(cpu_offloading_num_layers=4), "must be below the 4 layers"),
    (dict(cpu_offloading_num_layers=1, **FULL), "does not go with recompute full"),
    (
        dict(
            cpu_offloading_num_layers=1,
            pipeline_model_parallel_size=2,
            pipeline_layer_split=((2,), (2,)),
        ),
        "a model without a pipeline",
    ),
    (dict(tp_comm_overlap=True), "tp of at least 2 with sequence_parallel"),
    (
        dict(tp_comm_overlap=True, multi_latent_attention=True, **SP),
        "does not know the projections of latent attention",
    ),
    (dict(defer_embedding_wgrad_compute=True), "fills the end of a pipeline"),
    (
        dict(
            defer_embedding_wgrad_compute=True,
            mtp_num_layers=1,
            pipeline_model_parallel_size=2,
            pipeline_layer_split=((2,), (2,)),
        ),
        "wrong with prediction layers",
    ),
    (
        dict(
            defer_embedding_wgrad_compute=True,
            model_type="bert",
            pipeline_model_parallel_size=2,
            pipeline_layer_split=((2,), (2,)),
        ),
        "is for gpt and llama",
    ),
    (FLEX, "`moe_token_dispatcher_type: flex` has no effect: the model has no experts"),
    (dict(moe_permute_fusion=True), "`moe_permute_fusion` has no effect"),
    (dict(moe_shared_expert_overlap=True), "`moe_shared_expert_overlap` has no effect"),
    ({**FLEX, **MOE}, "needs etp x ep above 1"),
    (dict(moe_shared_expert_overlap=True, **MOE), "no effect without `shared_ffn`"),
    (
        dict(
            moe_shared_expert_overlap=True,
            moe_shared_expert_intermediate_size=32,
            expert_model_parallel_size=2,
            **FLEX,
            **MOE,
        ),
        "needs `moe_token_dispatcher_type: alltoall`",
    ),
    (dict(cuda_graph_impl="local", accelerator="cpu"), "needs GPUs, and the run trains on CPUs"),
    (dict(cuda_graph_impl="local", model_type="bert"), "is for gpt and llama"),
    (dict(cuda_graph_impl="local", **FULL), "does not go with full recomputation"),
    (
        dict(cuda_graph_impl="transformer_engine", cpu_offloading_num_layers=1),
        "does not go with `activation_offload_layers`",
    ),
    (
        dict(cuda_graph_impl="transformer_engine", dropout=0.1, **PARTS),
        "cannot draw dropout again while core_attn is recomputed",
    ),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_an_option_that_cannot_be_had_is_named(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    made = config(**changes)
    (problem,) = option_problems(made)
    assert words in problem.message
    assert problem in list(engine_problems(made, RunLayout(tmp_path))), "every launch checks it"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        BF16,
        FP8,
        {**FP8, "fp8_recipe": "mxfp8", "fp8": "e4m3"},
        dict(fp4="e2m1", **BF16),
        dict(grad_reduce_in_fp32=False, cross_entropy_loss_fusion=True, **BF16),
        dict(recompute_num_layers=4, **FULL),
        dict(recompute_modules=("mlp", "core_attn"), transformer_impl="local", **PARTS),
        dict(cpu_offloading_num_layers=3),
        dict(tp_comm_overlap=True, **SP),
        dict(
            defer_embedding_wgrad_compute=True,
            pipeline_model_parallel_size=2,
            pipeline_layer_split=((2,), (2,)),
        ),
        dict(expert_model_parallel_size=2, moe_permute_fusion=True, **FLEX, **MOE),
        dict(cuda_graph_impl="transformer_engine", dropout=0.1),
        dict(cuda_graph_impl="local", **PARTS),
    ],
)
def test_what_can_be_had_is_not_refused(changes: dict[str, Any]) -> None:
    assert list(option_problems(config(**changes))) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(expert_tensor_parallel_size=1, **SP, **MOE), "experts would get wrong gradients"),
        (dict(expert_tensor_parallel_size=3, **SP, **MOE), "etp 3 x ep 1 does not divide"),
        (dict(expert_tensor_parallel_size=2), "has no effect: the model has no experts"),
        (
            {
                **SP, **MOE, "moe_ffn_hidden_size": 63, "expert_tensor_parallel_size": 2,
                "expert_model_parallel_size": 2, "data_parallel_size": 2,
            },
            "moe_ffn_hidden_size is not divisible by etp 2",
        ),
    ],
)  # fmt: skip
def test_experts_are_split_only_where_their_gradients_are_right(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    found = engine_problems(config(**changes), RunLayout(tmp_path))
    assert words in " ".join(problem.message for problem in found)


def test_a_file_of_an_older_version_has_none_of_the_options() -> None:
    """`GOOD` is such a file: it names no option."""
    made = config()
    assert list(option_problems(made)) == [] and made.software_needs == ()
    assert (made.fp8, made.fp4, made.cuda_graph_impl) == (None, None, "none")
    assert made.grad_reduce_in_fp32 and made.expert_tensor_parallel_size is None
