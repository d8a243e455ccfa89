"""Seconds that planning a service takes: 70B at 100 requests/s on three kinds of GPU.

    python -m bench.serving_search [--rate 100] [--json]

The first line is the speed of the simulation alone. Each cluster is planned on its own, with all
that `serve plan` shows: bounds, search, promises with intervals, spares, alternatives, pools. Times
are of the process (CPU) and of the clock; imports are not counted, reading documents is.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from hpctrain.serve.make_plan import PlannedService, plan_service, read_model, service_request
from hpctrain.serve.plan.routing import SimulatedService, simulate_open
from hpctrain.serve.plan.search import bound, simulated
from hpctrain.serve.plan.traffic import draw_requests
from hpctrain.spec.loader import load_named_profile, load_service_spec

CLUSTERS = ("h100x16", "a100x64", "gb200nvl72")
SPEC = """\
kind: service
name: chat70b
weights: {{path: llama-3-70b}}
model: llama-3-70b
traffic:
  rate: {rate}
  prompt_tokens: {{p50: 512, p99: 2000}}
  output_tokens: {{p50: 128, p99: 512}}
objectives:
  ttft: {{p99: 500ms}}
  tpot: {{p99: 50ms}}
"""
_SIMULATED = 20_000
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Timed:
    """One cluster: its plan in short, and seconds."""

    profile: str
    gpu: str
    replicas: int
    gpus: int
    cost_per_hour: float | None
    cpu_seconds: float
    wall_seconds: float


def timed(work: Callable[[], _Result]) -> tuple[_Result, float, float]:
    """Return a result with seconds of the process and of the clock."""
    process, clock = time.process_time(), time.perf_counter()
    result = work()
    return result, time.process_time() - process, time.perf_counter() - clock


def plan_clusters(spec: Path) -> list[Timed]:
    """Plan the service on each cluster."""
    rows = []
    for name in CLUSTERS:

        def work(name: str = name) -> PlannedService:
            return plan_service(load_service_spec(spec), [load_named_profile(name)])

        planned, process, clock = timed(work)
        [plan] = planned.plans
        rows.append(
            Timed(
                profile=name,
                gpu=plan.replica.gpu,
                replicas=plan.count,
                gpus=plan.gpus,
                cost_per_hour=plan.cost_per_hour,
                cpu_seconds=process,
                wall_seconds=clock,
            )
        )
    return rows


def simulated_requests_per_second(spec: Path) -> float:
    """Simulate many requests on the replicas of the first cluster."""
    loaded = load_service_spec(spec)
    request = service_request(loaded, load_named_profile(CLUSTERS[0]), read_model(loaded))
    demand = request.demand
    bounded, _ = bound(request.offer, request.model, request.engine, demand)
    one = min((choices[0] for choices in bounded), key=lambda found: found.least_replicas(demand))
    count = one.least_replicas(demand) + 1
    simulated(one, one.tables.usual, count, demand, 100)
    service = SimulatedService(one.tables.usual, one.limits, count)
    requests = draw_requests(demand.traffic, _SIMULATED, seed=1)
    _, process, _ = timed(lambda: simulate_open(service, requests, demand.rate))
    return _SIMULATED / process


def main() -> None:
    """Print the rows and the total."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with TemporaryDirectory() as directory:
        spec = Path(directory, "service.yaml")
        spec.write_text(SPEC.format(rate=options.rate))
        speed = simulated_requests_per_second(spec)
        rows = plan_clusters(spec)
    process, clock = sum(row.cpu_seconds for row in rows), sum(row.wall_seconds for row in rows)
    if options.json:
        total = {"cpu_seconds": process, "wall_seconds": clock, "requests_per_second": speed}
        print(json.dumps({"clusters": [asdict(row) for row in rows], **total}, indent=2))
        return
    print(f"simulation: {speed:,.0f} requests per CPU second")
    print(f"{'cluster':12}{'GPU':16}{'replicas':>9}{'GPUs':>6}{'an hour':>9}{'CPU s':>7}{'s':>7}")
    for row in rows:
        print(
            f"{row.profile:12}{row.gpu:16}{row.replicas:9}{row.gpus:6}"
            f"{row.cost_per_hour or 0:9.2f}{row.cpu_seconds:7.2f}{row.wall_seconds:7.2f}"
        )
    print(f"{'all':52}{process:7.2f}{clock:7.2f}")


if __name__ == "__main__":
    main()
