"""Run one rank that computes nothing: `python -S rank.py STEP_SECONDS RUN_DIRECTORY/train.json`.

The smallest program that keeps all of the trainer's contract (docs/trainer-contract.md). Started
once per task, in place of `-m hpctrain.train`. Imports nothing of ours and little of Python's, so
that 512 ranks start on two cores; what needs more is done by the first rank of the node (`node`),
or by rank 0 (`leader`). Belongs here: a rank's state, its messages, its signals. Does not belong
here: records and checkpoints as such, and choosing this trainer (`interpreter`).
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import struct
import sys
import time

# What gloo says, too: the supervisor blames the rank that has gone, not those that say so.
PEER_GONE = "Connection closed by peer"
# Kinds of messages. Down the tree: what is to be done. Up: who has come, and what came of it.
WELCOME, RESTORE, TRAIN, SAVE, LEAVE = b"W", b"R", b"T", b"S", b"L"
HELLO, ANSWER = b"H", b"A"
# How long ranks wait for each other when a launch starts: that of megatron-core's default.
STARTUP_SECONDS = 600.0
_POLL_SECONDS = 0.1
_HEAD = struct.Struct("<cI")
_COUNTS = struct.Struct("<II")
HELLO_FIELDS = struct.Struct("<II")  # rank, process id
STEPS = struct.Struct("<QI")  # first step, number of steps
CODE = struct.Struct("<B")
# Added to the number of a rank that only the supervisor has asked to leave, by USR2.
BY_SUPERVISOR = 1 << 31
_WORD = (1 << 64) - 1
_CRASH, _YIELDED = 1, 75
_GOLDEN = 0x9E3779B97F4A7C15
_stop_signals: list[int] = []


def initial_state(seed: int, rank: int) -> int:
    """Return the state of a rank before the first step, 64 bits."""
    return advance(advance(seed & _WORD, 0), rank + 1)


def advance(state: int, step: int) -> int:
    """Return the state after `step`: splitmix64 (Steele, Lea, Flood 2014) of state and step."""
    mixed = (state ^ (step * _GOLDEN)) & _WORD
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _WORD
    return mixed ^ (mixed >> 31)


def train(state: int, first: int, count: int) -> tuple[int, list[int]]:
    """Return the state after `count` steps from `first` on, and the state after each of them."""
    states = []
    for step in range(first, first + count):
        state = advance(state, step)
        states.append(state)
    return state, states


def loss_of(step: int, states_sum: int) -> float:
    """Return the loss of a step from the sum of the states of all ranks: wrong if any is wrong."""
    return 2.0 + 8.0 / (1.0 + step / 1000.0) + (states_sum & _WORD) / 2.0**64 / 100.0


def shard_name(rank: int) -> str:
    """Return the file of one rank in a checkpoint, named as torch.distributed.checkpoint does."""
    return f"__{rank}_0.distcp"


def write_shard(directory: str, rank: int, state: int) -> None:
    """Write the state of a rank into a checkpoint."""
    with open(f"{directory}/{shard_name(rank)}", "x") as stream:
        stream.write(f"{rank} {state:016x}\n")


def read_shard(directory: str, rank: int) -> int:
    """Read the state of a rank. Raises ValueError if it is another rank's."""
    with open(f"{directory}/{shard_name(rank)}") as stream:
        owner, state = stream.read().split()
    if int(owner) != rank:
        raise ValueError(f"{directory}/{shard_name(rank)} is of rank {owner}")
    return int(state, 16)


class Link:
    """One connection between a rank and the next one of the tree, with whole messages."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        self._connection = connection

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        """Send a message. Raises OSError if the other rank has gone."""
        self._connection.sendall(_HEAD.pack(kind, len(payload)) + payload)

    def receive(self) -> tuple[bytes, bytes]:
        """Wait for a message. Raises ConnectionError if the other rank has gone."""
        kind, size = _HEAD.unpack(self._receive_exactly(_HEAD.size))
        return kind, self._receive_exactly(size)

    def close(self) -> None:
        self._connection.close()

    def _receive_exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self._connection.recv(size - len(data))
            if not part:
                raise ConnectionError(PEER_GONE)
            data += part
        return data


# The supervisor recognises by the file of the innermost frame that a rank waits for others
# (`hpctrain.judge.odd_stacks`). Stacks show this wait where real ranks have theirs, in torch.
_COLLECTIVES = f"{__file__}/torch/distributed/distributed_c10d.py"
Link._receive_exactly.__code__ = Link._receive_exactly.__code__.replace(co_filename=_COLLECTIVES)


def pack_answer(sums: list[int], ranks: list[int]) -> bytes:
    """Pack the sums of states by step and the ranks that have got a signal."""
    head = _COUNTS.pack(len(sums), len(ranks))
    return head + struct.pack(f"<{len(sums)}Q{len(ranks)}I", *sums, *ranks)


def unpack_answer(payload: bytes) -> tuple[list[int], list[int]]:
    """Return sums and ranks of `pack_answer`."""
    sums, ranks = _COUNTS.unpack_from(payload)
    values = struct.unpack_from(f"<{sums}Q{ranks}I", payload, _COUNTS.size)
    return list(values[:sums]), list(values[sums:])


def node_address(train_json: str) -> str:
    """Return the abstract Unix socket (unix(7)) of this node of this job step.

    All nodes of a sandbox are one machine, and other sandboxes may have the same job ids.
    """
    file = os.stat(train_json)
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURMD_NODENAME", "HPCTRAIN_EPOCH")
    words = (os.environ.get(name, "") for name in names)
    return "\0hpctrain-stand-in-" + "-".join((f"{file.st_dev}-{file.st_ino}", *words))


def connect(family: int, address: object, stop: list[int]) -> Link | None:
    """Connect to a rank that may not listen yet; None when this one is asked to stop meanwhile.

    Raises OSError if nobody listens in time.
    """
    deadline = time.monotonic() + STARTUP_SECONDS
    while not stop:
        connection = socket.socket(family)
        connection.settimeout(STARTUP_SECONDS)
        try:
            connection.connect(address)  # type: ignore[arg-type]
        except OSError:
            connection.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_SECONDS)
            continue
        return Link(connection)
    return None


def install_signals() -> None:
    """Remember the signals that ask for a stop, as `hpctrain.train.stop` does."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: _stop_signals.append(number))
    signal.signal(signal.SIGCONT, signal.SIG_IGN)
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)


def open_dump(path: str, header: bytes) -> int:
    """Have SIGQUIT write stacks into the file that the first rank of the node has named."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    os.write(descriptor, header)
    faulthandler.register(signal.SIGQUIT, descriptor, all_threads=True, chain=False)
    return descriptor


def follow(link: Link, rank: int) -> int:
    """Do what the first rank of the node says until it says to leave; returns the exit code."""
    link.send(HELLO, HELLO_FIELDS.pack(rank, os.getpid()))
    state, dump, path, header = 0, -1, "", b""
    while True:
        kind, payload = link.receive()
        if kind == LEAVE:
            if path and os.fstat(dump).st_size == len(header):
                os.unlink(path)
            return int(CODE.unpack(payload)[0])
        sums: list[int] = []
        if kind == WELCOME:
            seed, place, header = payload.split(b"\0")
            state = initial_state(int(seed), rank)
            path = place.decode()
            if path:
                dump = open_dump(path, header)
            continue
        if kind == RESTORE:
            state = read_shard(payload.decode(), rank)
        elif kind == SAVE:
            write_shard(payload.decode(), rank, state)
        elif kind == TRAIN:
            state, sums = train(state, *STEPS.unpack(payload))
        link.send(ANSWER, pack_answer(sums, signalled(rank, _stop_signals)))


def signalled(rank: int, stop: list[int]) -> list[int]:
    """The rank, if it has got a signal; marked if that is the one that the supervisor sends."""
    if not stop:
        return []
    return [rank | BY_SUPERVISOR if stop[0] == signal.SIGUSR2 else rank]


def main(arguments: list[str]) -> int:
    """Run one rank; returns its exit code."""
    install_signals()
    if os.environ.get("SLURM_LOCALID") == "0":
        from tests.rig.stand_in.node import run_first_rank

        return run_first_rank(float(arguments[0]), arguments[1], _stop_signals)
    rank = int(os.environ["SLURM_PROCID"])
    try:
        link = connect(socket.AF_UNIX, node_address(arguments[1]), _stop_signals)
        return _YIELDED if link is None else follow(link, rank)
    except (OSError, ValueError) as error:
        if _stop_signals and isinstance(error, ConnectionError):
            return _YIELDED
        from tests.rig.stand_in.leader import record_failure

        return record_failure(arguments[1], error)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
