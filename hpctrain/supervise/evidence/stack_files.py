"""Read the files into which the ranks of a launch dump their stacks.

Each rank opens its file at start and writes one header line (`rank= node= pid= epoch= package=`).
SIGQUIT appends the stacks of all its threads. Belongs here: waiting for these files, reading them
within limits, removing old ones. Does not belong here: sending the signal (`stack_inquiry`), what
stacks mean (`judge.odd_stacks`). NCCL's flight recordings in the same directory are kept and not
read.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.base import clock
from hpctrain.records.layout import RunLayout

_NAME = re.compile(r"rank-(\d+)\.txt")
# Trainers before `package=` was recorded end the line behind the epoch.
_HEADER = re.compile(r"rank=\d+ node=(?P<node>\S+) (?:.*? package=(?P<package>.+))?")
_EPOCH_NAME = re.compile(r"e(\d+)")
# Epochs whose stacks are kept, the present one included.
_KEPT_EPOCHS = 4
# A trainer's dump is a few kB; this cuts off a hundred threads of a hundred frames.
_LONGEST_DUMP_BYTES = 256 * 1024
_LONGEST_HEADER_BYTES = 8 * 1024
_POLL_SECONDS = 0.1
# faulthandler writes in small pieces, with pauses on a busy node.
_QUIET_SECONDS = 0.5
# Limit for reading the files of all ranks: 16384 files at half a millisecond each.
_READING_SECONDS = 8.0


@dataclass(frozen=True)
class StackDumps:
    """Stacks that the ranks have written since the signal, and the nodes in their headers.

    `texts` has an empty text for a rank that has a file and wrote nothing. It does not contain a
    rank without a file. `packages` has the directory of hpctrain of each rank that recorded it.
    `complete`: all files could be read in time.
    """

    texts: Mapping[int, str]
    nodes: Mapping[int, str]
    complete: bool
    packages: Mapping[int, str] = field(default_factory=dict)


def sizes(run: RunLayout, epoch: int) -> dict[int, int]:
    """Return the size in bytes of each rank's file, for ranks that have one."""
    found: dict[int, int] = {}
    for rank, path in _files(run, epoch):
        # After opening the file an NFS client asks the server for the size, not its cache.
        with contextlib.suppress(OSError), path.open("rb", buffering=0) as stream:
            found[rank] = os.fstat(stream.fileno()).st_size
    return found


def wait_for_dumps(
    run: RunLayout, epoch: int, before: Mapping[int, int], timeout_seconds: float
) -> None:
    """Return when every file has grown and none is still growing, or after the timeout."""
    deadline = clock.monotonic() + timeout_seconds
    last, changed_at = sizes(run, epoch), clock.monotonic()
    while clock.monotonic() < deadline:
        clock.sleep(_POLL_SECONDS)
        now = sizes(run, epoch)
        if now != last:
            last, changed_at = now, clock.monotonic()
        quiet = clock.monotonic() - changed_at >= _QUIET_SECONDS
        if quiet and all(now.get(rank, 0) > size for rank, size in before.items()):
            return


def read_dumps(run: RunLayout, epoch: int, before: Mapping[int, int]) -> StackDumps:
    """Read what was appended after the sizes in `before`, within limits of time and size."""
    deadline = clock.monotonic() + _READING_SECONDS
    texts: dict[int, str] = {}
    nodes: dict[int, str] = {}
    packages: dict[int, str] = {}
    complete = True
    for rank, path in _files(run, epoch):
        try:
            with path.open("rb") as stream:
                first = stream.readline(_LONGEST_HEADER_BYTES).decode("ascii", "replace")
                stream.seek(before.get(rank, 0))
                texts[rank] = stream.read(_LONGEST_DUMP_BYTES).decode("utf-8", "replace")
        except OSError:
            complete = False
            continue
        header = _HEADER.match(first)
        if header is not None:
            nodes[rank] = header["node"]
            if header["package"]:
                packages[rank] = header["package"]
        if clock.monotonic() >= deadline:
            return StackDumps(texts, nodes, complete=False, packages=packages)
    return StackDumps(texts, nodes, complete, packages)


def forget_old_dumps(run: RunLayout, epoch: int) -> None:
    """Remove the stacks of all but the last few epochs before `epoch`."""
    for entry in os.scandir(run.stacks):
        match = _EPOCH_NAME.fullmatch(entry.name)
        if match is not None and int(match[1]) <= epoch - _KEPT_EPOCHS:
            shutil.rmtree(entry.path, ignore_errors=True)


def _files(run: RunLayout, epoch: int) -> Iterator[tuple[int, Path]]:
    try:
        names = sorted(os.listdir(run.stack_dump(epoch, 0).parent))
    except FileNotFoundError:
        return
    for name in names:
        match = _NAME.fullmatch(name)
        if match is not None:
            rank = int(match[1])
            yield rank, run.stack_dump(epoch, rank)
