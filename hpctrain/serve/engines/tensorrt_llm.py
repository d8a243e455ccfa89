"""TensorRT-LLM by `trtllm-serve` with its PyTorch backend; by its documentation, not run here.

Options: tensorrt_llm/commands/serve.py and llmapi/llm_args.py (stored 2026). Metrics:
tensorrt_llm/metrics/collector.py, mounted by `return_perf_metrics`. Several nodes:
docs/source/commands/trtllm-serve, "Multi-node serving with Slurm". Belongs here: all that hpctrain
knows about TensorRT-LLM. Does not belong here: engine files, of which this backend needs none.
"""

from __future__ import annotations

import json

from hpctrain.serve.engines.contract import (
    EngineCommand,
    EngineDrain,
    EngineMetrics,
    EngineStart,
    ServingEngine,
    option,
)

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_OWN_OPTIONS = frozenset(
    {
        *("--host", "--port", "--backend", "--served_model_name"),
        *("--tp_size", "--tensor_parallel_size", "--pp_size", "--pipeline_parallel_size"),
        *("--max_batch_size", "--max_num_tokens", "--max_seq_len"),
        *("--kv_cache_free_gpu_memory_fraction", "--free_gpu_memory_fraction"),
        *("--config", "--extra_llm_api_options"),
    }
)


def _command(start: EngineStart) -> EngineCommand:
    # One process per GPU of all nodes runs this; the launcher makes them one MPI world.
    launcher = () if start.node is None else ("trtllm-llmapi-launch",)
    words = (
        *launcher,
        *(start.python, "-m", "tensorrt_llm.commands.serve", "serve", start.model_path),
        *("--served_model_name", start.served_name, "--backend", "pytorch"),
        *("--host", start.host, "--port", str(start.port)),
        *("--tp_size", str(start.tensor_parallel), "--pp_size", str(start.pipeline_parallel)),
        *option("--max_seq_len", start.max_model_tokens),
        *option("--max_batch_size", start.max_sequences),
        *option("--max_num_tokens", start.max_batched_tokens),
        *option("--kv_cache_free_gpu_memory_fraction", start.memory_fraction),
        *option("--config", start.settings_path),
        *start.extra_arguments,
    )
    # What has no option, in a file: JSON, which is YAML.
    settings: dict[str, object] = {
        # without these two, nothing is shown to Prometheus
        "enable_iter_perf_stats": True,
        "return_perf_metrics": True,
        "enable_chunked_prefill": True,
    }
    if start.precision in _DTYPES:
        settings["dtype"] = _DTYPES[start.precision]
    if start.kv_precision == "fp8":
        settings["kv_cache_config"] = {"dtype": "fp8"}
    text = json.dumps(settings, indent=2) + "\n"
    return EngineCommand(words, {"HF_HUB_OFFLINE": "1"}, {}, text)


def _refusals(start: EngineStart) -> tuple[str, ...]:
    found = []
    if start.precision not in (None, *_DTYPES) and not start.quantized_checkpoint:
        found.append(
            f"TensorRT-LLM needs a checkpoint that is quantized to {start.precision} already "
            "(NVIDIA's Model Optimizer)"
        )
    if start.quantized_checkpoint and start.precision in _DTYPES:
        found.append(
            f"the checkpoint is quantized, and TensorRT-LLM does not unpack it to {start.precision}"
        )
    if start.kv_precision not in (None, "fp8", start.precision):
        found.append("TensorRT-LLM keeps keys and values as it computes, or in fp8")
    if start.adapters:
        found.append("TensorRT-LLM names adapters in each request, not as models of its server")
    if start.tls is not None or start.api_key_path is not None:
        found.append("trtllm-serve speaks plain HTTP without keys: leave both to the router")
    if start.settings_path is None:
        found.append("trtllm-serve needs a file for its settings")
    if start.cpu is not None:
        found.append("TensorRT-LLM runs on GPUs only")
    return tuple(found)


ENGINE = ServingEngine(
    name="tensorrt-llm",
    title="TensorRT-LLM",
    reviewed="TensorRT-LLM's documentation and source as of 2026 (1.2), not run here",
    command=_command,
    own_options=_OWN_OPTIONS,
    refusals=_refusals,
    # uvicorn finishes what has begun, and takes nothing new, after SIGTERM; the parent of the
    # workers then gives them 10 seconds (commands/serve.py).
    drain=EngineDrain(finishes="all", health_fails=True, refuses_new=True),
    metrics=EngineMetrics(
        path="/prometheus/metrics",
        requests_running="trtllm_num_requests_running",
        requests_waiting="trtllm_num_requests_waiting",
        kv_cache_used_fraction="trtllm_kv_cache_utilization",
        prompt_tokens_total="trtllm_prompt_tokens_total",
        generation_tokens_total="trtllm_generation_tokens_total",
        ttft_seconds="trtllm_time_to_first_token_seconds",
        tpot_seconds="trtllm_time_per_output_token_seconds",
        e2e_seconds="trtllm_e2e_request_latency_seconds",
        queue_seconds="trtllm_request_queue_time_seconds",
    ),
    tasks="one per GPU",
)
