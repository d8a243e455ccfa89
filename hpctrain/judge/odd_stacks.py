"""Find the ranks whose stacks differ from those of the others. Pure.

In a hang nearly all ranks wait for another one; a rank that does not wait, or gives no stack, is
reported. A wrong report costs a good node, so no rank is reported where the stacks are ambiguous:
pipeline stages wait in different places, which proves nothing. Belongs here: reading the text of
faulthandler (CPython: Python/traceback.c, _Py_DumpTracebackThreads) and comparing. Does not belong
here: asking for stacks and reading files (`stack_inquiry`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hpctrain.judge.documents import OddRank

_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<path>[^"\n]+)", line (?P<line>\d+) in (?P<function>.+)$')
# Frames that distinguish two places. More of them would distinguish the callers of one wait.
_INNERMOST = 3
NOT_RECORDED: Mapping[int, str] = MappingProxyType({})
NO_STACK = "gave no stack: stopped, stuck in the kernel, or its node is gone"
_PACKAGE = "hpctrain"
# Where a rank waits for others, by file and function (None: any). A C call such as `work.wait()`
# has no frame of its own, so its callers are listed: megatron-core's pipeline schedules and
# gradient buffers, and our own agreement between ranks. Files of the trainer list the same names
# in `WAITS_FOR_RANKS`; tests/unit/judge/test_odd_stacks.py compares the two.
WAITS: tuple[tuple[str, frozenset[str] | None], ...] = (
    ("torch/distributed/distributed_c10d.py", None),
    ("torch/distributed/_functional_collectives.py", None),
    ("torch/distributed/rendezvous.py", None),
    ("torch/distributed/nn/functional.py", None),
    # On GPUs gradients are computed by threads of C++, and the main thread waits for them here.
    ("torch/autograd/graph.py", frozenset({"_engine_run_backward"})),
    ("torch/cuda/__init__.py", frozenset({"synchronize"})),
    ("torch/cuda/streams.py", frozenset({"synchronize", "wait", "wait_event", "wait_stream"})),
    ("megatron/core/pipeline_parallel/", None),
    ("megatron/core/distributed/param_and_grad_buffer.py", None),
    ("hpctrain/train/step_agreement.py", None),
    ("hpctrain/train/times.py", frozenset({"_receive"})),
    ("hpctrain/train/saving/saver.py", frozenset({"_agree_or_rest"})),
)
# Where a rank of our trainer waits until all writers of a checkpoint have ended: its own among
# them, or only those of others.
OWN_WRITER = ("hpctrain/train/saving/saver.py", "_wait_for_own_writer")
OTHER_WRITERS = ("hpctrain/train/saving/saver.py", "_wait_for_other_writers")
_WRITER_REMAINS = "its writer of a checkpoint has not ended, those of others have"


@dataclass(frozen=True)
class Frame:
    """One line of a stack.

    `path` is that of the interpreter, but begins with `hpctrain/` for files of the trainer.
    """

    path: str
    line: int
    function: str

    @property
    def place(self) -> str:
        """File and function without the line: equal for two ranks in one loop."""
        return f"{_short(self.path)}:{self.function}"

    @property
    def waits(self) -> bool:
        """True in code that waits for other ranks."""
        return any(
            self.is_in(path) and (names is None or self.function in names) for path, names in WAITS
        )

    def is_in(self, path: str) -> bool:
        """True for `path` itself or, where it ends in a slash, whatever is below it."""
        if path.startswith(f"{_PACKAGE}/"):
            return self.path == path
        return f"/{path}" in f"/{self.path}"

    def __str__(self) -> str:
        return f"{self.function} ({_short(self.path)}:{self.line})"


@dataclass(frozen=True)
class Stack:
    """The stack of the main thread of one rank, innermost frame first."""

    frames: tuple[Frame, ...]

    @property
    def place(self) -> tuple[str, ...]:
        return tuple(frame.place for frame in self.frames[:_INNERMOST])

    @property
    def waits(self) -> bool:
        return bool(self.frames) and self.frames[0].waits

    def passes(self, place: tuple[str, str]) -> bool:
        """True if a function of this file and name is anywhere in the stack."""
        path, function = place
        return any(frame.function == function and frame.is_in(path) for frame in self.frames)

    def __str__(self) -> str:
        return " < ".join(str(frame) for frame in self.frames[:_INNERMOST])


def main_stack(dump: str, package: str = "") -> Stack | None:
    """Return the main thread in one dump of faulthandler; None if there is no stack in the text.

    `package` is the directory of hpctrain that the rank recorded, empty if it recorded none.
    Of several threads it is the one that does not begin in `threading`; threads print newest
    first, so it is the last of those. The thread that got the signal decides if none is left.
    """
    threads: list[tuple[bool, list[Frame]]] = []
    for line in dump.splitlines():
        heading, frame = _THREAD.match(line), _FRAME.match(line)
        if heading is not None:
            threads.append((heading[1] == "Current thread", []))
        elif frame is not None and threads:
            path = _own_path(frame["path"], package)
            threads[-1][1].append(Frame(path, int(frame["line"]), frame["function"]))
    own = [
        frames
        for _, frames in threads
        if frames
        and not (frames[-1].path.endswith("threading.py") and frames[-1].function == "_bootstrap")
    ]
    current = [frames for is_current, frames in threads if is_current and frames]
    found = own or current
    return Stack(tuple(found[-1])) if found else None


def _own_path(path: str, package: str) -> str:
    """Replace the directory of the trainer's package by `hpctrain`; leave other paths alone.

    Without a recorded `package` it is the last directory of this name outside site-packages.
    """
    if package:
        above, found, inside = path.partition(f"{package}/")
        return f"{_PACKAGE}/{inside}" if found and not above else path
    _, found, inside = path.rpartition(f"/{_PACKAGE}/")
    return f"{_PACKAGE}/{inside}" if found and "site-packages/" not in inside else path


def _short(path: str) -> str:
    """Shorten a path below site-packages to what is below, others to their last two names."""
    if path.startswith(f"{_PACKAGE}/"):
        return path
    _, found, inside = path.rpartition("site-packages/")
    return inside if found else "/".join(path.split("/")[-2:])


def odd_ranks(
    dumps: Mapping[int, str],
    nodes_by_rank: Mapping[int, str],
    world_size: int,
    packages: Mapping[int, str] = NOT_RECORDED,
) -> tuple[OddRank, ...]:
    """Find the ranks that are not where the others are, in rank order; empty if none stands out.

    `dumps` holds what each rank wrote, empty text if nothing; `world_size` 0 means: only those.
    `packages` has the directory of hpctrain of each rank that recorded it.
    Odd is a rank without a stack while at least as many have one, and a rank that computes, sleeps
    or reads while at least as many wait, or whose writer of a checkpoint has not ended while those
    of at least as many have. Waiting in GPU calls that give no frame of their own (a
    loss that is copied to the host) looks like computing: then the place where more than half of
    the ranks are is the wait.
    """
    ranks = range(world_size) if world_size else sorted(dumps)
    stacks = {rank: main_stack(dumps.get(rank, ""), packages.get(rank, "")) for rank in ranks}
    silent = [rank for rank, stack in stacks.items() if stack is None]
    known = {rank: stack for rank, stack in stacks.items() if stack is not None}
    found = {rank: NO_STACK for rank in silent if len(silent) <= len(known)}
    found |= {rank: str(known[rank]) for rank in _not_waiting(known)}
    # All wait for the writers of a checkpoint: find the ranks whose own has not ended.
    own_writer = [rank for rank, stack in known.items() if stack.passes(OWN_WRITER)]
    if len(own_writer) <= sum(stack.passes(OTHER_WRITERS) for stack in known.values()):
        found |= {rank: f"{_WRITER_REMAINS}: {known[rank]}" for rank in own_writer}
    return tuple(OddRank(rank, nodes_by_rank.get(rank, ""), found[rank]) for rank in sorted(found))


def _not_waiting(stacks: Mapping[int, Stack]) -> list[int]:
    """Select the ranks that do not wait while the others do."""
    busy = {rank: stack.place for rank, stack in stacks.items() if not stack.waits}
    if 2 * len(busy) <= len(stacks):
        return list(busy)
    place, ranks_there = next(iter(Counter(busy.values()).most_common(1)), ((), 0))
    if 2 * ranks_there <= len(stacks):
        return []
    return [rank for rank, own in busy.items() if own != place]


def places(dumps: Mapping[int, str], packages: Mapping[int, str] = NOT_RECORDED) -> tuple[str, ...]:
    """`6 ranks (0-3,6,7): result (hpctrain/train/step_agreement.py:90) < ...`, most ranks first."""
    ranks_by_place: dict[tuple[str, ...], list[int]] = {}
    example: dict[tuple[str, ...], str] = {}
    for rank, dump in sorted(dumps.items()):
        stack = main_stack(dump, packages.get(rank, ""))
        place = stack.place if stack else (NO_STACK,)
        ranks_by_place.setdefault(place, []).append(rank)
        example.setdefault(place, str(stack) if stack else NO_STACK)
    order = sorted(ranks_by_place, key=lambda place: -len(ranks_by_place[place]))
    lines = []
    for place in order:
        ranks = ranks_by_place[place]
        count = f"{len(ranks)} {'rank' if len(ranks) == 1 else 'ranks'}"
        lines.append(f"{count} ({ranges(ranks)}): {example[place]}")
    return tuple(lines)


def ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as `0-2,5`; `numbers` ascending."""
    parts: list[str] = []
    first = last = None
    for number in [*numbers, None]:
        if first is not None and last is not None and number != last + 1:
            parts.append(str(first) if first == last else f"{first}-{last}")
            first = None
        first = number if first is None else first
        last = number
    return ",".join(parts)
