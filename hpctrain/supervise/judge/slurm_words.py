"""What Slurm's programs print about the end of a step. Pure.

slurmstepd prints the reason of a kill to the stderr of the step and of the batch script
(src/slurmd/slurmstepd/req.c, _handle_terminate and _handle_notify_job); srun prints what became of
its tasks (src/srun/libsrun/launch.c). Belongs here: reading those lines. Does not belong here: what
follows from them (`scheduler_verdict`, `rank_verdict`).
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable

from hpctrain.supervise.judge.causes import Cause
from hpctrain.supervise.judge.documents import TaskFailure

_REASONS = (
    ("DUE TO PREEMPTION", Cause.PREEMPTED),
    ("DUE TO TIME LIMIT", Cause.TIME_LIMIT),
    ("DUE TO NODE FAILURE", Cause.NODE_FAILURE),
    ("DUE TO JOB REQUEUE", Cause.REQUEUED),
    ("Node failure on", Cause.NODE_FAILURE),
)
_AWAY = r"Unable to contact slurm controller|Socket timed out on send/recv operation"
_PROLOG = re.compile(r"[Pp]rolog (?:error|fail)|launch[_ ]failed[_ ]requeued[_ ]held")
_LAUNCH_FAILURES = re.compile(r"Unable to create step|Task launch for .* failed|launch failed")
# A job that was requeued while one of its nodes was dead starts without its GPUs: slurmctld says
# "node offset invalid (0 >= 0)", and no step can be created until it is requeued again (22.05.8).
_BROKEN_ALLOCATION = re.compile(r"Invalid generic resource \(gres\) specification")
_OUT_OF_MEMORY = re.compile(r"oom.kill")
# src/api/step_launch.c: the slurmstepd of a node is gone, as srun finds out by asking (the step is
# missing) or by waiting (_check_io_timeout), whichever is first. Its number is that in the step.
_STEP_GONE = re.compile(
    r"error: (?:Aborting, .*missing step on|Cannot communicate with) node (\d+)"
)
# src/srun/libsrun/allocate.c and launch: srun itself got a signal that ends it and its step.
_TOLD_TO_END = re.compile(r"srun: forcing job termination")
_CONTROLLER_AWAY = re.compile(_AWAY)
_NOTICE = re.compile(
    rf"\*\*\* (?:STEP|JOB) |Node failure on |error: .*(?:{_LAUNCH_FAILURES.pattern})|oom.kill"
    rf"|{_STEP_GONE.pattern}|{_TOLD_TO_END.pattern}"
    rf"|error: .*(?:{_AWAY})|error: .*{_PROLOG.pattern}"
)
_TASK = re.compile(
    r"srun: error: (?P<node>\S+): tasks? (?P<tasks>[\d,\-]+): "
    r"(?P<what>Exited with exit code \d+|[A-Z][A-Za-z ()]+)"
)
_CODE = re.compile(r"Exited with exit code (\d+)")
# What people and programs send to a process; the other signals a process brings on itself.
_SENT_SIGNALS = frozenset(
    {
        *(signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
        *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGXCPU),
    }
)
_SENT_WORDS = frozenset(filter(None, map(signal.strsignal, _SENT_SIGNALS)))
# bash(1), EXIT STATUS: a command that signal N ends has the code 128 + N.
_SIGNAL_CODE = 128
_FAILED_NODE = re.compile(r"(?:Node failure|failed) on (?:node )?([^\s,:*\[]+)")


def read_task_failure(line: str) -> TaskFailure | None:
    """The task failure that a line of srun's stderr reports, if it reports one."""
    match = _TASK.search(line)
    return TaskFailure(match["node"], match["tasks"], match["what"].strip()) if match else None


def is_notice(line: str) -> bool:
    """True if Slurm says in this line why it ended something, or could not begin it."""
    return _NOTICE.search(line) is not None


def reason_of(lines: Iterable[str]) -> Cause | None:
    """Why slurmstepd or srun say that they ended the step; the first word counts."""
    for line in lines:
        for text, cause in _REASONS:
            if text in line:
                return cause
    return None


def launch_failures(lines: Iterable[str]) -> tuple[str, ...]:
    """The lines by which srun says that it could not start the step, or some of its tasks."""
    return tuple(line for line in lines if _LAUNCH_FAILURES.search(line))


def why_not_launched(lines: tuple[str, ...]) -> Cause:
    """One cause for lines of `launch_failures`."""
    if any(_PROLOG.search(line) for line in lines):
        return Cause.PROLOG_FAILURE
    if lines and all(_CONTROLLER_AWAY.search(line) for line in lines):
        return Cause.CONTROLLER_AWAY
    return Cause.LAUNCH_FAILURE


def is_broken_allocation(lines: Iterable[str]) -> bool:
    """True if Slurm says that the job does not have what it was given: another allocation has."""
    return any(_BROKEN_ALLOCATION.search(line) for line in lines)


def lost_step(lines: Iterable[str]) -> int | None:
    """The place in the launch, from 0, of the node whose slurmstepd is gone, as srun says."""
    found = (match for line in lines if (match := _STEP_GONE.search(line)))
    return next((int(match[1]) for match in found), None)


def srun_was_told_to_end(lines: Iterable[str]) -> bool:
    """True if srun ended its step because somebody sent it a signal."""
    return any(_TOLD_TO_END.search(line) for line in lines)


def out_of_memory(lines: Iterable[str]) -> tuple[str, ...]:
    """The lines by which slurmstepd says that the kernel killed tasks for their memory."""
    return tuple(line for line in lines if _OUT_OF_MEMORY.search(line))


def nodes_named(lines: Iterable[str]) -> tuple[str, ...]:
    """The single nodes that such lines blame, in their order; lists like n[0-1] are left out."""
    found = (match[1] for line in lines if (match := _FAILED_NODE.search(line)))
    return tuple(dict.fromkeys(found))


def killed_from_outside(failure: TaskFailure) -> bool:
    """True if the task was ended by a signal that another process has sent (signal(7))."""
    code = exit_code(failure)
    if code is None:
        return failure.what in _SENT_WORDS
    return code - _SIGNAL_CODE in _SENT_SIGNALS


def exit_code(failure: TaskFailure) -> int | None:
    """The exit code of a task; None if a signal ended it."""
    match = _CODE.fullmatch(failure.what)
    return int(match[1]) if match else None
