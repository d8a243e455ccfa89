"""What a training script calls to be supervised as well as hpctrain's own engines (level 4).

    from hpctrain import trainer

    t = trainer.start()
    if t.resume:
        load(t.resume)
    for step in ...:
        loss = train()
        request = t.step(step, loss=loss)
        if request or step % 100 == 0:
            with t.saving(step) as directory:
                save(directory)
        if request is trainer.Request.STOP:
            t.leave()
    t.finish()

Every rank makes the same calls. Outside of hpctrain they do nothing. Standard library only: the
script's Python needs nothing of hpctrain's, and torch is used if the script has imported it.
Belongs here: the calls, and the messages to the agent that is the parent of the rank. Does not
belong here: the agent (`agent`).
"""

from __future__ import annotations

import contextlib
import enum
import faulthandler
import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

# The socket of the agent on this node, and the directory in which SIGQUIT appends the stacks of a
# rank to a file of its own.
SOCKET_VARIABLE = "HPCTRAIN_AGENT"
STACKS_VARIABLE = "HPCTRAIN_STACKS"
OUTPUT_VARIABLE, CHECKPOINT_VARIABLE = "HPCTRAIN_OUTPUT", "HPCTRAIN_CHECKPOINT"
COMPLETE_NAME = "hpctrain-complete"
# Of a rank that leaves because it was asked to, after sysexits.h (EX_TEMPFAIL).
YIELDED = 75
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# Steps between two reports of the times of all ranks.
_WINDOW = 20


class Request(enum.IntEnum):
    """What is wanted after a step, the same on all ranks."""

    NONE = 0
    SAVE = 1
    STOP = 2


def start() -> Trainer:
    """Begin: catch signals, so that none ends this rank, and find the checkpoint to resume from."""
    return Trainer()


class Trainer:
    """The connection of one rank. `resume`: the checkpoint that hpctrain has verified, or None.

    `output`: where this launch writes; the working directory outside of hpctrain.
    """

    def __init__(self) -> None:
        environment = os.environ
        found = environment.get(CHECKPOINT_VARIABLE)
        self.resume: Path | None = Path(found) if found else None
        self.output = Path(environment.get(OUTPUT_VARIABLE) or ".")
        self.rank = int(environment.get("RANK") or environment.get("SLURM_PROCID") or 0)
        self._wanted = Request.NONE
        self._stream: socket.socket | None = None
        self._unread = b""
        self._stepped_at: float | None = None
        self._seconds: list[float] = []
        address = environment.get(SOCKET_VARIABLE)
        if not address:
            return
        self._stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._stream.connect(address)
        self._catch_signals(environment.get(STACKS_VARIABLE))
        self._say("start", rank=self.rank, pid=os.getpid(), resume=found or None)

    def _catch_signals(self, stacks: str | None) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _STOP_SIGNALS:
            signal.signal(number, lambda number, frame: self._ask(Request.STOP))
        if stacks:
            Path(stacks).mkdir(parents=True, exist_ok=True)
            self._stacks = Path(stacks, f"rank-{self.rank:06d}.txt").open("a")  # noqa: SIM115
            node = os.environ.get("SLURMD_NODENAME", "")
            head = f"rank={self.rank} node={node} pid={os.getpid()}"
            epoch, package = os.environ.get("HPCTRAIN_EPOCH", ""), Path(__file__).parents[1]
            self._stacks.write(f"{head} epoch={epoch} package={package}\n")
            self._stacks.flush()
            faulthandler.register(signal.SIGQUIT, file=self._stacks, all_threads=True)

    def _ask(self, wanted: Request) -> None:
        self._wanted = max(self._wanted, wanted)

    def step(self, number: int, loss: float | None = None, **reported: float) -> Request:
        """Report a finished step, and return what is wanted now.

        `reported`: of this step, as far as they are known: `samples` and `tokens`, counted from the
        beginning of training, `learning_rate`, `grad_norm`. All ranks wait for each other here.
        """
        now = time.monotonic()
        if self._stepped_at is not None:
            self._seconds.append(now - self._stepped_at)
        self._read()
        wanted = Request(_largest(self._wanted))
        if self._stream is not None:
            self._report(number, loss, reported)
        if wanted is Request.SAVE:
            self._wanted = Request.NONE
        self._stepped_at = time.monotonic()
        return wanted

    def _report(self, number: int, loss: float | None, reported: dict[str, float]) -> None:
        if self.rank == 0:
            values = {name: float(value) for name, value in reported.items() if value is not None}
            values |= {} if loss is None else {"loss": float(loss)}
            values |= {"seconds": self._seconds[-1]} if self._seconds else {}
            self._say("step", step=number, **values)
        if len(self._seconds) >= _WINDOW:
            mean = sum(self._seconds) / len(self._seconds)
            own = (mean, os.environ.get("SLURMD_NODENAME") or socket.gethostname())
            everyone = _everywhere(own)
            if self.rank == 0:
                first, times = number - len(self._seconds) + 1, [one[0] for one in everyone]
                nodes = [one[1] for one in everyone]
                self._say("times", first_step=first, last_step=number, seconds=times, nodes=nodes)
            self._seconds.clear()

    @contextlib.contextmanager
    def saving(self, number: int) -> Iterator[Path]:
        """Give all ranks the directory of a checkpoint; it counts when all have left the block."""
        directory = self.output / f"step-{number}"
        again = _largest((directory / COMPLETE_NAME).exists())
        if again:  # what is complete, and perhaps published, is never written over
            directory = self.output / f".again-step-{number}"
        directory.mkdir(parents=True, exist_ok=True)
        if self.rank == 0:
            self._say("saving", step=number)
        yield directory
        _largest(0)  # all ranks have written
        if self.rank == 0 and again:
            shutil.rmtree(directory, ignore_errors=True)
        elif self.rank == 0 and self._stream is not None:
            (directory / COMPLETE_NAME).touch()
        self._stepped_at = time.monotonic()

    def leave(self) -> NoReturn:
        """End this rank because it was asked to leave; its work is saved."""
        self._say("leave")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(YIELDED)  # threads of process groups may wait for ranks that have left

    def finish(self) -> None:
        """Say that training has come to its end."""
        self._say("finish")

    def _say(self, kind: str, **values: Any) -> None:
        if self._stream is None:
            return
        line = json.dumps({"kind": kind, **values}) + "\n"
        try:
            self._stream.sendall(line.encode())
        except OSError:  # the agent is gone, and this rank is about to be ended
            self._stream = None

    def _read(self) -> None:
        """Take what the agent asks for."""
        while self._stream is not None and select.select([self._stream], [], [], 0)[0]:
            try:
                data = self._stream.recv(4096)
            except OSError:
                data = b""
            if not data:
                self._stream = None
                return
            *lines, self._unread = (self._unread + data).split(b"\n")
            for line in lines:
                self._ask(Request[line.decode()])


def _group() -> Any:
    """Return torch.distributed if the script has opened a process group with it."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def _largest(value: int) -> int:
    """Return the largest value of all ranks."""
    distributed = _group()
    if distributed is None:
        return value
    torch: Any = sys.modules["torch"]
    cuda = "nccl" in distributed.get_backend()
    tensor = torch.tensor([value], device="cuda" if cuda else "cpu")
    distributed.all_reduce(tensor, op=distributed.ReduceOp.MAX)
    return int(tensor.item())


def _everywhere(value: Any) -> list[Any]:
    """Return the values of all ranks, in their order."""
    distributed = _group()
    if distributed is None:
        return [value]
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found
