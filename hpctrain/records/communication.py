"""Messages between ranks in one measured step (`communication.json`), replaced by rank 0.

Belongs here: the record. Does not belong here: measuring (`hpctrain.train.messages`), judging it
(`hpctrain.diagnose`).
"""

from __future__ import annotations

from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import Record, RecordPart, read_record


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
