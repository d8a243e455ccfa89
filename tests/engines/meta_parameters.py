"""Builds GPTModel of megatron-core on the meta device, rank by rank, and prints parameter counts.

A process of its own: the fake process group and the patches must not leak into other tests.
stdin: a JSON list of cases; stdout: for each case the counts of its pipeline stages.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.testing._internal.distributed.fake_pg import FakeStore


def config_of(case: dict[str, Any]) -> TransformerConfig:
    """Megatron's own split where the layout is even; else the listed one, in model order."""
    listed = case["stages"] is not None
    chunks = [["decoder"] * layers for layers in case["stages"] or [0]]
    chunks[0].insert(0, "embedding")
    chunks[-1].append("loss")
    return TransformerConfig(
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
        tensor_model_parallel_size=case["tp"],
        pipeline_model_parallel_size=case["pp"],
        virtual_pipeline_model_parallel_size=case["vpp"] if case["vpp"] > 1 else None,
        pipeline_model_parallel_layout=chunks if listed else None,
        account_for_embedding_in_pipeline_split=case["count_embedding"],
        account_for_loss_in_pipeline_split=case["count_loss"],
        pipeline_dtype=torch.float32,
        overlap_p2p_comm=case["vpp"] > 1,
        batch_p2p_comm=case["vpp"] == 1,
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
    )


def count_chunk(case: dict[str, Any], config: TransformerConfig, chunk: int | None) -> int:
    """Parameters of one model chunk on this rank."""
    interleaved = chunk is not None
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=case["normalization"]),
        vocab_size=case["padded_vocab"],
        max_sequence_length=case["seq"],
        pre_process=parallel_state.is_pipeline_first_stage(
            ignore_virtual=not interleaved, vp_stage=chunk
        ),
        post_process=parallel_state.is_pipeline_last_stage(
            ignore_virtual=not interleaved, vp_stage=chunk
        ),
        share_embeddings_and_output_weights=case["tied"],
        position_embedding_type=case["positions"],
        vp_stage=chunk,
    )
    return sum(parameter.numel() for parameter in model.parameters())


def count_stage(case: dict[str, Any], stage: int) -> int:
    """Parameters on the first rank of pipeline stage `stage`, over all its chunks."""
    world = case["tp"] * case["pp"]
    store = FakeStore()
    dist.init_process_group("fake", store=store, rank=stage * case["tp"], world_size=world)
    parallel_state.initialize_model_parallel(
        case["tp"],
        case["pp"],
        virtual_pipeline_model_parallel_size=case["vpp"] if case["vpp"] > 1 else None,
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
    cases = json.load(sys.stdin)
    counts = [[count_stage(case, stage) for stage in range(case["pp"])] for case in cases]
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
