"""The spec of a service: one frozen document per YAML file of `kind: service`.

Belongs here: fields, their limits, and checks that need only the document itself. Does not belong
here: how many replicas of which shape keep the objectives (see `hpctrain.serve.plan`), the words
that start an engine (see `hpctrain.serve.engines`), facts about a cluster (see `profile`).
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from hpctrain.base.units import ByteSize, Duration, Latency
from hpctrain.spec.document import Contradiction, Document
from hpctrain.spec.job_text import JobText, SubmitText
from hpctrain.spec.model import ModelSpec
from hpctrain.spec.notify import NotifySpec
from hpctrain.spec.run import MOST_GPUS, EnvironmentSpec, Name, QueueSpec, ResourcesSpec

# As registered in `hpctrain.serve.engines.registry`; a test compares the two.
ServingEngineName = Literal["vllm", "sglang", "tensorrt-llm", "transformers"]
WeightPrecision = Literal["bf16", "fp16", "fp32", "fp8", "fp4", "int8", "int4"]
KvPrecision = Literal["bf16", "fp16", "fp32", "fp8"]
LatencyName = Literal["ttft", "tpot", "e2e"]
LATENCY_NAMES: tuple[LatencyName, ...] = ("ttft", "tpot", "e2e")
MOST_REQUEST_TOKENS = 10_000_000


class WeightsSpec(Document):
    """Which weights are served, and under which names clients ask for them."""

    path: SubmitText | None = Field(
        None,
        min_length=1,
        description="Local Hugging Face directory (config.json, safetensors); `$NAME` is put in "
        "where you submit",
    )
    run: str | None = Field(
        None,
        min_length=1,
        description="Id of a run: its newest good checkpoint is converted when the service starts",
    )
    name: str | None = Field(
        None, min_length=1, description="`model` of requests; default: the service's name"
    )
    adapters: dict[Name, SubmitText] = Field(
        {},
        description="LoRA adapters: `model` of requests, and a directory of PEFT; `$NAME` is put "
        "in where you submit",
    )
    stage: bool = Field(
        True,
        description="Copy the weights to node-local disk once per node, where the profile has one",
    )

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.path is None) == (self.run is None):
            raise ValueError("give exactly one of `path` and `run`")
        return self


class ServingEngineSpec(Document):
    """The program that answers requests; `auto` is chosen by the planner."""

    name: ServingEngineName = Field("vllm", description="vLLM unless there is a reason")
    python: JobText | None = Field(
        None,
        description="Interpreter that has the engine; default: the profile's; the job puts in "
        "`$NAME`",
    )
    precision: WeightPrecision | Literal["auto"] = Field(
        "auto", description="Of the weights as computed with; auto: as the checkpoint has them"
    )
    kv_precision: KvPrecision | Literal["auto"] = Field(
        "auto", description="Of keys and values; auto: as the weights' activations, so 16 bits"
    )
    tp: int | Literal["auto"] = Field("auto", description="Tensor parallel size, inside a node")
    pp: int | Literal["auto"] = Field("auto", description="Pipeline parallel size")
    max_sequences: int | Literal["auto"] = Field(
        "auto", description="Most requests that one replica computes at a time"
    )
    batch_tokens: int | Literal["auto"] = Field(
        "auto", description="Most tokens of one iteration (chunked prefill)"
    )
    max_length: int | Literal["auto"] = Field(
        "auto", description="Longest prompt with its answer, in tokens; auto: as traffic needs"
    )
    memory_fraction: float = Field(
        0.9, gt=0, le=1, description="Share of the GPU's memory that the engine may take"
    )
    arguments: tuple[JobText, ...] = Field(
        (),
        description="Further words of the engine's command line, as its documentation has them; "
        "the job puts in `$NAME`",
    )

    @field_validator("tp", "pp", "max_sequences", "batch_tokens", "max_length")
    @classmethod
    def _positive(cls, value: int | Literal["auto"]) -> int | Literal["auto"]:
        if value != "auto" and value < 1:
            raise ValueError("must be at least 1")
        return value


class LengthsSpec(Document):
    """A log-normal distribution of lengths in tokens, by its median and its 99th percentile."""

    p50: float = Field(ge=1, le=MOST_REQUEST_TOKENS, description="Median, in tokens")
    p99: float = Field(ge=1, le=MOST_REQUEST_TOKENS, description="99th percentile, in tokens")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.p99 < self.p50:
            raise ValueError(f"p99 {self.p99:g} is below p50 {self.p50:g}")
        return self


Lengths = Annotated[int, Field(ge=1, le=MOST_REQUEST_TOKENS)] | LengthsSpec


class TrafficSpec(Document):
    """The requests that will come."""

    rate: float = Field(gt=0, description="Requests per second at the busiest hour")
    prompt_tokens: Lengths | None = Field(
        None, description="One number, or `{p50: 400, p99: 3000}`"
    )
    output_tokens: Lengths | None = Field(None, description="The same for answers")
    trace: SubmitText | None = Field(
        None,
        min_length=1,
        description="CSV with the columns arrival_seconds, prompt_tokens, output_tokens: their "
        "order and lengths instead of a distribution; scaled to `rate`; `$NAME` is put in where "
        "you submit",
    )
    shared_prefix_tokens: int = Field(
        0, ge=0, description="Tokens at the start of prompts that all requests share"
    )

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        given = self.prompt_tokens is not None, self.output_tokens is not None
        if self.trace is None and not all(given):
            raise ValueError("give `prompt_tokens` and `output_tokens`, or a `trace`")
        if self.trace is not None and any(given):
            raise ValueError("a `trace` has the lengths: drop prompt_tokens and output_tokens")
        return self


class PercentilesSpec(Document):
    """Limits of one latency by percentile."""

    p50: Latency | None = Field(None, gt=0, description="Half of the requests are faster")
    p90: Latency | None = Field(None, gt=0, description="90 of 100 requests are faster")
    p95: Latency | None = Field(None, gt=0, description="95 of 100 requests are faster")
    p99: Latency | None = Field(None, gt=0, description="99 of 100 requests are faster")

    @model_validator(mode="after")
    def _some(self) -> Self:
        if not self.limits:
            raise ValueError("give at least one of p50, p90, p95 and p99")
        return self

    @property
    def limits(self) -> dict[str, float]:
        """Seconds by the name of the percentile, for those that are given."""
        names = ("p50", "p90", "p95", "p99")
        found = {name: getattr(self, name) for name in names}
        return {name: float(limit) for name, limit in found.items() if limit is not None}


class ObjectivesSpec(Document):
    """What is promised to clients, by latency and percentile."""

    ttft: PercentilesSpec | None = Field(None, description="Time to the first token of the answer")
    tpot: PercentilesSpec | None = Field(
        None, description="Time per further token: (e2e - ttft) / (output tokens - 1)"
    )
    e2e: PercentilesSpec | None = Field(None, description="Time to the last token")
    p99: Latency | None = Field(
        None,
        gt=0,
        description="A limit without saying of what: `serve plan` answers with the price of each "
        "reading (ttft, tpot, e2e), and nothing is started",
    )

    @model_validator(mode="after")
    def _some(self) -> Self:
        if self.p99 is None and not self.named:
            raise ValueError("give at least one of ttft, tpot and e2e")
        return self

    @property
    def named(self) -> dict[LatencyName, PercentilesSpec]:
        found = {name: getattr(self, name) for name in LATENCY_NAMES}
        return {name: one for name, one in found.items() if one is not None}


class ReplicasSpec(Document):
    """How many replicas there are, and when that changes."""

    count: int | Literal["auto"] = Field(
        "auto", description="At the busiest hour; auto: the planner's answer"
    )
    min: int = Field(1, ge=0, description="Never fewer; 0: none while nobody asks")
    max: int | None = Field(None, ge=1, description="Never more; default: the planner's answer")
    hours: dict[str, float] = Field(
        {},
        description="Share of `traffic.rate` by time of day, such as `{'08:00': 1, '20:00': 0.3}`: "
        "replicas are started so that they are ready by then",
    )
    time_zone: str = Field("UTC", description="Of `hours`, such as Europe/Berlin")
    react: bool = Field(
        False, description="Also start and stop replicas by the engines' queues and KV use"
    )
    idle: Duration | None = Field(
        None, gt=0, description="With min 0: stop the last replica after so long without requests"
    )

    @field_validator("count")
    @classmethod
    def _positive(cls, value: int | Literal["auto"]) -> int | Literal["auto"]:
        if value != "auto" and value < 1:
            raise ValueError("must be at least 1")
        return value

    @field_validator("hours")
    @classmethod
    def _times_of_day(cls, hours: dict[str, float]) -> dict[str, float]:
        for time_of_day, share in hours.items():
            hour, _, minute = time_of_day.partition(":")
            digits = len(time_of_day) == 5 and (hour + minute).isdigit()
            if not digits or int(hour) > 23 or int(minute) > 59:
                raise ValueError(f"`{time_of_day}` is no time of day such as 08:00")
            if not 0 <= share <= 1:
                raise ValueError(f"the share at {time_of_day} must be from 0 to 1")
        return hours

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max is not None and self.max < self.min:
            raise ValueError(f"max {self.max} is below min {self.min}")
        if self.idle is not None and self.min > 0:
            raise ValueError("idle needs min 0")
        return self


class TlsSpec(Document):
    """Files for HTTPS, which stay where they are."""

    certificate: SubmitText = Field(
        min_length=1, description="PEM file with the chain; `$NAME` is put in where you submit"
    )
    key: SubmitText = Field(
        min_length=1,
        description="PEM file, readable by its owner only; `$NAME` is put in where you submit",
    )


class RouterSpec(Document):
    """What clients talk to: it hands each request to a replica that is ready."""

    name: Literal["vllm-router", "haproxy"] = Field(
        "vllm-router", description="haproxy: where no Python package can be installed"
    )
    program: JobText | None = Field(
        None,
        description="Its path; default: beside the engine's Python, else on PATH; the job puts "
        "in `$NAME`",
    )
    policy: Literal["least_loaded", "round_robin", "cache_aware"] = Field(
        "least_loaded", description="Which replica gets a request"
    )
    place: Literal["job", "login"] = Field(
        "job", description="job: a small Slurm job with a successor; login: where `up` is typed"
    )
    partition: str | None = Field(None, description="Of its job; default: that of the replicas")
    cpus: int = Field(4, ge=1, description="CPUs of its job")
    memory: ByteSize = Field(ByteSize(8 * 2**30), gt=0, description="Main memory of its job")
    port: int | None = Field(
        None, ge=1, le=65535, description="Default: a free one of the profile's `metrics.ports`"
    )
    address: str | None = Field(
        None, description="What it listens on; default: the node's own address"
    )
    tls: TlsSpec | None = Field(None, description="Absent: HTTP, for inside the cluster")
    token_file: SubmitText | None = Field(
        None,
        min_length=1,
        description="File with one token per line; requests need one of them. Absent: no token; "
        "`$NAME` is put in where you submit",
    )
    rate_limit: float | None = Field(
        None, gt=0, description="Requests per second of one client; more get HTTP 429"
    )
    retries: int = Field(2, ge=0, description="Tries of a request on other replicas")


class ServiceResourcesSpec(QueueSpec):
    """What each replica asks Slurm for, besides its GPUs."""

    cpus_per_gpu: int | None = Field(
        None, ge=1, description="CPUs for each GPU; default: its share of the node's"
    )
    memory_per_node: ByteSize | None = Field(
        None, description="Default: as the profile's `slurm.memory` says"
    )
    max_gpus: int | None = Field(
        None, ge=1, le=MOST_GPUS, description="Most GPUs of the whole service; default: no limit"
    )

    def of_replica(self, gpus: int) -> ResourcesSpec:
        """Make the request of one replica's job, as that of a run."""
        same = self.model_dump(exclude={"max_gpus"}, exclude_none=True)
        return ResourcesSpec(gpus=gpus, **same)


class DrainSpec(Document):
    """How a replica leaves: withdrawn from the router first, then what it has begun is finished."""

    longest: Duration = Field(
        Duration(120), gt=0, description="How long requests that have begun may take to finish"
    )
    notice: Duration = Field(
        Duration(5), gt=0, description="How long the router may take to stop asking the replica"
    )


class ServiceSpec(Document):
    """A service: weights, engine, traffic, objectives, replicas and the router before them."""

    kind: Literal["service"] = Field(description="`service`; a run's spec has no `kind`")
    name: Name = Field(description="First part of the service id")
    weights: WeightsSpec
    model: ModelSpec | None = Field(
        None, description="Shape, or a preset's name; default: from the weights' config.json"
    )
    engine: ServingEngineSpec = ServingEngineSpec()
    traffic: TrafficSpec
    objectives: ObjectivesSpec
    availability: float = Field(
        0.99, gt=0, lt=1, description="Share of time in which the objectives have to hold"
    )
    replicas: ReplicasSpec = ReplicasSpec()
    router: RouterSpec = RouterSpec()
    drain: DrainSpec = DrainSpec()
    resources: ServiceResourcesSpec = ServiceResourcesSpec()
    environment: EnvironmentSpec = EnvironmentSpec()
    load_time: Duration | None = Field(
        None,
        gt=0,
        description="From the start of a job to the first answer; default: from the size of the "
        "weights and the file system, and as measured once the service has run",
    )
    notify: NotifySpec | None = Field(
        None, description="Whom the service tells about its events; absent: as the profile says"
    )

    @field_validator("router")
    @classmethod
    def _policy_of_router(cls, router: RouterSpec) -> RouterSpec:
        if router.name == "haproxy" and router.policy == "cache_aware":
            raise Contradiction(
                ("router", "policy"),
                "haproxy reads no prompts, so it cannot prefer the replica that has cached one",
                "`policy: least_loaded`, or `name: vllm-router`",
            )
        return router

    @property
    def served_name(self) -> str:
        """`model` of requests to the weights themselves."""
        return self.weights.name or self.name
