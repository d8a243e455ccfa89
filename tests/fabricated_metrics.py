"""Hours of metrics of a fleet that never was, as text with times for `promtool tsdb create-blocks`.

Every family of `hpctrain.observe.families` is in it, and what panels read of other exporters. The
figures are made of sine waves and of counters, so that two calls write the same.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import generate_latest

from hpctrain.observe.families import BY_NAME, PHASES
from hpctrain.runs.state import RunState
from hpctrain.telemetry.timeline import Category

SCRAPE_SECONDS = 60
GPUS_OF_A_NODE = 8
SEEN_TWICE = "llama70b-91c0"  # by two exporters, so that all its series come twice
REPLICA_SEEN_TWICE = "r003-g001"
SERVICE = "chat-7f3a"


@dataclass(frozen=True)
class FabricatedRun:
    """One run of the fleet; `fractions` of the time at which it has that state from then on."""

    run: str
    user: str
    model: str
    nodes: tuple[str, ...]
    step_seconds: float
    planned_step_seconds: float
    axes: tuple[tuple[str, float], ...]  # share of a step in messages along each
    states: tuple[tuple[float, RunState], ...] = ((0.0, RunState.RUNNING),)
    ends: tuple[tuple[float, str], ...] = ()  # fraction of the time, cause
    stages: int = 1
    silent_seconds: float = 20.0
    slow_node: float = 1.03

    def state(self, fraction: float) -> RunState:
        return next(state for start, state in reversed(self.states) if fraction >= start)


def _nodes(first: int, count: int) -> tuple[str, ...]:
    return tuple(f"n{number:03}" for number in range(first, first + count))


FLEET = (
    FabricatedRun(
        "gpt175b-7f3a",
        "anna",
        "gpt 175B",
        _nodes(1, 16),
        31.4,
        30.0,
        (("tp", 0.11), ("pp", 0.04), ("dp", 0.06)),
        ends=((0.31, "preempted"), (0.87, "node_failure")),
        states=(
            (0.0, RunState.RUNNING),
            (0.31, RunState.PENDING),
            (0.36, RunState.RUNNING),
        ),
        stages=4,
    ),
    FabricatedRun(
        "llama70b-91c0",
        "ben",
        "llama 70B",
        _nodes(17, 8),
        14.9,
        10.2,
        (("tp", 0.21), ("dp", 0.17)),
        stages=2,
        slow_node=1.38,
    ),
    FabricatedRun(
        "vit22b-5e0d",
        "anna",
        "vit 22B",
        _nodes(24, 4),  # the first one is shared with the run above
        6.1,
        6.0,
        (("tp", 0.08), ("dp", 0.05)),
        ends=((0.55, "hang"),),
        silent_seconds=780.0,
    ),
    FabricatedRun(
        "moe8x22b-c41e",
        "cora",
        "moe 8x22B",
        _nodes(29, 8),
        19.0,
        17.0,
        (("ep", 0.19), ("tp", 0.07), ("dp", 0.05)),
        states=((0.0, RunState.PENDING), (0.2, RunState.RUNNING), (0.83, RunState.PENDING)),
        ends=((0.83, "time_limit"),),
    ),
    FabricatedRun(
        "gpt13b-00af",
        "ben",
        "gpt 13B",
        _nodes(37, 2),
        3.2,
        3.3,
        (("tp", 0.05), ("dp", 0.04)),
        states=((0.0, RunState.RUNNING), (0.6, RunState.DONE)),
        ends=((0.6, "done"),),
    ),
    FabricatedRun(
        "t5xxl-77aa",
        "dan",
        "t5 11B",
        _nodes(39, 2),
        4.4,
        4.0,
        (("dp", 0.08),),
        states=((0.0, RunState.RUNNING), (0.45, RunState.FAILED)),
        ends=((0.2, "crash"), (0.3, "crash"), (0.45, "crash")),
    ),
)


@dataclass
class _Writer:
    """Collects samples by metric."""

    begin: float
    end: float
    metrics: dict[str, Metric] = field(default_factory=dict)
    hosts: set[tuple[str, float]] = field(default_factory=set)

    def put(self, name: str, time: float, value: float | None, **labels: str) -> None:
        """Add a sample of a family of hpctrain; None is left out."""
        if value is None:
            return
        family = BY_NAME[name]
        metric = self.metrics.get(name)
        if metric is None:
            unit = "" if family.type in ("info", "stateset") else family.unit
            metric = self.metrics[name] = Metric(name, family.help, family.type, unit)
        if family.subject and family.type != "histogram":
            assert set(labels) == {*family.all_labels}, (name, labels)
        part = "_bucket" if "le" in labels else "_count" if family.type == "histogram" else ""
        sample_name = f"{name}{part}" if part else family.sample_name
        metric.add_sample(sample_name, labels, value, timestamp=time)
        if labels.get("run") == SEEN_TWICE or labels.get("replica") == REPLICA_SEEN_TWICE:
            again = {**labels, "instance": "another-exporter:9847"}
            metric.add_sample(sample_name, again, value, timestamp=time)

    def foreign(self, name: str, time: float, value: float, **labels: str) -> None:
        """Add a sample of somebody else's metric."""
        bare = name.removesuffix("_total")
        kind = "counter" if name.endswith("_total") else "gauge"
        metric = self.metrics.setdefault(name, Metric(bare, "Of another exporter.", kind))
        metric.add_sample(name, labels, value, timestamp=time)

    def times(self) -> Iterator[tuple[float, float]]:
        count = int((self.end - self.begin) // SCRAPE_SECONDS)
        for number in range(count + 1):
            yield self.begin + number * SCRAPE_SECONDS, number / count


def fabricated_metrics(begin: float, end: float) -> bytes:
    """Write the fleet's metrics from begin to end as OpenMetrics text with times."""
    out = _Writer(begin, end)
    for run in FLEET:
        for time, fraction in out.times():
            _run_samples(out, run, time, fraction)
    for time, fraction in out.times():
        _exporter_samples(out, time, fraction)
        _service_samples(out, time, fraction)

    class Registry:
        def collect(self) -> Iterator[Metric]:
            for metric in out.metrics.values():
                _by_series(metric)
                yield metric

    return bytes(generate_latest(Registry()))  # type: ignore[arg-type]


def _by_series(metric: Metric) -> None:
    """Put the samples of each series one after the other, as OpenMetrics demands."""
    groups = defaultdict(list)
    for sample in metric.samples:
        groups[tuple(sorted(sample.labels.items()))].append(sample)
    metric.samples = [sample for group in groups.values() for sample in group]


def _wave(time: float, period_seconds: float, phase: float = 0.0) -> float:
    return math.sin(2 * math.pi * (time / period_seconds + phase))


def _run_samples(out: _Writer, run: FabricatedRun, time: float, fraction: float) -> None:
    labels = {"run": run.run}

    def put(name: str, value: float | None, **more: str) -> None:
        out.put(f"hpctrain_run_{name}", time, value, **labels, **more)

    state = run.state(fraction)
    running = state is RunState.RUNNING
    past = [(at, cause) for at, cause in run.ends if at <= fraction]
    elapsed = time - out.begin
    gpus = GPUS_OF_A_NODE * len(run.nodes)
    step_seconds = run.step_seconds * (1 + 0.02 * _wave(time, 1300) + 0.01 * _wave(time, 310))
    step = 40_000 + int(elapsed / run.step_seconds) - 25 * len(past)
    out.put(
        "hpctrain_run",
        time,
        1.0,
        **labels,
        user=run.user,
        account="research",
        cluster="island",
        engine="megatron",
        model=run.model,
        layout="tp=8 pp=4 dp=4",
        gpu="h100-80gb",
    )
    for one in RunState:
        put("state", float(one is state), hpctrain_run_state=one.value)
    put("gpu_seconds", gpus * (900_000 + elapsed))
    put("planned_gpu_seconds", gpus * 2_000_000.0)
    put("budget_used_ratio", (900_000 + elapsed) / 2_000_000)
    put("cost", gpus * (900_000 + elapsed) / 3600 * 2.1, currency="EUR")
    _learning(put, step, time)
    _checkpoints(put, run, time, out.begin)
    _interruptions(put, out, past, elapsed)
    put("supervisor_timestamp_seconds", time - (8.0 if running else 600.0))
    if state is RunState.PENDING:
        put("pending_seconds", (time % 7200) + 60)
    if not running:
        return
    job = str(48_000 + len(past))
    put("job", 1.0, job=job)
    for number, node in enumerate(run.nodes):
        put("node", 1.0, job=job, node=node)
        slow = run.slow_node if number == 2 else 1 + 0.01 * (number % 3)
        put("node_slowdown_ratio", slow + 0.008 * _wave(time, 900, number / 7), node=node)
        _host(out, node, time, number)
    put("nodes", len(run.nodes))
    put("gpus", gpus)
    put("slow_rank_limit_ratio", 1.25)
    put("last_step_timestamp_seconds", time - run.silent_seconds)
    put("sign_of_life_timestamp_seconds", time - run.silent_seconds)
    put("stall_limit_seconds", 900.0)
    put("eta_seconds", (100_000 - step) * step_seconds)
    put("step_seconds", step_seconds)
    put("planned_step_seconds", run.planned_step_seconds)
    put("tokens_per_second", 1536 * 2048 / step_seconds)
    put("mfu_ratio", 0.46 * run.planned_step_seconds / step_seconds)
    put("planned_mfu_ratio", 0.46)
    for part, share in (("passes", 0.86), ("data", 0.02), ("optimizer", 0.08), ("rest", 0.04)):
        put("step_part_seconds", share * step_seconds, part=part)
    for number, (axis, share) in enumerate(run.axes):
        seconds = share * step_seconds * (1 + 0.04 * _wave(elapsed // 1800, 5, number / 3))
        put("message_seconds", seconds, axis=axis)
        put("message_bytes", seconds * (180e9, 42e9, 24e9)[number], axis=axis)
        planned = share * run.planned_step_seconds * 0.7
        put("planned_message_seconds", planned, axis=axis)
    for stage in range(run.stages):
        planned = (71 - 3 * stage) * 1e9
        put("planned_memory_bytes", planned, stage=str(stage))
        put("peak_memory_bytes", planned * (0.97 + 0.03 * stage), stage=str(stage))


def _learning(put, step: int, time: float) -> None:  # type: ignore[no-untyped-def]
    put("step", step)
    put("target_step", 100_000)
    put("loss", 1.9 + 2.0 * math.exp(-(step - 39_900) / 500) + 0.02 * _wave(time, 700))
    put("evaluation_loss", 2.0 + 2.0 * math.exp(-(step // 200 * 200 - 39_900) / 500))
    put("gradient_norm", 0.8 + 0.2 * _wave(time, 433) + 0.15 * _wave(time, 190))
    put("learning_rate", 1.2e-4 * (1 - step / 200_000))


def _checkpoints(put, run: FabricatedRun, time: float, begin: float) -> None:  # type: ignore[no-untyped-def]
    interval = 1800.0
    since = time - begin + 71 * len(run.nodes)  # runs do not save at the same time
    count = int(since // interval)
    age = since - count * interval
    put("checkpoint_step", 40_000 + count * int(interval / run.step_seconds))
    put("checkpoint_timestamp_seconds", time - age)
    put("checkpoint_bytes", 2.4e12 * len(run.nodes) / 16)
    put("checkpoint_stall_seconds", 6.5 + 1.5 * _wave(float(count), 5))
    put("checkpoint_publish_seconds", 74.0 + 12 * _wave(float(count), 7))
    put("checkpoint_interval_seconds", interval)
    put("checkpoints", 40 + count)
    put("at_risk_seconds", age)
    put("disk_free_bytes", 48e12 - (time - begin) * 2e8)


def _interruptions(put, out: _Writer, past, elapsed: float) -> None:  # type: ignore[no-untyped-def]
    put("attempts", 3 + sum(cause in ("preempted", "time_limit") for _, cause in past))
    put("launches", 4 + len(past))
    lost_seconds = 0.0
    for cause in sorted({cause for _, cause in past}):
        times = [at for at, one in past if one == cause]
        lost = {"preempted": 420.0, "hang": 1900.0, "done": 0.0}.get(cause, 900.0) * len(times)
        lost_seconds += lost
        put("launch_ends", len(times), cause=cause)
        put(
            "last_end_timestamp_seconds", out.begin + times[-1] * (out.end - out.begin), cause=cause
        )
        put("retries_left", 3 - len(times), cause=cause)
        put("lost_steps", 25.0 * len(times), cause=cause)
        put("lost_seconds", lost, cause=cause)
    wall = 900_000 + elapsed
    shares = {Category.SAVING: 0.01, Category.STARTING: 0.02, Category.QUEUEING: 0.05}
    for category in Category:
        seconds = shares.get(category, 0.002) * wall
        if category is Category.PRODUCTIVE:
            seconds = 0.9 * wall - lost_seconds
        elif category is Category.REDONE:
            seconds = lost_seconds
        put("time_seconds", seconds, category=category.value)
    put("goodput_ratio", 0.9 - lost_seconds / wall, window="run")
    put("goodput_ratio", 0.93 - 5 * lost_seconds / wall, window="day")
    passed = min((elapsed - at * (out.end - out.begin) for at, _ in past), default=3600.0)
    put("goodput_ratio", 0.95 - 0.4 * max(0.0, 1 - passed / 3600), window="hour")


def _host(out: _Writer, node: str, time: float, number: int) -> None:
    """DCGM exporter and node_exporter of one node, once for all its runs; two of its GPUs."""
    if (node, time) in out.hosts:
        return
    out.hosts.add((node, time))
    wave = _wave(time, 600, number / 5)
    for gpu in range(2):
        labels = {"Hostname": f"{node}.cluster.example", "gpu": str(gpu), "modelName": "H100"}
        out.foreign("DCGM_FI_DEV_GPU_UTIL", time, 97 + 2 * wave, **labels)
        out.foreign("DCGM_FI_DEV_FB_USED", time, 66_000 + 900 * wave, **labels)
        out.foreign("DCGM_FI_DEV_GPU_TEMP", time, 58 + 4 * wave + gpu, **labels)
        out.foreign("DCGM_FI_DEV_POWER_USAGE", time, 640 + 30 * wave, **labels)
        xid = 79.0 if node == "n019" else 0.0
        out.foreign("DCGM_FI_DEV_XID_ERRORS", time, xid, **labels)
        out.foreign("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", time, 0.44 + 0.03 * wave, **labels)
        out.foreign("DCGM_FI_PROF_DRAM_ACTIVE", time, 0.38 + 0.02 * wave, **labels)
        out.foreign("DCGM_FI_PROF_NVLINK_TX_BYTES", time, 9.1e10 * (1 + 0.05 * wave), **labels)
    labels = {"instance": f"{node}:9100"}
    elapsed = time - out.begin
    for mode, share in (("idle", 0.8), ("user", 0.2)):
        out.foreign("node_cpu_seconds_total", time, share * elapsed, **labels, cpu="0", mode=mode)
    out.foreign("node_memory_MemTotal_bytes", time, 1e12, **labels)
    out.foreign("node_memory_MemAvailable_bytes", time, 7.4e11 + 2e10 * wave, **labels)
    sent = 2.2e10 * elapsed
    port = {"device": "mlx5_0", "port": "1"}
    out.foreign("node_infiniband_port_data_transmitted_bytes_total", time, sent, **labels, **port)


def _exporter_samples(out: _Writer, time: float, fraction: float) -> None:
    out.put("hpctrain_exporter", time, 1.0, version="0.0.0")
    out.put("hpctrain_exporter_runs", time, len(FLEET))
    out.put("hpctrain_exporter_unreadable_runs", time, 0)
    out.put("hpctrain_exporter_services", time, 1)
    out.put("hpctrain_exporter_unreadable_services", time, 0)
    out.put("hpctrain_exporter_collection_seconds", time, 0.4)
    out.put("hpctrain_exporter_slurm_queries", time, 10 + 100 * fraction)
    out.put("hpctrain_exporter_slurm_up", time, 1)
    out.put("hpctrain_exporter_timestamp_seconds", time, time - 12)
    out.put("hpctrain_watch_timestamp_seconds", time, time - time % 300)
    out.put("hpctrain_suspect_nodes", time, 2)
    for name, run, severity, more in (
        ("HpctrainStraggler", "llama70b-91c0", "ticket", {"node": "n019"}),
        ("HpctrainMfuBelowPlan", "llama70b-91c0", "ticket", {}),
    ):
        if fraction > 0.4:
            labels = {"alertname": name, "run": run, "severity": severity, **more}
            out.foreign("ALERTS", time, 1.0, alertstate="firing", **labels)
            begun = out.begin + 0.4 * (out.end - out.begin)
            out.foreign("ALERTS_FOR_STATE", time, begun, **labels)


# The jobs of three replicas: name, from and until which share of the time it answers.
_REPLICAS = (
    ("r001-g001", 0.0, 0.52),
    ("r001-g002", 0.5, 1.0),
    ("r002-g001", 0.0, 0.7),
    ("r002-g002", 0.74, 1.0),
    ("r003-g001", 0.0, 1.0),
)
# Of each latency: its promised 99th percentile, and its median, in seconds.
_LATENCIES = {
    "ttft": (0.45, 0.12),
    "tpot": (0.04, 0.017),
    "e2e": (8.0, 3.1),
    "queue": (None, 0.004),
}
_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 40.0)


def _service_samples(out: _Writer, time: float, fraction: float) -> None:
    """One service: a successor at half of the time, later an engine that fails."""

    def put(name: str, value: float | None, **more: str) -> None:
        out.put(f"hpctrain_service_{name}", time, value, service=SERVICE, **more)

    labels = {"user": "anna", "cluster": "island", "engine": "vllm", "model": "llama-3-70b"}
    labels |= {"gpu": "h100-80gb", "router": "vllm-router", "url": "http://n900:8080"}
    out.put("hpctrain_service", time, 1.0, service=SERVICE, **labels)
    ready = [one for one in _REPLICAS if one[1] <= fraction < one[2] or one[2] == 1.0 <= fraction]
    elapsed = time - out.begin
    rate = 92 + 14 * _wave(time, 5400)
    for name, value in {
        "controller_epoch": 2,
        "controller_timestamp_seconds": time - 3,
        "replicas_wanted": 3,
        "replicas_needed": 2,
        "replicas_planned": 3,
        "replicas_ready": len(ready),
        "replicas_in_rotation": len(ready),
        "planned_load_seconds": 140.0,
        "replica_starts": 3 + (fraction > 0.45) + (fraction > 0.7),
        "broken_off_requests": 2 * (fraction > 0.52),
        "planned_requests_per_second": 100.0,
        "capacity_requests_per_second": 118.0,
        "rotation_timestamp_seconds": time - 2,
        "router_requests": 92 * elapsed,
        "gpus": 4 * len(ready),
        "gpu_seconds": 12 * (86_400 + elapsed),
    }.items():
        put(name, value)
    loading = (0.45 < fraction < 0.5) + (0.7 < fraction < 0.74)
    for phase in PHASES:
        counts = {"ready": len(ready), "loading": loading, "failed": int(fraction > 0.7)}
        put("replicas", counts.get(phase, 0), phase=phase)
    for cause, at in (("time_limit", 0.52), ("engine_exit", 0.7)):
        put("replica_ends", 1 if fraction > at else None, cause=cause)
    put("drains", 4, result="finished")
    put("drains", int(fraction > 0.52), result="broken_off")
    for reason, count in (("failed", 9 * (fraction > 0.7)), ("refused", 0), ("limited", 5)):
        put("router_failed_requests", count, reason=reason)
    put("cost", 12 * (86_400 + elapsed) / 3600 * 2.1, currency="EUR")
    put("planned_cost_per_hour", 12 * 2.1, currency="EUR")
    for latency, (limit, _) in _LATENCIES.items():
        if limit is not None:
            for percentile, factor in (("p50", 0.5), ("p99", 1.0)):
                of_promise = {"latency": latency, "percentile": percentile}
                put("promised_seconds", factor * limit, **of_promise)
                put("predicted_seconds", 0.8 * factor * limit, **of_promise)
                put("promised_slow_ratio", {"p50": 0.5, "p99": 0.01}[percentile], **of_promise)
    for number, (name, begin, _) in enumerate(ready):
        _replica_samples(put, name, number, elapsed - begin * (out.end - out.begin), time)
        put("running_requests", round(rate / len(ready) * 3.1), replica=name)
        put("kv_cache_used_ratio", 0.55 + 0.2 * (3 - len(ready)), replica=name)


def _replica_samples(put, name: str, number: int, since: float, time: float) -> None:  # type: ignore[no-untyped-def]
    """What one engine has counted since it began to answer."""
    put("replica_ready_timestamp_seconds", time - since, replica=name)
    put("replica_load_seconds", 138.0 + 9 * number, replica=name)
    put("replica_walltime_end_timestamp_seconds", time - since + 86_400, replica=name)
    put("replica_answers", 1, replica=name)
    put("waiting_requests", number, replica=name)
    requests = 31.0 * since
    put("prompt_tokens", 620 * requests, replica=name)
    put("output_tokens", 128 * requests, replica=name)
    put("recomputed_requests", 0.001 * requests, replica=name)
    put("prefix_cache_hit_tokens", 150 * requests, replica=name)
    put("prefix_cache_queried_tokens", 620 * requests, replica=name)
    for latency, (limit, median) in _LATENCIES.items():
        labels = {"latency": latency, "replica": name}
        for bound in _BOUNDS:
            # A log-logistic distribution of latencies, whose 99th percentile is 99^(1/6) medians.
            share = 1 / (1 + (bound / median) ** -6.0)
            put("latency_seconds", share * requests, **labels, le=str(bound))
        put("latency_seconds", requests, **labels, le="+Inf")
        if limit is not None:
            for percentile, factor in (("p50", 0.5), ("p99", 1.0)):
                slow = 1 - 1 / (1 + (factor * limit / median) ** -6.0)
                put("slow_requests", slow * requests, **labels, percentile=percentile)
