"""Strikes at single processes of a run: ranks, srun, slurmstepd, supervisor, writers.

Belongs here: killing, freezing and asking them to end. Does not belong here: whole nodes and
daemons (see `strikes_at_machines`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from targets import DeedKind, Target

from hpctrain.sandbox import faults
from hpctrain.sandbox.daemons import JobProcess
from hpctrain.sandbox.processes import all_processes, find_process, send

_SEEN_SECONDS = 300.0


def rank_killed(target: Target) -> None:
    _send(target, _rank(target, target.dice.randrange(2)), signal.SIGKILL)


def rank_frozen(target: Target) -> None:
    _send(target, _rank(target, target.dice.randrange(2)), signal.SIGSTOP)


def rank_asked_to_end(target: Target) -> None:
    """By a health checker, an early OOM killer, a person on the node: nobody tells Slurm."""
    _send(target, _rank(target, target.dice.randrange(2)), signal.SIGTERM)


def ranks_asked_to_end(target: Target) -> None:
    ranks = _rank(target, 0) + _rank(target, 1)
    _send(target, ranks, signal.SIGTERM)


def srun_killed(target: Target) -> None:
    _send(target, _sruns(target), signal.SIGKILL)


def srun_asked_to_end(target: Target) -> None:
    _send(target, _sruns(target)[:1], signal.SIGTERM)


def stepd_killed(target: Target) -> None:
    faults.kill_stepd(target.sandbox, target.nodes()[1])


def supervisor_asked_to_end(target: Target) -> None:
    _send(target, _supervisor(target), signal.SIGTERM)


def supervisor_killed(target: Target) -> None:
    """The job is over then; its owner, or `watch --act` from cron, submits the run again."""
    target.did(DeedKind.SUPERVISOR_KILLED)
    _send(target, _supervisor(target), signal.SIGKILL)
    target.until(target.has_left)
    if target.dice.random() < 0.5:
        target.hpctrain("resume")
    else:
        target.hpctrain("watch", "--act", "--grace", "0s", run=False)
    target.did(DeedKind.RESUMED)


def killed_in_a_save(target: Target) -> None:
    """Somebody wants a checkpoint, and a rank dies while it is written."""
    (target.directory / "control" / "save").touch()
    time.sleep(target.dice.uniform(0, 0.4))
    rank_killed(target)


def writer_stopped(target: Target) -> None:
    """The process that writes the checkpoint of one rank hangs in the storage client."""
    rank = target.dice.randrange(2)
    (target.directory / "control" / "save").touch()
    deadline = time.monotonic() + _SEEN_SECONDS
    while not _stop_a_writer(target, rank):
        assert time.monotonic() < deadline, "no writer was ever seen"


def _stop_a_writer(target: Target, rank: int) -> bool:
    """At once when it is there: it lives for a tenth of a second."""
    processes = target.rehearsal.rank_processes(rank)
    tops = _tops(processes)
    writers = [one for one in processes if one.pid not in tops]
    send([one.identity for one in writers], signal.SIGSTOP)
    found = (find_process(one.pid) for one in writers)
    return any(one is not None and one.state == "T" for one in found)


def _rank(target: Target, rank: int) -> list[JobProcess]:
    """The process of a rank, without those that it has forked; waits for one."""
    found: list[JobProcess] = []

    def seen() -> bool:
        trainers = [one for one in target.rehearsal.rank_processes(rank) if _trains(one)]
        tops = _tops(trainers)
        found[:] = [one for one in trainers if one.pid in tops]
        return bool(found)

    assert _seen(target, seen) and found, f"no running rank {rank}"
    return found


def _seen(target: Target, seen: Callable[[], bool]) -> bool:
    """A run that is done meanwhile shows no process any more."""
    return target.until(lambda: seen() or target.done, _SEEN_SECONDS)


def _tops(processes: list[JobProcess]) -> set[int]:
    """Those whose parent is none of them."""
    pids = {process.pid for process in processes}
    parents = {one.pid: one.parent_pid for one in all_processes() if one.pid in pids}
    return {pid for pid, parent in parents.items() if parent not in pids}


def _trains(process: JobProcess) -> bool:
    """A trainer, not a probe of the supervisor, which is started by srun as well."""
    names = ("faulty_trainer.py", "hpctrain.train", "dcp_loop.py")
    return any(word.endswith(names) for word in process.command_line)


def _sruns(target: Target) -> list[JobProcess]:
    """Both processes of the srun of the trainer, its first one first."""
    found: list[JobProcess] = []

    def seen() -> bool:
        sruns = [
            one
            for one in target.rehearsal.processes()
            if os.path.basename("".join(one.command_line[:1])) == "srun"
            and {"hpctrain.train", "hpctrain.trainer.agent"} & {*one.command_line}
        ]
        found[:] = sorted(sruns, key=lambda one: one.pid not in _tops(sruns))
        return bool(found)

    assert _seen(target, seen) and found, "no srun"
    return found


def _supervisor(target: Target) -> list[JobProcess]:
    found: list[JobProcess] = []

    def seen() -> bool:
        found[:] = [
            one for one in target.rehearsal.processes() if "hpctrain.supervise" in one.command_line
        ]
        return bool(found)

    assert _seen(target, seen) and found, "no supervisor"
    tops = _tops(found)
    return [one for one in found if one.pid in tops]


def _send(target: Target, processes: list[JobProcess], number: signal.Signals) -> None:
    for process in processes:
        if find_process(process.pid) is not None:  # srun's second process follows the first
            target.rehearsal.kill([process], number)
