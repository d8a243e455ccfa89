"""Builds models of megatron-core on the meta device, rank by rank, and prints parameter counts.

A process of its own: the fake process group and the patches must not leak into other tests.
stdin: a JSON list of cases; stdout: for each case the counts of its pipeline stages.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpctrain.train.megatron_on_cpu import import_core_to_read

import_core_to_read()  # nothing else of hpctrain: these are megatron-core's own models
assert not {"torch._inductor", "wandb", "torch.utils.tensorboard"} & set(sys.modules)

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec  # noqa: E402
from megatron.core.models.bert.bert_model import BertModel  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer import multi_latent_attention  # noqa: E402
from megatron.core.transformer.transformer_config import (  # noqa: E402
    MLATransformerConfig,
    TransformerConfig,
)


class Duplicated(torch.nn.Linear):
    """Stands in for TransformerEngine's linear layer, which is not installed here.

    megatron-core hands TELinear sizes and a mode; in this mode the weight is whole on every rank
    (megatron/core/extensions/transformer_engine.py, parallel_mode "duplicated").
    """

    def __init__(self, inputs: int, outputs: int, *, parallel_mode: str, bias: bool, **_: Any):
        assert parallel_mode == "duplicated"
        super().__init__(inputs, outputs, bias=bias)


class NoAttention(torch.nn.Module):
    """In place of the product of queries and keys, which has no parameters: megatron-core's own
    module for it does not take the sizes of latent heads (dot_product_attention.py:46)."""

    def __init__(self, **_: Any):
        super().__init__()


def config_of(case: dict[str, Any]) -> TransformerConfig:
    """Megatron's own split where the layout is even; else the listed one, in model order."""
    listed = case["stages"] is not None
    chunks = [["decoder"] * layers for layers in case["stages"] or [0]]
    chunks[0].insert(0, "embedding")
    chunks[-1] += ["mtp"] * case["mtp_layers"] + ["loss"]
    kind = MLATransformerConfig if case["mla"] else TransformerConfig
    return kind(
        num_layers=case["layers"],
        hidden_size=case["hidden"],
        ffn_hidden_size=case["ffn"],
        num_attention_heads=case["heads"],
        num_query_groups=case["kv_heads"],
        kv_channels=case["head_size"],
        normalization=case["normalization"],
        gated_linear_unit=case["gated"],
        activation_func=torch.nn.functional.silu if case["gated"] else torch.nn.functional.gelu,
        add_bias_linear=case["bias"],
        mtp_num_layers=case["mtp_layers"] or None,
        tensor_model_parallel_size=case["tp"],
        pipeline_model_parallel_size=case["pp"],
        virtual_pipeline_model_parallel_size=case["vpp"] if case["vpp"] > 1 else None,
        pipeline_model_parallel_layout=chunks if listed else None,
        account_for_embedding_in_pipeline_split=case["count_embedding"],
        account_for_loss_in_pipeline_split=case["count_loss"],
        expert_model_parallel_size=case["ep"],
        expert_tensor_parallel_size=case["expert_tp"],
        pipeline_dtype=torch.float32,
        overlap_p2p_comm=case["vpp"] > 1,
        batch_p2p_comm=case["vpp"] == 1,
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        **(moe_settings(case, case["moe"]) if case["moe"] else {}),
        **(mla_settings(case["mla"]) if case["mla"] else {}),
    )


def moe_settings(case: dict[str, Any], moe: dict[str, Any]) -> dict[str, Any]:
    dense = moe["dense_layers"]
    return dict(
        num_moe_experts=moe["experts"],
        moe_router_topk=moe["top_k"],
        moe_router_pre_softmax=moe["top_k"] == 1,
        moe_ffn_hidden_size=moe["ffn"],
        moe_shared_expert_intermediate_size=moe["shared_ffn"] or None,
        moe_layer_freq=[0] * dense + [1] * (case["layers"] - dense),
        moe_token_dispatcher_type="alltoall",
    )


def mla_settings(mla: dict[str, Any]) -> dict[str, Any]:
    return dict(
        q_lora_rank=mla["q_rank"],
        kv_lora_rank=mla["kv_rank"],
        qk_head_dim=mla["nope_dim"],
        qk_pos_emb_head_dim=mla["rope_dim"],
        v_head_dim=mla["value_dim"],
        qk_layernorm=True,
        rope_type="rope",
    )


def replace_latent_modules(attention: Any) -> None:
    """megatron-core builds no latent attention without TransformerEngine's modules."""
    attention.core_attention = NoAttention
    attention.linear_q_down_proj = attention.linear_kv_down_proj = Duplicated


def gpt(case: dict[str, Any], config: TransformerConfig, chunk: int | None, **ends: bool) -> Any:
    norm = case["normalization"]
    block = get_gpt_decoder_block_spec(config, False, norm, vp_stage=chunk)
    last_layer = get_gpt_decoder_layer_specs(config, False, norm)[-1]
    if case["mla"]:
        for layer in [*block.layer_specs, last_layer]:
            replace_latent_modules(layer.submodules.self_attention.submodules)
    return GPTModel(
        config,
        block,
        vocab_size=case["padded_vocab"],
        max_sequence_length=case["seq"],
        share_embeddings_and_output_weights=case["tied"],
        position_embedding_type=case["positions"],
        mtp_block_spec=get_gpt_mtp_block_spec(config, last_layer, False, vp_stage=chunk),
        vp_stage=chunk,
        **ends,
    )


def bert(case: dict[str, Any], config: TransformerConfig, chunk: int | None, **ends: bool) -> Any:
    return BertModel(
        config,
        num_tokentypes=2,
        transformer_layer_spec=bert_layer_local_spec,
        vocab_size=case["padded_vocab"],
        max_sequence_length=case["seq"],
        share_embeddings_and_output_weights=case["tied"],
        position_embedding_type=case["positions"],
        add_binary_head=False,
        vp_stage=chunk,
        **ends,
    )


def count_chunk(case: dict[str, Any], config: TransformerConfig, chunk: int | None) -> int:
    """Parameters of one model chunk on this rank."""
    virtual = dict(ignore_virtual=chunk is None, vp_stage=chunk)
    build = bert if case["family"] == "bert" else gpt
    model = build(
        case,
        config,
        chunk,
        pre_process=parallel_state.is_pipeline_first_stage(**virtual),
        post_process=parallel_state.is_pipeline_last_stage(**virtual),
    )
    return sum(parameter.numel() for parameter in model.parameters())


def count_stage(case: dict[str, Any], stage: int) -> int:
    """Parameters on the first rank of pipeline stage `stage`, over all its chunks.

    There are as many data parallel ranks as experts are spread over.
    """
    stage_ranks = case["tp"] * case["ep"]
    store, world = FakeStore(), stage_ranks * case["pp"]
    dist.init_process_group("fake", store=store, rank=stage * stage_ranks, world_size=world)
    parallel_state.initialize_model_parallel(
        case["tp"],
        case["pp"],
        virtual_pipeline_model_parallel_size=case["vpp"] if case["vpp"] > 1 else None,
        expert_model_parallel_size=case["ep"],
        expert_tensor_parallel_size=case["expert_tp"],
        create_gloo_process_groups=False,
    )
    try:
        with torch.device("meta"):
            config = config_of(case)
            chunks = range(case["vpp"]) if case["vpp"] > 1 else [None]
            return sum(count_chunk(case, config, chunk) for chunk in chunks)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def main() -> None:
    # megatron-core asks for the CUDA device and moves tied embeddings there, even from meta
    torch.cuda.current_device = lambda: torch.device("meta")  # type: ignore[assignment,return-value]
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
    multi_latent_attention.TELinear = Duplicated
    torch.cuda.Stream = lambda *_, **__: None  # type: ignore[assignment,misc]
    cases = json.load(sys.stdin)
    counts = [[count_stage(case, stage) for stage in range(case["pp"])] for case in cases]
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
