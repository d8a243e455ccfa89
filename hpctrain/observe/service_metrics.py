"""Collects the metrics of one service from its directory, and from what its engines answered.

Nothing here asks Slurm or an engine: answers are those that `metrics_scraper` was given. Belongs
here: which record and which engine's number has which metric. Does not belong here: the table of
metrics (`hpctrain.observe.families`), requests, passes (`exporter`).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.base.errors import HpctrainError
from hpctrain.observe.families import DRAIN_RESULTS, PHASES
from hpctrain.observe.metrics_scraper import MetricsTarget
from hpctrain.observe.samples import Sample, ServiceSamples
from hpctrain.plan.job import GpuPrice, gpu_price
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.run_records import read_record
from hpctrain.records.service_layout import ReplicaName
from hpctrain.records.service_records import Endpoint, ServiceState, Traffic
from hpctrain.serve.engines.contract import EngineMetrics
from hpctrain.serve.engines.registry import SERVING_ENGINES
from hpctrain.serve.plan.documents import Promise, ServicePlan
from hpctrain.serve.replica_lives import (
    ReplicaLife,
    held_timeline,
    job_records,
    replica_life,
)
from hpctrain.serve.service_files import ServiceFiles
from hpctrain.spec.loader import load_profile, load_service_spec
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.service import ServiceSpec
from hpctrain.telemetry.clock_repair import seconds
from hpctrain.telemetry.goodput import OCCUPYING
from hpctrain.telemetry.scraped_text import Histogram, ScrapedText

# What is over for so long stays so: a launch that ends is started again within seconds, if at all.
_OVER_SECONDS = 300.0
# By the name that the spec gives an engine, which an endpoint repeats.
_METRICS = {str(name): engine.metrics for name, engine in SERVING_ENGINES.items()}


@dataclass(frozen=True)
class _Started:
    """What does not change while a service lives; None for what cannot be read."""

    plan: ServicePlan | None
    spec: ServiceSpec | None
    profile: ClusterProfile | None

    @property
    def price(self) -> GpuPrice | None:
        return gpu_price(self.spec, self.profile) if self.spec and self.profile else None


@dataclass(frozen=True)
class _Spent:
    """The life of one replica, and how long its job has held nodes."""

    life: ReplicaLife
    held_seconds: float
    starts: int
    is_held: bool


class ServiceMetrics:
    """Collects the samples of one service, again and again."""

    def __init__(self, service: ServiceFiles) -> None:
        self.service = service
        self._started: _Started | None = None
        self._endpoints: dict[ReplicaName, Endpoint] = {}
        self._over: dict[ReplicaName, _Spent] = {}

    def targets(self, now: float) -> list[MetricsTarget]:
        """Read the endpoints, and list what is to be asked for its metrics.

        Raises OSError or NewerFormatError.
        """
        self._endpoints = self.service.endpoints(now)
        targets = (_target(endpoint) for endpoint in self._endpoints.values())
        return [target for target in targets if target is not None]

    def samples(self, now: float, answers: Mapping[MetricsTarget, str]) -> Sequence[Sample]:
        """Collect the samples with what the endpoints have answered since `targets`.

        Raises OSError or NewerFormatError if the service cannot be read.
        """
        if self._started is None:
            self._started = _read_started(self.service)
        out = ServiceSamples(self.service.service_id)
        state = self.service.state
        self._put_identity(out, self._started)
        self._put_replicas(out, self._started, state)
        self._put_lives(out, self._started, state, now)
        _put_promises(out, self._started.plan)
        self._put_traffic(out)
        promises = self._started.plan.promises if self._started.plan else ()
        for name, endpoint in self._endpoints.items():
            target, names = _target(endpoint), _METRICS.get(endpoint.engine)
            if target is None or names is None:
                continue
            text = answers.get(target)
            found = None
            if text is not None:
                with contextlib.suppress(ValueError, KeyError):
                    found = ScrapedText(text, _names_of(names))
            out.put("replica_answers", found is not None, replica=str(name))
            if found is not None:
                _put_engine(out, str(name), found, names, promises)
        return out.samples

    def _put_identity(self, out: ServiceSamples, started: _Started) -> None:
        plan, spec, address = started.plan, started.spec, self.service.address
        out.put_info(
            user=self.service.owner_name,
            cluster=started.profile.name if started.profile else None,
            engine=plan.replica.engine if plan else None,
            model=spec.served_name if spec else None,
            gpu=plan.replica.gpu if plan else None,
            router=spec.router.name if spec else None,
            url=address.url if address else None,
        )

    def _put_replicas(
        self, out: ServiceSamples, started: _Started, state: ServiceState | None
    ) -> None:
        """Add how many replicas there are, and what is known of those that are ready."""
        plan, rotation = started.plan, self.service.rotation
        if state is not None:
            phases = Counter(str(one.phase) for one in state.replicas)
            out.put("controller_epoch", state.epoch)
            out.put("controller_timestamp_seconds", state.time)
            out.put("replicas_wanted", 0 if self.service.asked_down else state.wanted)
            out.put_each("replicas", "phase", {phase: phases[phase] for phase in PHASES})
        if plan is not None:
            out.put("replicas_needed", plan.replicas)
            out.put("replicas_planned", plan.count)
            out.put("planned_load_seconds", plan.load_seconds)
        out.put("replicas_ready", len(self._endpoints))
        if rotation is not None:
            asked = set(rotation.replicas) & {str(name) for name in self._endpoints}
            out.put("replicas_in_rotation", len(asked))
            out.put("rotation_timestamp_seconds", rotation.time)
        for name, one in self._endpoints.items():
            replica = str(name)
            out.put("replica_ready_timestamp_seconds", one.ready_since, replica=replica)
            out.put("replica_load_seconds", one.load_seconds, replica=replica)
            out.put("replica_walltime_end_timestamp_seconds", one.walltime_ends, replica=replica)

    def _put_lives(
        self, out: ServiceSamples, started: _Started, state: ServiceState | None, now: float
    ) -> None:
        """Add how replicas began and ended, and what they have cost."""
        spent = self._spent(state, now)
        out.put("replica_starts", sum(one.starts for one in spent))
        causes = Counter(cause for one in spent for cause in one.life.causes)
        out.put_each("replica_ends", "cause", causes)
        drains = Counter(str(one.life.drain) for one in spent)
        out.put_each("drains", "result", {result: drains[result] for result in DRAIN_RESULTS})
        out.put("broken_off_requests", sum(one.life.broken_off or 0 for one in spent))
        if started.plan is None:
            return
        gpus = started.plan.replica.gpus
        held_seconds = sum(one.held_seconds for one in spent)
        out.put("gpus", gpus * sum(one.is_held for one in spent))
        out.put("gpu_seconds", gpus * held_seconds)
        if started.price is not None:
            cost = gpus * held_seconds / 3600 * started.price.per_gpu_hour
            out.put("cost", cost, currency=started.price.currency)
        if started.plan.currency is not None:
            hourly = started.plan.cost_per_hour
            out.put("planned_cost_per_hour", hourly, currency=started.plan.currency)

    def _spent(self, state: ServiceState | None, now: float) -> list[_Spent]:
        """Tell all lives; those that are over are read once."""
        events = self.service.ledger.events()
        found = []
        for name in self.service.layout.replica_names():
            spent = self._over.get(name)
            if spent is None:
                job = job_records(self.service, name)
                life = replica_life(job, events, state, now)
                spent = _spent_by(life, job.events, now)
                if life.over_since is not None and now - life.over_since > _OVER_SECONDS:
                    self._over[name] = spent
            found.append(spent)
        return found

    def _put_traffic(self, out: ServiceSamples) -> None:
        traffic = read_record(self.service.layout.traffic, Traffic)
        if traffic is not None:
            out.put("router_requests", traffic.requests)
            failures = {
                "failed": traffic.failed,
                "refused": traffic.refused,
                "limited": traffic.limited,
            }
            out.put_each("router_failed_requests", "reason", failures)


def _read_started(service: ServiceFiles) -> _Started:
    spec = profile = None
    with contextlib.suppress(HpctrainError, OSError):
        spec = load_service_spec(service.layout.spec).document
        profile = load_profile(service.layout.profile).document
    return _Started(service.plan(), spec, profile)


def _spent_by(life: ReplicaLife, events: Sequence[Event], now: float) -> _Spent:
    cut = held_timeline(life, events, now)
    held = [one for one in cut.segments if one.category in OCCUPYING]
    last = cut.segments[-1] if cut.segments else None
    return _Spent(
        life=life,
        held_seconds=seconds(sum(one.end - one.start for one in held)),
        starts=sum(one.event is EventKind.ATTEMPT_STARTED for one in events),
        is_held=life.over_since is None and last is not None and last.category in OCCUPYING,
    )


def _put_promises(out: ServiceSamples, plan: ServicePlan | None) -> None:
    if plan is None:
        return
    out.put("planned_requests_per_second", plan.rate)
    out.put("capacity_requests_per_second", plan.capacity_rate)
    for one in plan.promises:
        labels = {"latency": one.latency, "percentile": one.percentile}
        out.put("promised_seconds", one.limit_seconds, **labels)
        out.put("predicted_seconds", one.predicted_seconds, **labels)
        out.put("promised_slow_ratio", slow_share(one.percentile), **labels)


def slow_share(percentile: str) -> float:
    """Return the share of requests that may be slower: 0.01 for `p99`."""
    return round(1 - float(percentile.removeprefix("p")) / 100, 6)


def _target(endpoint: Endpoint) -> MetricsTarget | None:
    """What an endpoint is asked; None for an engine that shows no metrics."""
    names = _METRICS.get(endpoint.engine)
    return None if names is None else MetricsTarget(endpoint.url, names.path)


def _names_of(names: EngineMetrics) -> list[str]:
    """List the names of an engine's metrics that are exported."""
    return [
        name
        for name in (
            *(names.requests_running, names.requests_waiting, names.kv_cache_used_fraction),
            *(names.prompt_tokens_total, names.generation_tokens_total),
            *(names.ttft_seconds, names.tpot_seconds, names.e2e_seconds, names.queue_seconds),
            names.preemptions_total,
            *(names.prefix_cache_hits_total, names.prefix_cache_queries_total),
        )
        if name is not None
    ]


def _put_engine(
    out: ServiceSamples,
    replica: str,
    found: ScrapedText,
    names: EngineMetrics,
    promises: Sequence[Promise],
) -> None:
    """Add what one engine has counted, by our names for it."""
    out.put("running_requests", found.total(names.requests_running), replica=replica)
    out.put("waiting_requests", found.total(names.requests_waiting), replica=replica)
    out.put("kv_cache_used_ratio", found.largest(names.kv_cache_used_fraction), replica=replica)
    out.put("prompt_tokens", found.total(names.prompt_tokens_total), replica=replica)
    out.put("output_tokens", found.total(names.generation_tokens_total), replica=replica)
    out.put("recomputed_requests", found.total(names.preemptions_total), replica=replica)
    hits, queried = names.prefix_cache_hits_total, names.prefix_cache_queries_total
    out.put("prefix_cache_hit_tokens", found.total(hits), replica=replica)
    out.put("prefix_cache_queried_tokens", found.total(queried), replica=replica)
    measured: dict[str, Histogram | None] = {
        "ttft": found.histogram(names.ttft_seconds),
        "tpot": found.histogram(names.tpot_seconds),
        "e2e": found.histogram(names.e2e_seconds),
        "queue": found.histogram(names.queue_seconds),
    }
    for latency, histogram in measured.items():
        if histogram is not None:
            out.put_histogram("latency_seconds", histogram, latency=latency, replica=replica)
    for one in promises:
        if (histogram := measured[one.latency]) is not None:
            labels = {"latency": one.latency, "percentile": one.percentile, "replica": replica}
            out.put("slow_requests", histogram.above(one.limit_seconds), **labels)
