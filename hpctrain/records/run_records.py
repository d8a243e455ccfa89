"""Records that the trainer writes: progress, step metrics, how each rank ended, done.

Belongs here: the formats, reading and writing them. The trainer writes, everybody else reads. Does
not belong here: the files of exit records (`exit_records`), what follows from records (see
`hpctrain.supervise`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import groupby
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from hpctrain.base.durable import append_line, replace_text
from hpctrain.base.formats import refuse_newer
from hpctrain.records.layout import RunLayout

Phase = Literal[
    "starting",
    "loading",
    "training",
    "saving",
    "evaluating",
    "profiling",
    "leaving",
    # of a replica of a service, which answers requests instead of training
    "serving",
    "draining",
]
Outcome = Literal["done", "yielded", "config_error", "crash"]


class TrainerExit(IntEnum):
    """Exit codes of the trainer, after sysexits.h: 75 is EX_TEMPFAIL, 78 is EX_CONFIG.

    16 and 17 are Megatron's EXIT_CODE_RESUME_TO_DISAMBIGUATE and
    EXIT_CODE_FAILED_ON_RESULT_VALIDATION (megatron/core/rerun_state_machine.py).
    """

    DONE = 0
    CRASH = 1
    SUSPECT_NUMERICS = 16
    DIVERGED = 17
    YIELDED = 75
    CONFIG_ERROR = 78

    @classmethod
    def of(cls, outcome: Outcome) -> TrainerExit:
        """Return the code of an end whose cause has none of its own."""
        return cls[outcome.upper()]


class RecordPart(BaseModel):
    """Base of what stands inside a record. Fields of later versions are left out when it is read.

    `defer_build`: a validator is made when it is first used, because `status` uses only a few.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)


class Record(RecordPart):
    """Base of all documents and lines that the trainer and the supervisor write while a run lives.

    `schema_version`: the type lists all versions that are known; the default is that of files
    without it, so lines of version 1 need not carry it (see `hpctrain.base.formats`).
    """

    schema_version: Literal[1] = 1


class Progress(Record):
    """The trainer's last sign of life, replaced at most about once a second.

    `target_step`: None where the run ends with a file and not at a step.
    `ready_since`: when a replica of a service began to answer requests; its one step is being
    ready.
    """

    epoch: int
    phase: Phase
    step: int
    target_step: int | None
    time: float
    step_seconds: float | None = None
    loss: float | None = None
    checkpoint_step: int | None = None
    ready_since: float | None = None


class StepRecord(Record):
    """A line about one step, as the launch `epoch` has it; `time` is seconds since the epoch."""

    step: int
    epoch: int
    time: float


class StepMetrics(StepRecord):
    """One optimizer step. `loss_hex` is the exact float64 (float.hex), for bitwise comparison.

    `profiled`: a profiler was active, so the step's time is not comparable with other steps. A
    trainer that is no engine of ours reports some steps only, and some values of them: the others
    are None. Where it does not report `step_seconds`, readers take the mean since its report before
    (see `with_measured_seconds`).
    """

    loss: float | None
    loss_hex: str | None
    grad_norm: float | None
    learning_rate: float | None
    step_seconds: float | None
    tokens_per_second: float | None
    mfu: float | None
    memory_bytes: int | None
    consumed_samples: int | None
    eval_loss: float | None = None
    eval_accuracy: float | None = None
    profiled: bool = False

    @property
    def exact_loss(self) -> float | None:
        """The loss, which may be NaN or infinite; None where it was not reported."""
        return None if self.loss_hex is None else float.fromhex(self.loss_hex)


class EvaluationMetrics(StepRecord):
    """The evaluation of a step that an earlier launch has trained.

    That launch was asked to stop before the evaluation was complete. The line is appended to the
    step metrics; readers get the values in the row of the step.
    """

    eval_loss: float | None
    eval_accuracy: float | None


class ExitRecord(Record):
    """How one rank of one launch ended. Ranks that were killed leave none.

    `step` is the last finished step; with the cause "diverged" the step that diverged, and
    `consumed_samples` says how many samples had been consumed before it. `node_dependent`: what
    is wrong may be so on this node only, such as a file that is missing there. `loading_step` is
    the checkpoint whose loading failed in this rank, for no reason that a machine could have; None
    otherwise. `signal` names the one that has asked this rank to leave, such as SIGTERM. Of ranks
    that leave well only rank 0 has a record; its `signalled_ranks` are those that got a signal, the
    first 64 of them. `rank_codes` are the exit codes of the processes below the agent of a trainer
    of its own, each once, as a shell has them.
    """

    epoch: int
    rank: int
    node: str
    outcome: Outcome
    step: int
    exit_code: int
    time: float
    message: str | None = None
    traceback: str | None = None
    cause: str | None = None
    consumed_samples: int | None = None
    node_dependent: bool = False
    signal: str | None = None
    signalled_ranks: tuple[int, ...] = ()
    loading_step: int | None = None
    rank_codes: tuple[int, ...] = ()

    @property
    def words(self) -> str:
        """Its message; empty where it has none."""
        return self.message or ""


class RankEnd(RecordPart):
    """How a process of a rank ended; a negative code is the signal that killed it."""

    rank: int
    code: int


class AgentRecord(Record):
    """The ranks that had failed when an agent noticed the first failure.

    For ranks directly below srun, Slurm reports this (`srun: error: n1: task 3: Killed`).
    """

    epoch: int
    node: str
    time: float
    ended: tuple[RankEnd, ...]


class SaveRecord(StepRecord):
    """One published checkpoint: seconds that training stood still for it, and until it counted.

    `stall_seconds`: None where the trainer saves by itself and does not report it.
    """

    stall_seconds: float | None
    publish_seconds: float
    size_bytes: int


class RankTimes(Record):
    """Where the time of each rank went in a window of steps; replaced by rank 0 after each window.

    By rank, in seconds, the mean per step; on a GPU by its own clock. The parts do not overlap.
    `compute_seconds`: megatron-core, also in Megatron-LM: forward and backward passes, without
    waiting for other pipeline stages and for gradients; other engines: forward passes, of FSDP and
    ZeRO stage 3 with waiting for weights. `backward_seconds`: other engines: backward passes, with
    waiting for gradients to be summed (0 with megatron-core). `data_seconds`: waiting for the next
    batch. `optimizer_seconds`: from the last backward pass to the end of the update, with the sums
    over ranks that belong to it. What is left of `step_seconds` is `rest_seconds`.

    `peak_memory_bytes`, `reserved_memory_bytes`: since the launch began, allocated by PyTorch and
    taken by it from the GPU; on a CPU the peak resident set, and 0. Windows leave out the first
    step of a launch and profiled steps. A record of an older version has `compute_seconds` only,
    the others are empty. `nodes[rank]` is the rank's node.
    """

    epoch: int
    first_step: int
    last_step: int
    time: float
    compute_seconds: tuple[float, ...]
    nodes: tuple[str, ...]
    backward_seconds: tuple[float, ...] = ()
    data_seconds: tuple[float, ...] = ()
    optimizer_seconds: tuple[float, ...] = ()
    step_seconds: tuple[float, ...] = ()
    peak_memory_bytes: tuple[int, ...] = ()
    reserved_memory_bytes: tuple[int, ...] = ()

    @property
    def pass_seconds(self) -> tuple[float, ...]:
        """Forward and backward passes of each rank."""
        backward = self.backward_seconds or (0.0,) * len(self.compute_seconds)
        return tuple(f + b for f, b in zip(self.compute_seconds, backward, strict=True))

    @property
    def source(self) -> str:
        """The file and the steps, as evidence names them."""
        return f"ranks.json, steps {self.first_step} to {self.last_step}"

    def named(self, rank: int) -> str:
        node = self.nodes[rank] if rank < len(self.nodes) else ""
        return f"rank {rank} on {node}" if node else f"rank {rank}"

    @property
    def rest_seconds(self) -> tuple[float, ...]:
        """Step time outside compute, data and optimizer: with megatron-core mostly waiting for
        pipeline neighbours and gradients, else nearly 0. Empty for a record of an older version."""
        parts = (
            self.compute_seconds,
            self.backward_seconds,
            self.data_seconds,
            self.optimizer_seconds,
        )
        if not self.step_seconds:
            return ()
        return tuple(
            max(0.0, step - sum(of_rank))
            for step, *of_rank in zip(self.step_seconds, *parts, strict=True)
        )

    @property
    def mean_parts(self) -> dict[str, float]:
        """Means over ranks of the parts of a step, in seconds; without those that are not known."""
        parts = {
            "passes": self.pass_seconds,
            "data": self.data_seconds,
            "optimizer": self.optimizer_seconds,
            "rest": self.rest_seconds,
        }
        return {name: math.fsum(of) / len(of) for name, of in parts.items() if of}


class SkippedData(RecordPart):
    """Samples that training leaves out: after `from_samples` it continues at `to_samples`."""

    from_samples: int
    to_samples: int
    reason: str
    time: float


class SkipList(Record):
    """All data left out of a run, in the order of the samples (`skips.json`)."""

    skips: tuple[SkippedData, ...] = ()


class DoneMarker(Record):
    """The run has reached its target step and the final checkpoint is verified."""

    step: int
    epoch: int
    checkpoint: str
    time: float


class StepRow(Protocol):
    """What says which of several rows of a step counts."""

    @property
    def step(self) -> int: ...
    @property
    def epoch(self) -> int: ...


class TimedRow(StepRow, Protocol):
    """A row that says when its step ended, and may say how long it took."""

    @property
    def time(self) -> float: ...
    @property
    def step_seconds(self) -> float | None: ...


RecordT = TypeVar("RecordT", bound=Record)
StepRowT = TypeVar("StepRowT", bound=StepRow)
TimedRowT = TypeVar("TimedRowT", bound=TimedRow)
_LONGEST_ROW_BYTES = 512


def read_record(path: Path, kind: type[RecordT]) -> RecordT | None:
    """The record in `path`; None when it is absent, unreadable or not of that kind (unknown).

    Raises NewerFormatError for a format of a newer hpctrain.
    """
    try:
        text = path.read_bytes()
    except OSError:
        return None
    return parse_record(path, text, kind)


def parse_record(path: Path, text: bytes, kind: type[RecordT]) -> RecordT | None:
    """The record in `text`, which is a line or the whole of `path`; None when it is none.

    Raises NewerFormatError for a format of a newer hpctrain.
    """
    try:
        return kind.model_validate_json(text)
    except ValidationError:
        refuse_newer(path, text, kind)
        return None


def write_record(path: Path, record: Record, *, durable: bool = True) -> None:
    """Replace `path` atomically. Raises OSError when its directory is away."""
    replace_text(path, record.model_dump_json(), mode=0o600, durable=durable)


def _append(path: Path, record: Record) -> None:
    """Append a line, with its format version unless that is the one of lines without it."""
    omitted = {"schema_version"} if record.schema_version == 1 else None
    append_line(path, record.model_dump_json(exclude=omitted), mode=0o600, durable=False)


def append_metrics(run: RunLayout, metrics: StepMetrics | EvaluationMetrics) -> None:
    _append(run.metrics, metrics)


def read_metrics(run: RunLayout) -> list[StepMetrics]:
    """Read all rows in the order written; a torn line is left out.

    An evaluation that a later launch has completed is in the row of its step.
    """
    if not run.metrics.exists():
        return []
    return _readable(run.metrics, run.metrics.read_bytes().splitlines())


def lineage(rows: Sequence[StepRowT]) -> list[StepRowT]:
    """Select the rows of the steps that count: one per step, ascending.

    A launch that trains step N replaces the rows of earlier launches from N on, also of later
    steps that it has not reached yet, because they are not in its weights.
    """
    kept: list[StepRowT] = []
    for row in sorted(rows, key=lambda row: row.epoch):
        while kept and kept[-1].step >= row.step:
            kept.pop()
        kept.append(row)
    return kept


def read_evaluations(run: RunLayout) -> list[StepMetrics]:
    """Read the rows of steps that were evaluated, without parsing the others.

    A loss of an evaluation that was completed later is in the row of its step, as `read_metrics`
    has it, if that step was trained shortly before.
    """
    kept: list[bytes] = []
    try:
        with run.metrics.open("rb") as stream:
            before = b""
            for line in stream:
                value = line.partition(b'"eval_loss":')[2].lstrip()
                if value and not value.startswith(b"null"):
                    kept += [before, line] if b'"learning_rate":' not in line else [line]
                before = line
    except FileNotFoundError:
        return []
    rows = _readable(run.metrics, kept)
    return [row for row in rows if row.eval_loss is not None]


def with_measured_seconds(
    rows: list[TimedRowT], replaced: Callable[[TimedRowT, float, float], TimedRowT]
) -> list[TimedRowT]:
    """Fill in the `step_seconds` of rows without, by the time since the report before.

    Rows of one launch with the same time were read at once, as from a file that the trainer writes
    now and then: they are spread over the time since the report before. The first report of a
    launch stays without. `replaced` makes a row with another time and other seconds.
    """
    if all(row.step_seconds is not None for row in rows):
        return rows
    filled: list[TimedRowT] = []
    newest: dict[int, TimedRowT] = {}
    for (epoch, time), reported in groupby(rows, key=lambda row: (row.epoch, row.time)):
        at_once = list(reported)
        last, before = at_once[-1], newest.get(epoch)
        newest[epoch] = last
        if before is not None and before.step < last.step and before.time < time:
            seconds = (time - before.time) / (last.step - before.step)
            at_once = [
                row
                if row.step_seconds is not None
                else replaced(row, time - seconds * max(0, last.step - row.step), seconds)
                for row in at_once
            ]
        filled += at_once
    return filled


def append_save(run: RunLayout, save: SaveRecord) -> None:
    _append(run.saves, save)


def read_saves(run: RunLayout) -> list[SaveRecord]:
    """All readable records of saves in the order written; none when there is no such file."""
    try:
        lines = run.saves.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    saves = (parse_record(run.saves, line, SaveRecord) for line in lines)
    return [save for save in saves if save is not None]


def tail_metrics(run: RunLayout, count: int) -> list[StepMetrics]:
    """The last `count` readable rows, without reading the whole file."""
    try:
        with run.metrics.open("rb") as stream:
            size_bytes = stream.seek(0, 2)
            start = max(0, size_bytes - count * _LONGEST_ROW_BYTES)
            stream.seek(start)
            lines = stream.read().splitlines()[1 if start else 0 :]
    except FileNotFoundError:
        return []
    return _readable(run.metrics, lines)[-count:]


def _readable(path: Path, lines: list[bytes]) -> list[StepMetrics]:
    """The rows of steps; an evaluation is added to the newest row of its step, if that was read."""
    rows: list[StepMetrics] = []
    for line in lines:
        row = parse_record(path, line, StepMetrics)
        if row is not None:
            rows.append(row)
        elif (late := parse_record(path, line, EvaluationMetrics)) is not None:
            values = {"eval_loss": late.eval_loss, "eval_accuracy": late.eval_accuracy}
            for index in reversed(range(len(rows))):
                if rows[index].step == late.step:
                    rows[index] = rows[index].model_copy(update=values)
                    break
    return with_measured_seconds(
        rows,
        lambda row, time, seconds: row.model_copy(update={"time": time, "step_seconds": seconds}),
    )


# -- Messages between ranks in one measured step (`communication.json`), replaced by rank 0 -----


class AxisMessages(RecordPart):
    """Messages along one axis of the layout in one step; every tuple is indexed by rank.

    `axis`: tp, cp, ep, dp, pp, or `other` for groups that no axis has (such as all ranks).
    `groups[rank]` is the first rank of its group, -1 for a rank without one. `bytes`: what the rank
    has handed to collectives and sends of the axis; `seconds`: time of these, of overlapping ones
    once. `calls`: their number.
    """

    axis: str
    ranks_per_group: int
    groups: tuple[int, ...]
    calls: tuple[int, ...]
    bytes: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def members(self) -> list[int]:
        """The ranks that have a group."""
        return [rank for rank, group in enumerate(self.groups) if group >= 0]


class LinkBytes(RecordPart):
    """Bytes from one rank to another in the step."""

    source: int
    target: int
    bytes: int


class CommunicationRecord(Record):
    """Messages of all ranks in one step, `step_seconds` long.

    `links`: who has sent how much to whom. Point-to-point messages are exact; of a collective
    operation a rank sends to the next rank of its group what a ring algorithm sends (nccl-tests,
    doc/PERFORMANCE.md, bus bandwidth). `source` names what was measured with.
    """

    epoch: int
    step: int
    time: float
    step_seconds: float
    nodes: tuple[str, ...]
    axes: tuple[AxisMessages, ...]
    links: tuple[LinkBytes, ...] = ()
    source: str = ""


def read_communication(run: RunLayout) -> CommunicationRecord | None:
    """Read the record; None where nothing was measured, or the file cannot be read."""
    return read_record(run.communication, CommunicationRecord)
