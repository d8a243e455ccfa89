"""From megatron-core's names back to the shape that a spec would give.

Belongs here: that translation, for whoever has only a `train.json`. Does not belong here: the way
there (see `megatron`).
"""

from __future__ import annotations

from hpctrain.engines.megatron import MegatronConfig
from hpctrain.spec.model import MlaSpec, ModelSpec, MoeSpec


def shape_of(config: MegatronConfig) -> ModelSpec:
    """The model of `config`; a Llama where it has that family's choices, else a GPT."""
    rope, rms = config.position_embedding_type == "rope", config.normalization == "RMSNorm"
    llama = rope and rms and config.activation == "swiglu"
    return ModelSpec(
        family="llama" if llama else "gpt",
        layers=config.num_layers,
        hidden=config.hidden_size,
        ffn=config.ffn_hidden_size,
        heads=config.num_attention_heads,
        kv_heads=None if config.multi_latent_attention else config.num_query_groups,
        head_dim=None if config.multi_latent_attention else config.kv_channels,
        vocab=config.vocab_size,
        seq=config.seq_length,
        activation=config.activation,
        norm="rmsnorm" if rms else "layernorm",
        norm_epsilon=config.layernorm_epsilon,
        positions="rope" if rope else "learned",
        rope_base=config.rotary_base,
        tied=config.share_embeddings_and_output_weights,
        bias=config.add_bias_linear,
        dropout=config.dropout,
        moe=_experts(config),
        mla=_latent(config),
        mtp_layers=config.mtp_num_layers or 0,
    )


def _experts(config: MegatronConfig) -> MoeSpec | None:
    if config.num_moe_experts is None:
        return None
    return MoeSpec(
        experts=config.num_moe_experts,
        top_k=config.moe_router_topk,
        ffn=config.moe_ffn_hidden_size or config.ffn_hidden_size,
        shared_ffn=config.moe_shared_expert_intermediate_size or 0,
        dense_layers=config.moe_first_dense_layers,
    )


def _latent(config: MegatronConfig) -> MlaSpec | None:
    if not config.multi_latent_attention:
        return None
    return MlaSpec(
        q_rank=config.q_lora_rank,
        kv_rank=config.kv_lora_rank,
        nope_dim=config.qk_head_dim,
        rope_dim=config.qk_pos_emb_head_dim,
        value_dim=config.v_head_dim,
    )
