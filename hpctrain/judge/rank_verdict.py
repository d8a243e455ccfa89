"""Judge the end of a launch by the reports of ranks and machines. Pure.

Order of trust: a wrong setting (reported by the trainer; compared between nodes where it depends on
the node); a command of the site that ended a task; a checkpoint that is proven to have changed;
lost nodes; nodes that the ranks measured to be slow; broken hardware; kills for memory, because a
killed rank leaves no record; the earliest root cause of all ranks; a hang that the supervisor has
detected; tasks that could not start; srun's report of the first task that died; failures that
follow from others; exit codes. Belongs here:
choosing among these. Does not belong here: finding lines (`log_scan`), the scheduler
(`external_verdict`).
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Sequence
from dataclasses import replace
from enum import StrEnum

from hpctrain.base.units import short_duration
from hpctrain.judge.blame import is_singular
from hpctrain.judge.causes import FINAL_CAUSES, Cause
from hpctrain.judge.documents import (
    LaunchEvidence,
    LogFinding,
    Suspicion,
    Verdict,
)
from hpctrain.judge.external_verdict import failed_nodes, noticed
from hpctrain.judge.root_causes import AGENT, NEVER, candidates, fingerprint, own_crashes
from hpctrain.judge.silence_limits import LAUNCHING, RUNNING
from hpctrain.judge.slow_nodes import by_speed
from hpctrain.records.run_records import ExitRecord, TrainerExit
from hpctrain.slurm.messages import LaunchProblem, TaskFailure

# Exit codes of the trainer that are more specific than a crash.
_CODES: dict[int, Cause] = {
    TrainerExit.SUSPECT_NUMERICS: Cause.SUSPECT_NUMERICS,
    TrainerExit.DIVERGED: Cause.DIVERGED,
    TrainerExit.CONFIG_ERROR: Cause.CONFIG_ERROR,
}
_CONTAINER_SETTING, _SITE_COMMAND = "container_setting", "site_command"
# What can block a launch without ending it. Other roots in the logs of a launch that hangs were
# survived, or follow from the kill by the supervisor.
_CAN_BLOCK = frozenset(
    {
        Cause.GPU_ERROR,
        Cause.GPU_OOM,
        Cause.HOST_OOM,
        Cause.STORAGE,
        Cause.FABRIC,
        Cause.NODE_FAILURE,
    }
)
# What a replica may lack on its node alone, and a trainer nowhere or everywhere.
_OF_A_NODE = frozenset({Cause.WEIGHTS, Cause.PORT})
# Cascading failures that name what has failed come before those that only report a lost peer.
_VAGUE_CASCADES = {Cause.HANG: 1, Cause.CRASH: 2}
# How much later a kill may be reported than the failures that follow from it: on busy nodes
# slurmstepd and agents notice late. Less than ranks live that survive a failed one (`watch`).
_REPORTED_LATE_SECONDS = 3.0
# What people and programs send to a process; the other signals a process brings on itself.
_SENT_SIGNALS = frozenset(
    {
        *(signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
        *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGXCPU),
    }
)
# With more suspects than these none is suspected: a failure of many nodes is not that of one.
_MOST_SUSPECTS = 2


def by_ranks(evidence: LaunchEvidence) -> Verdict | None:
    """Judge a launch that neither the scheduler nor a person has ended."""
    judges = (
        _wrong_setting,
        _site_command,
        _wrong_container,
        _proven,
        _lost_nodes,
        by_speed,
        _earliest_root,
        _hang,
        _never_launched,
        _lost_step,
        _by_signal,
        _by_crash,
        _by_silent_end,
        _unfit_nodes,
        _cascade,
        _by_code,
    )
    for judge in judges:
        verdict = judge(evidence)
        if verdict is not None:
            return verdict
    return None


# -- what is beyond doubt --------------------------------------------------------------------


def _wrong_setting(evidence: LaunchEvidence) -> Verdict | None:
    """Judge settings that ranks refuse.

    What the settings themselves make wrong is wrong everywhere, whichever rank reports it. What
    depends on the node is compared between nodes.
    """
    wrong = [exit_ for exit_ in evidence.rank_exits if exit_.outcome == "config_error"]
    settled = next((exit_ for exit_ in wrong if not exit_.node_dependent), None)
    if settled is not None:
        return _config_error(settled)
    if not wrong:
        return None
    if evidence.common_problems:
        return _config_error(wrong[0])
    return _of_some_nodes(wrong, evidence) or _config_error(wrong[0])


def _site_command(evidence: LaunchEvidence) -> Verdict | None:
    """Judge commands of the site (`software.commands`) that have ended tasks before the trainer."""
    reports = _lines_as_records(evidence, _SITE_COMMAND)
    if not reports:
        return None
    found = _of_some_nodes(reports, evidence)
    if found is None:
        return replace(_config_error(reports[0]), cause=Cause.SITE_COMMAND)
    return replace(found, cause=Cause.NODE_COMMAND)


def _wrong_container(evidence: LaunchEvidence) -> Verdict | None:
    """Judge containers that lack what they need: an image, a mount, the program."""
    reports = _lines_as_records(evidence, _CONTAINER_SETTING)
    if not reports:
        return None
    return _of_some_nodes(reports, evidence) or _config_error(reports[0])


def _lines_as_records(evidence: LaunchEvidence, signature: str) -> list[ExitRecord]:
    """Make records of the ranks whose trainer has not started, of the lines that say why."""
    recorded = {exit_.rank for exit_ in evidence.rank_exits}
    return [
        ExitRecord(
            epoch=0,
            rank=one.rank,
            node=one.node,
            outcome="config_error",
            step=0,
            exit_code=TrainerExit.CONFIG_ERROR,
            time=0.0,
            message=one.line[max(0, one.line.find("software.commands.")) :],
            node_dependent=True,
        )
        for one in evidence.findings
        if one.signature == signature and one.rank is not None and one.node
        if one.rank not in recorded
    ]


def _config_error(exit_: ExitRecord) -> Verdict:
    return Verdict(Cause.CONFIG_ERROR, exit_.words, (_line(exit_),), exit_.rank)


def _line(exit_: ExitRecord) -> str:
    return f"rank {exit_.rank} on {exit_.node}: {exit_.words}"


def _of_some_nodes(reports: Sequence[ExitRecord], evidence: LaunchEvidence) -> Verdict | None:
    """Judge failures of the same kind that depend on the node; None if all nodes agree.

    Where the probe has found nodes that lack something, these are the affected ones.
    """
    if not reports:
        return None
    unfit = [one for one in evidence.unfit_nodes if one.node in evidence.nodes]
    decisive = [one.node for one in unfit] or [exit_.node for exit_ in reports]
    affected = tuple(dict.fromkeys(decisive))
    found = extent(affected, evidence)
    if found is Extent.EVERYWHERE:
        return None
    first = next((exit_ for exit_ in reports if exit_.node in affected), reports[0])
    lines = (
        *map(_line, reports[:3]),
        *(f"{one.node}: {one.problem}" for one in unfit[:3]),
    )
    if found is Extent.FEW:
        reason = f"on {', '.join(affected[:8])} alone: {first.words}"
        rank = first.rank if first.node in affected else None
        return Verdict(
            Cause.NODE_FAILURE,
            reason,
            lines,
            rank,
            nodes=affected,
            step=evidence.last_step,
            suspicion=Suspicion.UNFIT,
        )
    reason = f"on {len(affected)} nodes, and not on others: {first.words}"
    return Verdict(Cause.STORAGE, reason, lines, first.rank, step=evidence.last_step)


def _proven(evidence: LaunchEvidence) -> Verdict | None:
    """Find a rank that met a newer epoch, which the supervisor has not read yet, or whose
    checkpoint differs from what was written.
    """
    for cause in (Cause.SUPERSEDED, Cause.BAD_CHECKPOINT):
        exit_ = next((one for one in evidence.rank_exits if one.cause == cause), None)
        if exit_ is not None:
            reason, step = exit_.words, evidence.resume_step or None
            if cause is Cause.SUPERSEDED:
                reason, step = "a newer launch of this run has taken over", None
            return Verdict(cause, reason, (_line(exit_),), exit_.rank, checkpoint_step=step)
    return None


def _lost_nodes(evidence: LaunchEvidence) -> Verdict | None:
    if evidence.lost_nodes:
        reason = f"nodes do not answer: {', '.join(evidence.lost_nodes[:8])}"
        hard = [f.line for f in evidence.findings if f.hard and f.role == "root"]
        lines = (*evidence.notice_lines[-2:], *hard[:3])
        return Verdict(Cause.NODE_FAILURE, reason, lines, nodes=evidence.lost_nodes)
    if noticed(evidence) is not Cause.NODE_FAILURE:
        return None
    lines = evidence.notice_lines[-3:]
    nodes = failed_nodes(evidence)
    return Verdict(Cause.NODE_FAILURE, "a node of the job failed", lines, nodes=nodes)


# -- the earliest root -----------------------------------------------------------------------


def _earliest_root(evidence: LaunchEvidence) -> Verdict | None:
    """Find broken hardware, a kill for memory, or the earliest failure with a known cause.

    A crash without a known cause is left to `_by_crash`, because a rank that was killed by a
    signal may have ended before it.
    """
    found = sorted(candidates(evidence), key=lambda one: one.order)
    if evidence.stall is not None:
        found = [one for one in found if one.cause in _CAN_BLOCK]
    if not found:
        return None
    root = found[0]
    if root.cause is Cause.CRASH and root.tier == 2:
        return None
    if root.cause in FINAL_CAUSES or root.cause in _OF_A_NODE:
        # Unless one rank reports that it is wrong everywhere, it may be wrong on some nodes only.
        same = [exit_ for exit_ in evidence.rank_exits if exit_.cause == root.cause]
        if all(exit_.node_dependent for exit_ in same):
            on_some_nodes = _of_some_nodes(same, evidence)
            # Ports that several nodes lack are no matter of storage.
            if on_some_nodes is not None and (on_some_nodes.nodes or root.cause is not Cause.PORT):
                return on_some_nodes
    if root.cause is Cause.LOAD_FAILED and _first_kill(evidence) is not None:
        return None  # a rank that was killed may be why others could not load
    # The nodes with the same cause, unless they are many and no hardware is broken.
    same_cause = [one for one in found if one.cause is root.cause and one.hard is root.hard]
    nodes = tuple(dict.fromkeys(one.node for one in same_cause if one.node))
    hard = root.hard and root.cause not in FINAL_CAUSES
    if root.cause in FINAL_CAUSES or (not hard and len(nodes) > _MOST_SUSPECTS):
        nodes = ()
    where = f"rank {root.rank} on {root.node}" if root.rank is not None else root.node
    cause = str(root.cause).replace("_", " ")
    reason = f"{where or 'the launch'}: {cause}: {root.text.strip()[:200]}"
    lines = tuple(dict.fromkeys(map(str, found)))
    loaded = evidence.resume_step if root.cause is Cause.LOAD_FAILED else 0
    return Verdict(
        root.cause,
        reason,
        lines[:3],
        root.rank,
        nodes=nodes,
        hard=hard,
        step=root.step or evidence.last_step,
        checkpoint_step=loaded or None,
    )


# -- hangs, launches, deaths -------------------------------------------------------------------


def _hang(evidence: LaunchEvidence) -> Verdict | None:
    stall = evidence.stall
    if stall is None:
        return None
    if stall.phase == LAUNCHING:
        reason = f"srun could not create the step in {stall.silent_seconds:.0f} s"
        return Verdict(Cause.LAUNCH_FAILURE, reason, evidence.notice_lines[-3:])
    reason = (
        f"no sign of life for {stall.silent_seconds:.0f} s while {stall.phase} "
        f"(limit {stall.limit_seconds:.0f} s)"
    )
    if stall.phase == RUNNING:
        reason = (
            "no line of output and no file changed in `output/` for "
            f"{short_duration(stall.silent_seconds)} (limit: `trainer.silence`)"
        )
    explaining = [finding for finding in _cascading(evidence) if finding.cause in _CAN_BLOCK]
    if not stall.odd:
        if explaining:  # no rank stands out, but storage or a link was away
            return _verdict_of_cascade(explaining, evidence)
        return Verdict(Cause.HANG, reason, step=evidence.last_step)
    first = stall.odd[0]
    others = f" and {len(stall.odd) - 1} more" if len(stall.odd) > 1 else ""
    lines = tuple(f"rank {odd.rank} on {odd.node}: {odd.where}" for odd in stall.odd[:4])
    return Verdict(
        Cause.HANG,
        f"{reason}; rank {first.rank} on {first.node}{others} is elsewhere: {first.where}",
        (*lines, *(finding.line for finding in explaining[:2])),
        first.rank,
        nodes=tuple(dict.fromkeys(odd.node for odd in stall.odd if odd.node)),
        step=evidence.last_step,
    )


def _never_launched(evidence: LaunchEvidence) -> Verdict | None:
    """Find why srun could not start tasks; it ends the others, which have not crashed."""
    failed = [notice for notice in evidence.notices if notice.launch_problem is not None]
    if evidence.started or not failed:
        return None
    problems = {notice.launch_problem for notice in failed}
    cause = Cause.LAUNCH_FAILURE
    if LaunchProblem.PROLOG in problems:
        cause = Cause.PROLOG_FAILURE
    elif problems == {LaunchProblem.CONTROLLER_AWAY}:
        cause = Cause.CONTROLLER_AWAY
    named = [notice.node for notice in failed if notice.node]
    return Verdict(
        cause,
        f"srun could not start the step: {failed[0].text}",
        tuple(notice.text for notice in failed[:3]),
        nodes=() if cause is Cause.CONTROLLER_AWAY else tuple(dict.fromkeys(named)),
        broken_allocation=LaunchProblem.BROKEN_ALLOCATION in problems,
    )


def _lost_step(evidence: LaunchEvidence) -> Verdict | None:
    """Find a node whose slurmstepd is gone, after which srun kills the tasks of all others."""
    gone = (notice.lost_step for notice in evidence.notices if notice.lost_step is not None)
    place = next(gone, None)
    if place is None:
        return None
    known = evidence.nodes[place : place + 1]
    where = known[0] if known else f"node {place} of the launch"
    reason = f"the slurmstepd of {where} is gone, and srun ended the step"
    lines = (*evidence.notice_lines[-2:], *_task_lines(evidence))
    return Verdict(Cause.CRASH, reason, lines, nodes=known, step=evidence.last_step)


def _by_signal(evidence: LaunchEvidence) -> Verdict | None:
    """Find a rank that was killed: it leaves no record, so srun's first report counts."""
    first = _first_kill(evidence)
    if first is None:
        return None
    who = f"the {AGENT}" if first.tasks == AGENT else f"rank {first.tasks}"
    reason = f"{who} on {first.node} was ended by a signal: {first.what}"
    return Verdict(
        Cause.CRASH,
        reason,
        _task_lines(evidence),
        first.rank,
        nodes=(first.single_node,) if first.single_node else (),
        step=evidence.last_step,
        suspicion=_suspicion(first, explained=False),
    )


def _first_kill(evidence: LaunchEvidence) -> TaskFailure | None:
    """Find the first end of a task, if it was by a signal.

    If ranks report only lost peers, a kill that srun reports a little later counts as well. A
    watchdog that aborts its own rank has killed no other.
    """
    deaths = evidence.task_failures
    if not deaths:
        return None
    if deaths[0].code is None:
        return None if _is_abort(deaths[0]) and _cascading(evidence) else deaths[0]
    if not evidence.rank_exits or own_crashes(evidence):
        return None
    kills = (one for one in deaths if one.code is None and not _is_abort(one))
    return next((one for one in kills if one.at - deaths[0].at < _REPORTED_LATE_SECONDS), None)


def _is_abort(failure: TaskFailure) -> bool:
    return failure.signal == signal.SIGABRT


def _by_crash(evidence: LaunchEvidence) -> Verdict | None:
    """Find the first rank that failed for a reason of its own, whose cause is not known.

    An exception without a signature is one of the program, wherever it was raised.
    """
    crashes = [exit_ for exit_ in evidence.rank_exits if exit_.outcome == "crash"]
    own = own_crashes(evidence)
    if not own:
        return None
    # Without times the order in which they are given counts.
    root = min(own, key=lambda one: (one.time, one.rank) if one.time else (NEVER, 0))
    shown = sorted(crashes, key=lambda exit_: exit_ is not root)[:3]
    lines = (*map(_line, shown), *_task_lines(evidence))
    reason = f"rank {root.rank} failed: {root.words}"
    print_of_root = fingerprint(Cause.CRASH, root.words)
    same = {e.node for e in own if fingerprint(Cause.CRASH, e.words) == print_of_root}
    return Verdict(
        Cause.CRASH,
        reason,
        lines,
        root.rank,
        nodes=(root.node,) if len(same) <= _MOST_SUSPECTS else (),
        step=root.step or evidence.last_step,
        suspicion=Suspicion.NONE,
    )


def _by_silent_end(evidence: LaunchEvidence) -> Verdict | None:
    """Find a rank that exited with a code and no record, while others report only lost peers."""
    recorded = {exit_.rank for exit_ in evidence.rank_exits}
    specific = [f for f in _cascading(evidence) if f.cause not in _VAGUE_CASCADES]
    silent = [
        failure
        for failure in evidence.task_failures
        if failure.rank is not None and failure.rank not in recorded and failure.code is not None
    ]
    if not recorded or not silent or specific:
        return None
    first = silent[0]
    explained = any(f.rank == first.rank and f.role == "root" for f in evidence.findings)
    return Verdict(
        Cause.CRASH,
        f"rank {first.rank} on {first.node} exited with code {first.code} and left no record",
        _task_lines(evidence),
        first.rank,
        nodes=(first.node,),
        step=evidence.last_step,
        suspicion=_suspicion(first, explained),
    )


def _suspicion(failure: TaskFailure, explained: bool) -> Suspicion:
    if explained:
        return Suspicion.NONE
    # bash(1), EXIT STATUS: a command that signal N ends has the code 128 + N.
    number = failure.signal if failure.code is None else failure.code - 128
    return Suspicion.OUTSIDE if number in _SENT_SIGNALS else Suspicion.CAUSE


def _unfit_nodes(evidence: LaunchEvidence) -> Verdict | None:
    """Without a known cause, find the nodes on which the probe says that no launch can run.

    A trainer that cannot even read its settings leaves no record, only its exit code.
    """
    unfit = [one for one in evidence.unfit_nodes if one.node in evidence.nodes]
    nodes = tuple(dict.fromkeys(one.node for one in unfit))
    if not nodes or len(evidence.nodes) <= 1:
        return None
    reason = f"on {', '.join(nodes[:8])} alone: {unfit[0].problem}"
    lines = (*(f"{one.node}: {one.problem}" for one in unfit[:3]), *_task_lines(evidence))
    step = evidence.last_step
    return Verdict(
        Cause.NODE_FAILURE, reason, lines, nodes=nodes, step=step, suspicion=Suspicion.UNFIT
    )


def _cascade(evidence: LaunchEvidence) -> Verdict | None:
    """Where all failures follow from others, take the one that is most specific."""
    cascading = _cascading(evidence)
    failed = evidence.task_failures or evidence.rank_exits or evidence.srun_exit_code
    if not cascading or not failed:
        return None
    verdict = _verdict_of_cascade(cascading, evidence)
    if verdict.cause is not Cause.HANG:
        return verdict
    # The only rank without a timeout of a collective did not take part.
    late = {f.rank for f in cascading if f.cause is Cause.HANG and f.rank is not None}
    silent = sorted(set(range(evidence.world_size)) - late)
    if len(silent) != 1 or evidence.world_size < 3:
        return replace(verdict, rank=None, nodes=())
    node = _node_of(silent[0], evidence)
    reason = f"{verdict.reason}; rank {silent[0]} alone did not time out"
    return replace(verdict, reason=reason, rank=silent[0], nodes=(node,) if node else ())


def _cascading(evidence: LaunchEvidence) -> list[LogFinding]:
    found = [
        f
        for f in evidence.findings
        if f.role == "cascade" and not (f.is_of_slurm and f.cause is Cause.CRASH)
    ]

    def order(finding: LogFinding) -> tuple[int, float, int, str]:
        rank = -1 if finding.rank is None else finding.rank
        vagueness = _VAGUE_CASCADES.get(finding.cause, 0)
        return (vagueness, finding.order or NEVER, rank, finding.line)

    return sorted(found, key=order)


def _verdict_of_cascade(cascading: list[LogFinding], evidence: LaunchEvidence) -> Verdict:
    first = cascading[0]
    node = first.node or _node_of(first.rank, evidence)
    same = {f.node or _node_of(f.rank, evidence) for f in cascading if f.cause is first.cause}
    suspects = (node,) if node and len(same) == 1 else ()
    where = f"rank {first.rank}" if first.rank is not None else first.node
    reason = f"nothing names the root; first seen by {where or 'srun'}: {first.line[:200]}"
    lines = tuple(dict.fromkeys(f.line for f in cascading[:4]))
    return Verdict(first.cause, reason, lines, first.rank, nodes=suspects, step=evidence.last_step)


def _node_of(rank: int | None, evidence: LaunchEvidence) -> str | None:
    return next((exit_.node for exit_ in evidence.rank_exits if exit_.rank == rank), None)


def _by_code(evidence: LaunchEvidence) -> Verdict | None:
    """Judge by srun's report on the first task that ended.

    The exit code of srun itself is masked by its kills.
    """
    crashes = [exit_ for exit_ in evidence.rank_exits if exit_.outcome == "crash"]
    if evidence.task_failures:
        first = evidence.task_failures[0]
        cause = _CODES.get(first.code or 0, Cause.CRASH)
        same = {one.node for one in evidence.task_failures if one.code == first.code}
        alone = len(evidence.nodes) > 1 and same == {first.node} and first.node in evidence.nodes
        if cause is Cause.CONFIG_ERROR and alone:  # no task of another node has this code
            cause = Cause.NODE_FAILURE
        reason = f"task {first.tasks} on {first.node}: {first.what}"
        lines = _task_lines(evidence)
        nodes = (first.node,) if cause is Cause.NODE_FAILURE else ()
        rank = first.rank if cause is not Cause.CRASH else None
        suspicion = Suspicion.UNFIT if nodes else Suspicion.CAUSE
        return Verdict(cause, reason, lines, rank, nodes=nodes, suspicion=suspicion)
    if crashes:
        root = crashes[0]
        reason = f"rank {root.rank} failed: {root.words}"
        return Verdict(Cause.CRASH, reason, (_line(root),), root.rank)
    return None


def _task_lines(evidence: LaunchEvidence) -> tuple[str, ...]:
    return tuple(f"{f.node}: task {f.tasks}: {f.what}" for f in evidence.task_failures[:3])


# -- Distinguish failures on all nodes of a launch from failures on a few of them. Pure ---------
# A run is stopped for good only by what all nodes agree on: a file that is missing on one node is
# the fault of that node.


class Extent(StrEnum):
    """How many nodes of a launch have the same failure.

    EVERYWHERE: all that could report; FEW: so few that it may be their own fault; MOST: so many
    that something between the nodes is at fault, although other nodes do not have it.
    """

    EVERYWHERE = "everywhere"
    FEW = "few"
    MOST = "most"


def extent(affected: Collection[str], evidence: LaunchEvidence) -> Extent:
    """Determine how far a failure reaches that ranks on the nodes `affected` have reported.

    Nodes whose ranks have reported something else, or have got further, contradict. Nodes without
    any report neither agree nor contradict: then more than half of all nodes have to agree.
    """
    nodes = {*evidence.nodes, *affected, *(exit_.node for exit_ in evidence.rank_exits)}
    if len(nodes) <= 1:
        return Extent.EVERYWHERE  # there is no other node to compare with
    # Nodes with a report of a rank, and that of rank 0 once it has reported progress.
    further = {exit_.node for exit_ in evidence.rank_exits}
    if evidence.last_step is not None and evidence.nodes:
        further.add(evidence.nodes[0])
    contradicting = further - set(affected)
    if not contradicting and 2 * len(affected) > len(nodes):
        return Extent.EVERYWHERE
    return Extent.FEW if is_singular(affected, nodes) else Extent.MOST
