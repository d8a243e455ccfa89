"""Collects the metrics of one service from its directory, and from what its engines answer.

What does not answer in time is counted and not waited for, so that a dead node delays no metrics
of anything else. Addresses come from files that other users may have written: only http and https
are spoken, a redirect is not followed, no credential is sent, and an answer has a largest size.
Belongs here: requests to engines, and which record and which engine's number has which metric.
Does not belong here: the table of metrics (`families`), what answers mean
(`hpctrain.telemetry.scraped_text`), passes (`exporter`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import urllib.parse
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from hpctrain.base import clock
from hpctrain.base.errors import HpctrainError
from hpctrain.judge.attempts import starts
from hpctrain.observe.families import DRAIN_RESULTS, PHASES
from hpctrain.observe.samples import Sample, Samples
from hpctrain.plan.job import gpu_price
from hpctrain.records.run_records import read_record
from hpctrain.records.service_layout import ReplicaName
from hpctrain.records.service_records import Endpoint, ServiceState, Traffic
from hpctrain.serve.engines.contract import EngineMetrics
from hpctrain.serve.engines.registry import SERVING_ENGINES
from hpctrain.serve.plan.documents import Promise
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
from hpctrain.telemetry.goodput import OCCUPYING
from hpctrain.telemetry.scraped_text import Histogram, ScrapedText
from hpctrain.telemetry.timeline import seconds

# One answer of a replica that is alive takes milliseconds, also under load.
ANSWER_SECONDS = 2.0
_AT_ONCE = 32
_MOST_BYTES = 8 * 2**20
_PIECE_BYTES = 2**16
_ACCEPT = {"Accept": "text/plain;version=0.0.4"}


@dataclass(frozen=True)
class MetricsTarget:
    """Whose metrics are asked for: the scheme, host and port of `url`, and a path."""

    url: str
    path: str


def fetch_metrics(target: MetricsTarget, seconds: float = ANSWER_SECONDS) -> str:
    """Ask one target. Raises OSError or ValueError, at the latest after twice the seconds."""
    deadline = clock.monotonic() + seconds
    parts = urllib.parse.urlsplit(target.url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{target.url!r} is no address of HTTP")
    kind = http.client.HTTPConnection if parts.scheme == "http" else http.client.HTTPSConnection
    connection = kind(parts.hostname, parts.port, timeout=seconds)
    try:
        connection.request("GET", target.path, headers=_ACCEPT)
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            raise ValueError(f"status {answer.status}")
        text = b""
        while piece := answer.read1(_PIECE_BYTES):
            text += piece
            if len(text) > _MOST_BYTES or clock.monotonic() > deadline:
                raise ValueError("an answer that does not end")
        return text.decode()
    except http.client.HTTPException as error:
        raise ValueError(f"no HTTP: {type(error).__name__}") from error
    finally:
        connection.close()


class MetricsScraper:
    """Asks targets again and again; one that still owes an answer is not asked a second time."""

    def __init__(self, seconds: float = ANSWER_SECONDS) -> None:
        self._seconds = seconds
        self._pool: ThreadPoolExecutor | None = None
        self._owed: dict[MetricsTarget, Future[str]] = {}
        self._asked: dict[MetricsTarget, Future[str]] = {}
        self._deadline = 0.0

    def begin(self, targets: Collection[MetricsTarget]) -> None:
        """Ask all targets in the background."""
        if self._pool is None and targets:
            self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="metrics")
        before = {**self._owed, **self._asked}
        # A request that has not even begun is taken back, and so owes nothing.
        self._owed = {
            one: asked for one, asked in before.items() if not asked.done() and not asked.cancel()
        }
        self._asked = {}
        if self._pool is not None:
            for target in dict.fromkeys(targets):
                if target not in self._owed:
                    self._asked[target] = self._pool.submit(fetch_metrics, target, self._seconds)
        self._deadline = clock.monotonic() + self._seconds

    def answers(self) -> Mapping[MetricsTarget, str]:
        """Return the answers that come in time after `begin`."""
        left_seconds = max(0.0, self._deadline - clock.monotonic())
        concurrent.futures.wait(self._asked.values(), timeout=left_seconds)
        return {
            target: asked.result()
            for target, asked in self._asked.items()
            if asked.done() and asked.exception() is None
        }


# -- Collects the metrics of one service from its directory, and from what its engines answered -


# What is over for so long stays so: a launch that ends is started again within seconds, if at all.
_OVER_SECONDS = 300.0
# By the name that the spec gives an engine, which an endpoint repeats.
_METRICS = {str(name): engine.metrics for name, engine in SERVING_ENGINES.items()}


class _Started:
    """What does not change while a service lives; None for what cannot be read."""

    def __init__(self, service: ServiceFiles) -> None:
        self.plan = service.plan()
        self.spec: ServiceSpec | None = None
        self.profile: ClusterProfile | None = None
        with contextlib.suppress(HpctrainError, OSError):
            self.spec = load_service_spec(service.layout.spec).document
            self.profile = load_profile(service.layout.profile).document


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

        Engines that show no metrics are asked nothing. Raises OSError or NewerFormatError.
        """
        self._endpoints = self.service.endpoints(now)
        return [target for _, target, _ in self._asked()]

    def _asked(self) -> Iterator[tuple[ReplicaName, MetricsTarget, EngineMetrics]]:
        for name, endpoint in self._endpoints.items():
            metrics = _METRICS.get(endpoint.engine)
            if metrics is not None:
                yield name, MetricsTarget(endpoint.url, metrics.path), metrics

    def samples(self, now: float, answers: Mapping[MetricsTarget, str]) -> Sequence[Sample]:
        """Collect the samples with what the endpoints have answered since `targets`.

        Raises OSError or NewerFormatError if the service cannot be read.
        """
        if self._started is None:
            self._started = _Started(self.service)
        plan, spec, profile = self._started.plan, self._started.spec, self._started.profile
        service, state = self.service, self.service.state
        out = Samples("service", service.service_id)
        address, rotation = service.address, service.rotation

        # -- which service
        out.put_info(
            user=service.owner_name,
            cluster=profile.name if profile else None,
            engine=plan.replica.engine if plan else None,
            model=spec.served_name if spec else None,
            gpu=plan.replica.gpu if plan else None,
            router=spec.router.name if spec else None,
            url=address.url if address else None,
        )

        # -- how many replicas there are, and what is known of those that are ready
        if state is not None:
            phases = Counter(str(one.phase) for one in state.replicas)
            out.put("controller_epoch", state.epoch)
            out.put("controller_timestamp_seconds", state.time)
            out.put("replicas_wanted", 0 if service.asked_down else state.wanted)
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
        for ready_name, ready in self._endpoints.items():
            replica = str(ready_name)
            out.put("replica_ready_timestamp_seconds", ready.ready_since, replica=replica)
            out.put("replica_load_seconds", ready.load_seconds, replica=replica)
            out.put("replica_walltime_end_timestamp_seconds", ready.walltime_ends, replica=replica)

        # -- how replicas began and ended, and what they have cost
        spent = self._spent(state, now)
        out.put("replica_starts", sum(one.starts for one in spent))
        causes = Counter(cause for one in spent for cause in one.life.causes)
        out.put_each("replica_ends", "cause", causes)
        drains = Counter(str(one.life.drain) for one in spent)
        out.put_each("drains", "result", {result: drains[result] for result in DRAIN_RESULTS})
        out.put("broken_off_requests", sum(one.life.broken_off or 0 for one in spent))
        if plan is not None:
            gpus = plan.replica.gpus
            held_seconds = sum(one.held_seconds for one in spent)
            out.put("gpus", gpus * sum(one.is_held for one in spent))
            out.put("gpu_seconds", gpus * held_seconds)
            price = gpu_price(spec, profile) if spec and profile else None
            if price is not None:
                cost = gpus * held_seconds / 3600 * price.per_gpu_hour
                out.put("cost", cost, currency=price.currency)
            if plan.currency is not None:
                out.put("planned_cost_per_hour", plan.cost_per_hour, currency=plan.currency)

            # -- promise
            out.put("planned_requests_per_second", plan.rate)
            out.put("capacity_requests_per_second", plan.capacity_rate)
            for promise in plan.promises:
                labels = {"latency": promise.latency, "percentile": promise.percentile}
                out.put("promised_seconds", promise.limit_seconds, **labels)
                out.put("predicted_seconds", promise.predicted_seconds, **labels)
                # of the requests, 0.01 for `p99`
                share = round(1 - float(promise.percentile.removeprefix("p")) / 100, 6)
                out.put("promised_slow_ratio", share, **labels)

        # -- router and engines
        traffic = read_record(service.layout.traffic, Traffic)
        if traffic is not None:
            out.put("router_requests", traffic.requests)
            failures = {
                reason: getattr(traffic, reason) for reason in ("failed", "refused", "limited")
            }
            out.put_each("router_failed_requests", "reason", failures)
        for name, target, metrics in self._asked():
            text, found = answers.get(target), None
            if text is not None:
                with contextlib.suppress(ValueError, KeyError):
                    found = ScrapedText(
                        text,
                        [name for field, name in vars(metrics).items() if name and field != "path"],
                    )
            out.put("replica_answers", found is not None, replica=str(name))
            if found is not None:
                _put_engine(out, str(name), found, metrics, plan.promises if plan else ())
        return out.samples

    def _spent(self, state: ServiceState | None, now: float) -> list[_Spent]:
        """Tell all lives; those that are over are read once."""
        events = self.service.ledger.events()
        found = []
        for name in self.service.layout.replica_names():
            spent = self._over.get(name)
            if spent is None:
                job = job_records(self.service, name)
                life = replica_life(job, events, state, now)
                cut = held_timeline(life, job.events, now).segments
                held = [one for one in cut if one.category in OCCUPYING]
                spent = _Spent(
                    life=life,
                    held_seconds=seconds(sum(one.end - one.start for one in held)),
                    starts=len(starts(job.events)),
                    is_held=life.over_since is None and bool(cut) and cut[-1].category in OCCUPYING,
                )
                if life.over_since is not None and now - life.over_since > _OVER_SECONDS:
                    self._over[name] = spent
            found.append(spent)
        return found


def _put_engine(
    out: Samples,
    replica: str,
    found: ScrapedText,
    names: EngineMetrics,
    promises: Sequence[Promise],
) -> None:
    """Add what one engine has counted, by our names for it."""
    totals = {
        "running_requests": names.requests_running,
        "waiting_requests": names.requests_waiting,
        "prompt_tokens": names.prompt_tokens_total,
        "output_tokens": names.generation_tokens_total,
        "recomputed_requests": names.preemptions_total,
        "prefix_cache_hit_tokens": names.prefix_cache_hits_total,
        "prefix_cache_queried_tokens": names.prefix_cache_queries_total,
    }
    for family, name in totals.items():
        out.put(family, found.total(name), replica=replica)
    out.put("kv_cache_used_ratio", found.largest(names.kv_cache_used_fraction), replica=replica)
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
