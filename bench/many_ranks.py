"""A night of 512 ranks on 64 nodes, for real: the rendered 175B script, Slurm, and four faults.

Real are the script of examples/gpt175b.yaml, a Slurm of 64 nodes with 8 counted GPUs each, the
supervisor, 512 processes below srun, and every file. Only what ranks compute is not: they are those
of the stand-in (docs/trainer-contract.md). The run is preempted, loses a node, has a rank that is
stopped, has a rank killed, and is then asked to stop. Printed: what each fault took until the
verdict, until the next launch and until the first new step, what the supervisor and Slurm paid for
it, the files that were made, and whether all losses equal those of an undisturbed run bit by bit.
Exit code 1 unless they do and each fault had the verdict that it should have.

    python -m bench.many_ranks [--nodes 64] [--step-seconds 0.25] [--steady-seconds 60] [--write]
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.rehearsals import Rehearsal, own_sandbox
from bench.supervisor_cost import counting_commands

from stand_in_runs import PROFILE, shape_of, start_stand_in, wrong_losses  # isort: skip

from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.requests import make_request
from hpctrain.records.run_records import StepMetrics, read_metrics
from hpctrain.sandbox.faults import crash_node, has_rebooted, restart_node
from hpctrain.sandbox.repair import return_nodes
from hpctrain.sandbox.sandbox import Sandbox

_ROOT = Path(__file__).resolve().parents[1]
_GOLDEN = _ROOT / "tests" / "golden" / "scripts" / f"{PROFILE}--gpt175b.sbatch"
_GOLDEN_PYTHON = "/opt/hpctrain/bin/python3"
_DOCUMENT = _ROOT / "docs" / "scale.md"
_PATIENCE_SECONDS = 900.0
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_SAMPLE_SECONDS = 0.5


@dataclass(frozen=True)
class Cost:
    """What a supervisor has used: CPU seconds of its own and of ended children, peak memory."""

    own_seconds: float = 0.0
    children_seconds: float = 0.0
    peak_bytes: int = 0


class Supervisors(threading.Thread):
    """Follows the supervisors of a run, one per attempt; `costs` has the last sight of each."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        super().__init__(daemon=True)
        self.costs: dict[int, Cost] = {}
        self._directory = str(rehearsal.run.layout.directory)
        self._over = threading.Event()

    def run(self) -> None:
        """Look at the present supervisor until `close`."""
        pid = None
        while not self._over.wait(_SAMPLE_SECONDS):
            pid = pid if pid is not None and self._look(pid) else self._find()

    def close(self) -> None:
        self._over.set()
        self.join()

    @property
    def total(self) -> Cost:
        costs = self.costs.values()
        return Cost(
            sum(one.own_seconds for one in costs),
            sum(one.children_seconds for one in costs),
            max(one.peak_bytes for one in costs),
        )

    def _find(self) -> int | None:
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if b"hpctrain.supervise" in words and os.readlink(entry / "cwd") == self._directory:
                    return int(entry.name)
            except OSError:
                continue
        return None

    def _look(self, pid: int) -> bool:
        """Record proc(5), stat, fields 14 to 17, and VmHWM; False if the process is gone."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return False
        peak = next((line for line in status.splitlines() if line.startswith("VmHWM:")), None)
        if peak is None:  # a zombie has no memory
            return False
        own, children = (sum(map(int, fields[first : first + 2])) for first in (11, 13))
        self.costs[pid] = Cost(
            own / _TICKS_PER_SECOND, children / _TICKS_PER_SECOND, int(peak.split()[1]) * 1024
        )
        return True


@dataclass(frozen=True)
class Recovery:
    """One fault and how long the run took, in seconds from the fault."""

    fault: str
    causes: tuple[str, ...]
    expected: str
    verdict_seconds: float
    launch_seconds: float
    step_seconds: float
    calls: int
    cost: Cost
    lost_steps: int


class Night:
    """The run and its faults, one after the other."""

    def __init__(self, sandbox: Sandbox, rehearsal: Rehearsal, calls: Path) -> None:
        self.sandbox, self.rehearsal = sandbox, rehearsal
        self.supervisors = Supervisors(rehearsal)
        self.recoveries: list[Recovery] = []
        self._calls = calls

    @property
    def calls(self) -> int:
        """Commands of Slurm that the job has run."""
        return len(self._calls.read_text().splitlines()) if self._calls.exists() else 0

    def strike(
        self, fault: str, expected: str, do: Callable[[], object], mend: Callable[[], object]
    ) -> None:
        """Do it after a new checkpoint and some steps; `mend` follows the verdict."""
        rehearsal, epoch = self.rehearsal, self.rehearsal.epoch
        self.await_progress(epoch)
        calls, cost, events = self.calls, self.supervisors.total, len(self._events)
        began_at = time.time()
        do()
        self.wait(lambda: self._verdicts(events) != (), f"a verdict on {fault}")
        mend()
        self.wait(lambda: bool(self._rows_after(epoch)), f"a new step after {fault}")
        verdicts = self._verdicts(events)
        launched = next(
            event for event in self._events[events:] if event.event is EventKind.LAUNCH_STARTED
        )
        first = self._rows_after(epoch)[0]
        after = self.supervisors.total
        self.recoveries.append(
            Recovery(
                fault=fault,
                causes=tuple(str(event.cause) for event in verdicts),
                expected=expected,
                verdict_seconds=verdicts[0].time - began_at,
                launch_seconds=launched.time - began_at,
                step_seconds=first.time - began_at,
                calls=self.calls - calls,
                cost=Cost(
                    after.own_seconds - cost.own_seconds,
                    after.children_seconds - cost.children_seconds,
                    after.peak_bytes,
                ),
                lost_steps=rehearsal.rows(epoch)[-1].step - first.step + 1,
            )
        )
        _say(f"{fault}: a new step {first.time - began_at:.1f} s later")

    def await_progress(self, epoch: int) -> None:
        """Until this launch has published a checkpoint of its own and trained on."""
        saves = self.rehearsal.run.layout.saves

        def moved() -> bool:
            lines = saves.read_text().splitlines() if saves.exists() else []
            rows = self.rehearsal.rows(epoch)
            own = [line for line in lines if f'"epoch":{epoch},' in line]
            return bool(own and rows) and f'"step":{rows[-1].step},' not in own[-1]

        self.wait(moved, f"a checkpoint of launch {epoch}")

    def wait(self, reached: Callable[[], bool], what: str) -> None:
        self.rehearsal.wait(reached, what, _PATIENCE_SECONDS)

    def _rows_after(self, epoch: int) -> list[StepMetrics]:
        """The steps of later launches than this one."""
        return [row for row in read_metrics(self.rehearsal.run.layout) if row.epoch > epoch]

    @property
    def _events(self) -> list[Event]:
        return self.rehearsal.run.ledger.events()

    def _verdicts(self, since: int) -> tuple[Event, ...]:
        kinds = (EventKind.LAUNCH_ENDED, EventKind.ATTEMPT_LOST)
        return tuple(event for event in self._events[since:] if event.event in kinds)


def strike_all(night: Night) -> None:
    """All faults of the night; each is mended before the next."""
    sandbox, rehearsal = night.sandbox, night.rehearsal
    names = sandbox.shape.node_names
    urgent = "#!/bin/sh\n#SBATCH -J urgent -p priority -N1 --exclusive -t 5 -o /dev/null\nsleep 2\n"
    lost, stopped = names[len(names) // 3], len(names) * 8 * 3 // 4 + 3

    def nothing() -> None:
        pass

    def return_node() -> None:
        restart_node(sandbox, lost, rebooted=True)
        night.wait(lambda: has_rebooted(sandbox, lost), f"{lost} is back")
        return_nodes(sandbox, (lost,))

    def signal_rank(number: int) -> Callable[[], None]:
        return lambda: rehearsal.kill_rank(stopped, number)

    night.strike("preemption", "preempted", lambda: rehearsal.slurm.submit(urgent), nothing)
    night.strike("node lost", "node_failure", lambda: crash_node(sandbox, lost), return_node)
    night.strike("rank stopped", "hang", signal_rank(signal.SIGSTOP), nothing)
    night.strike("rank killed", "crash", signal_rank(signal.SIGKILL), nothing)


def main() -> int:
    """Run the night; 0 only if nothing was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--step-seconds", type=float, default=0.25)
    parser.add_argument("--steady-seconds", type=float, default=60.0)
    parser.add_argument("--write", action="store_true", help="write docs/scale.md")
    options = parser.parse_args()
    full = options.nodes == 64
    overrides = () if full else (f"resources.gpus={options.nodes * 8}",)
    lines: list[str] = []
    began_at = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="hpctrain-many-") as name,
        own_sandbox(shape_of(options.nodes)) as sandbox,
    ):
        place = Path(name)
        lines.append(f"sandbox of {options.nodes} nodes up in {time.monotonic() - began_at:.0f} s")
        lines.append(f"its daemons: {daemon_bytes(sandbox) / 1e6:.0f} MB resident")
        calls = place / "calls"
        shims = counting_commands(place / "bin", calls)
        path = f"{shims}:{sandbox.environment()['PATH']}"
        submitted_at = time.time()
        rehearsal, prepared = start_stand_in(
            sandbox, place, "gpt175b", overrides, step_seconds=options.step_seconds, path=path
        )
        lines.append(compare_script(prepared.script, str(place / "python"), full=full))
        night = Night(sandbox, rehearsal, calls)
        night.supervisors.start()
        night.wait(lambda: bool(rehearsal.rows(1)), "a first step")
        launched = rehearsal.events(EventKind.LAUNCH_STARTED)[0].time
        first = rehearsal.rows(1)[0].time
        lines.append(
            f"first step {first - submitted_at:.0f} s after sbatch, {first - launched:.0f} s after "
            f"srun of {options.nodes * 8} tasks"
        )
        lines.append(rank_bytes(rehearsal))
        lines += steady(night, options.steady_seconds)
        for line in lines:
            _say(line)
        strike_all(night)
        make_request(rehearsal.run.layout, "stop", "the night is over")
        rehearsal.wait_till_over()
        night.supervisors.close()
        said, wrong = conclude(night, began_at)
        _say("\n".join(said))
        if options.write:
            _DOCUMENT.write_text(document(lines + said, options.nodes))
        for words in wrong:
            _say(f"WRONG: {words}")
        return 1 if wrong else 0


def compare_script(script: str, python: str, *, full: bool) -> str:
    """Say whether the script is the golden one but for its interpreter."""
    if not full:
        return "the script is of fewer nodes than the golden one"
    assert script.replace(python, _GOLDEN_PYTHON) == _GOLDEN.read_text(), "another script"
    return f"script: {_GOLDEN.name}, byte by byte, but for the path of the interpreter"


def steady(night: Night, seconds: float) -> list[str]:
    """What the supervisor costs while nothing happens to the run."""
    night.await_progress(1)
    calls, cost, began_at = night.calls, night.supervisors.total, time.monotonic()
    time.sleep(seconds)
    hours = (time.monotonic() - began_at) / 3600
    own = night.supervisors.total.own_seconds - cost.own_seconds
    return [
        f"steady state: {own / hours:.0f} CPU s of the supervisor per hour "
        f"({own / hours / 36:.2f} % of a core), "
        f"{(night.calls - calls) / hours:.0f} commands of Slurm per hour"
    ]


def daemon_bytes(sandbox: Sandbox) -> int:
    """Resident memory of all daemons of the sandbox."""
    return sum(resident_bytes(daemon.pid) for daemon in sandbox.status().daemons)


def rank_bytes(rehearsal: Rehearsal) -> str:
    """Memory of the ranks, with what they share counted in each."""
    sizes = sorted(
        resident_bytes(process.pid)
        for process in rehearsal.processes()
        if process.rank is not None and "train.json" in process.command_line
    )
    middle = sizes[len(sizes) // 2] / 1e6
    return (
        f"{len(sizes)} ranks: {sum(sizes) / 1e9:.1f} GB resident, the median rank {middle:.0f} MB, "
        f"rank 0 {sizes[-1] / 1e6:.0f} MB"
    )


def resident_bytes(pid: int) -> int:
    """VmRSS; 0 for a process that has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(found[0]) * 1024 if found else 0


def conclude(night: Night, began_at: float) -> tuple[list[str], list[str]]:
    """The table, the account of files and losses, and what was wrong."""
    rehearsal, wrong = night.rehearsal, list[str]()
    head = ("fault", "verdict", "to verdict", "to launch", "to step", "calls", "CPU s", "lost")
    rows = [head]
    for one in night.recoveries:
        rows.append(
            (
                one.fault,
                ", ".join(one.causes),
                f"{one.verdict_seconds:.1f} s",
                f"{one.launch_seconds:.1f} s",
                f"{one.step_seconds:.1f} s",
                str(one.calls),
                f"{one.cost.own_seconds:.1f}",
                str(one.lost_steps),
            )
        )
        if one.expected not in one.causes:
            wrong.append(f"{one.fault} was judged {one.causes}, not {one.expected}")
    total = night.supervisors.total
    steps, others = wrong_losses(rehearsal)
    if others:
        wrong.append(f"{len(others)} losses differ, the first at step {others[0].step}")
    directory = rehearsal.run.layout.directory
    files = {
        name: sum(len(found) for _, _, found in os.walk(directory / name))
        for name in ("logs", "exits", "stacks", "checkpoints")
    }
    said = [
        *table(rows),
        f"supervisors of {len(night.supervisors.costs)} attempts: {total.own_seconds:.1f} CPU s, "
        f"srun and other commands {total.children_seconds:.1f} CPU s, "
        f"at most {total.peak_bytes / 1e6:.0f} MB",
        f"{rehearsal.epoch} launches, {night.calls} commands of Slurm, files: "
        + ", ".join(f"{count} in {name}" for name, count in files.items()),
        f"losses: {steps - len(others)} of {steps} steps equal those of an undisturbed run bit by "
        "bit",
        f"wall time {time.monotonic() - began_at:.0f} s, load {os.getloadavg()[0]:.0f} on "
        f"{os.cpu_count()} cores",
    ]
    return said, wrong


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def document(lines: Sequence[str], nodes: int) -> str:
    """docs/scale.md: the figures as they were printed, and where they come from."""
    text = "\n".join(lines)
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}"
    arguments = " ".join(sys.argv[1:])
    return _TEXT.format(
        nodes=nodes, ranks=nodes * 8, text=text, machine=machine, arguments=arguments
    )


_TEXT = """\
# {ranks} ranks on {nodes} nodes

`python -m bench.many_ranks {arguments}` has written this page on one machine
({machine}), which was shared with other work: read the seconds as upper bounds (the last
line has the load). Real are the script of
`examples/gpt175b.yaml` as `hpctrain submit --profile a100x64` renders it, a Slurm of {nodes} nodes
with 8 counted GPUs each, the supervisor, {ranks} processes below srun, and every file of the run
directory. What ranks compute is not: they are the stand-in of
[trainer-contract.md](trainer-contract.md), whose losses depend on the state of every rank, so that
one wrong shard in a resume changes them.

```text
{text}
```

All seconds count from the fault. `to verdict`: the ledger has the cause. `to launch`: the next srun
of all ranks. `to step`: the first new step. `calls`: commands of Slurm from the fault to the first
new step. `CPU s`: of the supervisor itself. `lost`: steps that were trained twice.

- **Preemption**: Slurm gives 60 s of grace here, and the run saves and leaves within it; a requeued
  job then waits for `cred_expire` (6 s here, 121 s by default) and for its nodes.
- **A lost node**: slurmd, slurmstepd and all processes of a node are killed at once. The node comes
  back after the verdict. The next launch waits for other nodes: a slurmstepd above a lost one in
  Slurm's tree of width 7 waits 60 s for it (slurmd/slurmstepd, REVERSE_TREE_CHILDREN_TIMEOUT), and
  where UnkillableStepTimeout is not more than that (its default is 60 s) Slurm drains its node
  ("Kill task failed"); here it is 180 s.
- **A stopped rank**: SIGSTOP. No silence below 90 s is taken for a hang, however short the steps
  (`judge/silence_limits.py`), so most of the time to the verdict is that limit.
- **A killed rank**: SIGKILL; each of the others sees a lost connection and leaves a record of its
  own, as ranks with gloo do.
"""


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
