"""Measure the messages between ranks in one step out of many, and gather them on rank 0.

The third step of a launch is the first that is measured: by then every engine has connected its
groups and DDP has arranged its buckets. The sums of all ranks are gathered in one vector beside
training, and received one step later. A rank that cannot measure ends measuring for all of them;
training goes on. Belongs here: when, and gathering. Does not belong here: what is read from torch
(see `message_recording`), sums by axis and link (see `message_axes`), judging
(`hpctrain.diagnose`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hpctrain.records.run_records import CommunicationRecord
from hpctrain.train.engine import AxisGroup
from hpctrain.train.message_axes import (
    ROW_SIZE,
    KnownGroup,
    all_measured,
    failed_row,
    record_of,
    row_of,
)
from hpctrain.train.message_recording import Recording
from hpctrain.train.step_agreement import Control

# Functions of this file in which a rank waits for others, as the supervisor recognises them in
# stacks (`hpctrain.judge.odd_stacks`; its unit test compares the two).
WAITS_FOR_RANKS = ("_receive",)
_WARM_UP_STEPS = 2


@dataclass
class _Measured:
    """A step whose messages are being read or gathered."""

    step: int
    step_seconds: float
    vector: Any = None
    work: Any = None


@dataclass
class MessageClock:
    """Measures a step every `interval_steps` steps (None: never); `tell` runs on rank 0.

    All ranks must call `begin` and `end` for the same steps with the same `counts`: a step that
    does not count is not measured, but the next one is.
    """

    recording: Recording
    known: Sequence[KnownGroup]
    control: Control
    rank: int
    nodes: tuple[str, ...]
    epoch: int
    interval_steps: int | None
    tell: Callable[[CommunicationRecord], None]
    _left: int = _WARM_UP_STEPS
    _recording_now: bool = False
    _failed: bool = False
    _ended: _Measured | None = field(default=None)
    _sent: _Measured | None = field(default=None)

    def begin(self, *, counts: bool) -> None:
        """Start to record if this step is to be measured."""
        if self.interval_steps is None or len(self.nodes) == 1:
            return
        if self._left > 0 or not counts:
            self._left -= 1
            return
        self._left = self.interval_steps - 1
        self._recording_now = True
        with self._attempt():
            self.recording.start()

    def end(self, step: int, step_seconds: float) -> None:
        """Stop recording; send what is complete, and report what has been gathered."""
        self._receive()
        if self._ended is not None:
            self._send(self._ended)
        if not self._recording_now:
            return
        self._recording_now = False
        with self._attempt():
            self.recording.stop()
        self._ended = _Measured(step, step_seconds)
        if not self.recording.late:
            self._send(self._ended)

    def _send(self, measured: _Measured) -> None:
        self._ended = None
        row = failed_row()
        with self._attempt():
            messages = self.recording.messages()
            row = row_of(messages, self.rank, self.known, measured.step_seconds)
        vector = torch.zeros(len(self.nodes), ROW_SIZE, dtype=torch.float64)
        vector[self.rank] = torch.tensor(failed_row() if self._failed else row, dtype=torch.float64)
        measured.vector, measured.work = vector, self.control.start_sum(vector)
        self._sent = measured

    def _receive(self) -> None:
        """Finish gathering, one step later, so that no rank waits for the slowest one."""
        if self._sent is None:
            return
        sent, self._sent = self._sent, None
        sent.work.wait()
        table = sent.vector.tolist()
        if not all_measured(table):
            self.interval_steps = None  # on all ranks, which have the same table
            return
        if self.rank == 0:
            record = record_of(
                table,
                epoch=self.epoch,
                step=sent.step,
                time=time.time(),
                nodes=self.nodes,
                source=self.recording.source,
            )
            self.tell(record)

    @contextlib.contextmanager
    def _attempt(self) -> Iterator[None]:
        """Report what fails in measuring once; it never ends training."""
        try:
            yield
        except Exception as error:
            if not self._failed:
                print(
                    f"event=messages rank={self.rank} messages are not measured any more, "
                    f"{type(error).__name__}: {error}",
                    flush=True,
                )
            self._failed = True


def known_groups(axes: Sequence[AxisGroup]) -> tuple[KnownGroup, ...]:
    """Name the groups of a mesh as torch's flight recorder does."""
    return tuple(KnownGroup(one.axis, str(one.group.group_name), one.ranks) for one in axes)
