"""Find what old launches have left, and pack their logs and exit records, many files into one.

    logs/archive-e000041.tar.gz    logs and exit records that were old when launch 41 began

`tar xzf logs/archive-e000041.tar.gz` in the run directory puts them back. Packing starts when twice
as many launches as are to be kept have left files, so that one archive takes those of many. Belongs
here: which files are old, packing them. Does not belong here: when (`supervise`, `runs.clean`),
stacks (`supervise.evidence.stack_inquiry`).
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.durable import fsync_directory, fsync_file, shared_mode
from hpctrain.records.jobs import started_ids
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import Ledger

_ARCHIVE_NAME = re.compile(r"archive-e\d{6,}\.tar\.gz")
_UNFINISHED_NAME = re.compile(r"\.archive-e(\d{6,})\.tar\.gz\.tmp")
_EPOCH_NAME = re.compile(r"e(\d{6,})")
# Of 9: logs are mostly the same lines, and the node that packs them trains.
_COMPRESSION = 3
# nice(2): 19 is the lowest priority.
_NICENESS = 15
_THREAD_NAME = "pack old launches"


@dataclass(frozen=True)
class Packed:
    """An archive and how many files of how many bytes it has taken."""

    archive: Path
    files: int
    size_bytes: int


def logs_by_launch(run: RunLayout) -> list[list[Path]]:
    """List the logs of ranks and nodes by launch, the oldest launch first. Raises OSError."""
    order = {job_id: n for n, job_id in enumerate(started_ids(Ledger(run.ledger).events()))}
    launches: dict[tuple[int, int, int, int], list[Path]] = {}
    for attempt in run.logs.iterdir():
        name = ATTEMPT_NAME.fullmatch(attempt.name)
        if name is None or not _is_directory(attempt):
            continue
        job_id, restart = int(name["job"]), int(name["restart"])
        for path in attempt.iterdir():
            log = LOG_NAME.fullmatch(path.name)
            if log is not None:
                key = (order.get(job_id, len(order)), job_id, restart, int(log["step"]))
                launches.setdefault(key, []).append(path)
    return [sorted(launches[key]) for key in sorted(launches)]


def exits_by_launch(run: RunLayout) -> list[list[Path]]:
    """List the exit records by launch, the oldest launch first. Raises OSError."""
    return [sorted(directory.iterdir()) for _, directory in epoch_directories(run.exits)]


def epoch_directories(parent: Path) -> list[tuple[int, Path]]:
    """List the directories of launches, such as `e000012`, with their epochs, the oldest first."""
    try:
        matches = [(_EPOCH_NAME.fullmatch(path.name), path) for path in parent.iterdir()]
    except FileNotFoundError:
        return []
    return sorted((int(m[1]), path) for m, path in matches if m and _is_directory(path))


def log_archives(run: RunLayout) -> list[Path]:
    """List the archives of old launches, the oldest first. Raises OSError."""
    return sorted(path for path in run.logs.iterdir() if _ARCHIVE_NAME.fullmatch(path.name))


def pack_old_launches(run: RunLayout, keep: int, epoch: int) -> Packed | None:
    """Pack logs and exit records of all but the `keep` newest launches; None if there are too few.

    `epoch` is that of the newest launch. A file that somebody still writes to stays where it is. A
    crash leaves all files, or the archive and some of the files that it contains. Raises OSError.
    """
    _remove_unfinished(run, epoch)
    groups = [found for found in (logs_by_launch(run), exits_by_launch(run))]
    if keep < 1 or all(len(found) <= 2 * keep for found in groups):
        return None
    paths = [path for found in groups for launch in found[:-keep] for path in launch]
    target = run.log_archive(epoch)
    temporary = target.with_name(f".{target.name}.tmp")
    sizes = dict(_add_all(run, temporary, paths))
    fsync_file(temporary)
    os.replace(temporary, target)
    fsync_directory(target.parent)
    for path, size_bytes in sizes.items():
        with contextlib.suppress(OSError):
            if path.stat().st_size == size_bytes:
                path.unlink()
    for _, directory in epoch_directories(run.exits)[:-keep]:
        with contextlib.suppress(OSError):  # of attempts they stay: `logs --attempt` counts them
            directory.rmdir()
    return Packed(target, len(sizes), sum(sizes.values()))


def _add_all(run: RunLayout, archive: Path, paths: list[Path]) -> Iterator[tuple[Path, int]]:
    """Write the archive; yield the files that are in it, with their sizes."""
    mode = shared_mode(archive.parent, 0o600)
    descriptor = os.open(archive, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
    with (
        os.fdopen(descriptor, "wb") as raw,
        tarfile.open(fileobj=raw, mode="w:gz", compresslevel=_COMPRESSION) as tar,
    ):
        for path in paths:
            if not stat.S_ISREG(path.lstat().st_mode):
                continue
            name = str(path.relative_to(run.directory))
            with path.open("rb") as stream:
                member = tar.gettarinfo(arcname=name, fileobj=stream)
                tar.addfile(member, stream)
            yield path, member.size


def _remove_unfinished(run: RunLayout, epoch: int) -> None:
    """Remove what an earlier launch had not finished packing when it ended."""
    for path in run.logs.iterdir():
        match = _UNFINISHED_NAME.fullmatch(path.name)
        if match is not None and int(match[1]) < epoch:
            path.unlink(missing_ok=True)


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def start_packing(
    run: RunLayout, keep: int, epoch: int, report: Callable[[str], None]
) -> threading.Thread:
    """Pack beside training, in a thread of low priority that ends with the process.

    Errors are reported and have no other consequence. Returns the thread; that of an earlier launch
    if it is still packing.
    """
    for thread in threading.enumerate():
        if thread.name == _THREAD_NAME:
            return thread

    def work() -> None:
        with contextlib.suppress(OSError):  # setpriority(2): on Linux the priority of this thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            packed = pack_old_launches(run, keep, epoch)
        except OSError as error:
            report(f"old logs could not be packed: {error}")
            return
        if packed is not None:
            name = packed.archive.relative_to(run.directory)
            report(f"packed {packed.files} logs and exit records of old launches into {name}")

    thread = threading.Thread(target=work, daemon=True, name=_THREAD_NAME)
    thread.start()
    return thread


# -- Names of the logs of a launch, and the lines of one rank in a shared log -------------------
# logs/4711.0/step0-rank0003.log one rank logs/4711.0/step0-node0001.log one node: its ranks' lines
# with labels (`12: text`), and those of its agent without (launcher: torchrun)
#
# srun(1), --label: each line begins with the number of its task and a colon. slurmstepd hands on at
# most 1024 bytes at a time (MAX_MSG_LEN, src/slurmd/slurmstepd/io.c; measured with 22.05.8) and
# ends each piece with a newline: a piece of exactly that length goes on in the next one of the same
# rank.


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
