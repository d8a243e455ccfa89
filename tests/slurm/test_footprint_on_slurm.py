"""What a real supervisor asks of a real Slurm and of the file system, beside the prediction."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from rehearsal import PATIENCE_SECONDS, PlannedFault, Rehearsal, Stage

from bench.footprint.small_runs import TABLE, settled
from bench.footprint.system_calls import calls_below, programs, strace_command
from hpctrain.job.footprint import size_of
from hpctrain.job.prepare import prepare
from hpctrain.plan.footprint.table import OPERATIONS, Event, FileRow, RunSize
from hpctrain.records.ledger import EventKind

pytestmark = pytest.mark.nightly("counts every call of a whole run by strace")

SUPERVISOR = "supervisor"
# The daemons' own, and what this test asks itself.
NOT_OF_COMMANDS = re.compile(r"MESSAGE_|REQUEST_STATS_INFO|REQUEST_COMPLETE_BATCH|_REGISTRATION")


@dataclass(frozen=True)
class Traced:
    """A run whose first launch fails at step 7 and whose second one ends well."""

    rehearsal: Rehearsal
    size: RunSize
    traces: Path

    @property
    def events(self) -> dict[Event, int]:
        return {"launch": 2, "fresh": 1, "resume": 1, "failure": 1}

    @property
    def seconds(self) -> float:
        """How long the supervisor has watched its launches."""
        began = [event.time for event in self.rehearsal.events(EventKind.LAUNCH_STARTED)]
        ended = [event.time for event in self.rehearsal.events(EventKind.LAUNCH_ENDED)]
        return sum(ended) - sum(began)


@pytest.fixture(scope="module")
def traced(real_stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    traces = tmp_path_factory.mktemp("traces")
    rehearsal = real_stage.start(
        *("name=traced", "budget.steps=12", "checkpoint.every_steps=4", "checkpoint.keep=2"),
        planned=[PlannedFault(epoch=1, rank=1, do="raise", step=7)],
        strace=strace_command(traces, SUPERVISOR, beside=True),
    )
    rehearsal.wait_till_over()
    assert rehearsal.causes == ["crash", "done"], rehearsal.logs()
    directory = rehearsal.run.layout.directory
    made = prepare(directory / "spec.yaml", str(directory / "profile.yaml"), runs=real_stage.runs)
    return Traced(rehearsal, size_of(made), traces)


def command_of(words: Sequence[str]) -> str | None:
    """A key of `rpcs`; None for a program that asks slurmctld nothing."""
    name = os.path.basename(words[0])
    if name == "scontrol":
        verbs = [word for word in words[1:] if not word.startswith("-")]
        name = " ".join(["scontrol", *verbs[: 2 if verbs[0] == "show" else 1]])
    if name == "squeue" and "--steps" in words:
        name = "squeue --steps"
    return name if name in TABLE.rpcs else None


def test_commands_are_as_predicted(traced: Traced) -> None:
    """No more than all rows say, no fewer than those that every launch and failure has."""
    found = Counter(filter(None, map(command_of, programs(traced.traces, SUPERVISOR))))
    for command in TABLE.rpcs:
        rows = [row for row in TABLE.slurm if row.command == command and row.per in traced.events]
        counts = {row: row.count.at(traced.size) * traced.events[row.per] for row in rows}
        least = sum(count for row, count in counts.items() if not row.varies)
        assert least <= found[command] <= sum(counts.values()), f"{command}: {found}"


def test_files_of_the_run_are_as_predicted(traced: Traced) -> None:
    """Logs, epochs and records of a failed and of a good launch, exactly."""
    root = traced.rehearsal.run.layout.directory
    left = Counter(TABLE.place_of(str(path.relative_to(root))) for path in root.rglob("*"))
    events = {**traced.events, "run": 1}
    for place in ("epochs", "ledger", "metrics", "progress", "saves", "done marker", "requests"):
        rows = [row for row in TABLE.file_rows if row.place == place and row.per in events]
        assert left[place] == sum(r.inodes.at(traced.size) * events[r.per] for r in rows), place
    makers = ("Slurm", "submit")
    by_others = [row for row in TABLE.file_rows if row.place == "logs" and row.by in makers]
    rows = [row for row in by_others if row.per in events]
    most = sum(row.inodes.at(traced.size) * events[row.per] for row in rows)
    # both launches are of one job, which has one directory and one log of its own
    assert left["logs"] == most - 2


def test_operations_of_the_supervisor_are_below_the_prediction(traced: Traced) -> None:
    """At most as predicted, and at least half of it.

    It reads faster while a failure is looked into, and the run directory is local here: what is
    read twice is not counted in the table. So the bound is a quarter above.
    """
    root = traced.rehearsal.run.layout.directory
    found: Counter[str] = Counter()
    unknown = []
    for call, count in calls_below(root, traced.traces, SUPERVISOR).items():
        place = TABLE.place_of(settled(call.path))
        if place == "kept code":  # the supervisor imports itself from there
            continue
        found[call.operation] += count
        unknown += [call.path] if place is None else []
    assert not unknown

    def times(row: FileRow) -> float:
        return traced.seconds if row.per == "second" else traced.events.get(row.per, 0)

    # what is old enough to be packed: nothing after two launches
    packing = "hpctrain.records.old_launches:"
    rows = [
        row
        for row in TABLE.file_rows
        if row.by == SUPERVISOR and not row.source.startswith(packing)
    ]
    for operation in OPERATIONS:
        expected = sum(row.calls(operation, traced.size) * times(row) for row in rows)
        assert found[operation] <= 1.25 * expected + 5, f"{operation}: {found} for {expected}"
        assert found[operation] >= 0.5 * expected - 5, f"{operation}: {found} for {expected}"


# -- RPCs of one command -------------------------------------------------------------------------


@pytest.fixture
def job(stage: Stage) -> Iterator[int]:
    """A job on two nodes with a step that stays."""
    text = "#!/bin/sh\n#SBATCH -p train -N2 -t 20 -o /dev/null\nsrun -n2 sleep 600\n"
    job_id = stage.slurm.submit(text).job_id
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not any(step.step_id.isdigit() for step in _steps(stage, job_id)):
        assert time.monotonic() < deadline, "no step has started"
        time.sleep(0.2)
    yield job_id
    stage.slurm.cancel(job_id)


def _steps(stage: Stage, job_id: int) -> Sequence[object]:
    record = stage.slurm.jobs([job_id]).get(job_id)
    return stage.slurm.steps(job_id) if record is not None and record.state.is_running else ()


def test_rpcs_of_each_command(stage: Stage, job: int) -> None:
    """As sdiag(1) counts them, for the calls of the supervisor's own client."""
    slurm, environment = stage.slurm, {**os.environ, **stage.sandbox.environment()}
    node = stage.sandbox.shape.node_names[0]
    waiting = slurm.submit("#!/bin/sh\n", ("--hold", "--partition=train")).job_id

    def srun() -> None:
        words = ["srun", f"--jobid={job}", "--overlap", "--nodes=2", "--ntasks=2", "true"]
        subprocess.run(words, env=environment, check=True)

    calls: dict[str, Callable[[], object]] = {
        "squeue": lambda: slurm.jobs([job]),
        "squeue --steps": lambda: slurm.steps(job),
        "scontrol show node": lambda: slurm.node_address(node),
        "scontrol show config": slurm.config,
        "scontrol show topology": slurm.leaves,
        "sinfo": lambda: slurm.node_states([node]),
        "scontrol update": lambda: slurm.update_job(waiting, exclude_nodes=[node]),
        "scancel": lambda: slurm.signal_step(job, "0", "CONT"),
        "sbatch": lambda: slurm.submit("#!/bin/sh\n", ("--hold", "--partition=train")),
        "srun": srun,
        "scontrol requeue": lambda: slurm.requeue(waiting),  # refused, by one RPC as well
    }
    assert calls.keys() == TABLE.rpcs.keys()
    found = {}
    for command, call in calls.items():
        before = _settled_rpcs(environment)
        call()
        counted = _rpcs(environment) - before
        found[command] = sum(n for name, n in counted.items() if not NOT_OF_COMMANDS.match(name))
    most = {name: rpc.at(RunSize(nodes=2)) for name, rpc in TABLE.rpcs.items()}
    over = {name: (found[name], most[name]) for name in found if found[name] > most[name]}
    assert not over, f"more RPCs than the table says: {over}"
    assert all(found[name] for name in found), f"a command without an RPC: {found}"


def _settled_rpcs(environment: dict[str, str]) -> Counter[str]:
    """What is counted once nothing is on its way: the end of srun's step comes from its nodes."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    before = _rpcs(environment)
    while time.monotonic() < deadline:
        time.sleep(0.5)
        now = _rpcs(environment)
        own = {name for name in now if NOT_OF_COMMANDS.match(name)}
        if all(now[name] == before[name] for name in now.keys() - own):
            return now
        before = now
    raise AssertionError("slurmctld is asked all the time")


def _rpcs(environment: dict[str, str]) -> Counter[str]:
    done = subprocess.run(["sdiag"], env=environment, check=True, capture_output=True, text=True)
    by_type = done.stdout.partition("by message type")[2].partition("by user")[0]
    return Counter(
        {m[1]: int(m[2]) for m in re.finditer(r"(\w+)\s*\(\s*\d+\) count:(\d+)", by_type)}
    )
