"""Prints how long the report about the runs of a directory takes, for `tests.team_runs`.

`python -m tests.week_seconds DIRECTORY`
"""

from __future__ import annotations

import resource
import sys
import time
from datetime import UTC
from pathlib import Path

from hpctrain.report.report_windows import last_days
from hpctrain.report.team_report import team_report
from tests.team_runs import NOW


def measure(directory: Path) -> str:
    """Report once, and describe what it took."""
    begin, processor_begin = time.perf_counter(), time.process_time()
    report = team_report([directory], last_days(NOW, UTC), NOW)
    wall, processor = time.perf_counter() - begin, time.process_time() - processor_begin
    steps = report.total.steps + report.total.redone_steps
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return (
        f"{report.total.runs} runs, {steps:,} steps in the window: {wall:.1f} s, of which "
        f"{processor:.1f} s of the processor; at most {peak:.0f} MiB"
    )


if __name__ == "__main__":
    print(measure(Path(sys.argv[1])))
