"""The directory of a comparison, beside the directories of its runs.

comparison.json    what was asked for: variants, the ids of their runs, refusals
comparison.png     the plot
lock               held by the process that submits the trials

It has no ledger, so that it is no run; everything that happens to a trial is in the directory of
its run. Belongs here: paths and the lock. Does not belong here: what the record says.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpctrain.records.submission_lock import try_lock


@dataclass(frozen=True)
class ComparisonLayout:
    """Paths of one comparison."""

    directory: Path

    @property
    def record(self) -> Path:
        return self.directory / "comparison.json"

    @property
    def plot(self) -> Path:
        return self.directory / "comparison.png"

    @property
    def runs(self) -> Path:
        """Where the runs of its trials are."""
        return self.directory.parent

    def try_lock(self) -> int | None:
        """Take the lock of the process that submits; see `submission_lock`."""
        return try_lock(self.directory)
