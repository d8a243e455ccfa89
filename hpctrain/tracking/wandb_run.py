"""Write settled rows into a W&B run: offline as finished segments, or to the server.

All segments have the same id and steps that do not overlap, so `wandb sync` makes one run of them.
A segment is made on the node, copied, and moved to the finished ones when it is complete: what is
there can be uploaded at any time, and a process that was killed leaves nothing of it. Belongs here:
what is asked of the package wandb, and when a segment is due. Does not belong here: which rows are
settled (`continuous`).
"""

from __future__ import annotations

import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hpctrain.base import clock
from hpctrain.base.durable import make_private_directory, shared_mode
from hpctrain.base.errors import StorageError
from hpctrain.records.jobs import nothing_follows
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import Ledger
from hpctrain.records.run_records import StepMetrics, read_record, read_saves, write_record
from hpctrain.records.step_times import rows_from
from hpctrain.records.tracking import (
    TrackingConfig,
    WandbPosition,
    WandbSettings,
    finished_segments,
    position_file,
)
from hpctrain.tracking.continuous import scalars, settled
from hpctrain.tracking.follower import WriterLock

STEP_NAME = "train/step"
# So often rows become a segment that can be uploaded; at the end of an attempt the others do.
SEGMENT_SECONDS = 3600.0


class WandbRun:
    """The W&B run of one hpctrain run: settled rows, offline once an hour and at the end."""

    name = "W&B"

    def __init__(self, run: RunLayout, config: TrackingConfig) -> None:
        assert config.wandb is not None, "W&B is asked for"
        self._run, self._config, self._settings = run, config, config.wandb
        run.make_directory(run.wandb)
        self._lock = WriterLock(run.wandb_lock)
        # what a process that was killed has left
        shutil.rmtree(run.wandb_unfinished, ignore_errors=True)
        # how far the run is in segments: a process may be killed before it records a new one
        files = [run.wandb_position, *(position_file(one) for one in finished_segments(run))]
        positions = filter(None, [read_record(path, WandbPosition) for path in files])
        self._position = max(positions, key=lambda one: one.step, default=WandbPosition())
        self._session: _Session | None = None
        # An attempt that was killed may have left rows.
        self._due_at = clock.monotonic()

    def write(self, *, last: bool) -> None:
        """Write the rows that are settled, offline as one segment where it is time for one."""
        online = self._settings.mode == "online"
        if not last and not online and clock.monotonic() < self._due_at:
            return
        self._due_at = clock.monotonic() + SEGMENT_SECONDS
        if online and self._session is None:
            # Begin where the server is: what a killed process sent may not have arrived.
            self._session = _Session(self._settings, self._config)
            known = self._session.next_step
            if known is not None and known <= self._position.step:
                again = {"offset": 0, "epoch": 0, "step": known - 1}
                self._position = self._position.model_copy(update=again)
        before = self._position
        placed, end = rows_from(self._run, before.offset)
        found = settled(
            placed,
            read_saves(self._run),
            epoch=before.epoch,
            step=before.step,
            end=end,
            over=run_is_over(self._run),
        )
        if not found.rows:
            return
        after = WandbPosition(
            offset=found.offset,
            epoch=found.epoch,
            step=found.rows[-1].step,
            kept_first=before.kept_first + found.kept_first,
        )
        if self._session is not None:
            self._session.log(found.rows)
        else:
            self._write_segment(found.rows, after)
        self._position = after
        write_record(self._run.wandb_position, after, durable=False)

    def close(self) -> None:
        if self._session is not None:
            self._session.end()
            self._session.close()
            self._session = None
        self._lock.release()

    def _write_segment(self, rows: Sequence[StepMetrics], after: WandbPosition) -> None:
        unfinished = self._run.wandb_unfinished
        shutil.rmtree(unfinished, ignore_errors=True)
        make_private_directory(unfinished)
        session = _Session(self._settings, self._config)
        try:
            session.log(rows)
            session.end()
            segment = unfinished / session.directory.name
            _copy_segment(session.directory, segment)
        finally:
            session.close()
        write_record(position_file(segment), after)
        os.rename(segment, _free_name(self._run.wandb / segment.name))
        unfinished.rmdir()


def run_is_over(run: RunLayout) -> bool:
    """True once no job of the run trains it further, unless a person resumes it."""
    if run.done.exists():
        return True
    return nothing_follows(Ledger(run.ledger).events())


def _copy_segment(source: Path, target: Path) -> None:
    """Copy what `wandb sync` reads, durably and as private as the run. Raises OSError."""
    (log,) = source.glob("*.wandb")
    if not is_complete(log):
        raise StorageError(f"W&B could not write {log}")
    make_private_directory(target)
    make_private_directory(target / "files")  # of media, of which there are none
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    descriptor = os.open(target / log.name, flags, shared_mode(target, 0o600))
    with os.fdopen(descriptor, "wb") as copy, log.open("rb") as written:
        shutil.copyfileobj(written, copy)
        copy.flush()
        os.fsync(copy.fileno())


class _Session:
    """A run of the package wandb, from its init on, in a directory on this node."""

    def __init__(self, settings: WandbSettings, config: TrackingConfig) -> None:
        self._scratch = tempfile.mkdtemp(prefix="hpctrain-wandb-")
        try:
            self._handle = self._init(settings, config)
        except BaseException:
            self.close()
            raise

    def _init(self, settings: WandbSettings, config: TrackingConfig) -> Any:
        offline = settings.mode == "offline"
        os.environ.update(_variables(self._scratch, offline=offline))
        import wandb

        chosen = wandb.Settings(
            mode=settings.mode,
            root_dir=self._scratch,
            run_id=settings.run_id,
            project=settings.project,
            entity=settings.entity,
            run_name=settings.name,
            run_group=settings.group,
            run_tags=settings.tags or None,
            # It has no effect offline, but for a warning: there the id joins the segments.
            resume=None if offline else "allow",
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            save_code=False,
            disable_job_creation=True,
            x_disable_stats=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
            host="",
        )
        handle = wandb.init(settings=chosen, config=dict(config.description))
        handle.define_metric(STEP_NAME, hidden=True)
        handle.define_metric("*", step_metric=STEP_NAME)
        return handle

    @property
    def directory(self) -> Path:
        """The directory of the segment."""
        return Path(self._handle.dir).parent

    @property
    def next_step(self) -> int | None:
        """The step after the last one that the server has; None for a new run."""
        return int(self._handle.starting_step) if self._handle.resumed else None

    def log(self, rows: Sequence[StepMetrics]) -> None:
        """Log rows with their own steps and times."""
        for row in rows:
            values = {**scalars(row), STEP_NAME: row.step, "_timestamp": row.time}
            # The package keeps a step back until the next one, unless it is told that this is all.
            self._handle.log(values, step=row.step, commit=True)

    def end(self) -> None:
        """Have everything written that was logged.

        The package's own process has written its file when it has ended, and not before.
        """
        self._handle.finish()
        sys.modules["wandb"].teardown()

    def close(self) -> None:
        """Remove what is on this node."""
        shutil.rmtree(self._scratch, ignore_errors=True)


def _variables(scratch: str, *, offline: bool) -> dict[str, str]:
    """Keep the package from reporting errors, and its caches out of the home directory."""
    kept_here = ["WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR"]
    variables = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
    if offline:  # online, the address of the server and the key stand in the home directory
        kept_here.append("WANDB_CONFIG_DIR")
        variables["WANDB_MODE"] = "offline"
    return {**variables, **dict.fromkeys(kept_here, scratch)}


def _free_name(path: Path) -> Path:
    """A name that no segment has: two may have begun in the same second."""
    number, free = 1, path
    while free.exists():
        number += 1
        prefix, _, rest = path.name.rpartition("-")
        free = path.with_name(f"{prefix}.{number}-{rest}")
    return free


# -- Read a `.wandb` file as far as needed to know that it is complete --------------------------
# The package writes it in a process of its own, which may be killed or meet a full disk without a
# word. Its format is the log of LevelDB: blocks of 32 KiB with records that may span several of
# them; the last record of a run is its exit.


_BLOCK_BYTES, _MAGIC_BYTES = 32768, 7
_HEAD = struct.Struct("<IHB")  # checksum, length, type
_FULL, _LAST = 1, 4


def log_records(path: Path) -> Iterator[bytes]:
    """Yield the complete records of the file, as encoded protobuf."""
    data, place, record = path.read_bytes(), _MAGIC_BYTES, b""
    while place + _HEAD.size <= len(data):
        left = _BLOCK_BYTES - place % _BLOCK_BYTES
        if left < _HEAD.size:
            place += left
            continue
        _, length, kind = _HEAD.unpack_from(data, place)
        place += _HEAD.size
        if place + length > len(data):
            return
        record += data[place : place + length]
        place += length
        if kind in (_FULL, _LAST):
            yield record
            record = b""


def is_complete(path: Path) -> bool:
    """True if the file ends with the exit of its run."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    last = b""
    for record in log_records(path):
        last = record
    parsed = Record()
    parsed.ParseFromString(last)
    return bool(parsed.HasField("exit"))
