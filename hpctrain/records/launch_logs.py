"""Names of the logs of a launch, and the lines of each rank in a log that several ranks share.

    logs/4711.0/step0-rank0003.log    one rank
    logs/4711.0/step0-node0001.log    one node: its ranks' lines with labels (`12: text`), and those
                                      of its torchelastic agent without (launcher: torchrun)

srun(1), --label: each line begins with the number of its task and a colon. slurmstepd hands on at
most 1024 bytes at a time (MAX_MSG_LEN, src/slurmd/slurmstepd/io.c; measured with 22.05.8) and ends
each piece with a newline: a piece of exactly that length goes on in the next one of the same rank.
Belongs here: names and labels. Does not belong here: which log to read (`runs.logs`), what lines
mean (`supervise.evidence.log_scan`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

LOG_NAME = re.compile(r"step(?P<step>\d{1,9})-(?:rank(?P<rank>\d{1,9})|node(?P<node>\d{1,9}))\.log")
ATTEMPT_NAME = re.compile(r"(?P<job>\d+)\.(?P<restart>\d+)")
# The width of a label is that of the highest rank (right-justified) or none, by version.
_LABEL = re.compile(rb" {0,8}(\d{1,8}): ")
_PIECE_BYTES = 1024
_READ_BYTES = 1 << 20


class LabelledLines:
    """Splits the text of a node's log, as it is read, into lines with the ranks that wrote them."""

    def __init__(self) -> None:
        self._rest = b""
        self._pieces: dict[int, bytes] = {}

    def feed(self, data: bytes) -> Iterator[tuple[int | None, bytes]]:
        """Yield the lines that `data` completes, with their rank; None for lines without a label.

        Lines have no newline.
        """
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            yield from self._line(line)

    def finish(self) -> Iterator[tuple[int | None, bytes]]:
        """Yield what is left of lines that have not been completed."""
        if self._rest:
            yield from self._line(self._rest)
        yield from self._pieces.items()
        self._rest, self._pieces = b"", {}

    def _line(self, line: bytes) -> Iterator[tuple[int | None, bytes]]:
        label = _LABEL.match(line)
        if label is None:
            yield None, line
            return
        rank, text = int(label[1]), line[label.end() :]
        before = self._pieces.pop(rank, b"")
        if len(text) == _PIECE_BYTES:
            self._pieces[rank] = before + text
        else:
            yield rank, before + text


def lines_of_rank(path: Path, rank: int) -> Iterator[bytes]:
    """Yield the lines of one rank in a node's log, without label and newline. Raises OSError."""
    lines = LabelledLines()
    with path.open("rb") as stream:
        while data := stream.read(_READ_BYTES):
            yield from (line for owner, line in lines.feed(data) if owner == rank)
    yield from (line for owner, line in lines.finish() if owner == rank)
