"""What the process does to files, counted by strace: as the table of the footprint says."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from fabricated_runs import fabricate
from tracked_runs import tracked

from bench.footprint.system_calls import calls_below, strace_command
from hpctrain.job.footprint import load_footprint_table
from hpctrain.plan.footprint.table import CONSTANTS, OPERATIONS, Operation, RunSize
from hpctrain.tracking import follower, wandb_run

ROOT = Path(__file__).resolve().parents[3]
PLACES = ("tracking", "metrics", "saves")
# Writes as often as it is told to, with new rows each time, all of them settled.
PROGRAM = """
import sys, time
from pathlib import Path
from hpctrain.records.layout import RunLayout
from hpctrain.records.tracking import tracking_config
from hpctrain.tracking import wandb_run
from hpctrain.tracking.__main__ import writers
from tracked_runs import train

run, times = RunLayout(Path(sys.argv[1])), int(sys.argv[2])
wandb_run.SEGMENT_SECONDS = 0.0
(make,) = writers(run, tracking_config(run))
writer = make()
for number in range(times):
    train(run, [2 * number + 1, 2 * number + 2], saved=[2 * number + 1])
    writer.write(last=False)
    time.sleep(1.1)  # names of segments have seconds
writer.close()
"""


def counted(tmp_path: Path, kind: str, times: int) -> Counter[tuple[str, Operation]]:
    """Calls of that many rounds, by place; without those of who trains."""
    directory = tmp_path / f"{kind}-{times}"
    run = fabricate(directory / "runs").layout
    tracked(run, tensorboard=kind == "tensorboard", wandb=kind == "wandb")
    traces = directory / "traces"
    traces.mkdir()
    words = [*strace_command(traces, "t"), sys.executable, "-c", PROGRAM]
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    subprocess.run([*words, str(run.directory), str(times)], check=True, env=paths)
    found: Counter[tuple[str, Operation]] = Counter()
    for call, count in calls_below(run.directory, traces, "t").items():
        path = call.path.removesuffix(".tmp")
        place = "tracking" if path.startswith("tracking") else load_footprint_table().place_of(path)
        if place in PLACES:
            found[place, call.operation] += count
    found["metrics", "open"] -= 2 * times
    found["saves", "open"] -= times
    return found


def test_intervals_are_those_of_the_process() -> None:
    assert CONSTANTS["follow seconds"] == follower.FOLLOW_SECONDS
    assert CONSTANTS["segment seconds"] == wandb_run.SEGMENT_SECONDS


@pytest.mark.variant("test_intervals_are_those_of_the_process")
@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        ("tensorboard", follower.FOLLOW_SECONDS),
        ("wandb", wandb_run.SEGMENT_SECONDS),
    ],
)
def test_each_round_is_as_predicted(tmp_path: Path, kind: str, seconds: float) -> None:
    few, many = counted(tmp_path, kind, 1), counted(tmp_path, kind, 3)
    size = RunSize(**{kind: 1})
    rows = [row for row in load_footprint_table().tracking if row.per == "second"]
    for place in PLACES:
        for operation in OPERATIONS:
            calls = [row.calls(operation, size) for row in rows if row.place == place]
            expected = sum(calls) * seconds
            each = (many[place, operation] - few[place, operation]) / 2
            assert each == pytest.approx(expected), f"{operation} of {place}"
