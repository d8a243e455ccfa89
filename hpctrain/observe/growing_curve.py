"""Reads the losses of a run as its metrics grow, so that a live view reads each line once.

Belongs here: where the last look has ended, and what is kept of a line. Does not belong here: the
points of a curve (`run_page`).
"""

from __future__ import annotations

import os
from typing import NamedTuple

from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import StepMetrics, parse_record
from hpctrain.runs.run_page import CurvePoint, curve_of


class _StepLoss(NamedTuple):
    """What is kept of a row: a run may have a million of them."""

    step: int
    epoch: int
    loss: float


class GrowingCurve:
    """The loss curve of one run, read on from where the last call has ended."""

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self._rows: list[_StepLoss] = []
        self._position = 0
        self._inode = 0

    def read(self, points: int) -> tuple[CurvePoint, ...]:
        """Read the rows that were added, and summarize all in at most so many points.

        A torn last line is left for the next call; a file that was replaced is read anew. Raises
        OSError and NewerFormatError.
        """
        try:
            stream = self._layout.metrics.open("rb")
        except FileNotFoundError:
            return ()
        with stream:
            found = os.fstat(stream.fileno())
            if found.st_ino != self._inode or found.st_size < self._position:
                self._rows, self._position, self._inode = [], 0, found.st_ino
            stream.seek(self._position)
            for line in stream:
                if not line.endswith(b"\n"):
                    break
                self._position += len(line)
                row = parse_record(self._layout.metrics, line, StepMetrics)
                if row is not None and row.loss is not None:
                    self._rows.append(_StepLoss(row.step, row.epoch, row.loss))
        return curve_of(self._rows, points)
