"""Print the footprint of gpt175b, and the table behind it beside what strace has counted.

python -m bench.footprint [--ranks 2 3 4]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from bench.footprint.small_runs import RANK_ACTORS, TABLE, Counted, count_small_runs, total
from hpctrain.job.footprint import footprint_of, size_of
from hpctrain.job.footprint_command import footprint_lines
from hpctrain.job.prepare import prepare
from hpctrain.plan.footprint.predict import TableSums
from hpctrain.plan.footprint.table import OPERATIONS, Operation, RunSize

EXAMPLE, PROFILE = Path(__file__).resolve().parents[2] / "examples" / "gpt175b.yaml", "a100x64"


def by_the_table(one: Counted, size: RunSize) -> dict[Operation, float]:
    """What the table says that the ranks of a run of that size do in the events of this launch."""
    sums = TableSums(TABLE, size)
    calls = [(sums.calls(event, by=RANK_ACTORS), n) for event, n in one.events.items()]
    return {name: sum(call[name] * n for call, n in calls) for name in OPERATIONS}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    sizes = parser.parse_args().ranks
    with tempfile.TemporaryDirectory(prefix="hpctrain-footprint-") as name:
        counted = count_small_runs(Path(name) / "runs", sizes)
        made = prepare(EXAMPLE, PROFILE, runs=Path(name))
    print("\n".join(footprint_lines(footprint_of(made))))
    size = size_of(made)
    print(f"\n{'Operations of ranks':<34}" + "".join(f"{o:>9}" for o in OPERATIONS))
    for one in counted:
        if one.size.ranks == max(sizes):
            name = f"  {one.kind}, {one.size.ranks} ranks"
            _row(f"{name}: counted", total(one))
            _row(f"{name}: table", by_the_table(one, one.size))
            _row(f"  {one.kind}, {size.ranks} ranks: table", by_the_table(one, size))
    print(
        "\nThe same events in all rows of a kind: two checkpoints in `first`, one in `again`. "
        "Counted above\nthe table is what is done by the clock: a sign of life each second, a look "
        "for requests. Launches of\n`failed` end before they read data. The example has more "
        "datasets and checkpoints."
    )
    return 0


def _row(label: str, calls: Mapping[Operation, float]) -> None:
    print(f"{label:<34}" + "".join(f"{round(calls[one]):>9,}" for one in OPERATIONS))


if __name__ == "__main__":
    sys.exit(main())
