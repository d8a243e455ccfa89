"""Be the first rank of a node: pass messages on, add answers up, and write for the node's ranks.

Belongs here: the tree of ranks, digests of shards, stack files. Does not belong here: pace, records
of progress and publishing, which rank 0 does (`leader`).
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.base.errors import CheckpointError
from hpctrain.checkpoints.resume_shares import files_of_rank
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import read_manifest, step_of, write_rank_digests
from hpctrain.records.run_records import DoneMarker, TrainerExit, read_record
from hpctrain.train.rank_environment import Launch, read_launch
from hpctrain.train.saving.digest_check import DigestCheck
from hpctrain.train.stacks import dump_header, open_stack_dump
from hpctrain.train.storage import fence_of, outlast
from tests.rig.stand_in.rank import (
    ANSWER,
    CODE,
    HELLO,
    HELLO_FIELDS,
    LEAVE,
    PEER_GONE,
    RESTORE,
    SAVE,
    STARTUP_SECONDS,
    STEPS,
    TRAIN,
    WELCOME,
    Link,
    connect,
    initial_state,
    node_address,
    pack_answer,
    read_shard,
    shard_name,
    signalled,
    train,
    unpack_answer,
    write_shard,
)

_ACCEPT_SECONDS = 0.2


class StoppedInStartupError(Exception):
    """A signal has asked this rank to leave before all others had come."""


@dataclass
class Tree:
    """This rank and those that it speaks for: the others of its node, on rank 0 all nodes."""

    run: RunLayout
    launch: Launch
    stop: list[int]
    seed: int
    local_links: dict[int, Link] = field(default_factory=dict)
    nodes: list[Link] = field(default_factory=list)
    node_names: list[str] = field(default_factory=list)
    begun: bool = False
    loading_step: int | None = None
    _state: int = 0

    def __post_init__(self) -> None:
        self._state = initial_state(self.seed, self.launch.rank)

    @property
    def ranks(self) -> list[int]:
        """The ranks of this node."""
        return [self.launch.rank, *sorted(self.local_links)]

    def welcome(self, listener: socket.socket, count: int, *, dumps: bool = True) -> None:
        """Wait for the other ranks of this node, and name their stack files if they need some."""
        while len(self.local_links) < count:
            link = accept(listener, self.stop)
            kind, payload = link.receive()
            assert kind == HELLO, "a rank begins with a greeting"
            rank, pid = HELLO_FIELDS.unpack(payload)
            self.local_links[rank] = link
            header = dump_header(rank, self.launch.node, self.launch.epoch, pid)
            path = str(self.run.stack_dump(self.launch.epoch, rank)) if dumps else ""
            words = (str(self.seed), path, header)
            link.send(WELCOME, "\0".join(words).encode())

    def everyone(self, kind: bytes, payload: bytes) -> tuple[list[int], list[int]]:
        """Have all ranks of this part of the tree do something.

        Returns the sums of their states by step, and the ranks that have got a signal. Raises
        ConnectionError if a rank has gone.
        """
        self.begun = self.begun or kind == TRAIN
        self.loading_step = step_of(Path(payload.decode()).name) if kind == RESTORE else None
        for link in (*self.local_links.values(), *self.nodes):
            link.send(kind, payload)
        sums = self._do(kind, payload)
        stopped = signalled(self.launch.rank, self.stop)
        for links in (self.local_links.values(), self.nodes):
            for link in links:
                answer, words = link.receive()
                assert answer == ANSWER, "a rank answers what it is asked"
                others, ranks = unpack_answer(words)
                sums = [own + other for own, other in zip(sums, others, strict=True)]
                stopped += ranks
            if links is not self.nodes and kind == SAVE:
                self._digest(Path(payload.decode()))
        return [number & ((1 << 64) - 1) for number in sums], stopped

    def leave(self, code: int) -> None:
        """Have all other ranks of this part of the tree end with this code."""
        for link in (*self.local_links.values(), *self.nodes):
            with contextlib.suppress(OSError):
                link.send(LEAVE, CODE.pack(code))

    def fail_locals(self, code: int) -> None:
        """Have the other ranks of this node end; other nodes see that this one has gone."""
        for link in self.local_links.values():
            with contextlib.suppress(OSError):
                link.send(LEAVE, CODE.pack(code))
        for link in self.nodes:
            link.close()

    def _do(self, kind: bytes, payload: bytes) -> list[int]:
        sums: list[int] = []
        if kind == RESTORE:
            directory = Path(payload.decode())
            self._verify(directory)
            self._state = read_shard(str(directory), self.launch.rank)
        elif kind == SAVE:
            write_shard(payload.decode(), self.launch.rank, self._state)
        elif kind == TRAIN:
            self._state, sums = train(self._state, *STEPS.unpack(payload))
        return sums

    def _verify(self, directory: Path) -> None:
        """Compare the digests of the node's share of a checkpoint, as the trainer does."""
        manifest = read_manifest(directory)
        if manifest is None:
            raise CheckpointError(f"cannot resume from {directory.name}: no readable manifest")
        if manifest.world_size < self.launch.world_size:
            raise CheckpointError(f"{directory.name} was saved by {manifest.world_size} ranks")
        who = f"rank {self.launch.rank} on {self.launch.node}"
        files = [
            file
            for rank in self.ranks
            for file in files_of_rank(manifest, rank, self.launch.world_size)
        ]
        DigestCheck(directory, files, who).wait()

    def _digest(self, directory: Path) -> None:
        for rank in self.ranks:
            write_rank_digests(directory, rank, [shard_name(rank)])


def run_first_rank(step_seconds: float, train_json: str, stop: list[int]) -> int:
    """Run the first rank of a node to its end; returns the exit code."""
    local = socket.socket(socket.AF_UNIX)
    local.bind(node_address(train_json))
    local.listen(socket.SOMAXCONN)
    path = Path(train_json).absolute()
    launch, run = read_launch(os.environ), RunLayout(path.parent)
    others = tasks_of_node(os.environ) - 1
    import json  # the documents of all engines would cost a second

    tree = Tree(run, launch, stop, seed=int(json.loads(path.read_bytes())["seed"]))
    if launch.leads:
        from tests.rig.stand_in.leader import lead

        return lead(tree, path, local, others, step_seconds)
    try:
        if read_record(run.done, DoneMarker) is not None:
            tree.welcome(local, others, dumps=False)
            tree.leave(TrainerExit.DONE)
            return TrainerExit.DONE
        outlast(run, fence_of(run, launch).check)
        dump = open_stack_dump(run, launch)
        tree.welcome(local, others)
        master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        parent = connect(socket.AF_INET, master, stop)
        if parent is None:
            raise StoppedInStartupError
        parent.send(HELLO, f"{launch.rank} {launch.node}".encode())
        while True:
            kind, payload = parent.receive()
            if kind == LEAVE:
                tree.leave(CODE.unpack(payload)[0])
                dump.discard_if_unused()
                return int(CODE.unpack(payload)[0])
            parent.send(ANSWER, pack_answer(*tree.everyone(kind, payload)))
    except StoppedInStartupError:
        tree.fail_locals(TrainerExit.YIELDED)
        return TrainerExit.YIELDED
    except Exception as error:
        if stop and not tree.begun and isinstance(error, ConnectionError):
            tree.fail_locals(TrainerExit.YIELDED)
            return TrainerExit.YIELDED
        return fail(tree, error)


def fail(tree: Tree, error: Exception) -> int:
    """End the ranks of this node, each with a record of its own, as after a failed collective.

    Returns the exit code of this rank.
    """
    from tests.rig.stand_in.leader import record_failures

    tree.fail_locals(TrainerExit.CRASH)
    gone = ConnectionError(PEER_GONE)
    errors = {tree.launch.rank: error, **dict.fromkeys(sorted(tree.local_links), gone)}
    return record_failures(tree.run, errors, begun=tree.begun, loading_step=tree.loading_step)


def accept(listener: socket.socket, stop: list[int]) -> Link:
    """Wait for a connection. Raises StoppedInStartupError on a signal, TimeoutError in the end."""
    deadline = time.monotonic() + STARTUP_SECONDS
    listener.settimeout(_ACCEPT_SECONDS)
    while time.monotonic() < deadline:
        if stop:
            raise StoppedInStartupError
        with contextlib.suppress(TimeoutError):
            return Link(listener.accept()[0])
    raise TimeoutError(f"not all ranks have come in {STARTUP_SECONDS:.0f} s")


def tasks_of_node(environment: os._Environ[str] | dict[str, str]) -> int:
    """Return how many ranks of the step are on this node: srun(1), SLURM_STEP_TASKS_PER_NODE."""
    counts: list[int] = []
    for part in environment["SLURM_STEP_TASKS_PER_NODE"].split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        assert match, f"not a list of tasks: {part}"
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[int(environment["SLURM_NODEID"])]
