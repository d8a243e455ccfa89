"""Collect the stacks of all ranks of a silent launch and name the ranks that stand out.

Belongs here: the order (signal, wait, read, compare), the files of stacks, the message for the
ledger. Does not belong here: when, and what follows (`launch_watch`), what stacks mean
(`judge.odd_stacks`).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.base import clock
from hpctrain.base.errors import SlurmError
from hpctrain.judge.documents import OddRank
from hpctrain.judge.launch_nodes import nodes_of_ranks
from hpctrain.judge.odd_stacks import odd_ranks, places
from hpctrain.records.layout import RunLayout
from hpctrain.supervise.context import AttemptContext
from hpctrain.supervise.evidence.slurm_facts import OwnSteps
from hpctrain.supervise.timeouts import run_with_timeout

# Time limits for listing the files of all ranks, ...
_FINDING_SECONDS = 15.0
# ... for the ranks to dump their stacks, ...
_DUMP_SECONDS = 5.0
# ... and for reading them: `read_dumps` stops by itself a little earlier.
_READING_SECONDS = 10.0
_READING_AT_THE_END_SECONDS = 1.0
_LONGEST_EVIDENCE = 8


@dataclass(frozen=True)
class OddRanks:
    """The ranks that stand out, a message about them, and where all ranks are, most first."""

    odd: tuple[OddRank, ...]
    reason: str
    evidence: tuple[str, ...]


class StackInquiry:
    """The inquiry of one launch; may be opened again after a silence that ended by itself.

    `tasks` and `nodes` as for `LaunchWatch`; `give_up` is called while waiting for ranks.
    """

    def __init__(
        self,
        context: AttemptContext,
        epoch: int,
        tasks: int,
        nodes: Sequence[str],
        give_up: Callable[[], bool],
    ) -> None:
        self._context = context
        self._run = context.run_layout
        self._epoch = epoch
        self._tasks = tasks
        self._nodes = tuple(nodes)
        self._give_up = give_up
        self._before: Mapping[int, int] = {}

    def open(self) -> None:
        """Have all ranks dump their stacks, and wait until they have.

        QUIT is sent only if a rank has opened its file, because it would kill other processes.
        """
        run, epoch, found = self._run, self._epoch, list[dict[int, int]]()
        run_with_timeout(
            lambda: found.append(sizes(run, epoch)),
            _FINDING_SECONDS,
            give_up=self._give_up,
        )
        before = self._before = found[0] if found else {}
        if not before:
            return
        if self._context.config.launcher == "agent":
            run_with_timeout(run.stacks_request.touch, _DUMP_SECONDS, give_up=self._give_up)
        else:
            OwnSteps(self._context).signal("QUIT")
        run_with_timeout(
            lambda: wait_for_dumps(run, epoch, before, _DUMP_SECONDS),
            _DUMP_SECONDS,
            give_up=self._give_up,
        )

    def close(self, phase: str) -> OddRanks | None:
        """Read the dumps; None if no rank was signalled, or nothing could be read.

        Best called after the ranks' end, because an NFS client may keep what a process writes until
        it ends. In the phase `leaving`, a rank without a file has exited already; otherwise it has
        never started.
        """
        run, epoch, before, found = (
            self._run,
            self._epoch,
            self._before,
            list[StackDumps](),
        )
        final = self._context.signals.final
        run_with_timeout(
            lambda: found.append(read_dumps(run, epoch, before)),
            _READING_AT_THE_END_SECONDS if final else _READING_SECONDS,
        )
        if not before or not found or not found[0].texts:
            return None
        all_count = found[0].complete and phase != "leaving"
        texts = found[0].texts
        nodes = {**self._planned_nodes(), **found[0].nodes}
        packages = found[0].packages
        odd = odd_ranks(texts, nodes, self._tasks if all_count else 0, packages)
        dumped = sum(bool(text) for text in texts.values())
        reason = f"{dumped} of {self._tasks or len(texts)} ranks gave their stacks"
        names = [f"rank {rank.rank} on {rank.node or 'an unknown node'}" for rank in odd]
        if len(names) > _LONGEST_EVIDENCE:
            names[_LONGEST_EVIDENCE:] = [f"{len(names) - _LONGEST_EVIDENCE} more"]
        reason += f"; unlike the others: {', '.join(names)}" if names else ""
        return OddRanks(odd, reason, places(texts, packages)[:_LONGEST_EVIDENCE])

    def _planned_nodes(self) -> dict[int, str]:
        """The node of each rank as Slurm places it; empty if not known."""
        try:
            nodes = self._nodes or self._context.slurm.hostnames(self._context.attempt.nodes)
        except SlurmError:
            return {}
        return nodes_of_ranks(nodes, self._tasks)


# -- Read the files into which the ranks of a launch dump their stacks --------------------------
# Each rank opens its file at start and writes one header line (`rank= node= pid= epoch= package=`).
# SIGQUIT appends the stacks of all its threads.


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
_READING_DUMPS_SECONDS = 8.0


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
    deadline = clock.monotonic() + _READING_DUMPS_SECONDS
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
