"""Remember which profiles have proved their first start, beside the runs that they are for.

One line per event in `.first-starts.jsonl` of the directory of runs, private and append-only, so
that neither a crash nor another process loses one. Belongs here: file, lines, reading. Does not
belong here: proving a start (`hpctrain.site.first_start`), saying that a proof is missing
(`hpctrain.job`).
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from hpctrain.base.durable import append_line
from hpctrain.records.find import all_runs, users_file

_NAME = ".first-starts"
# The header of a job script names the profile and its digest.
_HEADER_LINES = 12


class FirstStart(BaseModel):
    """A proof, or that somebody was told of a missing one; `event_time` in seconds since the
    epoch.

    `cluster` is Slurm's ClusterName, `partition` the one that the job was in.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    event: Literal["proved", "told"]
    profile: str
    profile_digest: str
    partition: str | None = None
    cluster: str | None = None
    job_id: int | None = None
    event_time: float


def read_first_starts(runs: Path) -> tuple[FirstStart, ...]:
    """Read all lines, oldest first; none where there is no file, and without a torn line."""
    found = []
    try:
        lines = users_file(runs, _NAME).read_bytes().splitlines()
    except OSError:
        return ()
    for line in lines:
        try:
            found.append(FirstStart.model_validate_json(line))
        except ValidationError:
            continue
    return tuple(found)


def record_first_start(runs: Path, event: FirstStart) -> None:
    """Append one event, and make the directory of runs if it is not there. Raises OSError."""
    runs.mkdir(parents=True, exist_ok=True)
    append_line(users_file(runs, _NAME), event.model_dump_json(), mode=0o600)


def has_trained(runs: Path, profile: str, profile_digest: str) -> bool:
    """Tell whether a run of this profile has trained a step, by the headers of job scripts."""
    words = f"profile {profile} {profile_digest[:12]}"
    for run in all_runs(runs):
        try:
            if run.unreadable or run.layout.metrics.stat().st_size == 0:
                continue
            with run.layout.script.open(encoding="utf-8", errors="replace") as stream:
                if any(words in line for line in islice(stream, _HEADER_LINES)):
                    return True
        except OSError:
            continue
    return False
