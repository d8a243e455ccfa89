"""Parse what srun and slurmstepd print about a step: its start, its tasks and its end. Pure.

slurmstepd prints the reason of a kill to the stderr of the step and of the batch script
(src/slurmd/slurmstepd/req.c, _handle_terminate and _handle_notify_job); srun prints how its tasks
ended (src/srun/libsrun/launch.c). Belongs here: from such a line to a typed value. Does not belong
here: what follows for a launch (`judge`).
"""

from __future__ import annotations

import re
import signal as signals
from dataclasses import dataclass, field
from enum import StrEnum

from hpctrain.slurm.reasons import JobEnd


class LaunchProblem(StrEnum):
    """Why srun could not create the step or start some of its tasks."""

    PROLOG = "prolog"
    CONTROLLER_AWAY = "controller_away"
    BROKEN_ALLOCATION = "broken_allocation"
    OTHER = "other"


@dataclass(frozen=True)
class StepNotice:
    """A line about the step itself; fields that the line does not set stay empty.

    `end` is why Slurm ended the step, `node` the single node that the line blames,
    `launch_problem` why the step could not start. `lost_step` is the position in the step, from 0,
    of a node whose slurmstepd is gone. `out_of_memory`: the kernel killed tasks for their memory.
    `forced_end`: srun ended the step because it got a signal.
    """

    text: str
    end: JobEnd | None = None
    node: str | None = None
    launch_problem: LaunchProblem | None = None
    lost_step: int | None = None
    out_of_memory: bool = False
    forced_end: bool = False


@dataclass(frozen=True)
class TaskFailure:
    """How a task of the step ended, as srun or an agent below it reports it.

    Exactly one is set: `code`, `signal`, `out_of_memory`, or `other`, srun's text for an end that
    is none of these. `tasks` is a number or a list of numbers as srun prints it. `at` is when the
    report was read, in seconds since the epoch, 0 if unknown.
    """

    node: str
    tasks: str
    code: int | None = None
    signal: int | None = None
    out_of_memory: bool = False
    other: str = ""
    core_dumped: bool = False
    at: float = field(default=0.0, compare=False)

    @property
    def rank(self) -> int | None:
        """The number of the task; None for a list of them."""
        return int(self.tasks) if self.tasks.isdigit() else None

    @property
    def single_node(self) -> str | None:
        """The node; None for a list of nodes such as `n[0-1]`."""
        return None if "[" in self.node else self.node

    @property
    def what(self) -> str:
        """The end in srun's words, for display only."""
        if self.code is not None:
            return f"Exited with exit code {self.code}"
        if self.out_of_memory:
            return _OUT_OF_MEMORY_TASK
        if self.signal is None:
            return self.other
        name = signals.strsignal(self.signal) or f"Signal {self.signal}"
        return f"{name} (core dumped)" if self.core_dumped else name


_ENDS = {
    "DUE TO PREEMPTION": JobEnd.PREEMPTED,
    "DUE TO TIME LIMIT": JobEnd.TIME_LIMIT,
    "DUE TO NODE FAILURE": JobEnd.NODE_FAILED,
    "DUE TO JOB REQUEUE": JobEnd.REQUEUED,
    "Node failure on": JobEnd.NODE_FAILED,
}
_AWAY = re.compile(r"Unable to contact slurm controller|Socket timed out on send/recv operation")
_PROLOG = re.compile(r"[Pp]rolog (?:error|fail)|launch[_ ]failed[_ ]requeued[_ ]held")
_LAUNCH_FAILED = re.compile(r"Unable to create step|Task launch for .* failed|launch failed")
# A job that was requeued while one of its nodes was dead starts without its GPUs: slurmctld logs
# "node offset invalid (0 >= 0)", and no step can be created until it is requeued again (22.05.8).
_BROKEN_ALLOCATION = re.compile(r"Invalid generic resource \(gres\) specification")
_OUT_OF_MEMORY = re.compile(r"oom.kill")
# src/api/step_launch.c: the slurmstepd of a node is gone, as srun finds out by a request (the step
# is missing) or by a timeout (_check_io_timeout), whichever is first.
_STEP_GONE = re.compile(
    r"error: (?:Aborting, .*missing step on|Cannot communicate with) node (\d+)"
)
# src/srun/libsrun/allocate.c and launch: srun itself got a signal that ends it and its step.
_FORCED_END = re.compile(r"srun: forcing job termination")
_FAILED_NODE = re.compile(r"(?:Node failure|failed) on (?:node )?([^\s,:*\[]+)(?=[\s,:*]|$)")
_NOTICE = re.compile(
    rf"\*\*\* (?:STEP|JOB) |Node failure on |error: .*(?:{_LAUNCH_FAILED.pattern})|oom.kill"
    rf"|{_STEP_GONE.pattern}|{_FORCED_END.pattern}"
    rf"|error: .*(?:{_AWAY.pattern})|error: .*{_PROLOG.pattern}"
)
_TASK = re.compile(
    r"srun: error: (?P<node>\S+): tasks? (?P<tasks>[\d,\-]+): "
    r"(?:Exited with exit code (?P<code>\d+)|(?P<what>[A-Z].+))"
)
_OTHER_END = re.compile(r"[A-Z][A-Za-z ()]+")
_OUT_OF_MEMORY_TASK = "Out Of Memory"
_CORE_DUMPED = " (core dumped)"
_SIGNAL_OF_NAME = {
    name: int(number) for number in signals.valid_signals() if (name := signals.strsignal(number))
}
# Printed while srun cannot create the step, and once it has (src/srun/libsrun/launch.c).
_STEP_WAITS = re.compile(r"step creation (?:temporarily|still) disabled|configured, please wait")
_STEP_CREATED = re.compile(r"[Ss]tep created")


def read_notice(line: str) -> StepNotice | None:
    """Parse a line about the end or the failed start of the step; None for any other line."""
    if _NOTICE.search(line) is None:
        return None
    failed_node, step_gone = _FAILED_NODE.search(line), _STEP_GONE.search(line)
    problem = None
    if _LAUNCH_FAILED.search(line):
        problem = LaunchProblem.OTHER
        for pattern, kind in (
            (_PROLOG, LaunchProblem.PROLOG),
            (_AWAY, LaunchProblem.CONTROLLER_AWAY),
            (_BROKEN_ALLOCATION, LaunchProblem.BROKEN_ALLOCATION),
        ):
            if pattern.search(line):
                problem = kind
                break
    return StepNotice(
        text=line.strip(),
        end=next((end for text, end in _ENDS.items() if text in line), None),
        node=failed_node[1] if failed_node else None,
        launch_problem=problem,
        lost_step=int(step_gone[1]) if step_gone else None,
        out_of_memory=_OUT_OF_MEMORY.search(line) is not None,
        forced_end=_FORCED_END.search(line) is not None,
    )


def read_end_of_job(text: str, job_id: int) -> StepNotice | None:
    """Parse the last line in which slurmstepd tells the batch script that its job is being ended.

    None without such a line. A plain cancel has the line without a reason (`end` None).
    """
    lines = [line for line in text.splitlines() if f"*** JOB {job_id} ON " in line]
    return read_notice(lines[-1]) if lines else None


def read_task_failure(line: str) -> TaskFailure | None:
    """Parse srun's report on the end of a task; None for any other line."""
    match = _TASK.search(line)
    if match is None:
        return None
    node, tasks = match["node"], match["tasks"]
    if match["code"]:
        return TaskFailure(node, tasks, code=int(match["code"]))
    what = match["what"].strip()
    if what.startswith(_OUT_OF_MEMORY_TASK):
        return TaskFailure(node, tasks, out_of_memory=True)
    number = _SIGNAL_OF_NAME.get(what.removesuffix(_CORE_DUMPED))
    if number is not None:
        dumped = what.endswith(_CORE_DUMPED)
        return TaskFailure(node, tasks, signal=number, core_dumped=dumped)
    other = _OTHER_END.match(what)
    return TaskFailure(node, tasks, other=other[0].strip()) if other else None


def waits_for_step(line: str, before: bool) -> bool:
    """Update whether srun still waits for its step to be created, after it printed `line`."""
    if _STEP_WAITS.search(line):
        return True
    return before and not _STEP_CREATED.search(line)
