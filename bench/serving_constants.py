"""The constants of the serving planner that are fitted: where they stand, start, bounds, belief.

Belongs here: the table. Does not belong here: the fit (`calibrate_serving`), the constants'
meaning (`hpctrain.spec.calibration`).

`weight` is a belief in the start: a constant that is e times larger or smaller costs as much as
`weight` squared rows that are far off.
"""

from __future__ import annotations

from dataclasses import dataclass

GPUS = ("hopper", "blackwell")
LIKE_HOPPER = ("ampere", "ada", "cdna3", "other")  # generations without rows of their own
ENGINES = ("vllm", "sglang", "tensorrt-llm")
# Engines with few rows of their own, and whose constants they share but for those listed below.
LIKE_ENGINE = {
    "tensorrt-llm-2024": "tensorrt-llm",
    "tensorrt-llm-2025": "tensorrt-llm",
    "vllm-2024": "vllm",
    "sglang-2025": "sglang",
    "transformers": "vllm",
    "other": "vllm",
}


@dataclass(frozen=True)
class FreeConstant:
    """One constant: section (`gpus` or `engines`), entries that share it, and field."""

    section: str
    keys: tuple[str, ...]
    field: str
    start: float
    low: float
    high: float
    weight: float

    @property
    def name(self) -> str:
        return f"{'+'.join(self.keys)}.{self.field}"


# field -> start, bounds, weight. Shares: what large products and copies reach in the training
# calibration (catalogue/calibration.yaml) and in vendors' benchmarks. Least times: three to ten
# kernels of 3 to 5 microseconds each (CUDA graphs; NVIDIA, "Getting Started with CUDA Graphs").
GPU_FIELDS: dict[str, tuple[float, float, float, float]] = {
    "product_16": (0.7, 0.3, 0.9, 6),
    "product_8": (0.6, 0.2, 0.9, 6),
    "product_blocks": (0.45, 0.1, 0.9, 4),
    "attention_share": (0.4, 0.1, 0.8, 4),
    "stream_16": (0.85, 0.3, 0.95, 8),
    "stream_8": (0.75, 0.3, 0.95, 6),
    "stream_expanded": (0.6, 0.1, 0.95, 4),
    "grouped_16": (0.8, 0.2, 0.98, 6),
    "grouped_8": (0.75, 0.2, 0.98, 6),
    "grouped_expanded": (0.6, 0.1, 0.98, 3),
    "grouped_product": (0.8, 0.2, 1.2, 4),
    "cache_stream": (0.75, 0.2, 0.95, 6),
    "message_share": (0.45, 0.1, 0.9, 4),
}
BLACKWELL_FIELDS: dict[str, tuple[float, float, float, float]] = {
    "product_4": (0.35, 0.1, 0.8, 4),
    "stream_4": (0.6, 0.2, 0.95, 6),
    "grouped_4": (0.65, 0.2, 0.98, 6),
    "block_pace": (0.9, 0.4, 1.5, 6),
    "message_pace": (1.0, 0.4, 2.0, 6),
}
ENGINE_FIELDS: dict[str, tuple[float, float, float, float]] = {
    "iteration_seconds": (1e-3, 1e-4, 1e-2, 2),
    "sequence_seconds": (1e-5, 1e-7, 2e-4, 1),
    "request_seconds": (2e-2, 1e-3, 0.3, 1),
    "token_seconds": (2e-6, 1e-7, 3e-5, 1),
    "waited_iterations": (5.0, 1.0, 30.0, 1),
    "attention_seconds": (20e-6, 3e-6, 1e-4, 3),
    "latent_seconds": (40e-6, 3e-6, 2e-4, 2),
    "mlp_seconds": (8e-6, 1e-6, 1e-4, 4),
    "expert_seconds": (35e-6, 3e-6, 2e-4, 3),
    "message_seconds": (6e-6, 1e-6, 4e-5, 4),
    "message_hop_seconds": (2e-6, 2e-7, 1e-5, 4),
    "expert_imbalance": (1.15, 1.0, 3.0, 6),
    "eager_factor": (5.0, 0.1, 60.0, 1),
    "handover_seconds": (0.1, 5e-3, 1.0, 1),
}
TENSORRT = ("tensorrt-llm", "tensorrt-llm-2025")
BUNCHED = {"vllm": 1.0, "sglang": 100.0, "tensorrt-llm": 1.5}

# MLPerf v4.1 ran engines of 2024, with large batches and other schedulers.
OF_2024: dict[str, tuple[float, float, float, float]] = {
    "product_speed": (0.8, 0.4, 1.0, 2),
    "iteration_seconds": (5e-3, 1e-4, 8e-2, 1),
    "sequence_seconds": (1e-5, 1e-7, 2e-4, 1),
    "request_seconds": (2e-2, 1e-3, 0.3, 1),
}

# TensorRT-LLM before 1.2 and SGLang before 0.5.8: other kernels and schedulers of the same design.
OF_2025 = ("iteration_seconds", "request_seconds", "latent_seconds", "expert_seconds")

# What is not fitted. Token budgets: vLLM's max_num_batched_tokens, SGLang's chunked_prefill_size
# and TensorRT-LLM's max_num_tokens of their defaults on large GPUs. Memory: vLLM's
# gpu_memory_utilization, SGLang's mem_fraction_static, TensorRT-LLM's
# kv_cache_free_gpu_memory_fraction. TensorRT-LLM keeps room for whole answers
# (GUARANTEED_NO_EVICT), the others admit by what is there and preempt.
GPU_FIXED = {"product_4": 0.35, "stream_4": 0.6, "grouped_4": 0.65, "block_pace": 1.0}
GPU_FIXED |= {"message_pace": 1.0}
ENGINE_FIXED = {
    "product_speed": 1.0,
    "expanded_speed": 1.0,
    "token_budget": 8192.0,
    "max_sequences": 1024.0,
    "reserved_output": 0.5,
    "memory_share": 0.9,
    "overhead_bytes": 3e9,
    "activation_copies": 4.0,
    "prompts_first": 0.0,
}
OWN_FIXED = {"tensorrt-llm": {"reserved_output": 1.0}, "sglang": {"prompts_first": 1.0}}


def free_constants() -> list[FreeConstant]:
    """The table as a list."""
    found = []
    for gpu in GPUS:
        keys: tuple[str, ...] = (gpu, *LIKE_HOPPER) if gpu == "hopper" else (gpu,)
        fields = GPU_FIELDS if gpu == "hopper" else GPU_FIELDS | BLACKWELL_FIELDS
        found += [FreeConstant("gpus", keys, name, *values) for name, values in fields.items()]
    for engine in ENGINES:
        likes = tuple(key for key, like in LIKE_ENGINE.items() if like == engine)
        for name, values in ENGINE_FIELDS.items():
            own = {key for key in likes if key.endswith("-2025") and name in OF_2025}
            found += [FreeConstant("engines", (key,), name, *values) for key in sorted(own)]
            apart = {"tensorrt-llm-2024"} if name in OF_2024 else set()
            apart |= {"vllm-2024"} if name == "iteration_seconds" else set()
            keys = (engine, *(key for key in likes if key not in own | apart))
            found.append(FreeConstant("engines", keys, name, *values))
        bunched = ("bunched_prompts", BUNCHED[engine], 0.3, 1000.0, 2)
        found.append(FreeConstant("engines", (engine, *likes), *bunched))
    everyone = (*ENGINES, *LIKE_ENGINE)
    return [
        *found,
        FreeConstant("engines", everyone, "expert_variety", 0.7, 0.2, 1.0, 4),
        FreeConstant("engines", everyone, "scaling_seconds", 1e-5, 1e-7, 1e-4, 4),
        FreeConstant("engines", everyone, "draft_acceptance", 0.7, 0.3, 0.9, 4),
        FreeConstant("engines", everyone, "recurrent_seconds", 25e-6, 3e-6, 2e-4, 4),
        FreeConstant("engines", everyone, "indexer_seconds", 2e-5, 3e-6, 2e-4, 2),
        FreeConstant("engines", TENSORRT, "expanded_speed", 1.0, 0.2, 1.5, 4),
        *(FreeConstant("engines", ("tensorrt-llm-2024",), n, *v) for n, v in OF_2024.items()),
        FreeConstant("engines", ("vllm-2024",), "product_speed", 0.7, 0.2, 1.0, 2),
        FreeConstant("engines", ("vllm-2024",), "iteration_seconds", 5e-3, 1e-4, 8e-2, 1),
    ]
