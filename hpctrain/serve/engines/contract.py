"""Describe an engine that serves: how it is started, asked whether it is ready, drained and read.

    command(start)   words, environment and settings of one engine process (EngineCommand)
    ready            GET path that answers 200 when requests may come
    drain            what SIGTERM does to requests that have begun
    metrics          GET path and names of what Prometheus reads

Belongs here: the record and what it is asked with. Does not belong here: any engine (each has a
module beside this one), the table of engines (see `registry`), starting one (see `replica`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hpctrain.spec.service import KvPrecision, ServingEngineName, WeightPrecision


@dataclass(frozen=True)
class LoraAdapter:
    """An adapter of PEFT that requests name as their model."""

    name: str
    path: str
    rank: int


@dataclass(frozen=True)
class TlsFiles:
    """PEM files by which the engine itself speaks HTTPS."""

    certificate_path: str
    key_path: str


@dataclass(frozen=True)
class NodeOfReplica:
    """Which node of a replica on several nodes a command is for; node 0 answers requests.

    `address`: where the other nodes reach this one; None: the engine chooses.
    """

    nodes: int
    rank: int
    leader_host: str
    leader_port: int
    address: str | None = None


@dataclass(frozen=True)
class CpuEngine:
    """An engine without GPUs, as in tests and demos."""

    threads: int = 1
    kv_cache_gib: int = 1


@dataclass(frozen=True)
class EngineStart:
    """What an engine is started with, in words that no engine owns; None: the engine's default."""

    python: str
    model_path: str
    served_name: str
    host: str
    port: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    precision: WeightPrecision | None = None
    # config.json has a `quantization_config`: engines take the precision from there.
    quantized_checkpoint: bool = False
    kv_precision: KvPrecision | None = None
    max_model_tokens: int | None = None
    max_sequences: int | None = None
    max_batched_tokens: int | None = None
    memory_fraction: float | None = None
    adapters: tuple[LoraAdapter, ...] = ()
    drain_seconds: int = 0
    extra_arguments: tuple[str, ...] = ()
    tls: TlsFiles | None = None
    # A file with one token; the token itself is in no command line.
    api_key_path: str | None = None
    node: NodeOfReplica | None = None
    cpu: CpuEngine | None = None
    # Where the text of `EngineCommand.settings` will be, for engines that read a file.
    settings_path: str | None = None


@dataclass(frozen=True)
class EngineCommand:
    """One engine process: what to write, what to set and what to run."""

    words: tuple[str, ...]
    environment: dict[str, str]
    # Variables whose values are read from files by whoever starts the engine, right before.
    secret_files: dict[str, str]
    # Written to `EngineStart.settings_path` before the start; None: the engine reads no file.
    settings: str | None = None
    # A link to the weights with this name in the engine's working directory, for engines that
    # answer to the path that they were started with and to no other name.
    model_link: str | None = None


@dataclass(frozen=True)
class EngineDrain:
    """What an engine does with requests that have begun when it gets SIGTERM.

    `finishes`: `within` the seconds of `EngineStart.drain_seconds` and aborts what is left then;
    `all` of them, however long that takes, so that its starter ends it at the deadline; `none`.
    `health_fails`: the ready path stops answering 200. Either way the engine is withdrawn from
    the router first: requests that reach it now are lost.
    """

    finishes: Literal["within", "all", "none"]
    health_fails: bool
    refuses_new: bool


@dataclass(frozen=True)
class EngineMetrics:
    """Names of what an engine shows to Prometheus; histograms without `_bucket`.

    All times are in seconds. None: the engine does not show it.
    """

    path: str
    requests_running: str
    requests_waiting: str
    kv_cache_used_fraction: str
    prompt_tokens_total: str
    generation_tokens_total: str
    ttft_seconds: str
    tpot_seconds: str
    e2e_seconds: str
    queue_seconds: str | None = None
    preemptions_total: str | None = None
    prefix_cache_hits_total: str | None = None
    prefix_cache_queries_total: str | None = None


@dataclass(frozen=True)
class ServingEngine:
    """All that the rest of hpctrain knows about one engine."""

    name: ServingEngineName
    title: str
    # Releases whose documentation or source the module follows.
    reviewed: str
    command: Callable[[EngineStart], EngineCommand]
    # Options that hpctrain sets from the spec: `engine.arguments` must not contain them.
    own_options: frozenset[str]
    # What this engine cannot do of a start, one line for each reason.
    refusals: Callable[[EngineStart], tuple[str, ...]]
    drain: EngineDrain
    metrics: EngineMetrics | None
    ready_path: str = "/health"
    # Tasks of one engine on several nodes.
    tasks: Literal["one per node", "one per GPU"] = "one per node"
    # Takes prompts as token ids, and `ignore_eos`, so that a load test has exact lengths.
    exact_lengths: bool = True


def option(name: str, value: object) -> tuple[str, ...]:
    """Return two words for an option that is given, none for None."""
    return () if value is None else (name, str(value))
