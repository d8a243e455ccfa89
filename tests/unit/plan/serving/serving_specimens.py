"""A GPU without losses and an engine without overheads: seconds can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hpctrain.plan.cost.case import Machine, Shape
from hpctrain.serve.plan.served_model import WIDE, ReplicaLayout, ServedModel
from hpctrain.serve.plan.serving_machine import ReplicaCase, ServingMachine
from hpctrain.spec.calibration import ServingEngineCalibration, ServingGpuCalibration

NEVER = 1e30  # bytes/s or FLOP/s of something that shall cost nothing

# Llama 3 70B: config.json of meta-llama/Meta-Llama-3-70B
LLAMA_70B = Shape(
    layers=80,
    hidden=8192,
    seq=8192,
    vocab=128256,
    attention_blocks=80,
    heads=64,
    kv_heads=8,
    qk_dim=128,
    value_dim=128,
    mlp_blocks=80,
    ffn=28672,
    gated=1,
    expert_hidden=8192,
    rms_norm=1,
)
# DeepSeek-V3: arXiv 2412.19437, section 4.2
DEEPSEEK_V3 = Shape(
    layers=61,
    hidden=7168,
    seq=4096,
    vocab=129280,
    attention_blocks=61,
    heads=128,
    kv_heads=128,
    qk_dim=192,
    value_dim=128,
    mla=1,
    q_rank=1536,
    kv_rank=512,
    rope_dim=64,
    mlp_blocks=3,
    ffn=18432,
    gated=1,
    moe_blocks=58,
    experts=256,
    top_k=8,
    expert_ffn=2048,
    expert_hidden=7168,
    shared_ffn=2048,
    rms_norm=1,
)
LINKS = Machine(
    peak=1e15,
    peak_low=2e15,
    memory_bandwidth=4e12,
    nvlink_bandwidth=450e9,
    network_bandwidth=50e9,
    domain=8,
    product_efficiency=1,
    low_efficiency=1,
    flash_efficiency=1,
    batched_efficiency=1,
    memory_efficiency=1,
    nvlink_efficiency=1,
    network_efficiency=1,
)
GPU = ServingMachine(
    links=LINKS,
    memory=80e9,
    memory_bandwidth=4e12,
    peak_16=1e15,
    peak_8=2e15,
    peak_4=4e15,
    shares=ServingGpuCalibration.model_validate(
        dict.fromkeys(ServingGpuCalibration.model_fields, 1.0) | {"provenance": "by hand"}
    ),
)
ENGINE = ServingEngineCalibration.model_validate(
    dict.fromkeys(ServingEngineCalibration.model_fields, 0.0)
    | dict.fromkeys(("product_speed", "expanded_speed", "expert_variety", "expert_imbalance"), 1.0)
    | {"draft_acceptance": 0.5, "reserved_output": 0.5, "memory_share": 0.9}
    | {"token_budget": 8192.0, "max_sequences": 1024.0}
    | {"provenance": "by hand", "unseen_provenance": "by hand"}
)


def served(shape: Shape = LLAMA_70B, **changes: Any) -> ServedModel:
    """A model in 16 bits."""
    plain = ServedModel(
        shape=shape,
        attention_bytes=2,
        mlp_bytes=2,
        expert_bytes=2,
        head_bytes=2,
        attention_operands=WIDE,
        mlp_operands=WIDE,
        expert_operands=WIDE,
        cache_bytes=2,
    )
    return replace(plain, **changes)


def replica(
    model: ServedModel | None = None,
    layout: ReplicaLayout | None = None,
    gpu: ServingMachine = GPU,
    **constants: float,
) -> ReplicaCase:
    """A replica of Llama 3 70B on four GPUs without losses; `constants` are of its engine."""
    engine = ENGINE.model_copy(update=constants)
    return ReplicaCase(model or served(), gpu, layout or ReplicaLayout(4), engine)
