"""SGLang, by its documentation: this machine cannot run it, a site's GPUs can.

Options: docs/advanced_features/server_arguments.md and srt/server_args.py (stored 2026). Metrics:
docs/references/production_metrics.md. Drain: `sigterm_watchdog` of srt/managers/tokenizer_manager.
Belongs here: all that hpctrain knows about SGLang. Does not belong here: the contract.
"""

from __future__ import annotations

from hpctrain.serve.engines.contract import (
    EngineCommand,
    EngineDrain,
    EngineMetrics,
    EngineStart,
    ServingEngine,
    option,
)

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_KV_DTYPES = {"bf16": "bf16", "fp8": "fp8_e4m3"}
_OWN_OPTIONS = frozenset(
    {
        *("--model-path", "--model", "--served-model-name", "--host", "--port", "--config"),
        *("--tensor-parallel-size", "--tp-size", "--tp", "--pipeline-parallel-size", "--pp-size"),
        *("--dtype", "--quantization", "--kv-cache-dtype", "--context-length"),
        *("--max-running-requests", "--chunked-prefill-size", "--mem-fraction-static"),
        *("--enable-lora", "--lora-paths", "--max-loras-per-batch", "--max-lora-rank"),
        *("--enable-metrics", "--api-key", "--admin-api-key", "--ssl-keyfile", "--ssl-certfile"),
        *("--dist-init-addr", "--nccl-init-addr", "--nnodes", "--node-rank", "--device"),
    }
)


def _command(start: EngineStart) -> EngineCommand:
    online = "fp8" if start.precision == "fp8" and not start.quantized_checkpoint else None
    kv_cache = None
    if start.kv_precision is not None and start.kv_precision != start.precision:
        kv_cache = _KV_DTYPES.get(start.kv_precision)
    adapters: tuple[str, ...] = ()
    if start.adapters:
        adapters = (
            "--enable-lora",
            # One batch may also contain requests to the base model.
            *("--max-loras-per-batch", str(len(start.adapters) + 1)),
            *("--max-lora-rank", str(max(adapter.rank for adapter in start.adapters))),
            *("--lora-paths", *(f"{adapter.name}={adapter.path}" for adapter in start.adapters)),
        )
    node: tuple[str, ...] = ()
    if start.node is not None:
        node = (
            *("--nnodes", str(start.node.nodes), "--node-rank", str(start.node.rank)),
            *("--dist-init-addr", f"{start.node.leader_host}:{start.node.leader_port}"),
        )
    words = (
        *(start.python, "-m", "sglang.launch_server", "--model-path", start.model_path),
        *("--served-model-name", start.served_name),
        *("--host", start.host, "--port", str(start.port)),
        *("--tp-size", str(start.tensor_parallel), "--pp-size", str(start.pipeline_parallel)),
        *option("--dtype", _DTYPES.get(start.precision or "")),
        *option("--quantization", online),
        *option("--kv-cache-dtype", kv_cache),
        *option("--context-length", start.max_model_tokens),
        *option("--max-running-requests", start.max_sequences),
        *option("--chunked-prefill-size", start.max_batched_tokens),
        *option("--mem-fraction-static", start.memory_fraction),
        *adapters,
        "--enable-metrics",
        *option("--ssl-certfile", start.tls and start.tls.certificate_path),
        *option("--ssl-keyfile", start.tls and start.tls.key_path),
        *node,
        *start.extra_arguments,
    )
    return EngineCommand(words, {"HF_HUB_OFFLINE": "1"}, {})


def _refusals(start: EngineStart) -> tuple[str, ...]:
    found = []
    if not start.quantized_checkpoint and start.precision in ("fp4", "int8", "int4"):
        found.append(f"SGLang needs a checkpoint that is quantized to {start.precision} already")
    if start.quantized_checkpoint and start.precision in _DTYPES:
        found.append(
            f"the checkpoint is quantized, and SGLang does not unpack it to {start.precision}"
        )
    if start.kv_precision not in (None, start.precision, *_KV_DTYPES):
        found.append(
            f"SGLang keeps no keys and values in {start.kv_precision} beside other weights"
        )
    if start.api_key_path is not None:
        found.append(
            "SGLang takes its key on the command line only, where others on the node can read it: "
            "leave the token to the router"
        )
    if start.cpu is not None:
        found.append("SGLang is started on GPUs only here")
    return tuple(found)


ENGINE = ServingEngine(
    name="sglang",
    title="SGLang",
    reviewed="SGLang's documentation and source as of 2026, not run here",
    command=_command,
    own_options=_OWN_OPTIONS,
    refusals=_refusals,
    # Waits for all requests, looks every 5 seconds, and has no limit; /health answers 503 then.
    drain=EngineDrain(finishes="all", health_fails=True, refuses_new=False),
    metrics=EngineMetrics(
        path="/metrics",
        requests_running="sglang:num_running_reqs",
        requests_waiting="sglang:num_queue_reqs",
        kv_cache_used_fraction="sglang:token_usage",
        prompt_tokens_total="sglang:prompt_tokens_total",
        generation_tokens_total="sglang:generation_tokens_total",
        ttft_seconds="sglang:time_to_first_token_seconds",
        tpot_seconds="sglang:inter_token_latency_seconds",
        e2e_seconds="sglang:e2e_request_latency_seconds",
        queue_seconds="sglang:queue_time_seconds",
        # `sglang:num_retracted_reqs` is a gauge of the last batch; this one is the counter.
        preemptions_total="sglang:num_retracted_requests_total",
    ),
)
