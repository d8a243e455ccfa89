"""Print the footprint of gpt175b beside what strace has counted per rank on small runs.

python -m bench.footprint [--ranks 2 3 4]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from bench.footprint.small_runs import RANK_ACTORS, Counted, count_small_runs, total
from hpctrain.actions.footprint import footprint_of
from hpctrain.actions.plan import run_facts
from hpctrain.actions.prepare import prepare
from hpctrain.cli.footprint_text import footprint_lines
from hpctrain.plan.footprint.predict import file_calls, run_size
from hpctrain.plan.footprint.quantities import OPERATIONS, Event
from hpctrain.plan.forecast.predict import forecast

EXAMPLE, PROFILE = Path(__file__).resolve().parents[2] / "examples" / "gpt175b.yaml", "a100x64"
_EVENTS: dict[str, tuple[Event, ...]] = {
    "first": ("launch", "fresh", "checkpoint"),
    "again": ("launch", "resume", "checkpoint"),
    "failed": ("launch", "fresh", "failure"),
}


def per_rank(counted: list[Counted], kind: str) -> dict[str, float]:
    """Operations that one more rank adds, from the smallest to the largest size."""
    chosen = sorted((one for one in counted if one.kind == kind), key=lambda one: one.size.ranks)
    least, most = chosen[0], chosen[-1]
    low, high = total(least), total(most)
    return {one: (high[one] - low[one]) / (most.size.ranks - least.size.ranks) for one in low}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    sizes = parser.parse_args().ranks
    with tempfile.TemporaryDirectory(prefix="hpctrain-footprint-") as name:
        counted = count_small_runs(Path(name) / "runs", sizes)
        made = prepare(EXAMPLE, PROFILE, runs=Path(name))
    print("\n".join(footprint_lines(footprint_of(made))))
    spec, site = made.spec.document, made.profile.document
    facts = run_facts(spec, site, made.plan)
    assert facts is not None, "the profile has a known GPU"
    size = run_size(spec, site, made.plan, forecast(spec, site, facts))
    print(
        f"\n{f'Operations of ranks at {size.ranks}':<34}" + "".join(f"{o:>9}" for o in OPERATIONS)
    )
    for kind, events in _EVENTS.items():
        slopes, calls = per_rank(counted, kind), file_calls(size, events, RANK_ACTORS)
        scaled = "".join(f"{slopes[one] * size.ranks:>9,.0f}" for one in OPERATIONS)
        table = "".join(f"{getattr(calls, one):>9,}" for one in OPERATIONS)
        print(f"{f'  {kind}: per rank x {size.ranks}, counted':<34}{scaled}")
        print(f"{f'  {kind}: by the table':<34}{table}")
    print(
        f"\nCounted on {', '.join(map(str, sizes))} ranks, with two checkpoints in `first`, one in "
        "`again`; the example has more datasets and checkpoints than the small runs."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
