"""`transformers serve`: any model class that trains here, without an engine's kernels.

It runs for real in the tests. Options are those of `transformers serve --help` of 5.19.0, which
has neither metrics nor parallel ranks, and answers to no name but the path that it was given (400
"Server is pinned to"), so that this path is a link with the served name. Belongs here: all that
hpctrain knows about it. Does not belong here: the model classes themselves.
"""

from __future__ import annotations

from hpctrain.serve.engines.contract import (
    EngineCommand,
    EngineDrain,
    EngineStart,
    ServingEngine,
    option,
)

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# `--quantization` by bitsandbytes while weights are loaded.
_ONLINE = {"int8": "bnb-8bit", "int4": "bnb-4bit"}
_OWN_OPTIONS = frozenset(
    {
        *("--host", "--port", "--dtype", "--quantization", "--device"),
        *("--continuous-batching", "--no-continuous-batching"),
        *("--cb-max-batch-tokens", "--cb-max-memory-percent"),
    }
)


def _command(start: EngineStart) -> EngineCommand:
    precision: tuple[str, ...] = ()
    if start.precision in _DTYPES:
        precision = ("--dtype", _DTYPES[start.precision])
    elif start.precision in _ONLINE and not start.quantized_checkpoint:
        precision = ("--quantization", _ONLINE[start.precision])
    # Requests are batched on GPUs; on a processor paged attention has no kernel.
    batching: tuple[str, ...] = ("--device", "cpu")
    if start.cpu is None:
        batching = (
            "--continuous-batching",
            *option("--cb-max-batch-tokens", start.max_batched_tokens),
            *option("--cb-max-memory-percent", start.memory_fraction),
        )
    words = (
        *(start.python, "-m", "transformers.cli.transformers", "serve", start.served_name),
        *("--host", start.host, "--port", str(start.port)),
        *precision,
        *batching,
        *start.extra_arguments,
    )
    environment = {"HF_HUB_OFFLINE": "1"}
    if start.cpu is not None:
        environment["OMP_NUM_THREADS"] = str(start.cpu.threads)
    return EngineCommand(words, environment, {}, model_link=start.served_name)


def _refusals(start: EngineStart) -> tuple[str, ...]:
    found = []
    if start.tensor_parallel * start.pipeline_parallel > 1 or start.node is not None:
        found.append("`transformers serve` runs in one process: tp and pp must be 1")
    if start.precision in ("fp8", "fp4") and not start.quantized_checkpoint:
        found.append(
            f"`transformers serve` needs a checkpoint that is quantized to {start.precision}"
        )
    if start.quantized_checkpoint and start.precision in _DTYPES:
        found.append("the checkpoint is quantized: leave `precision` to it")
    if start.kv_precision not in (None, start.precision):
        found.append("`transformers serve` keeps keys and values as it computes")
    if "/" in start.served_name:
        found.append(f"`transformers serve` cannot answer to `{start.served_name}`: it has a slash")
    if start.adapters:
        found.append("`transformers serve` has no adapters: merge them (hpctrain export)")
    if start.tls is not None or start.api_key_path is not None:
        found.append(
            "`transformers serve` speaks plain HTTP without keys: leave both to the router"
        )
    return tuple(found)


ENGINE = ServingEngine(
    name="transformers",
    title="transformers serve",
    reviewed="transformers 5.19.0, by running it",
    command=_command,
    own_options=_OWN_OPTIONS,
    refusals=_refusals,
    drain=EngineDrain(finishes="all", health_fails=True, refuses_new=True),
    metrics=None,
    exact_lengths=False,
)
