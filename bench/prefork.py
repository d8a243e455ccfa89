"""Ranks on one CPU machine for tests and benchmarks: import once, then fork.

The results are those of separate processes, but 32 ranks start in seconds instead of a minute.
Safe because nothing before the fork starts threads, a process group or an OpenMP region. Belongs
here: starting and waiting. Does not belong here: a launcher for users (srun is that).
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.free_ports import free_port
from hpctrain.engines.module import ModuleConfig
from hpctrain.train.stop import StopSignals, leave


@dataclass
class Ranks:
    """Forked ranks of one launch."""

    logs: Path
    pids: list[int]
    codes: dict[int, int] = field(default_factory=dict)

    def wait(self, limit_seconds: float) -> list[int]:
        """Exit codes by rank (negative: killed by that signal); kills all past the limit."""
        end = time.monotonic() + limit_seconds
        while len(self.codes) < len(self.pids):
            self._collect()
            if time.monotonic() > end:
                self.signal(signal.SIGKILL)
                end = float("inf")
            time.sleep(0.01)
        return [self.codes[rank] for rank in range(len(self.pids))]

    @property
    def ended(self) -> bool:
        """Whether no rank lives any more."""
        self._collect()
        return len(self.codes) == len(self.pids)

    def signal(self, number: int, *ranks: int) -> None:
        """Send a signal to the given ranks that still live, or to all."""
        for rank in ranks or range(len(self.pids)):
            if rank not in self.codes:
                os.kill(self.pids[rank], number)

    def log(self, rank: int = 0) -> str:
        return (self.logs / f"rank-{rank}.log").read_text()

    def _collect(self) -> None:
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)


def start(
    config: Path,
    world_size: int,
    logs: Path,
    *,
    environment: Mapping[str, str] | None = None,
    prepare: Callable[[], None] | None = None,
) -> Ranks:
    """Fork `world_size` ranks of the trainer; `prepare` runs in each of them first."""
    from hpctrain.train.data import import_reader
    from hpctrain.train.entry import main
    from hpctrain.train.job import read_config
    from hpctrain.train.startup import room_of

    # The imports that the ranks share. torch's optimizers import torch._dynamo.
    document = read_config(config)
    room_of(document)
    import_reader(document)
    importlib.import_module("torch._dynamo")
    if isinstance(document, ModuleConfig):
        from hpctrain.train.engines.models.build import import_classes

        import_classes(document)

    def work() -> None:
        gc.disable()  # as the entry point does
        stop = StopSignals()
        stop.install()
        if prepare is not None:
            prepare()
        leave(main([str(config)], stop))

    return fork(work, world_size, logs, environment=environment)


def fork(
    work: Callable[[], None],
    world_size: int,
    logs: Path,
    *,
    environment: Mapping[str, str] | None = None,
) -> Ranks:
    """Fork ranks that run `work` with a launcher's environment; stdout and stderr go to `logs`."""
    logs.mkdir(parents=True, exist_ok=True)
    shared = {
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        **(environment or {}),
    }
    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            become(rank, logs, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, work)
        pids.append(pid)
    return Ranks(logs, pids)


def become(rank: int, logs: Path, environment: dict[str, str], work: Callable[[], None]) -> None:
    """In the child: never returns, whatever happens, or there would be two of the caller.

    It gets these variables, and its output goes to the file of its rank.
    """
    code = 1
    try:
        log = os.open(logs / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        sys.stdout.flush()
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        os.environ.update(environment)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def run(arguments: list[str]) -> int:
    """`python -m bench.prefork RANKS TRAIN_JSON`: run and print the exit codes."""
    config = Path(arguments[1]).absolute()
    ranks = start(config, int(arguments[0]), config.parent / "logs" / f"prefork-{os.getpid()}")
    codes = ranks.wait(3600)
    print(ranks.log(), end="")
    print(f"exit codes: {codes}")
    return max(codes, key=abs)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
