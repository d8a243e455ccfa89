"""Engines that serve: their commands, what they refuse, and that the spec knows the same names."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import get_args

import pytest

from hpctrain.base.errors import InvalidInputError
from hpctrain.serve.engines.contract import (
    CpuEngine,
    EngineStart,
    LoraAdapter,
    NodeOfReplica,
    TlsFiles,
)
from hpctrain.serve.engines.registry import SERVING_ENGINES, command_of, refusals_of
from hpctrain.spec.service import ServingEngineName

START = EngineStart(
    python="python3",
    model_path="/weights/llama-70b",
    served_name="llama",
    host="10.0.0.7",
    port=8000,
    tensor_parallel=4,
    max_model_tokens=4096,
    max_sequences=256,
    max_batched_tokens=8192,
    memory_fraction=0.9,
    drain_seconds=120,
    settings_path="/run/engine.yaml",
)
ONE_PROCESS = replace(START, tensor_parallel=1)
ADAPTERS = (LoraAdapter("law", "/lora/law", 8), LoraAdapter("code", "/lora/code", 20))


def line(name: ServingEngineName, start: EngineStart) -> str:
    return " ".join(command_of(name, start).words)


def test_the_spec_names_the_engines_of_the_table() -> None:
    assert tuple(SERVING_ENGINES) == get_args(ServingEngineName)
    assert all(name == engine.name for name, engine in SERVING_ENGINES.items())


def test_vllm() -> None:
    assert line("vllm", START) == (
        "python3 -m vllm.entrypoints.cli.main serve /weights/llama-70b --served-model-name llama "
        "--host 10.0.0.7 --port 8000 --tensor-parallel-size 4 --pipeline-parallel-size 1 "
        "--max-model-len 4096 --max-num-seqs 256 --max-num-batched-tokens 8192 "
        "--gpu-memory-utilization 0.9 --shutdown-timeout 120 "
        "--disable-access-log-for-endpoints /health,/metrics"
    )


def test_sglang() -> None:
    assert line("sglang", START) == (
        "python3 -m sglang.launch_server --model-path /weights/llama-70b --served-model-name llama "
        "--host 10.0.0.7 --port 8000 --tp-size 4 --pp-size 1 --context-length 4096 "
        "--max-running-requests 256 --chunked-prefill-size 8192 --mem-fraction-static 0.9 "
        "--enable-metrics"
    )


def test_tensorrt_llm() -> None:
    command = command_of("tensorrt-llm", replace(START, kv_precision="fp8"))
    assert " ".join(command.words) == (
        "python3 -m tensorrt_llm.commands.serve serve /weights/llama-70b "
        "--served_model_name llama --backend pytorch --host 10.0.0.7 --port 8000 --tp_size 4 "
        "--pp_size 1 --max_seq_len 4096 --max_batch_size 256 --max_num_tokens 8192 "
        "--kv_cache_free_gpu_memory_fraction 0.9 --config /run/engine.yaml"
    )
    assert json.loads(command.settings or "") == {
        "enable_chunked_prefill": True,
        "enable_iter_perf_stats": True,
        "kv_cache_config": {"dtype": "fp8"},
        "return_perf_metrics": True,
    }


def test_transformers() -> None:
    command = command_of("transformers", replace(ONE_PROCESS, precision="bf16"))
    assert " ".join(command.words) == (
        "python3 -m transformers.cli.transformers serve llama --host 10.0.0.7 --port 8000 "
        "--dtype bfloat16 --continuous-batching --cb-max-batch-tokens 8192 "
        "--cb-max-memory-percent 0.9"
    )
    assert command.model_link == "llama"


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("vllm", {"precision": "fp8"}, "--quantization fp8"),
        ("vllm", {"precision": "bf16", "kv_precision": "fp8"}, "--kv-cache-dtype fp8"),
        ("vllm", {"adapters": ADAPTERS}, "--max-lora-rank 32 --lora-modules law=/lora/law code="),
        ("vllm", {"tls": TlsFiles("/c.pem", "/k.pem")}, "--ssl-certfile /c.pem --ssl-keyfile /k"),
        ("vllm", {"extra_arguments": ("--seed", "7")}, "--seed 7"),
        ("sglang", {"precision": "fp8"}, "--quantization fp8"),
        ("sglang", {"kv_precision": "fp8"}, "--kv-cache-dtype fp8_e4m3"),
        ("sglang", {"adapters": ADAPTERS}, "--max-loras-per-batch 3 --max-lora-rank 20 --lora-pat"),
    ],
)
def test_what_a_field_adds(name: ServingEngineName, changes: dict[str, object], words: str) -> None:
    assert words in line(name, replace(START, **changes))  # type: ignore[arg-type]


def test_a_quantized_checkpoint_says_its_precision_itself() -> None:
    quantized = replace(START, precision="fp8", quantized_checkpoint=True)
    for name in ("vllm", "sglang", "tensorrt-llm"):
        assert "quantization" not in line(name, quantized)


def test_a_replica_on_two_nodes_answers_on_the_first() -> None:
    nodes = [
        replace(START, pipeline_parallel=2, node=NodeOfReplica(2, rank, "n1", 29600))
        for rank in (0, 1)
    ]
    first, second = (line("vllm", start) for start in nodes)
    words = "--distributed-executor-backend mp --nnodes 2 --node-rank {} --master-addr n1 "
    assert words.format(0) + "--master-port 29600" in first and "--headless" not in first
    assert words.format(1) + "--master-port 29600 --headless" in second
    assert "--nnodes 2 --node-rank 1 --dist-init-addr n1:29600" in line("sglang", nodes[1])
    assert line("tensorrt-llm", nodes[1]).startswith("trtllm-llmapi-launch python3 ")
    assert SERVING_ENGINES["tensorrt-llm"].tasks == "one per GPU"


def test_a_replica_on_two_nodes_is_reached_over_the_interface_of_the_profile() -> None:
    node = NodeOfReplica(2, 0, "n1", 29600, "10.1.0.5")
    assert command_of("vllm", replace(START, node=node)).environment["VLLM_HOST_IP"] == "10.1.0.5"
    assert "VLLM_HOST_IP" not in command_of("vllm", START).environment


def test_a_processor_instead_of_gpus() -> None:
    start = replace(ONE_PROCESS, cpu=CpuEngine(threads=2, kv_cache_gib=3), precision="fp32")
    command = command_of("vllm", start)
    assert "--enforce-eager --distributed-executor-backend uni" in " ".join(command.words)
    assert "--gpu-memory-utilization" not in command.words
    assert command.environment["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert command.environment["OMP_NUM_THREADS"] == "2"
    assert "--device cpu" in line("transformers", start)


def test_a_key_is_in_no_command_line() -> None:
    command = command_of("vllm", replace(START, api_key_path="/secrets/key"))
    assert command.secret_files == {"VLLM_API_KEY": "/secrets/key"}
    assert "/secrets/key" not in " ".join((*command.words, *command.environment.values()))


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("vllm", {"precision": "int4"}, "quantize the checkpoint first"),
        ("vllm", {"precision": "bf16", "quantized_checkpoint": True}, "does not unpack it"),
        ("vllm", {"precision": "bf16", "kv_precision": "fp32"}, "only beside weights in fp32"),
        ("vllm", {"adapters": (LoraAdapter("a", "/a", 1024),)}, "up to rank 512"),
        ("sglang", {"precision": "fp4"}, "quantized to fp4 already"),
        ("sglang", {"precision": "bf16", "quantized_checkpoint": True}, "does not unpack it"),
        ("sglang", {"kv_precision": "fp32"}, "keeps no keys and values in fp32"),
        ("sglang", {"api_key_path": "/key"}, "leave the token to the router"),
        ("sglang", {"cpu": CpuEngine()}, "GPUs only"),
        ("tensorrt-llm", {"precision": "fp8"}, "Model Optimizer"),
        ("tensorrt-llm", {"precision": "bf16", "quantized_checkpoint": True}, "does not unpack"),
        ("tensorrt-llm", {"kv_precision": "fp16"}, "or in fp8"),
        ("tensorrt-llm", {"adapters": ADAPTERS}, "in each request"),
        ("tensorrt-llm", {"tls": TlsFiles("/c", "/k")}, "leave both to the router"),
        ("tensorrt-llm", {"settings_path": None}, "needs a file"),
        ("tensorrt-llm", {"cpu": CpuEngine()}, "GPUs only"),
        ("transformers", {"tensor_parallel": 2}, "must be 1"),
        ("transformers", {"precision": "fp8"}, "quantized to fp8"),
        ("transformers", {"precision": "bf16", "quantized_checkpoint": True}, "leave `precision`"),
        ("transformers", {"kv_precision": "fp8"}, "as it computes"),
        ("transformers", {"served_name": "org/llama"}, "has a slash"),
        ("transformers", {"adapters": ADAPTERS}, "merge them"),
        ("transformers", {"api_key_path": "/key"}, "leave both to the router"),
        ("vllm", {"extra_arguments": ("--api-key=abc",)}, "process list"),
        ("vllm", {"extra_arguments": ("--api_key", "abc")}, "process list"),
        ("vllm", {"extra_arguments": ("--port=1",)}, "set from the spec's own fields"),
        ("vllm", {"extra_arguments": ("--max-num-se", "7")}, "set from the spec's own fields"),
        ("tensorrt-llm", {"extra_arguments": ("--tp_size", "2")}, "the spec's own fields"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_with_a_reason(
    name: ServingEngineName, changes: dict[str, object], reason: str
) -> None:
    base = START if name != "transformers" else ONE_PROCESS
    assert refusals_of(name, base) == ()
    changed = replace(base, **changes)  # type: ignore[arg-type]
    assert [reason in line for line in refusals_of(name, changed)] == [True]
    with pytest.raises(InvalidInputError):
        command_of(name, changed)
