"""Parse the output of Slurm's commands into records. Pure.

Job names and comments are free text and may hold anything, newlines and `|` included. So fields
are separated by the ASCII unit separator and squeue's records end with the record separator;
`-O` and `-P` take any text as separator (squeue(1), `--Format=type[:[.][size][suffix]]`).
Tables keep their header: a header distinguishes an empty table from no output.

Raises ValueError for text that does not have the expected form.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from datetime import UTC, datetime

from hpctrain.base.printable_text import printable_line
from hpctrain.slurm.records import (
    JobRecord,
    JobTerms,
    NodeState,
    RequeueResult,
    StepRecord,
    SubmittedJob,
    TestOnlyAnswer,
)
from hpctrain.slurm.states import JobState

UNIT, RECORD = "\x1f", "\x1e"

SQUEUE_FIELDS = (
    *("JobID", "State", "Reason", "NodeList", "RestartCnt", "PreemptTime", "StartTime", "EndTime"),
    *("SubmitTime", "TimeLimit", "Partition", "Account", "exit_code", "Requeue", "ArrayJobID"),
    *("NumNodes", "NumCPUs", "tres-per-node", "QOS", "Reservation"),
    *("Cluster", "WorkDir", "Name", "Comment"),
)
STEP_FIELDS = ("StepID", "StepState", "StepName")
NODE_FIELDS = ("NodeList", "StateLong")
# sinfo(1): maintenance reservation, reboot requested, reboot issued; `scontrol reboot ASAP` drains.
_PLANNED_MARKS = frozenset("$@^")
_PLANNED_STATES = ("drain", "maint", "reboot")
# The last field must be one that cannot hold a newline: it ends the record.
SACCT_FIELDS = (
    *("JobIDRaw", "State", "Reason", "NodeList", "Start", "End", "Submit", "Timelimit"),
    *("Partition", "Account", "ExitCode", "Comment", "JobName", "JobID", "Cluster"),
)
_NAMES_OF_SQUEUE = {
    "JobIDRaw": "JobID",
    "JobID": "ArrayJobID",  # `7_2` of an element
    "JobName": "Name",
    "Start": "StartTime",
    "End": "EndTime",
    "Submit": "SubmitTime",
    "Timelimit": "TimeLimit",
    "ExitCode": "exit_code",
}
_MARKS = "*~#!%$@^-"
_LEAVING_MARKS = frozenset("@^%!")
_LEAVING_STATES = ("reboot", "powering_down", "power_down")
_NOTHING = frozenset({"", "(null)", "N/A", "NONE", "None", "Unknown", "None assigned"})
# In lower case; a tuple and not a regular expression, whose compilation costs 2 ms of each import.
_UNREACHABLE = (
    *("unable to contact slurm", "connect failure", "connection refused", "connection timed out"),
    *("connection reset", "socket timed out", "unexpected message received", "no response"),
    *("zero bytes were transmitted", "standby mode", "authentication error", "munge encode failed"),
    *("configuration source", "cannot stat file", "temporarily unable", "unable to connect"),
    *("unable to resolve",),
)

# src/common/slurm_errno.c
_UNKNOWN_JOB = "Invalid job id"
_ACCESS_DENIED = "Access/permission denied"
_REQUEUE_REFUSALS = {
    "Job is pending execution": RequeueResult.ALREADY_PENDING,
    "presently disabled": RequeueResult.DISABLED,
    _UNKNOWN_JOB: RequeueResult.UNKNOWN_JOB,
}


# Of sbatch, with and without --parsable (src/sbatch/sbatch.c).
_SUBMITTED = r"(\d+)(?:;(\S+))?|(?:sbatch: )?Submitted batch job (\d+)(?: on cluster (\S+))?"
_MOST_MESSAGES, _LONGEST_MESSAGE = 20, 500


def long_format(fields: Iterable[str]) -> str:
    """Build the argument of squeue's `-O` that prints `fields` untruncated and separated safely."""
    names = list(fields)
    return ",".join([*(f"{name}:{UNIT}" for name in names[:-1]), f"{names[-1]}:{RECORD}"])


def table(text: str, columns: int) -> list[list[str]]:
    """Split a table printed with `long_format` into rows, without its header.

    squeue drops an unknown field with a message and exit code 0, hence the check of the header.
    With several clusters it prints `CLUSTER: name` lines and one header for each.
    """
    *records, rest = text.split(RECORD)
    rows = [re.sub(r"\A\n*(CLUSTER: \S*\n)?", "", record).split(UNIT) for record in records]
    if not rows or rest.strip() or any(len(row) != columns for row in rows):
        raise ValueError(f"not a table of {columns} columns: {text[:200]!r}")
    return [row for row in rows if row != rows[0]]


def jobs_from_squeue(text: str) -> dict[int, JobRecord]:
    """Parse jobs printed by squeue with SQUEUE_FIELDS in UTC, by job id."""
    records = (
        _job(dict(zip(SQUEUE_FIELDS, row, strict=True)), "squeue")
        for row in table(text, len(SQUEUE_FIELDS))
    )
    return {record.job_id: record for record in records}


def _job(cell: dict[str, str], source: str) -> JobRecord:
    """Read a job by squeue's names of fields; sacct has no field for some of them."""
    state = JobState.parse(cell["State"])
    code, signal = exit_status(cell["exit_code"]) if state.is_ended else (None, None)
    restarts, requeue = cell.get("RestartCnt"), cell.get("Requeue")
    return JobRecord(
        job_id=int(cell["JobID"]),
        name=cell["Name"],
        state=state,
        reason=_value(cell["Reason"]),
        node_list=_value(cell["NodeList"]),
        restart_count=None if restarts is None else int(restarts),
        preempt_time=epoch_seconds(cell.get("PreemptTime", "")),
        start_time=epoch_seconds(cell["StartTime"]),
        end_time=epoch_seconds(cell["EndTime"]),
        submit_time=epoch_seconds(cell["SubmitTime"]),
        time_limit_seconds=limit_seconds(cell["TimeLimit"]),
        partition=_value(cell["Partition"]),
        account=_value(cell["Account"]),
        exit_code=code,
        exit_signal=signal,
        requeue=None if requeue is None else requeue == "1",
        comment=_value(cell["Comment"]),
        array_job_id=_number(cell["ArrayJobID"]),
        node_count=_number(cell.get("NumNodes", "")),
        terms=JobTerms(
            _value(cell.get("QOS", "")),
            _value(cell.get("Reservation", "")),
            _number(cell.get("NumCPUs", "")),
            gpus_per_node(cell["tres-per-node"]) if "tres-per-node" in cell else None,
        ),
        cluster=_value(cell["Cluster"]),
        work_directory=_value(cell.get("WorkDir", "")),
        source=source,
    )


def jobs_from_sacct(text: str) -> dict[int, JobRecord]:
    """Parse jobs printed by `sacct -P` with SACCT_FIELDS in UTC; the last row of an id wins.

    Records are counted by separators: only the token between two records holds a newline that
    is not part of a name or comment.
    """
    cells = text.split(UNIT)
    width = len(SACCT_FIELDS)
    if len(cells) < width or len(cells) % (width - 1) != 1:
        raise ValueError(f"not a table of sacct: {text[:200]!r}")
    flat: list[str] = []
    for index, cell in enumerate(cells):
        is_boundary = index > 0 and index % (width - 1) == 0
        flat.extend(cell.partition("\n")[::2] if is_boundary else [cell])
    rows = [flat[start : start + width] for start in range(width, len(flat) - 1, width)]
    names = [_NAMES_OF_SQUEUE.get(name, name) for name in SACCT_FIELDS]
    records = (_job(dict(zip(names, row, strict=True)), "sacct") for row in rows)
    return {record.job_id: record for record in records}


def steps_from_squeue(text: str) -> tuple[StepRecord, ...]:
    """Parse live steps printed by `squeue -s` with STEP_FIELDS: `12.0`, `12.batch`, `12_3.0`."""
    rows = table(text, len(STEP_FIELDS))
    return tuple(
        StepRecord(step.rpartition(".")[2], JobState.parse(word), name) for step, word, name in rows
    )


def node_states(text: str) -> tuple[NodeState, ...]:
    """Parse nodes printed by `sinfo -N` with NODE_FIELDS; one of several partitions comes once.

    Behind the word sinfo marks a node: `*` does not respond, `~`, `#`, `!`, `%`, `$`, `@`, `^`,
    `-` power saving, reservation, reboot and planning (sinfo(1), NODE STATE CODES).
    """
    found = {}
    for node, word in table(text, len(NODE_FIELDS)):
        found[node] = node_state(node, word)
    return tuple(found.values())


def node_state(node: str, word: str) -> NodeState:
    """Parse the state that sinfo prints as `word`, such as `allocated`, `down*` or `mixed@`."""
    state = word.lower().rstrip(_MARKS)
    marks = set(word.lower()[len(state) :])
    planned = bool(_PLANNED_MARKS & marks) or state.startswith(_PLANNED_STATES)
    leaving = bool(_LEAVING_MARKS & marks) or state.startswith(_LEAVING_STATES)
    return NodeState(node, state, "*" not in marks, planned, leaving)


def gpus_per_node(text: str) -> int:
    """Count the GPUs of `tres-per-node`: `gres:gpu:a100:8` (22.05), `gres/gpu:8` (24.11), `N/A`."""
    counts = re.findall(r"gres[:/]gpu(?::[^:,()]+)??(?::(\d+))?(?=[,(]|$)", text)
    return sum(int(count or 1) for count in counts)


def without_cluster(text: str) -> str:
    """Remove the line `CLUSTER: name` that squeue and sinfo print first with `--clusters`."""
    return re.sub(r"\A\n*CLUSTER: [^\n]*\n", "", text)


def exit_status(text: str) -> tuple[int, int]:
    """Parse exit code and signal: `code:signal` (sacct) or a wait status (squeue, wait(2))."""
    code, colon, signal = text.partition(":")
    if colon:
        return int(code), int(signal)
    status = int(code)
    return status >> 8 & 0xFF, status & 0x7F


def epoch_seconds(text: str) -> float | None:
    """Parse `2024-01-01T00:00:00`, printed under TZ=UTC0, to epoch seconds; None if not set."""
    if text in _NOTHING:
        return None
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def limit_seconds(text: str) -> float | None:
    """Parse `[days-][[hours:]minutes:]seconds`; infinite for UNLIMITED, None if not set."""
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return math.inf
    match = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(days * 86400 + hours * 3600 + minutes * 60 + seconds)


def submitted(stdout: str, stderr: str = "") -> SubmittedJob:
    """Parse the output of `sbatch --parsable`, or of a site's own command in its place.

    The last line that is `id`, `id;cluster` or sbatch's sentence counts. All others are messages,
    as stderr is: of plug-ins (`slurm.user_msg` of job_submit.lua), or of the site's command.
    """
    lines = stdout.splitlines()
    for number in reversed(range(len(lines))):
        match = re.fullmatch(_SUBMITTED, lines[number].strip())
        if match is not None:
            said = [*lines[:number], *lines[number + 1 :], *stderr.splitlines()]
            kept = [printable_line(line, _LONGEST_MESSAGE) for line in said if line.strip()]
            more = len(kept) - _MOST_MESSAGES
            kept[_MOST_MESSAGES:] = [f"and {more} more lines"] if more > 0 else []
            return SubmittedJob(int(match[1] or match[3]), match[2] or match[4], tuple(kept))
    raise ValueError(f"no job id in {stdout[:200]!r}")


def test_only_answer(text: str) -> TestOnlyAnswer:
    """Parse the sentence of `sbatch --test-only`; fields stay None for an unknown wording."""
    sentence = text.strip()
    # 26.05 has a stray word in it: `to start at 2026-11-22T01:21:19 a using 2 processors`.
    match = re.search(
        r"to start at (\S+)(?: a)? using (\d+) processors on (?:nodes )?(\S*) in partition (\S+)",
        sentence,
    )
    if match is None:
        return TestOnlyAnswer(sentence)
    return TestOnlyAnswer(sentence, match[1], int(match[2]), match[3], match[4])


test_only_answer.__test__ = False  # type: ignore[attr-defined]


def requeue_result(returncode: int, text: str) -> RequeueResult:
    """Classify the result of `scontrol requeue`."""
    if returncode == 0:
        return RequeueResult.DONE
    for words, result in _REQUEUE_REFUSALS.items():
        if words in text:
            return result
    return RequeueResult.UNREACHABLE if is_unreachable(text) else RequeueResult.REFUSED


def dependencies(text: str) -> tuple[str, ...]:
    """Read what a job still waits for, all of it: squeue(1), `%E`, `(null)` for nothing.

    `afterok:7(unfulfilled),afterany:9(unfulfilled)` are `afterok:7` and `afterany:9`.
    """
    terms = re.sub(r"\([a-z]+\)", "", text.strip())
    return tuple(term for term in terms.split(",") if term)


def is_unknown_job(text: str) -> bool:
    """True if the controller refused because it does not know the job (any more)."""
    return _UNKNOWN_JOB in text


def is_access_denied(text: str) -> bool:
    """True if the controller denies access, as it does to hosts that may not submit (slurm.conf(5),
    AllocNodes)."""
    return _ACCESS_DENIED in text


def is_unreachable(text: str) -> bool:
    """True if Slurm's message reports a missing response, as opposed to a refusal."""
    lower = text.lower()
    return any(words in lower for words in _UNREACHABLE)


def config_values(text: str) -> dict[str, str]:
    """Parse `scontrol show config`: one `Key = value` a line."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}


def _value(text: str) -> str | None:
    return None if text in _NOTHING else text


def _number(text: str) -> int | None:
    """Parse the first number: `2` of a range `2-4`."""
    match = re.match(r"\d+", text)
    return int(match[0]) if match else None


def boot_times(text: str) -> dict[str, float]:
    """Parse `NodeName=` and `BootTime=` of `scontrol -o show node`, in seconds since the epoch.

    A node that has never registered has none. Free text (Comment, Extra, Reason) stands behind what
    is Slurm's own, so the first value of a key counts.
    """
    # from the back, so that the first one stays
    rows = (
        dict(word.split("=", 1) for word in reversed(line.split()) if "=" in word)
        for line in text.splitlines()
    )
    found = {
        row["NodeName"]: epoch_seconds(row.get("BootTime", "None"))
        for row in rows
        if "NodeName" in row
    }
    return {node: booted for node, booted in found.items() if booted is not None}


def leaf_lines(text: str) -> dict[str, str]:
    """Parse the leaves of `scontrol show topology`: name of switch or block -> its node list.

    topology/tree prints `SwitchName=leaf0 Level=0 LinkSpeed=1 Nodes=n[0-1]`, and switches above the
    leaves with another level; topology/block `BlockName=b0 BlockIndex=0 Nodes=n[0-1] BlockSize=2`,
    and blocks of blocks as AggregatedBlock.
    """
    found = {}
    for line in text.splitlines():
        row = dict(word.split("=", 1) for word in line.split() if "=" in word)
        leaf = row.get("SwitchName") if row.get("Level") == "0" else row.get("BlockName")
        if leaf and (nodes := _value(row.get("Nodes", ""))):
            found[leaf] = nodes
    return found


def has_leaves(pattern: str) -> bool:
    """Tell from SLURM_TOPOLOGY_ADDR_PATTERN whether Slurm knows more than nodes: `switch.node`."""
    return "." in pattern


def node_address(text: str) -> str:
    """Parse `NodeAddr=` of `scontrol -o show node`. Raises ValueError if it is missing."""
    for word in text.split():
        if word.startswith("NodeAddr="):
            return word.removeprefix("NodeAddr=")
    raise ValueError("no NodeAddr in the answer")


# -- Expand Slurm's lists of hosts, such as `gpu[001-004,9],login1`. Pure, needs no program -----


_LONGEST = 1_000_000  # hosts of one list: more is a mistake in the text, not a cluster


def expand_hosts(text: str) -> tuple[str, ...]:
    """Expand `n[0-2],x` to (n0, n1, n2, x). Raises ValueError for brackets without an end."""
    if text.count("[") != text.count("]"):
        raise ValueError(f"brackets of `{text[:80]}` do not match")
    found: list[str] = []
    for part in filter(None, re.split(r",(?![^\[]*\])", text.strip())):
        pieces = re.split(r"\[([^\]]*)\]", part)
        choices = [_numbers(one) if index % 2 else [one] for index, one in enumerate(pieces)]
        if sum(map(len, choices)) > _LONGEST:
            raise ValueError(f"too many hosts in `{part[:80]}`")
        found += ("".join(names) for names in itertools.product(*choices))
    return tuple(found)


def _numbers(text: str) -> list[str]:
    found = []
    for piece in text.split(","):
        first, dash, last = piece.partition("-")
        if not dash:
            found.append(first)
            continue
        if not (first.isdecimal() and last.isdecimal()) or int(last) - int(first) > _LONGEST:
            raise ValueError(f"`{text[:80]}` is no range of numbers")
        width = len(first) if first.startswith("0") else 0
        found += [f"{number:0{width}d}" for number in range(int(first), int(last) + 1)]
    return found
