"""How a published benchmark loads a server and sets it up, where its rows do not say.

Belongs here: facts from the public scripts of benchmarks, each with where it stands. Does not
belong here: figures that were measured, rows (`serving_rows`), layouts (`serving_recipes`).

InferenceX (formerly InferenceMAX): SemiAnalysisAI/InferenceX, `benchmarks/*.sh` and
`benchmarks/benchmark_lib.sh` in its history from 2025-10-29 to 2026-04-27.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Protocol:
    """How a benchmark loads a server; None: the engine's own setting.

    length_share         mean length over the stated one
    requests_per_stream  of which the first ones come all at once
    equal_lengths        1: all requests are alike
    waited_iterations    that a request waits in the mean, by settings of the scheduler
    token_budget         tokens of one iteration at most
    memory_share         of the GPU's memory that the engine takes
    """

    length_share: float = 1.0
    requests_per_stream: float = 10.0
    equal_lengths: int = 1
    waited_iterations: float = 0.0
    token_budget: float | None = None
    memory_share: float | None = None


AS_DEFAULT = Protocol()


@dataclass(frozen=True)
class BenchmarkRun:
    """What the settings of a script depend on."""

    engine: str
    model: str
    weights: str
    generation: str  # of the GPU
    tp: int
    streams: float
    prompt_tokens: float
    output_tokens: float
    drafted_tokens: int = 0
    dp: int = 1
    day: str = ""  # of the measurement, as 2026-01-29


# Of all of InferenceX: lengths are uniform from 0.8 to 1 of the stated ones (RANDOM_RANGE_RATIO
# 0.8), ten requests per stream (--num-prompts).
INFERENCE_X = Protocol(length_share=0.9, requests_per_stream=10.0, equal_lengths=0)


def inference_x(run: BenchmarkRun) -> Protocol:
    """What InferenceX's script for one replica that does prompts and answers sets beside that."""
    return replace(
        INFERENCE_X,
        waited_iterations=_waited(run),
        token_budget=_token_budget(run),
        memory_share=_memory_share(run),
    )


def _waited(run: BenchmarkRun) -> float:
    """Iterations waited for: half of those between two looks for requests, or for a full batch.

    SGLang's scripts for Blackwell have --scheduler-recv-interval 30 from 16 streams on and 10
    below (GLM-5 and DeepSeek on 4 GPUs: 10; GLM-5 in FP8: none). TensorRT-LLM's hold prompts back
    for batch_wait_timeout_iters: 20 for Llama 70B with tp < 8, 40 for DeepSeek in FP8 on B200 from
    64 streams on, since 2026-01-29; both with 1024/1024 tokens only. With attention data parallel
    ranks DeepSeek's wait for prompts on all of them (attention_dp_config: timeout_iters 60).
    """
    if run.engine == "sglang" and run.generation == "blackwell":
        few = "deepseek" in run.model and run.weights == "fp8" and run.tp == 4
        slow = run.streams >= 16 and not few
        if "glm" in run.model:
            return 0.0 if run.weights == "fp8" else 5.0
        return 15.0 if slow else 5.0
    if run.engine == "tensorrt-llm" and "deepseek" in run.model and run.dp > 1:
        return _held_back(run, 60)
    if run.engine == "tensorrt-llm" and run.prompt_tokens == run.output_tokens == 1024:
        if "llama" in run.model and run.tp < 8:
            return _held_back(run, 20)
        late = run.day >= "2026-01-29" and run.streams >= 64 and not run.drafted_tokens
        fits = run.generation == "blackwell" and run.weights == "fp8" and "deepseek" in run.model
        return _held_back(run, 40) if late and fits else 0.0
    return 0.0


def _held_back(run: BenchmarkRun, longest: float) -> float:
    """Iterations that a prompt is held back in the mean, where the first one waits `longest`.

    One request comes per output_tokens / streams iterations; those behind the first wait for less.
    """
    behind = longest * run.streams / run.output_tokens
    return longest * (1 + behind / 2) / (1 + behind)


def _token_budget(run: BenchmarkRun) -> float | None:
    """--chunked-prefill-size, --max-num-batched-tokens or --max_num_tokens of the scripts."""
    blackwell = run.generation == "blackwell"
    if run.engine == "sglang" and "deepseek" in run.model:
        if run.weights == "fp4":
            return 16384
        return 8192 if run.tp == 4 else 32768
    if run.engine == "sglang" and "qwen3.5" in run.model:
        return 32768 if blackwell else 16384
    if run.engine == "sglang" and "glm" in run.model:
        return 32768 if blackwell else None
    if run.engine == "vllm" and "minimax" in run.model and blackwell:
        return 2 * run.prompt_tokens
    if run.engine == "tensorrt-llm" and "gpt-oss" in run.model:
        return 20000
    if run.engine == "tensorrt-llm" and "llama" in run.model:
        return 16384
    if run.engine == "tensorrt-llm" and "deepseek" in run.model:
        each = run.streams / run.dp * (1 + run.drafted_tokens)
        whole = each + run.prompt_tokens + 64
        return whole if run.drafted_tokens else max(8192.0, whole)
    return None


def _memory_share(run: BenchmarkRun) -> float | None:
    """--mem-fraction-static 0.95 where weights would not fit else; 0.95 of vLLM for Kimi."""
    full = run.engine == "sglang" and "deepseek" in run.model and run.weights == "fp8"
    if (full and run.tp == 4) or (run.engine == "vllm" and "kimi" in run.model):
        return 0.95
    return None
