"""What the process that exports metrics does to files, counted by strace: as the table says."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

from fabricated_runs import LAUNCHED, STARTED, SUBMITTED, fabricate

from bench.footprint.system_calls import calls_below, strace_command
from hpctrain.job.footprint import load_footprint_table
from hpctrain.observe.attempt_exporter import PASS_SECONDS
from hpctrain.plan.footprint.table import OPERATIONS, Operation, RunSize
from hpctrain.records.run_records import (
    AxisMessages,
    CommunicationRecord,
    RankTimes,
    SaveRecord,
    append_save,
    write_record,
)

ROOT = Path(__file__).resolve().parents[3]
# Reads the directory as often as it is told to; the account of all steps only once.
PROGRAM = """
import sys
from pathlib import Path
from hpctrain.observe.attempt_exporter import AttemptExporter
from hpctrain.records.find import RunFiles
from hpctrain.records.layout import RunLayout

AttemptExporter.account_share = 1e-9
source = AttemptExporter(RunFiles(RunLayout(Path(sys.argv[1]))), {"SLURM_JOB_ID": "1"})
for _ in range(int(sys.argv[2])):
    assert source.samples()
"""


def counted(tmp_path: Path, passes: int) -> Counter[tuple[str, Operation]]:
    """Calls of that many passes, by place."""
    directory = tmp_path / str(passes)
    run = fabricate(directory / "runs", entries=(*SUBMITTED, STARTED, LAUNCHED), steps=5).layout
    append_save(
        run,
        SaveRecord(step=5, epoch=1, time=1.0, stall_seconds=0.1, publish_seconds=0.2, size_bytes=9),
    )
    times = RankTimes(
        epoch=1, first_step=1, last_step=5, time=1.0, compute_seconds=(1.0,), nodes=("n0",)
    )
    write_record(run.rank_times, times)
    along = AxisMessages(
        axis="dp", ranks_per_group=1, groups=(0,), calls=(1,), bytes=(4,), seconds=(0.1,)
    )
    record = CommunicationRecord(
        epoch=1, step=5, time=1.0, step_seconds=1.0, nodes=("n0",), axes=(along,)
    )
    write_record(run.communication, record)
    traces = directory / "traces"
    traces.mkdir()
    words = [*strace_command(traces, "t"), sys.executable, "-c", PROGRAM]
    subprocess.run(
        [*words, str(run.directory), str(passes)], check=True, env={"PYTHONPATH": str(ROOT)}
    )
    found: Counter[tuple[str, Operation]] = Counter()
    for call, count in calls_below(run.directory, traces, "t").items():
        found[load_footprint_table().place_of(call.path) or call.path, call.operation] += count
    return found


def test_each_pass_is_as_predicted(tmp_path: Path) -> None:
    few, many = counted(tmp_path, 1), counted(tmp_path, 5)
    rows = [row for row in load_footprint_table().exporter if row.per == "second"]
    expected: Counter[tuple[str, Operation]] = Counter()
    for row in rows:
        for operation in OPERATIONS:
            if each := row.calls(operation, RunSize(exported=1)) * PASS_SECONDS:
                expected[row.place, operation] += round(each)
    seen = {key: (many[key] - few[key]) / 4 for key in many if many[key] != few[key]}
    assert seen == dict(expected)
