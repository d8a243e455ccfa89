"""Collect the failures that may be the root cause of the end of a launch. Pure.

A line of a log is weak evidence by itself: programs survive errors and print them. So lines of a
rank that exited cleanly are ignored. A line that would stop the run for good needs the record of
its rank as confirmation. An error that only the program's author can repair has to show on most
ranks. Belongs here: collecting candidates with their time, and comparing failures. Does not belong
here: choosing one (`rank_verdict`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hpctrain.judge.causes import FAILURE_CAUSES, FINAL_CAUSES, SCHEDULER_CAUSES, Cause
from hpctrain.judge.documents import LaunchEvidence, LogFinding
from hpctrain.records.run_records import AgentRecord, ExitRecord
from hpctrain.slurm.messages import TaskFailure

NEVER = float("inf")
# A signature whose meaning depends on how many ranks report it.
_MISSING_PATH = "missing_path"
# Causes that the trainer reports where a machine may be at fault.
_CAUSES_THAT_MAY_BE_HARDWARE = frozenset({Cause.DATA_LOADER})
# While a rank loads a checkpoint these mean that it cannot be loaded.
_CAUSES_WHILE_LOADING = frozenset({Cause.LOAD_FAILED, Cause.CRASH, Cause.USER_ERROR})
_DEEPER_CAUSES = frozenset({Cause.STORAGE, Cause.HOST_OOM, Cause.DISK_FULL})
_COMPARED_LETTERS = 80


@dataclass(frozen=True)
class RootCandidate:
    """A failure that may be the root cause: the candidate with the lowest `order` is chosen."""

    cause: Cause
    text: str
    rank: int | None
    node: str | None
    when: float
    tier: int = 2
    hard: bool = False
    step: int | None = None
    place: int = 0

    @property
    def order(self) -> tuple[int, float, bool, int, int, str, str]:
        vague = self.cause is Cause.CRASH
        rank = -1 if self.rank is None else self.rank
        return (self.tier, self.when, vague, self.place, rank, str(self.cause), self.text)

    def __str__(self) -> str:
        where = [f"rank {self.rank}"] if self.rank is not None else []
        where += [f"on {self.node}"] if self.node else []
        return f"{' '.join(where)}: {self.text}" if where else self.text


def candidates(evidence: LaunchEvidence) -> list[RootCandidate]:
    """Collect all possible root causes, in no order."""
    # Kills for memory, from slurmstepd and srun; neither gives a time.
    killed = [failure for failure in evidence.task_failures if failure.out_of_memory]
    lines: list[tuple[str | None, str]] = [
        *((failure.single_node, f"task {failure.tasks}: {failure.what}") for failure in killed),
        *((None, notice.text) for notice in evidence.notices if notice.out_of_memory),
    ]
    from_slurm = [
        RootCandidate(Cause.HOST_OOM, line, None, node, NEVER, tier=1, place=place)
        for place, (node, line) in enumerate(lines)
    ]
    return [*_from_findings(evidence), *from_slurm, *_from_exits(evidence)]


def _from_findings(evidence: LaunchEvidence) -> list[RootCandidate]:
    known = {exit_.rank: exit_ for exit_ in evidence.rank_exits}
    everywhere = _common_at_start(evidence)
    no_own_crash = not own_crashes(evidence)
    found = []
    for finding in evidence.findings:
        exit_ = known.get(finding.rank) if finding.rank is not None else None
        cause = _in_context(finding, exit_, everywhere)
        if finding.role != "root" or finding.cause in SCHEDULER_CAUSES or finding.is_of_slurm:
            continue
        if exit_ is not None and exit_.outcome != "crash":
            continue  # the rank exited cleanly, so it survived this
        if cause in FINAL_CAUSES:
            # It stops the run for good if its rank reports the same, or no rank reports a failure.
            confirmed = no_own_crash if exit_ is None else _contains_message(finding, exit_)
            if not confirmed:
                continue
        # The kernel killed for memory; the killed rank leaves no record of its own.
        by_kernel = finding.cause is Cause.HOST_OOM and finding.rank is None
        found.append(
            RootCandidate(
                cause=cause,
                text=finding.line,
                rank=finding.rank,
                node=finding.node or (exit_.node if exit_ else None),
                when=finding.order or NEVER,
                tier=0 if finding.hard else 1 if by_kernel else 2,
                hard=finding.hard,
                step=exit_.step if exit_ else None,
            )
        )
    return found


def own_crashes(evidence: LaunchEvidence) -> list[ExitRecord]:
    """Select the ranks that failed for a reason of their own."""
    crashes = [exit_ for exit_ in evidence.rank_exits if exit_.outcome == "crash"]
    return [exit_ for exit_ in crashes if not only_reports_peer(exit_, evidence.findings)]


def _contains_message(finding: LogFinding, exit_: ExitRecord) -> bool:
    message = exit_.words.strip()[:_COMPARED_LETTERS]
    return bool(message) and message in finding.line


def _from_exits(evidence: LaunchEvidence) -> list[RootCandidate]:
    """Collect failures from exit records, unless they only follow from another's end."""
    candidates = []
    for place, exit_ in enumerate(evidence.rank_exits):
        if exit_.outcome != "crash" or only_reports_peer(exit_, evidence.findings):
            continue
        cause = _reported_cause(exit_, evidence.findings)
        roots = [f for f in evidence.findings if f.rank == exit_.rank and f.role == "root"]
        if cause is Cause.CRASH and roots:
            continue
        if cause is Cause.CRASH and exit_.loading_step is not None:
            cause = Cause.LOAD_FAILED
        candidates.append(
            RootCandidate(
                cause=cause,
                text=exit_.words,
                rank=exit_.rank,
                node=exit_.node,
                when=exit_.time or NEVER,
                step=exit_.step,
                place=0 if exit_.time else place,
            )
        )
    return candidates


def _reported_cause(exit_: ExitRecord, findings: Iterable[LogFinding]) -> Cause:
    try:
        cause = Cause(exit_.cause) if exit_.cause else Cause.CRASH
    except ValueError:
        return Cause.CRASH
    if cause not in _CAUSES_THAT_MAY_BE_HARDWARE:
        return cause
    deeper = [f.cause for f in findings if f.rank == exit_.rank and f.role == "root"]
    return next((one for one in deeper if one in _DEEPER_CAUSES), cause)


def only_reports_peer(exit_: ExitRecord, findings: Iterable[LogFinding]) -> bool:
    """True if the error of this rank only reports a peer that is gone or late."""
    if exit_.cause is not None:
        return False
    same = [f for f in findings if f.rank == exit_.rank and _contains_message(f, exit_)]
    return bool(same) and all(f.role == "cascade" for f in same)


# -- how many ranks report the same ------------------------------------------------------


def _common_at_start(evidence: LaunchEvidence) -> frozenset[str]:
    """Find the signatures that most of the launch has met before its first step."""
    if evidence.last_step is not None and evidence.last_step > evidence.resume_step:
        return frozenset()
    nodes = {exit_.rank: exit_.node for exit_ in evidence.rank_exits}
    met: dict[str, set[int]] = {}
    for finding in evidence.findings:
        if finding.role == "root" and finding.rank is not None:
            met.setdefault(finding.signature, set()).add(finding.rank)
            nodes.setdefault(finding.rank, finding.node or "")
    return frozenset(
        signature
        for signature, ranks in met.items()
        if 2 * len(ranks) > (evidence.world_size or NEVER)
        or len({nodes[rank] for rank in ranks} - {""}) > 1
    )


def _in_context(finding: LogFinding, exit_: ExitRecord | None, everywhere: frozenset[str]) -> Cause:
    """Correct the cause of a finding by how many ranks have it, and whether the rank was loading.

    A wrong program fails everywhere and at once; a missing mount fails on one node.
    """
    common = finding.signature in everywhere
    loading = exit_ is not None and exit_.loading_step is not None
    if loading and (finding.cause in _CAUSES_WHILE_LOADING or finding.signature == _MISSING_PATH):
        return Cause.LOAD_FAILED
    if finding.cause is Cause.LOAD_FAILED:
        return Cause.CRASH
    if finding.cause is Cause.USER_ERROR:
        return Cause.USER_ERROR if common else Cause.CRASH
    if finding.signature == _MISSING_PATH and common:
        return Cause.CRASH
    return finding.cause


# ----------------------------------------------------------------------------------------------
# Replace failures of agents by those of their ranks (`launcher: torchrun`). Pure.
# srun numbers agents, not ranks, and an agent exits with a code even if a signal killed its rank.
# So the record of an agent about its ranks replaces srun's report on the agent.


# Instead of a rank's number, which the failure of an agent does not have.
AGENT = "agent"
# Less than the time for which the supervisor lets ranks survive a failed one (`launch_watch`).
_SRUN_IS_LATE_SECONDS = 3.0


def failures_below_agents(
    records: Sequence[AgentRecord], reported_by_srun: Sequence[TaskFailure]
) -> tuple[TaskFailure, ...]:
    """List failures of ranks, and of agents without a record, in the order of their ends."""
    recorded = {record.node for record in records}
    agents = [replace(one, tasks=AGENT) for one in reported_by_srun if one.node not in recorded]
    ranks = [
        TaskFailure(
            record.node,
            str(end.rank),
            code=end.code if end.code >= 0 else None,
            signal=-end.code if end.code < 0 else None,
            at=record.time,
        )
        for record in records
        for end in record.ended
    ]

    def order(failure: TaskFailure) -> float:
        # srun reports a killed agent a little after the end of its ranks has affected others. A
        # kill by the supervisor comes much later.
        killed = failure.tasks == AGENT and failure.code is None
        return failure.at - (_SRUN_IS_LATE_SECONDS if killed else 0.0)

    return tuple(sorted([*agents, *ranks], key=order))


# ----------------------------------------------------------------------------------------------
# Compare failures: class and text of an error, without what changes between equal ones. Pure.


_LONGEST = 160
_WITHOUT = (
    # prefixes: [rank3]:[E1121 05:33:37.123 ProcessGroupNCCL.cpp:607], dmesg, syslog, node names
    (re.compile(r"^\s*(?:\[rank\d+\]:\s*)?(?:\[[EWIF]\d+ [\d:.]+ [^\]\s]*\]\s*)?"), ""),
    (
        re.compile(
            r"\[\w{3} \w{3} {1,2}\d+ [\d:]+ \d{4}\]\s*|^\w{3} {1,2}\d+ [\d:]+ \S+ kernel:\s*"
        ),
        "",
    ),
    (re.compile(r"\b\d{4}-\d\d-\d\d[T ][\d:.,]+Z?"), ""),
    (re.compile(r"(?i)\[?\brank[ _]?\d+\]?"), "rank"),
    (re.compile(r"\b(?:on|node|host) [A-Za-z][\w.-]*\d[\w.-]*"), "on node"),
    (re.compile(r"\b0x[0-9a-fA-F]+\b"), "#"),
    (re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"), "#"),
    (re.compile(r"(?:[\w.~-]*/)+[\w.@%+-]*"), "PATH"),
    (re.compile(r"\d+"), "#"),
    (re.compile(r"\s+"), " "),
)


def fingerprint(cause: Cause, text: str) -> str:
    """Compute a text that is equal for equal failures; empty where there is nothing to compare."""
    if cause not in FAILURE_CAUSES | FINAL_CAUSES:
        return ""
    for expression, instead in _WITHOUT:
        text = expression.sub(instead, text[:1000])
    return f"{cause}: {text.strip()[:_LONGEST]}"
