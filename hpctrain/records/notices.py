"""What was sent to people about a run: one small file for each try, which only one sender can make.

A supervisor and any number of passes of `hpctrain watch` may want to tell the same event. Whoever
makes `notices/EVENT.CHANNEL.01` first, exclusively, sends it; the file says `sending`, and after
that how it ended. So each event is sent once per channel.

At least once and at most once cannot both be had: a sender that dies between sending and recording
leaves `sending`, and nobody can know whether the message has arrived. The same is true of one that
got no answer: its file keeps `sending` and has a `problem`, which earlier versions understand, too.
Such a try is repeated once, later, and the message says that it may be a repetition: a message that
comes twice costs a glance, one that is missing costs the night. A second such try is not repeated.
A try that failed for certain is repeated with growing pauses until `EXPIRES_SECONDS` after the
event.

Belongs here: these files, and which try may be made when. Does not belong here: which events there
are (`hpctrain.notify.notices`), quiet hours and rates (`hpctrain.notify.delivery`), sending.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from hpctrain.base.durable import create_exclusive, replace_text
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import Record, parse_record

# News that is older is no longer sent.
EXPIRES_SECONDS = 3 * 86400.0
# A sender takes seconds. Beyond this it has died; clocks of hosts differ, and NFS shows an old file
# for up to a minute (nfs(5), acregmax).
LOST_SECONDS = 300.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 60.0, 6 * 3600.0
_MOST_TRIES = 20
_MOST_LOST_TRIES = 2

SendState = Literal["sending", "sent", "failed"]


class SendRecord(Record):
    """One try to send one notice on one channel, in a file of its own.

    `message` is equal for the notices that one message has told. `problem`: why it failed, or why
    nobody knows, without address and token. `by`: who sent it, such as `job 12 on n1` or `watch on
    login1`.
    """

    notice: str
    channel: str
    kind: str
    state: SendState
    try_time: float
    message: str
    by: str
    problem: str | None = None

    @property
    def unconfirmed(self) -> bool:
        """Whether its sender lives and does not know whether the message has arrived."""
        return self.state == "sending" and self.problem is not None


@dataclass(frozen=True)
class Tries:
    """All tries for one notice on one channel, the oldest first.

    `unreadable`: how many more have a file without a record, such as an empty one after a crash of
    the file system.
    """

    records: tuple[SendRecord, ...] = ()
    unreadable: int = 0

    @property
    def sent(self) -> bool:
        return any(one.state == "sent" for one in self.records)

    @property
    def lost(self) -> int:
        """Tries of which nobody knows how they ended: older ones, that still say `sending`."""
        return self.unreadable + sum(one.state == "sending" for one in self.records)

    @property
    def given_up(self) -> bool:
        tries = self.unreadable + len(self.records)
        return tries >= _MOST_TRIES or self.lost >= _MOST_LOST_TRIES

    @property
    def next_time(self) -> float:
        """When the next try may be made, in seconds since the epoch; 0 before the first."""
        if not self.records:
            return 0.0
        last = self.records[-1]
        if last.state == "sending":
            return last.try_time + LOST_SECONDS
        return last.try_time + pause_seconds(len(self.records))


@dataclass(frozen=True)
class Outbox:
    """What has been sent about a run, as it was when it was read.

    `numbers`: the highest number of a file by the rest of its name, readable or not: its name is
    taken. `error`: what kept it from being read; then nothing can be claimed.
    """

    run: RunLayout
    found: Mapping[tuple[str, str], Tries] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)
    error: OSError | None = None

    def tries(self, notice: str, channel: str) -> Tries:
        tries = self.found.get((notice, channel), Tries())
        taken = self.numbers.get(_stem(notice, channel), 0)
        return replace(tries, unreadable=max(0, taken - len(tries.records)))

    def of_channel(self, channel: str) -> list[SendRecord]:
        """All tries on a channel, in the order of their times."""
        records = (one for key, tries in self.found.items() if key[1] == channel
                   for one in tries.records)  # fmt: skip
        return sorted(records, key=lambda record: record.try_time)

    def claim(self, record: SendRecord) -> bool:
        """Take the right to make the next try; False if another sender has it.

        Raises OSError when the run directory cannot be read or written: then nobody can know who
        else sends it.
        """
        if self.error is not None:
            raise self.error
        self.run.make_directory(self.run.notices)
        return create_exclusive(self._path(record), _text(record), mode=0o600)

    def finish(self, record: SendRecord) -> None:
        """Record how a try ended that was claimed with the same notice and channel."""
        replace_text(self._path(record), _text(record), mode=0o600)

    def _path(self, record: SendRecord) -> Path:
        stem = _stem(record.notice, record.channel)
        return self.run.notices / f"{stem}.{self.numbers.get(stem, 0) + 1:02d}"


def pause_seconds(tries: int) -> float:
    """How long to wait after so many tries have failed."""
    return min(_FIRST_PAUSE_SECONDS * float(2 ** (tries - 1)), _LONGEST_PAUSE_SECONDS)


def _stem(notice: str, channel: str) -> str:
    """Name the files of all tries for one notice on one channel, without their number."""
    return f"{notice}.{channel}"


def _text(record: SendRecord) -> str:
    return record.model_dump_json(exclude_none=True) + "\n"


def read_outbox(run: RunLayout) -> Outbox:
    """Read all tries of a run; none where nothing was sent yet. Raises OSError."""
    try:
        names = sorted(os.listdir(run.notices))
    except FileNotFoundError:
        return Outbox(run)
    found: dict[tuple[str, str], list[SendRecord]] = {}
    numbers: dict[str, int] = {}
    for name in names:
        stem, _, number = name.rpartition(".")
        if name.startswith(".") or not number.isdecimal():
            continue
        numbers[stem] = max(numbers.get(stem, 0), int(number))
        with contextlib.suppress(FileNotFoundError):
            path = run.notices / name
            if (record := parse_record(path, path.read_bytes(), SendRecord)) is not None:
                found.setdefault((record.notice, record.channel), []).append(record)
    return Outbox(run, {key: Tries(tuple(records)) for key, records in found.items()}, numbers)
