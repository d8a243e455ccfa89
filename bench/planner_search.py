"""The planner's search: candidates, seconds, candidates per second, and peak memory.

The peer is a plain Python loop that calls the same formulas for one candidate at a time, on a
sample of the same candidates; the ratio of both speeds hardly depends on the machine. Targets:
512 GPUs within 1 s and 500 MB, 16,384 GPUs within 5 s. Each search runs in a process of its own,
so that the peak memory is its own. Run it alone: another process on the core counts as time.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hpctrain.plan.cost.from_spec import case_of  # noqa: E402
from hpctrain.plan.cost.memory import peak_bytes  # noqa: E402
from hpctrain.plan.cost.step import step_seconds  # noqa: E402
from hpctrain.plan.mesh.candidate import columns_of  # noqa: E402
from hpctrain.plan.planner import Decision, decide  # noqa: E402
from hpctrain.plan.request import Knowledge, PlanRequest  # noqa: E402
from hpctrain.spec.catalogue import cluster_gpu  # noqa: E402
from hpctrain.spec.loader import (  # noqa: E402
    find_profile,
    load_calibration,
    load_catalogue,
    load_profile,
    load_run_spec,
    load_uncertainty,
)
from hpctrain.spec.profile import ClusterProfile  # noqa: E402
from hpctrain.spec.run import RunSpec  # noqa: E402

SAMPLE = 200
ROUNDS = 3
FREE = ["parallel=auto", "batch.micro=auto", "recompute=auto"]


def gpt175b_on_512() -> tuple[RunSpec, ClusterProfile]:
    """The example with every axis free."""
    spec = load_run_spec(ROOT / "examples/gpt175b.yaml", FREE).document
    return spec, load_profile(find_profile("a100x64")).document


def gpt175b_on_16384() -> tuple[RunSpec, ClusterProfile]:
    """The same on 2048 nodes like those of h100x16, with eight times the batch."""
    more = ["resources.gpus=16384", "batch.global=12288"]
    spec = load_run_spec(ROOT / "examples/gpt175b.yaml", [*FREE, *more]).document
    profile = load_profile(find_profile("h100x16")).document
    nodes = profile.nodes.model_copy(update={"count": 2048})
    return spec, profile.model_copy(update={"nodes": nodes})


CASES: dict[str, tuple[Callable[[], tuple[RunSpec, ClusterProfile]], float]] = {
    "gpt175b on 512 A100": (gpt175b_on_512, 1.0),
    "gpt175b on 16,384 H100": (gpt175b_on_16384, 5.0),
}


def measure(name: str) -> dict[str, Any]:
    """One case in this process."""
    spec, profile = CASES[name][0]()
    gpu = cluster_gpu(load_catalogue(), profile)
    knowledge = Knowledge(gpu, load_calibration(), load_uncertainty())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds, decision = [], None
    for _ in range(ROUNDS):
        start = time.perf_counter()
        decision = decide(PlanRequest(spec, profile, knowledge))
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert decision is not None
    counts = decision.found.counts
    return {
        "layout": str(decision.found.candidate(decision.row)),
        "step_seconds": decision.plan.step_seconds,
        "first": seconds[0],
        "best": min(seconds),
        "enumerated": counts.enumerated,
        "priced": len(decision.found.columns),
        "fitting": counts.fitting,
        "peak_mib": peak / 1024,
        "before_mib": before / 1024,
        "loop_seconds": loop_seconds(decision),
    }


def loop_seconds(decision: Decision) -> float:
    """Seconds per candidate when each is priced alone."""
    found = decision.found
    step = max(1, len(found.columns) // SAMPLE)
    rows = range(0, len(found.columns), step)
    start = time.perf_counter()
    for row in rows:
        columns = columns_of(found.candidate(row))
        case = case_of(decision.request, columns)
        if float(peak_bytes(case)[0]) <= found.capacity_bytes:
            step_seconds(case)
    return (time.perf_counter() - start) / len(rows)


def report(name: str, told: dict[str, Any]) -> bool:
    """Print one case; True when it is within its target."""
    limit = CASES[name][1]
    per_second = told["enumerated"] / told["best"]
    whole_loop = told["loop_seconds"] * told["priced"]
    print(f"{name}: {told['layout']}, {told['step_seconds']:.2f} s a step")
    print(
        f"  {told['enumerated']:,} candidates, {told['priced']:,} of them priced, "
        f"{told['fitting']:,} fit"
    )
    print(
        f"  {told['first']:.2f} s the first time, {told['best']:.2f} s the best of {ROUNDS}: "
        f"{per_second:,.0f} candidates/s ({told['priced'] / told['best']:,.0f} priced/s)"
    )
    print(
        f"  peak {told['peak_mib']:.0f} MiB, {told['before_mib']:.0f} MiB of it before the search"
    )
    print(
        f"  one at a time: {1e3 * told['loop_seconds']:.2f} ms each, {whole_loop:.0f} s for all: "
        f"{whole_loop / told['best']:.0f} x slower"
    )
    good = told["first"] <= limit and told["peak_mib"] <= 500
    print(f"  target {limit:g} s and 500 MiB: {'met' if good else 'MISSED'}")
    return good


def main() -> int:
    """Every case in a process of its own."""
    good = True
    for name in CASES:
        done = subprocess.run(
            [sys.executable, __file__, name], capture_output=True, text=True, timeout=600
        )
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            return done.returncode
        good &= report(name, json.loads(done.stdout))
    return 0 if good else 1


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
    else:
        sys.exit(main())
