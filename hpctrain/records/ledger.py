"""The ledger: one append-only file of events per run, the single truth about its attempts.

An entry is written and flushed *before* the action it announces, because many actions (a requeue,
a cancel) end the process that takes them. Belongs here: the event format, appending and reading,
also while the file cannot be reached. Does not belong here: deciding anything.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

from hpctrain.base import clock
from hpctrain.base.durable import LineBuffer, append_line
from hpctrain.base.errors import StorageError
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import Record, parse_record

# A supervisor writes a few lines for each launch: this is more than all of its budgets allow.
_MOST_LINES = 10_000


class EventKind(StrEnum):
    """What happened; the fields of `Event` that are set depend on it."""

    RENDERED = "rendered"
    SUBMITTING = "submitting"
    SUBMITTED = "submitted"
    SUBMIT_FAILED = "submit_failed"
    JOB_CHANGED = "job_changed"
    ADOPTED = "adopted"
    ATTEMPT_STARTED = "attempt_started"
    ATTEMPT_LOST = "attempt_lost"
    RESUME = "resume"
    CHECKPOINT_REJECTED = "checkpoint_rejected"
    LAUNCH_STARTED = "launch_started"
    SERVING = "serving"
    SIGNAL = "signal"
    LAUNCH_ENDED = "launch_ended"
    ACTION = "action"
    ACTION_RESULT = "action_result"
    CANCEL_REQUESTED = "cancel_requested"
    CANCEL_FAILED = "cancel_failed"
    CANCELLED = "cancelled"
    CONTROL = "control"
    OBSERVED = "observed"
    STACKS_SAVED = "stacks_saved"
    STOP_TIMED = "stop_timed"
    SLOW_RANK = "slow_rank"
    SPEED_CHECKED = "speed_checked"
    ROLLED_BACK = "rolled_back"
    PROBED = "probed"
    PLACED = "placed"
    FRESH_START_ACCEPTED = "fresh_start_accepted"
    DATA_ACCEPTED = "data_accepted"
    CLEANED = "cleaned"
    UPGRADED = "upgraded"
    WATCH = "watch"
    TRACKING_FAILED = "tracking_failed"
    METRICS_FAILED = "metrics_failed"


class Event(Record):
    """One line of the ledger. `time` is seconds since the epoch; steps are optimizer steps.

    `cluster`: Slurm's ClusterName, where an event is about a job; None in ledgers of older
    versions. `answered` is False for a submission without an answer: Slurm may have the job.
    `symptom`: what `hpctrain watch` saw; None in ledgers of older versions. `groups_outside`: how
    many groups of ranks a launch has under several leaves or in several blocks. `after_run`: the
    run for whose end a submitted job waits; of an observation: that it began before that end.
    `served_seconds`: how long a replica had answered requests when the event was written.
    `slurm_cluster`: the cluster that Slurm's commands name to reach the jobs (`--clusters`);
    None where they need not. `site_messages`: what the site has said at a submission.
    """

    event: EventKind
    time: float
    job_id: int | None = None
    restart_count: int | None = None
    epoch: int | None = None
    launch: int | None = None
    cause: str | None = None
    action: str | None = None
    reason: str | None = None
    evidence: tuple[str, ...] = ()
    nodes: str | None = None
    resume_step: int | None = None
    last_step: int | None = None
    checkpoint_step: int | None = None
    signal: str | None = None
    exit_code: int | None = None
    rank: int | None = None
    user: str | None = None
    script_sha256: str | None = None
    node: str | None = None
    lost_nodes: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    fingerprint: str | None = None
    failed_step: int | None = None
    launch_nodes: int | None = None
    hard: bool = False
    delay_seconds: float | None = None
    factor: float | None = None
    successor_of: int | None = None
    cluster: str | None = None
    answered: bool = True
    symptom: str | None = None
    groups_outside: int | None = None
    after_run: str | None = None
    served_seconds: float | None = None
    slurm_cluster: str | None = None
    site_messages: tuple[str, ...] = ()

    @property
    def attempt(self) -> tuple[int | None, int | None]:
        """Job and restart count: which start of the run by Slurm the event belongs to."""
        return self.job_id, self.restart_count


class Ledger:
    """Appends to and reads one ledger file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, kind: EventKind, **fields: object) -> Event:
        """Write one event durably and return it."""
        return self.write(Event.model_validate({"event": kind, "time": clock.now(), **fields}))

    def write(self, event: Event) -> Event:
        """Write an event durably that is known as a whole, and return it."""
        self._write(event.model_dump_json(exclude_defaults=True))
        return event

    def _write(self, line: str) -> None:
        append_line(self.path, line, mode=0o600)

    def events(self) -> list[Event]:
        """All readable events in the order written; a torn line of a crashed writer is left out.

        Raises NewerFormatError when a newer hpctrain has written events that must be understood.
        """
        if not self.path.exists():
            return []
        return self._readable(self.path.read_bytes())

    def last_events(self, size_bytes: int) -> tuple[list[Event], bool]:
        """The readable events at the end of the file, and whether these are all there are.

        Raises OSError when it cannot be read.
        """
        with self.path.open("rb") as stream:
            start = max(0, stream.seek(0, 2) - size_bytes)
            stream.seek(start)
            data = stream.read()
        return self._readable(data.partition(b"\n")[2] if start else data), start == 0

    def _readable(self, data: bytes) -> list[Event]:
        """The events in `data`. Torn lines and kinds of events that are not known are left out."""
        events = (parse_record(self.path, line, Event) for line in data.splitlines())
        return [event for event in events if event is not None]


class BufferedLedger(Ledger):
    """The ledger of a run whose directory may be away for a while: nothing of it is lost.

    Events that cannot be written wait in memory, in their order and with their times, and are
    written as soon as the file can be reached again. While it cannot be read, `events` answers
    with what was read last and what was appended since. At most `most_lines` wait; beyond them
    `append` raises OSError. `listener` is called after events were written; it must return at once.
    """

    def __init__(self, run: RunLayout, most_lines: int = _MOST_LINES) -> None:
        super().__init__(run.ledger)
        self._buffer = LineBuffer(
            run.ledger, may_create=self._may_create, mode=0o600, most_lines=most_lines
        )
        self._require = run.require
        self._known: bytes | None = None
        self._deferred = False
        self.listener: Callable[[], None] = lambda: None

    @property
    def waiting(self) -> tuple[str, ...]:
        """The lines that are not in the file yet, oldest first."""
        return self._buffer.waiting

    def waiting_events(self) -> list[Event]:
        """What waits, as events."""
        return self._readable("\n".join(self.waiting).encode())

    def defer(self) -> None:
        """Keep events in memory until `write_on`: only seconds are left, for something else.

        Whoever defers has to do what keeps the run going without them. Should this process be
        killed before, the next attempt finds this one unfinished.
        """
        self._deferred = True

    def write_on(self) -> None:
        """End what `defer` began, and write what waits if possible."""
        self._deferred = False
        self._buffer.flush()
        self.listener()

    def flush(self) -> OSError | None:
        """Write what waits, unless deferred; returns the error that keeps it from the file."""
        return None if self._deferred else self._buffer.flush()

    def events(self) -> list[Event]:
        """All events, written or waiting.

        Raises OSError when the file cannot be read and never could be: without the past of a run
        nothing can be decided about it.
        """
        self.flush()
        # First what waits: a line that is written in between is then seen once or twice, not never.
        waiting = self.waiting
        written = self._read()
        lines = set(written.splitlines())
        late = [line for line in waiting if line.encode() not in lines]
        return self._readable(b"\n".join([written, *(line.encode() for line in late)]))

    def _may_create(self) -> None:
        """Only the first line makes the file: one that has held lines is not begun anew."""
        self._require()
        if self._known:
            raise StorageError(f"{self.path} is gone, and it had been there")

    def _read(self) -> bytes:
        try:
            self._known = self.path.read_bytes()
        except FileNotFoundError:
            if self._known is None:
                self._require()  # its whole directory may be away
                self._known = b""
        except OSError:
            if self._known is None:
                raise
        return self._known

    def _write(self, line: str) -> None:
        if self._deferred:
            self._buffer.keep(line)
        else:
            self._buffer.append(line)
            self.listener()
