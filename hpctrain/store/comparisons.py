"""The directory of a comparison, beside the directories of its runs.

comparison.json    what was asked for: variants, the ids of their runs, refusals
comparison.png     the plot
lock               held by the process that submits the trials

It has no ledger, so that it is no run; everything that happens to a trial is in the directory of
its run. Belongs here: paths and the lock. Does not belong here: what the record says.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path


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
        """A descriptor that holds the lock until it is closed; None while another process has it.

        The kernel frees it when its process ends in any way (flock(2)), so it is never stale. On
        a file system without locks everybody gets it.
        """
        descriptor = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            pass
        return descriptor
