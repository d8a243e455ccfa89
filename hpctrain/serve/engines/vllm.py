"""vLLM, which runs for real in the tests.

Options are those of `vllm serve --help=all` of 0.32.0, metrics those of its `/metrics`; a test
hands every command to vLLM's own parser. Belongs here: all that hpctrain knows about vLLM. Does
not belong here: installing it (see `scripts/serving-environment`).
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
_KV_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp8": "fp8"}
# `--quantization` that vLLM applies to 16-bit weights while it loads them (config/quantization).
_ONLINE = {"fp8": "fp8"}
# The values that `--max-lora-rank` takes.
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_OWN_OPTIONS = frozenset(
    {
        *("--model", "--served-model-name", "--host", "--port", "--uds", "--config"),
        *("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"),
        *("--dtype", "--quantization", "-q", "--kv-cache-dtype", "--max-model-len"),
        *("--max-num-seqs", "--max-num-batched-tokens", "--gpu-memory-utilization"),
        *("--enable-lora", "--lora-modules", "--max-loras", "--max-lora-rank"),
        *("--shutdown-timeout", "--api-key", "--ssl-keyfile", "--ssl-certfile", "--hf-token"),
        *("--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port", "--headless"),
        *("--data-parallel-size", "-dp", "--disable-access-log-for-endpoints"),
    }
)


def _command(start: EngineStart) -> EngineCommand:
    online = None if start.quantized_checkpoint else _ONLINE.get(start.precision or "")
    kv_cache = None
    if start.kv_precision is not None and start.kv_precision != start.precision:
        kv_cache = _KV_DTYPES.get(start.kv_precision)
    words = (
        *(start.python, "-m", "vllm.entrypoints.cli.main", "serve", start.model_path),
        *("--served-model-name", start.served_name),
        *("--host", start.host, "--port", str(start.port)),
        *("--tensor-parallel-size", str(start.tensor_parallel)),
        *("--pipeline-parallel-size", str(start.pipeline_parallel)),
        *option("--dtype", _DTYPES.get(start.precision or "")),
        *option("--quantization", online),
        *option("--kv-cache-dtype", kv_cache),
        *option("--max-model-len", start.max_model_tokens),
        *option("--max-num-seqs", start.max_sequences),
        *option("--max-num-batched-tokens", start.max_batched_tokens),
    )
    if start.cpu is None:
        words += option("--gpu-memory-utilization", start.memory_fraction)
    else:
        # Nothing to compile or capture for a processor in a demo: it would take a minute more. The
        # model runs in the scheduler's process: in one of its own, both would spin on shared memory
        # for a second after each iteration (shm_broadcast.SpinCondition), on cores that others
        # need.
        words += ("--enforce-eager", "--distributed-executor-backend", "uni")
    if start.adapters:
        rank = max(adapter.rank for adapter in start.adapters)
        words += (
            "--enable-lora",
            *("--max-loras", str(len(start.adapters))),
            *("--max-lora-rank", str(next(known for known in _LORA_RANKS if known >= rank))),
            *("--lora-modules", *(f"{adapter.name}={adapter.path}" for adapter in start.adapters)),
        )
    words += (
        *("--shutdown-timeout", str(start.drain_seconds)),
        *("--disable-access-log-for-endpoints", "/health,/metrics"),
        *option("--ssl-certfile", start.tls and start.tls.certificate_path),
        *option("--ssl-keyfile", start.tls and start.tls.key_path),
    )
    if start.node is not None:
        # docs/serving/parallelism_scaling.md, "Running vLLM with MultiProcessing": the same command
        # on each node, and `--headless` on all but the first, which answers requests.
        node = start.node
        words += (
            *("--distributed-executor-backend", "mp"),
            *("--nnodes", str(node.nodes), "--node-rank", str(node.rank)),
            *("--master-addr", node.leader_host, "--master-port", str(node.leader_port)),
            *(("--headless",) if node.rank else ()),
        )
    words += start.extra_arguments
    # vllm/envs.py: no report of usage to its makers; no look-ups of local directories on the hub
    environment = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    if start.node is not None and start.node.address is not None:
        # vllm/utils/network_utils.py: else the interface of the route to 8.8.8.8, if there is one
        environment["VLLM_HOST_IP"] = start.node.address
    if start.cpu is not None:
        environment |= {
            "OMP_NUM_THREADS": str(start.cpu.threads),
            "VLLM_CPU_KVCACHE_SPACE": str(start.cpu.kv_cache_gib),
            # Cores are Slurm's to bind: by default vLLM takes some by itself.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Lets `--distributed-executor-backend uni` stand (platforms/cpu.py).
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
    secrets = {} if start.api_key_path is None else {"VLLM_API_KEY": start.api_key_path}
    return EngineCommand(words, environment, secrets)


def _refusals(start: EngineStart) -> tuple[str, ...]:
    found = []
    if not start.quantized_checkpoint and start.precision in ("fp4", "int8", "int4"):
        found.append(
            f"vLLM makes no {start.precision} weights of others: quantize the checkpoint first "
            "(llm-compressor), which config.json says by `quantization_config`"
        )
    if start.quantized_checkpoint and start.precision in _DTYPES:
        found.append(
            f"the checkpoint is quantized, and vLLM does not unpack it to {start.precision}"
        )
    if start.kv_precision == "fp32" and start.precision != "fp32":
        found.append("vLLM keeps keys and values in fp32 only beside weights in fp32")
    if start.adapters and max(adapter.rank for adapter in start.adapters) > _LORA_RANKS[-1]:
        found.append(f"vLLM takes adapters up to rank {_LORA_RANKS[-1]}")
    return tuple(found)


ENGINE = ServingEngine(
    name="vllm",
    title="vLLM",
    reviewed="vLLM 0.32.0, by running it",
    command=_command,
    own_options=_OWN_OPTIONS,
    refusals=_refusals,
    # Seen with 0.32.0: requests that have begun end with 200, new ones get 500, and /health
    # goes on answering 200 (v1/engine/core.py, EngineShutdownState).
    drain=EngineDrain(finishes="within", health_fails=False, refuses_new=True),
    metrics=EngineMetrics(
        path="/metrics",
        requests_running="vllm:num_requests_running",
        requests_waiting="vllm:num_requests_waiting",
        kv_cache_used_fraction="vllm:kv_cache_usage_perc",
        prompt_tokens_total="vllm:prompt_tokens_total",
        generation_tokens_total="vllm:generation_tokens_total",
        ttft_seconds="vllm:time_to_first_token_seconds",
        tpot_seconds="vllm:request_time_per_output_token_seconds",
        e2e_seconds="vllm:e2e_request_latency_seconds",
        queue_seconds="vllm:request_queue_time_seconds",
        preemptions_total="vllm:num_preemptions_total",
        prefix_cache_hits_total="vllm:prefix_cache_hits_total",
        prefix_cache_queries_total="vllm:prefix_cache_queries_total",
    ),
)
