"""Choose how often a command that waits asks Slurm: not more often than the site allows.

Everybody's queries are served by one process, so a site sets the least time between two queries of
one command (`limits.poll` of the profile). Each query is one squeue for all runs of the command.
Belongs here: that time. Does not belong here: queries (`job_queries`).
"""

from __future__ import annotations

from collections.abc import Iterable

from hpctrain.base.errors import UsageError
from hpctrain.base.units import short_duration
from hpctrain.records.find import RunFiles
from hpctrain.records.supervise_config import DEFAULT_POLL_SECONDS, known_supervise_config


def poll_interval(runs: Iterable[RunFiles], wanted_seconds: float | None = None) -> float:
    """Return the seconds between two queries about `runs`: as wanted, or as the site sets.

    Raises UsageError if less is wanted than the site of one of the runs allows.
    """
    configs = [known_supervise_config(run.layout.supervise_config) for run in runs]
    floors = [config.poll_seconds for config in configs if config is not None]
    floor_seconds = max(floors, default=DEFAULT_POLL_SECONDS)
    if wanted_seconds is None:
        return floor_seconds
    if wanted_seconds < floor_seconds:
        raise UsageError(
            f"asking Slurm every {short_duration(wanted_seconds)} is too often for this site",
            hint=f"the profile allows {short_duration(floor_seconds)} or more (`limits.poll`)",
        )
    return wanted_seconds
