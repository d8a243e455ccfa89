"""Write rows into event files, which TensorBoard reads.

Each start of the program begins a file of its own, in the order of numbers, so that nothing is ever
appended to a file that another process has written. TensorBoard forgets steps from a START record
on. Belongs here: records and files of TensorBoard. Does not belong here: names of values
(`continuous`), which rows come next (`continuous`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from hpctrain.base.durable import make_private_directory, shared_mode
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import read_record, write_record
from hpctrain.records.step_times import rows_from
from hpctrain.records.tracking import TensorboardPosition, position_file
from hpctrain.tracking.continuous import Continuation, continuation, evaluation_scalars, scalars
from hpctrain.tracking.follower import WriterLock

_VERSION = "brain.Event:2"


class EventFiles:
    """The event files of one run in one directory: rows at once, and a rewind when it happens."""

    name = "TensorBoard"

    def __init__(self, run: RunLayout, directory: Path) -> None:
        """Make the directory, and cut off what a killed process wrote and did not record.

        Raises TrackingInUseError, OSError.
        """
        self._run, self._directory = run, directory
        if directory.is_relative_to(run.directory):
            run.make_directory(directory)
        else:
            directory.parent.mkdir(parents=True, exist_ok=True)
            make_private_directory(directory)
        self._lock = WriterLock(directory / "lock")
        found = read_record(position_file(directory), TensorboardPosition)
        self._position = found or TensorboardPosition()
        self._file: BinaryIO | None = None
        number = self._position.file_number
        newest = self._path(number)
        if newest.exists() and newest.stat().st_size > self._position.size_bytes:
            os.truncate(newest, self._position.size_bytes)

    def write(self, *, last: bool = False) -> None:
        """Write the rows that have come since the last call."""
        before = self._position
        placed, end = rows_from(self._run, before.offset)
        found = continuation(placed, epoch=before.epoch, step=before.step)
        if found.rows or found.late:
            self._write(found)
        if end != before.offset:
            newest = found.rows[-1].row if found.rows else before
            size_bytes = self._file.tell() if self._file is not None else before.size_bytes
            values = dict(offset=end, epoch=newest.epoch, step=newest.step, size_bytes=size_bytes)
            self._position = self._position.model_copy(update=values)
            write_record(position_file(self._directory), self._position, durable=False)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._lock.release()

    def _path(self, number: int) -> Path:
        return self._directory / f"events.out.tfevents.{number:010d}.hpctrain"

    def _write(self, found: Continuation) -> None:
        stream = self._open(found)
        writer = RecordWriter(stream)
        for late in found.late:
            writer.write(_record(late.time, late.step, evaluation_scalars(late)))
        if found.rewound_to is not None:
            writer.write(_start(found.rows[0].row.time, found.rewound_to))
        for one in found.rows:
            writer.write(_record(one.row.time, one.row.step, scalars(one.row)))
        stream.flush()
        os.fsync(stream.fileno())

    def _open(self, found: Continuation) -> BinaryIO:
        """Return the file of this process; begin it with a START at the first step after others."""
        if self._file is not None:
            return self._file
        number = self._position.file_number
        mode = shared_mode(self._directory, 0o600)
        descriptor = None
        while descriptor is None:
            number += 1
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                descriptor = os.open(self._path(number), flags, mode)
            except FileExistsError:
                continue  # of a process that was killed before it recorded anything
        stream = os.fdopen(descriptor, "wb")
        first = found.rows[0].row if found.rows else found.late[0]
        writer = RecordWriter(stream)
        writer.write(Event(wall_time=first.time, file_version=_VERSION).SerializeToString())
        if self._position.file_number:
            step = found.late[-1].step + 1 if found.late else first.step
            writer.write(_start(first.time, step))
        self._file = stream
        self._position = self._position.model_copy(update={"file_number": number})
        return stream


def _start(wall_time: float, step: int) -> bytes:
    """Tell TensorBoard to forget all values of this step and later ones."""
    log = SessionLog(status=SessionLog.START)
    data: bytes = Event(wall_time=wall_time, step=step, session_log=log).SerializeToString()
    return data


def _record(wall_time: float, step: int, values: Mapping[str, float]) -> bytes:
    summary = Summary(
        value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
    )
    data: bytes = Event(wall_time=wall_time, step=step, summary=summary).SerializeToString()
    return data
