"""Real small runs at several numbers of ranks, and what strace has counted of them.

Three launches at each size, on CPU by gloo with the smallest GPT on megatron-core: a fresh one with
two checkpoints, one that resumes from the first of them, saves another and deletes the old one, and
one that fails on all ranks before it trains. Belongs here: these runs, their counts, and the sums
of the table for them. Does not belong here: limits of what is acceptable (the tests).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.footprint.system_calls import Call, calls_below, strace_command
from hpctrain.checkpoints.resume_shares import SHARES_NAME
from hpctrain.job.footprint import load_footprint_table
from hpctrain.plan.footprint.table import OPERATIONS, Event, FileRow, Operation, RunSize
from hpctrain.records.manifest import checkpoint_name, read_manifest

_ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_ROOT / "tests" / "engines"))

from trial_runs import Trial, make_trial  # noqa: E402

TABLE = load_footprint_table()
RANK_ACTORS = ("rank 0", "each rank")
_SAVE_STEPS = 2
_TEMPORARY = re.compile(r"(^|/)\.([^/]+?)(?:\.[^/.]+\.\d+\.\d+\.tmp|\.\d+\.npy|\.tmp)$")
_NUMBERS = re.compile(r"[0-9a-f]{32}|\d+")


@dataclass(frozen=True)
class Counted:
    """One launch: its kind, its size, the events in it, its calls, and the files that it left."""

    kind: str
    size: RunSize
    events: dict[Event, int]
    calls: Counter[Call]
    made: Counter[str]
    exit_codes: tuple[int, ...]

    def by_place(self) -> Counter[tuple[str, Operation]]:
        """Calls by place of the table; paths that belong to no place are under `?`."""
        found: Counter[tuple[str, Operation]] = Counter()
        for call, count in self.calls.items():
            found[TABLE.place_of(settled(call.path)) or f"? {call.path}", call.operation] += count
        return found

    def by_kind_of_path(self, without: Collection[str]) -> Counter[tuple[str, Operation]]:
        """Calls by path, with `#` for numbers and digests; not those of some places."""
        found: Counter[tuple[str, Operation]] = Counter()
        for call, count in self.calls.items():
            path = settled(call.path)
            if TABLE.place_of(path) not in without:
                found[_NUMBERS.sub("#", path), call.operation] += count
        return found

    def processes_at(self, chosen: Collection[str]) -> int:
        """How many processes have done anything to files of these places."""
        return len(
            {call.process for call in self.calls if TABLE.place_of(settled(call.path)) in chosen}
        )

    def predicted(self, place: str, operation: Operation) -> float:
        """What the table says that ranks do in this launch."""
        return sum(row.calls(operation, self.size) * self._times(row) for row in _rows(place))

    def predicted_inodes(self, place: str) -> float:
        """The inodes that the table says that ranks leave."""
        return sum(row.inodes.at(self.size) * self._times(row) for row in _rows(place))

    def _times(self, row: FileRow) -> int:
        return self.events.get(row.per, 0)


def settled(path: str) -> str:
    """A path without the marks of a temporary file."""
    return _TEMPORARY.sub(r"\1\2", path)


def places() -> tuple[str, ...]:
    """The places to which ranks do something."""
    return tuple(dict.fromkeys(row.place for row in TABLE.file_rows if row.by in RANK_ACTORS))


def _rows(place: str) -> list[FileRow]:
    return [row for row in TABLE.file_rows if row.place == place and row.by in RANK_ACTORS]


def count_small_runs(directory: Path, ranks: Sequence[int]) -> list[Counted]:
    """Run everything under strace and count. Raises RuntimeError when strace or a launch fails."""
    traces = directory / "traces"
    traces.mkdir(parents=True)
    trials: list[tuple[str, int, Trial]] = []
    lines = []
    for size in ranks:
        first = _trial(directory / f"first-{size}", size)
        again = _trial(directory / f"again-{size}", size, keep_checkpoints=1)
        # its layout needs one rank more than are started
        failed = _trial(directory / f"failed-{size}", size + 1)
        source = first.run.checkpoints / checkpoint_name(_SAVE_STEPS)
        trials += [("first", size, first), ("again", size, again), ("failed", size, failed)]
        lines += [
            f"{first.run.train_config}\t{size}\t-",
            f"{again.run.train_config}\t{size}\t{source}",
            f"{failed.run.train_config}\t{size}\t-",
        ]
    before = {trial.run.directory: _paths(trial) for _, _, trial in trials}
    listed = directory / "launches"
    listed.write_text("\n".join(lines))
    program = [sys.executable, "-m", "bench.footprint.traced_launches", str(listed)]
    done = subprocess.run(
        [*strace_command(traces, "ranks"), *program],
        cwd=_ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    codes = [
        tuple(map(int, line.split()[2:]))
        for line in done.stdout.splitlines()
        if line.startswith("exit codes ")
    ]
    if done.returncode or len(codes) != len(trials):
        raise RuntimeError(f"traced launches failed:\n{done.stdout}\n{done.stderr}")
    itself = int(listed.with_suffix(".pid").read_text())
    return [
        _counted(kind, size, trial, traces, itself, before[trial.run.directory], exit_codes)
        for (kind, size, trial), exit_codes in zip(trials, codes, strict=True)
    ]


def _trial(directory: Path, ranks: int, **changes: object) -> Trial:
    settings = {
        "data_parallel_size": ranks,
        "micro_batch_size": 1,
        "global_batch_size": 12 if 12 % ranks == 0 else ranks,
        "train_steps": 2 * _SAVE_STEPS,
        "save_interval_steps": _SAVE_STEPS,
        "data_cache": None,  # its own, whose files are counted
    }
    made = make_trial(directory, **settings, **changes)
    # as the supervisor leaves them before it starts ranks
    (made.run.epochs / "000001.json").write_text("traced launches")
    made.run.supervise_config.write_text("{}")
    return made


def _paths(trial: Trial) -> set[str]:
    root = trial.run.directory
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def _counted(
    kind: str,
    ranks: int,
    trial: Trial,
    traces: Path,
    itself: int,
    before: set[str],
    exit_codes: tuple[int, ...],
) -> Counted:
    steps, saves = (0, 0) if kind == "failed" else (4, 2) if kind == "first" else (2, 1)
    newest = trial.run.checkpoints / checkpoint_name(2 * _SAVE_STEPS)
    manifest = read_manifest(newest)
    size = RunSize(
        ranks=ranks,
        nodes=1,
        logs=ranks,
        kept_launches=1,
        files=len(manifest.files) if manifest is not None else 0,
        # `keep` of a fresh run leaves all; the one that resumes looks at two, and deletes one
        kept=0 if kind == "first" else 2,
        unverified=0 if kind == "first" else 2,
        retired=0 if kind == "first" else 1,
        jobs=1,
        index_files=3 * 4,
    )
    events: dict[Event, int] = {"run": 1, "launch": 1, "checkpoint": saves, "step": steps}
    events |= {"resume": 1} if kind == "again" else {"fresh": 1}
    events |= {"failure": 1} if kind == "failed" else {}
    root = trial.run.directory
    left = _paths(trial) - before - {f"checkpoints/{SHARES_NAME}"}  # the supervisor's
    made = Counter(TABLE.place_of(path) or f"? {path}" for path in left)
    calls = calls_below(root, traces, "ranks", without=[itself])
    return Counted(kind, size, events, calls, made, exit_codes)


def growth(
    counted: Sequence[Counted], kind: str, without: Collection[str] = ()
) -> dict[tuple[str, Operation], list[int]]:
    """Calls of one kind of launch by kind of path, in the order of sizes; not of these places."""
    chosen = sorted((one for one in counted if one.kind == kind), key=lambda one: one.size.ranks)
    found = [one.by_kind_of_path(without) for one in chosen]
    keys = sorted(set[tuple[str, Operation]]().union(*found))
    return {key: [counts[key] for counts in found] for key in keys}


def total(counted: Counted) -> dict[Operation, int]:
    """All calls of a launch by operation."""
    by_place = counted.by_place()
    return {
        one: sum(count for (_, kind), count in by_place.items() if kind == one)
        for one in OPERATIONS
    }
