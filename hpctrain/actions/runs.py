"""Runs on disk: the `Run` handle of the Python API, finding runs by name, naming new ones.

Belongs here: which directory is meant. Does not belong here: Slurm or the state of a run.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import NoSuchRunError, UsageError
from hpctrain.store.layout import RunLayout
from hpctrain.store.ledger import Ledger

RUNS_VARIABLE = "HPCTRAIN_RUNS"


def runs_directory(given: Path | None = None) -> Path:
    """Where runs live: the given directory, else $HPCTRAIN_RUNS, else ./runs."""
    return given or Path(os.environ.get(RUNS_VARIABLE) or "runs")


@dataclass(frozen=True)
class RunFiles:
    """One run directory and its ledger."""

    layout: RunLayout

    @property
    def run_id(self) -> str:
        return self.layout.run_id

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.layout.ledger)


def all_runs(runs: Path) -> list[RunFiles]:
    """Every run under `runs`, newest ledger last. Directories without a ledger are not runs."""
    if not runs.is_dir():
        return []
    found = [RunFiles(RunLayout(path)) for path in runs.iterdir() if path.is_dir()]
    with_ledger = [run for run in found if run.layout.ledger.exists()]
    return sorted(with_ledger, key=lambda run: (run.layout.ledger.stat().st_mtime_ns, run.run_id))


def find_run(runs: Path, name: str) -> RunFiles:
    """The run of that id, or the only one whose id starts with `name`.

    Raises NoSuchRunError (with the nearest ids) or UsageError when the prefix is ambiguous.
    """
    runs_found = all_runs(runs)
    exact = [run for run in runs_found if run.run_id == name]
    # An empty name, as of an unset shell variable, is no prefix: `cancel` would take any run.
    matches = exact or [run for run in runs_found if name and run.run_id.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        ids = ", ".join(f"`{run.run_id}`" for run in matches)
        raise UsageError(f"`{name}` is the start of several runs: {ids}")
    raise NoSuchRunError(f"no run `{name}` in {runs}", hint=_nearest(name, runs_found))


def _nearest(name: str, runs: list[RunFiles]) -> str:
    import difflib

    ids = [run.run_id for run in runs]
    near = difflib.get_close_matches(name, ids, n=3, cutoff=0.5)
    if near:
        return "did you mean " + " or ".join(f"`{run_id}`" for run_id in near) + "?"
    return "`hpctrain status -a` lists all runs" if ids else "no run has been submitted here yet"


def new_run_id(runs: Path, name: str, *digests: str) -> str:
    """`NAME-xxxx`: four hexadecimal digits of spec and profile, the next free ones if taken."""
    import hashlib  # loads OpenSSL, which `status` does not need

    for number in range(65536):
        text = "\n".join((name, *digests, str(number)))
        run_id = f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:4]}"
        if not (runs / run_id).exists():
            return run_id
    raise UsageError(f"no free run id is left for `{name}` in {runs}", hint="rename the run")
