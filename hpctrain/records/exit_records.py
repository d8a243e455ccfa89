"""Write and read how the ranks of a launch have ended: one file per node, one line per record.

    exits/e000001/node-000003.jsonl    ranks of the fourth node of a launch, and its agent
    exits/e000001/left-startup         a rank was stopped before its first step (empty)

Ranks of one node append to one file, so that a launch leaves as many files as it has nodes.
open(2), O_APPEND: the position is atomic between processes of one host; on NFS too, where only
clients on several hosts overwrite each other. A line that is torn is left out, and only that one.
Earlier versions wrote one document per rank and per agent, which is still read. Belongs here: the
files. Does not belong here: the records (`run_records`), what follows from them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from hpctrain.base.durable import append_line, fsync_directory, shared_mode
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import (
    AgentRecord,
    ExitRecord,
    Record,
    parse_record,
    read_record,
)

_NODE = re.compile(r"node-\d{6,}\.jsonl")
# Documents of hpctrain 0.1.0.
_ONE_RANK = re.compile(r"rank-\d{6,}\.json")
_ONE_AGENT = re.compile(r"node-\d{6,}\.json")


def write_exit_record(run: RunLayout, node_rank: int, record: ExitRecord) -> None:
    """Append how a rank on node `node_rank` of its launch has ended. Raises OSError."""
    _append(run, run.exit_records(record.epoch, node_rank), record)


def write_agent_record(run: RunLayout, node_rank: int, record: AgentRecord) -> None:
    """Append which ranks below the agent of a node have failed. Raises OSError."""
    _append(run, run.exit_records(record.epoch, node_rank), record)


def _append(run: RunLayout, path: Path, record: Record) -> None:
    run.make_directory(path.parent)
    is_new = not path.exists()
    append_line(path, record.model_dump_json(), mode=0o600)
    if is_new:
        fsync_directory(path.parent)


def read_exit_records(run: RunLayout, epoch: int) -> list[ExitRecord]:
    """Read the exit records of one launch, in rank order; of a rank with several the last one."""
    return of_ranks(_read_all(run, epoch))


def read_agent_records(run: RunLayout, epoch: int) -> list[AgentRecord]:
    """Read the records of one launch's agents, the earliest first."""
    found = [one for one in _read_all(run, epoch) if isinstance(one, AgentRecord)]
    return sorted(found, key=lambda one: one.time)


def of_ranks(records: list[ExitRecord | AgentRecord]) -> list[ExitRecord]:
    """Select the records of ranks, in rank order; of a rank with several the last one."""
    newest = {one.rank: one for one in records if isinstance(one, ExitRecord)}
    return [newest[rank] for rank in sorted(newest)]


def mark_left_startup(run: RunLayout, epoch: int) -> None:
    """Show the other ranks of a launch that one was stopped before its first step. Raises OSError.

    They fail by that, all at once: each of them looks for this file instead of reading all records.
    """
    path = run.left_startup(epoch)
    run.make_directory(path.parent)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
    os.close(os.open(path, flags, shared_mode(path.parent, 0o600)))


def has_left_startup(run: RunLayout, epoch: int) -> bool:
    """Check whether a rank of a launch was stopped before its first step.

    By open(2) and not stat(2): an NFS client then asks the server (nfs(5), close-to-open).
    """
    try:
        os.close(os.open(run.left_startup(epoch), os.O_RDONLY))
    except OSError:
        return False
    return True


def rank_0_has_exited(run: RunLayout, epoch: int) -> bool:
    """Check for a record of rank 0, which is on the first node, without reading other nodes'."""
    if run.exit_record(epoch, 0).exists():
        return True
    return any(one.rank == 0 for one in of_ranks(read_records(run.exit_records(epoch, 0))))


def _read_all(run: RunLayout, epoch: int) -> list[ExitRecord | AgentRecord]:
    directory = run.exits_of(epoch)
    try:
        names = sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [record for name in names for record in read_records(directory / name)]


def read_records(path: Path) -> list[ExitRecord | AgentRecord]:
    """Read the records in one file of a launch's directory, in the order written.

    Empty for a file of another name, and where nothing can be read. Raises NewerFormatError.
    """
    if _NODE.fullmatch(path.name) is None:
        kinds = ((_ONE_RANK, ExitRecord), (_ONE_AGENT, AgentRecord))
        documents = (read_record(path, kind) for name, kind in kinds if name.fullmatch(path.name))
        return [one for one in documents if isinstance(one, (ExitRecord, AgentRecord))]
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    found: list[ExitRecord | AgentRecord] = []
    for line in lines:
        record = parse_record(path, line, ExitRecord) or parse_record(path, line, AgentRecord)
        if record is not None:
            found.append(record)
    return found
