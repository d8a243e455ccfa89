"""The directory of a sweep, beside the directories of its runs.

sweep.json    the points, the ids of their runs, refusals, forecasts
lock          held by the process that submits the points, or cancels them
cancel        there once somebody cancels the sweep: whoever submits points stops at the next one

It has no ledger, so that it is no run; everything that happens to a point is in the directory of
its run. Belongs here: the record, its paths, finding sweeps. Does not belong here: the states of
the runs.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from hpctrain.base.durable import replace_text
from hpctrain.base.errors import InvalidInputError, NoSuchRunError, Problem, UsageError
from hpctrain.base.formats import refuse_newer
from hpctrain.records.run_records import Record, RecordPart

_GROUP_READS = 0o2750


class SweepPoint(RecordPart):
    """One point of the grid, which is one run.

    `values` has one text for each field of the sweep. `run_id` is absent for a point that cannot
    run, and `refusal` is the reason. `gpu_hours` is the forecast, absent where none can be made.
    `submitted`: its run has had a job, so it is not submitted again, whatever becomes of its
    directory; false in records of older versions until the sweep is continued.
    """

    values: tuple[str, ...]
    name: str
    run_id: str | None = None
    gpu_hours: float | None = None
    refusal: str | None = None
    submitted: bool = False


class SweepRecord(Record):
    """What was requested, and the run of each point.

    Written before the first run directory, and again when a point takes another run id or has got
    a job.
    `digest` covers everything that decides the runs: the same request continues the same sweep.
    Times are seconds since the epoch; `cancelled_time` is absent for a sweep that nobody has
    cancelled.
    """

    schema_version: Literal[1] = 1
    sweep_id: str
    digest: str
    begun_time: float
    run_name: str
    profile_name: str
    fields: tuple[str, ...]
    points: tuple[SweepPoint, ...]
    at_a_time: int | None = None
    cancelled_time: float | None = None

    def with_point(self, number: int, **changes: object) -> SweepRecord:
        """Change one point."""
        points = list(self.points)
        points[number] = points[number].model_copy(update=changes)
        return self.model_copy(update={"points": tuple(points)})


@dataclass(frozen=True)
class SweepLayout:
    """Paths of one sweep."""

    directory: Path

    @property
    def record(self) -> Path:
        return self.directory / "sweep.json"

    @property
    def runs(self) -> Path:
        """Where the runs of its points are."""
        return self.directory.parent

    @property
    def cancel_request(self) -> Path:
        """Exists once somebody cancels the sweep; a file, so that no lock has to be waited for."""
        return self.directory / "cancel"

    def is_cancelled(self, record: SweepRecord) -> bool:
        """Whether no further point is to be submitted."""
        return record.cancelled_time is not None or self.cancel_request.exists()

    def create(self, group: int | None) -> None:
        """Make the directory, private to the user; with a `group` its members may read it."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if group is not None:
            os.chown(self.directory, -1, group)
            self.directory.chmod(_GROUP_READS)

    def try_lock(self) -> int | None:
        """Take the lock of the process that submits or cancels; see `sweeps`."""
        return try_lock(self.directory)

    def write(self, record: SweepRecord) -> None:
        """Replace the record."""
        replace_text(self.record, record.model_dump_json(indent=1) + "\n", mode=0o600)

    def read(self) -> SweepRecord:
        """Read the record. Raises NoSuchRunError, InvalidInputError or OSError."""
        try:
            text = self.record.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            hint = "`hpctrain sweep status` lists the sweeps that are here"
            raise NoSuchRunError(f"no sweep in {self.directory}", hint=hint) from None
        try:
            return SweepRecord.model_validate_json(text)
        except ValidationError as error:
            refuse_newer(self.record, text, SweepRecord)
            message = f"is no record of a sweep: {error.errors()[0]['msg']}"
            raise InvalidInputError([Problem(message, str(self.record))]) from None


def all_sweeps(runs: Path) -> list[SweepLayout]:
    """List the sweeps in a directory of runs that this user may read, by name."""
    try:
        names = sorted(os.listdir(runs))
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [SweepLayout(runs / name) for name in names if not name.startswith(".")]
    return [sweep for sweep in found if os.access(sweep.record, os.R_OK)]


def find_sweep(runs: Path, name: str) -> SweepLayout:
    """Find the sweep of that name, or the only one whose name starts with `name`.

    Raises NoSuchRunError with what there is, UsageError for the start of several names.
    """
    sweeps = all_sweeps(runs)
    exact = [sweep for sweep in sweeps if sweep.directory.name == name]
    found = exact or [one for one in sweeps if name and one.directory.name.startswith(name)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(f"`{one.directory.name}`" for one in found or sweeps)
    if found:
        raise UsageError(f"`{name}` is the start of several sweeps: {names}")
    hint = f"there are {names}" if names else "no sweep has been submitted here yet"
    raise NoSuchRunError(f"no sweep `{name}` in {runs}", hint=hint)


# -- The directory of a comparison, beside the directories of its runs --------------------------
# comparison.json what was asked for: variants, the ids of their runs, refusals comparison.png the
# plot lock held by the process that submits the trials
#
# It has no ledger, so that it is no run; everything that happens to a trial is in the directory of
# its run.


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
        """Take the lock of the process that submits; see `sweeps`."""
        return try_lock(self.directory)


# -- Lock a directory of several runs, so that one process at a time submits them ---------------


def try_lock(directory: Path) -> int | None:
    """Return a descriptor that holds the lock until it is closed; None while another process does.

    The kernel frees it when its process ends in any way (flock(2)), so it is never stale. On
    a file system without locks everybody gets it.
    """
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        pass
    return descriptor
