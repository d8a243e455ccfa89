"""What ranks and machines say about the end of a launch. Pure.

Order of trust: a wrong setting (the trainer's own word, with that of all nodes where it depends on
the node); a checkpoint that is proven to have changed; nodes that are lost; broken hardware; the
earliest root over all ranks, which a kernel or slurmstepd that kills for memory precedes, because a
killed rank leaves no word; the hang that the supervisor has seen; tasks that could not start; what
srun says of the first task that died; what follows from failures of others; exit codes.
Belongs here: choosing among these. Does not belong here: finding lines (`log_scan`), the scheduler
(`scheduler_verdict`).
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace

from hpctrain.slurm.messages import LaunchProblem, TaskFailure
from hpctrain.store.run_records import TrainerExit
from hpctrain.supervise.judge.agent_failures import AGENT
from hpctrain.supervise.judge.causes import FINAL_CAUSES, Cause
from hpctrain.supervise.judge.documents import (
    Evidence,
    Finding,
    RankExit,
    Suspicion,
    Verdict,
)
from hpctrain.supervise.judge.fingerprint import fingerprint
from hpctrain.supervise.judge.root_causes import NEVER, Candidate, candidates, own_crashes
from hpctrain.supervise.judge.scheduler_verdict import failed_nodes, noticed
from hpctrain.supervise.judge.shared_failures import Extent, extent
from hpctrain.supervise.judge.silence_limits import LAUNCHING

# Exit codes of the trainer that are more specific than a crash.
_CODES: dict[int, Cause] = {
    TrainerExit.SUSPECT_NUMERICS: Cause.SUSPECT_NUMERICS,
    TrainerExit.DIVERGED: Cause.DIVERGED,
    TrainerExit.CONFIG_ERROR: Cause.CONFIG_ERROR,
}
# What can hold up a launch without ending it. Other roots in the logs of a launch that hangs were
# survived, or follow from the supervisor's killing it.
_HOLD_UP = frozenset(
    {
        Cause.GPU_ERROR,
        Cause.GPU_OOM,
        Cause.HOST_OOM,
        Cause.STORAGE,
        Cause.FABRIC,
        Cause.NODE_FAILURE,
    }
)
# Echoes that say what has failed go before those that only say that a peer is gone.
_VAGUE_ECHOES = {Cause.HANG: 1, Cause.CRASH: 2}
# How much later a kill may be told of than what fails because of it: on busy nodes slurmstepd and
# agents notice late. Less than ranks live that survive a failed one (`watch`).
_TOLD_LATE_SECONDS = 3.0
# What people and programs send to a process; the other signals a process brings on itself.
_SENT_SIGNALS = frozenset(
    {
        *(signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
        *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGXCPU),
    }
)
# More suspects than these are no suspects: what many nodes see is not the fault of one.
_MOST_SUSPECTS = 2


def by_ranks(evidence: Evidence) -> Verdict | None:
    """The verdict on a launch that neither the scheduler nor a person has ended."""
    judges = (
        _wrong_setting,
        _replaced,
        _damaged,
        _lost_nodes,
        _root,
        _hang,
        _never_launched,
        _lost_step,
        _by_signal,
        _by_crash,
        _by_silent_end,
        _unfit_nodes,
        _echo,
        _by_code,
    )
    for judge in judges:
        verdict = judge(evidence)
        if verdict is not None:
            return verdict
    return None


# -- what is beyond doubt --------------------------------------------------------------------


def _wrong_setting(evidence: Evidence) -> Verdict | None:
    """What the settings themselves say is wrong everywhere, whoever says it; what depends on the
    node is compared between nodes."""
    wrong = [exit_ for exit_ in evidence.rank_exits if exit_.outcome == "config_error"]
    settled = next((exit_ for exit_ in wrong if not exit_.node_dependent), None)
    if settled is not None:
        return _config_error(settled)
    if not wrong:
        return None
    if evidence.common_problems:
        return _config_error(wrong[0])
    return _of_some_nodes(wrong, evidence) or _config_error(wrong[0])


def _config_error(exit_: RankExit) -> Verdict:
    lines = (f"rank {exit_.rank} on {exit_.node}: {exit_.message}",)
    return Verdict(Cause.CONFIG_ERROR, exit_.message, lines, exit_.rank)


def _of_some_nodes(reports: Sequence[RankExit], evidence: Evidence) -> Verdict | None:
    """The verdict on failures of the same kind that depend on the node; None if all nodes agree.

    Where the probe has found the nodes that lack something, it decides which they are.
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
        *(f"rank {exit_.rank} on {exit_.node}: {exit_.message}" for exit_ in reports[:3]),
        *(f"{one.node}: {one.problem}" for one in unfit[:3]),
    )
    if found is Extent.FEW:
        reason = f"on {', '.join(affected[:8])} alone: {first.message}"
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
    reason = f"on {len(affected)} nodes, and not on others: {first.message}"
    return Verdict(Cause.STORAGE, reason, lines, first.rank, step=evidence.last_step)


def _replaced(evidence: Evidence) -> Verdict | None:
    """A rank has read the epochs later than the supervisor has."""
    for exit_ in evidence.rank_exits:
        if exit_.cause == Cause.SUPERSEDED:
            lines = (f"rank {exit_.rank} on {exit_.node}: {exit_.message}",)
            reason = "a newer launch of this run has taken over"
            return Verdict(Cause.SUPERSEDED, reason, lines, exit_.rank)
    return None


def _damaged(evidence: Evidence) -> Verdict | None:
    """A rank has compared the content of the checkpoint with what was written."""
    for exit_ in evidence.rank_exits:
        if exit_.cause == Cause.BAD_CHECKPOINT:
            lines = (f"rank {exit_.rank} on {exit_.node}: {exit_.message}",)
            step = evidence.resume_step or None
            return Verdict(
                Cause.BAD_CHECKPOINT, exit_.message, lines, exit_.rank, checkpoint_step=step
            )
    return None


def _lost_nodes(evidence: Evidence) -> Verdict | None:
    if evidence.lost_nodes:
        reason = f"nodes do not answer: {', '.join(evidence.lost_nodes[:8])}"
        lines = (*evidence.notice_lines[-2:], *(f.line for f in _hard(evidence)[:3]))
        return Verdict(Cause.NODE_FAILURE, reason, lines, nodes=evidence.lost_nodes)
    if noticed(evidence) is not Cause.NODE_FAILURE:
        return None
    lines = evidence.notice_lines[-3:]
    nodes = failed_nodes(evidence)
    return Verdict(Cause.NODE_FAILURE, "a node of the job failed", lines, nodes=nodes)


def _hard(evidence: Evidence) -> list[Finding]:
    return [f for f in evidence.findings if f.hard and f.role == "root"]


# -- the earliest root -----------------------------------------------------------------------


def _root(evidence: Evidence) -> Verdict | None:
    """Broken hardware, a kill for memory, or the earliest failure of a rank that names its cause.

    A crash that nobody can name is left to `_by_crash`, for a rank that died by a signal may have
    gone before it.
    """
    found = sorted(candidates(evidence), key=lambda one: one.order)
    if evidence.stall is not None:
        found = [one for one in found if one.cause in _HOLD_UP]
    if not found:
        return None
    root = found[0]
    if root.cause is Cause.CRASH and root.tier == 2:
        return None
    elsewhere = _of_some_nodes(_node_dependent(root.cause, evidence), evidence)
    if elsewhere is not None:
        return elsewhere
    if root.cause is Cause.LOAD_FAILED and _first_kill(evidence) is not None:
        return None  # a rank that was killed may be why others could not load
    nodes, hard = _suspects(root, found)
    where = f"rank {root.rank} on {root.node}" if root.rank is not None else root.node
    reason = f"{where or 'the launch'}: {_sentence(root)}"
    lines = tuple(dict.fromkeys(map(_shown, found)))
    loaded = evidence.resume_step if root.cause is Cause.LOAD_FAILED else 0
    return Verdict(
        root.cause,
        reason,
        lines[:3],
        root.rank,
        nodes=nodes,
        hard=hard,
        step=_step(root, evidence),
        checkpoint_step=loaded or None,
    )


def _node_dependent(cause: Cause, evidence: Evidence) -> list[RankExit]:
    """Reports of this cause, if no retry helps against it and each may be wrong on its node only;
    none as soon as one rank says that it is wrong everywhere."""
    if cause not in FINAL_CAUSES:
        return []
    same = [exit_ for exit_ in evidence.rank_exits if exit_.cause == cause]
    return same if all(exit_.node_dependent for exit_ in same) else []


def _suspects(root: Candidate, found: list[Candidate]) -> tuple[tuple[str, ...], bool]:
    """The nodes that the same cause points at, unless they are many and the hardware is whole."""
    same = [one for one in found if one.cause is root.cause and one.hard is root.hard]
    nodes = tuple(dict.fromkeys(one.node for one in same if one.node))
    if root.cause in FINAL_CAUSES:
        return (), False
    if root.hard:
        return nodes, True
    return (nodes if len(nodes) <= _MOST_SUSPECTS else ()), False


def _step(root: Candidate, evidence: Evidence) -> int | None:
    return root.step or evidence.last_step


def _sentence(root: Candidate) -> str:
    return f"{str(root.cause).replace('_', ' ')}: {root.words.strip()[:200]}"


def _shown(one: Candidate) -> str:
    where = [f"rank {one.rank}"] if one.rank is not None else []
    where += [f"on {one.node}"] if one.node else []
    return f"{' '.join(where)}: {one.words}" if where else one.words


# -- hangs, launches, deaths -------------------------------------------------------------------


def _hang(evidence: Evidence) -> Verdict | None:
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
    if not stall.odd:
        return _held_up(evidence) or Verdict(Cause.HANG, reason, step=evidence.last_step)
    first = stall.odd[0]
    others = f" and {len(stall.odd) - 1} more" if len(stall.odd) > 1 else ""
    lines = tuple(f"rank {odd.rank} on {odd.node}: {odd.where}" for odd in stall.odd[:4])
    return Verdict(
        Cause.HANG,
        f"{reason}; rank {first.rank} on {first.node}{others} is elsewhere: {first.where}",
        (*lines, *(f.line for f in _explaining_echoes(evidence)[:2])),
        first.rank,
        nodes=tuple(dict.fromkeys(odd.node for odd in stall.odd if odd.node)),
        step=evidence.last_step,
    )


def _held_up(evidence: Evidence) -> Verdict | None:
    """Nobody is odd, but somebody says that storage or a link was away."""
    echoes = _explaining_echoes(evidence)
    return _verdict_of_echo(echoes, evidence) if echoes else None


def _explaining_echoes(evidence: Evidence) -> list[Finding]:
    return [f for f in _echoes(evidence) if f.cause in _HOLD_UP]


def _never_launched(evidence: Evidence) -> Verdict | None:
    """srun could not start some tasks and ends the others, which is no crash of theirs."""
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


def _lost_step(evidence: Evidence) -> Verdict | None:
    """The slurmstepd of a node is gone; srun kills the tasks of all others."""
    gone = (notice.lost_step for notice in evidence.notices if notice.lost_step is not None)
    place = next(gone, None)
    if place is None:
        return None
    known = evidence.nodes[place : place + 1]
    where = known[0] if known else f"node {place} of the launch"
    reason = f"the slurmstepd of {where} is gone, and srun ended the step"
    lines = (*evidence.notice_lines[-2:], *_task_lines(evidence))
    return Verdict(Cause.CRASH, reason, lines, nodes=known, step=evidence.last_step)


def _by_signal(evidence: Evidence) -> Verdict | None:
    """A rank that was killed leaves no record, so srun's first line about a death comes first."""
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
        suspicion=_suspicion(first, own_words=False),
    )


def _first_kill(evidence: Evidence) -> TaskFailure | None:
    """The death that came first, if it was by a signal; or one that came next to it, if all that
    ranks say is that others are gone. A watchdog that aborts its own rank has killed nobody."""
    deaths = evidence.task_failures
    if not deaths:
        return None
    if deaths[0].code is None:
        return None if _is_abort(deaths[0]) and _echoes(evidence) else deaths[0]
    if not evidence.rank_exits or own_crashes(evidence):
        return None
    kills = (one for one in deaths if one.code is None and not _is_abort(one))
    return next((one for one in kills if one.at - deaths[0].at < _TOLD_LATE_SECONDS), None)


def _is_abort(failure: TaskFailure) -> bool:
    return failure.signal == signal.SIGABRT


def _by_crash(evidence: Evidence) -> Verdict | None:
    """The first rank that failed for a reason of its own, though nobody knows which.

    An exception that no signature knows is one of the program, wherever it was raised.
    """
    crashes = [exit_ for exit_ in evidence.rank_exits if exit_.outcome == "crash"]
    own = own_crashes(evidence)
    if not own:
        return None
    root = min(own, key=_order_of_end)
    shown = sorted(crashes, key=lambda exit_: exit_ is not root)[:3]
    lines = (*(f"rank {c.rank} on {c.node}: {c.message}" for c in shown), *_task_lines(evidence))
    reason = f"rank {root.rank} failed: {root.message}"
    step = root.step or evidence.last_step
    nodes = _nodes_of_the_same(root, own)
    suspicion = Suspicion.NONE
    return Verdict(
        Cause.CRASH, reason, lines, root.rank, nodes=nodes, step=step, suspicion=suspicion
    )


def _order_of_end(exit_: RankExit) -> tuple[float, int]:
    """Without times the order in which they are given counts."""
    return (exit_.ended_at, exit_.rank) if exit_.ended_at else (NEVER, 0)


def _nodes_of_the_same(root: RankExit, own: list[RankExit]) -> tuple[str, ...]:
    print_of_root = fingerprint(Cause.CRASH, root.message)
    same = {e.node for e in own if fingerprint(Cause.CRASH, e.message) == print_of_root}
    return (root.node,) if len(same) <= _MOST_SUSPECTS else ()


def _by_silent_end(evidence: Evidence) -> Verdict | None:
    """A rank left with a code and no record, and all that others say is that a peer is gone."""
    recorded = {exit_.rank for exit_ in evidence.rank_exits}
    telling = [f for f in _echoes(evidence) if f.cause not in _VAGUE_ECHOES]
    silent = [
        failure
        for failure in evidence.task_failures
        if failure.rank is not None and failure.rank not in recorded and failure.code is not None
    ]
    if not recorded or not silent or telling:
        return None
    first = silent[0]
    own_words = any(f.rank == first.rank and f.role == "root" for f in evidence.findings)
    return Verdict(
        Cause.CRASH,
        f"rank {first.rank} on {first.node} left with code {first.code} and said nothing",
        _task_lines(evidence),
        first.rank,
        nodes=(first.node,),
        step=evidence.last_step,
        suspicion=_suspicion(first, own_words),
    )


def _suspicion(failure: TaskFailure, own_words: bool) -> Suspicion:
    if own_words:
        return Suspicion.NONE
    # bash(1), EXIT STATUS: a command that signal N ends has the code 128 + N.
    number = failure.signal if failure.code is None else failure.code - 128
    return Suspicion.OUTSIDE if number in _SENT_SIGNALS else Suspicion.CAUSE


def _unfit_nodes(evidence: Evidence) -> Verdict | None:
    """Nobody names a cause, and the probe has found nodes on which no launch can run.

    A trainer that cannot even read its settings leaves no record, only its code.
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


def _echo(evidence: Evidence) -> Verdict | None:
    """Nothing but failures that follow from others: the one that says most about them."""
    echoes = _echoes(evidence)
    if not echoes or not (evidence.task_failures or evidence.rank_exits or _died(evidence)):
        return None
    verdict = _verdict_of_echo(echoes, evidence)
    return _with_silent_rank(verdict, echoes, evidence)


def _died(evidence: Evidence) -> bool:
    return evidence.srun_exit_code not in (0, None)


def _echoes(evidence: Evidence) -> list[Finding]:
    found = [
        f
        for f in evidence.findings
        if f.role == "cascade" and not (f.is_of_slurm and f.cause is Cause.CRASH)
    ]
    return sorted(found, key=_order_of_echo)


def _order_of_echo(finding: Finding) -> tuple[int, float, int, str]:
    rank = -1 if finding.rank is None else finding.rank
    vagueness = _VAGUE_ECHOES.get(finding.cause, 0)
    return (vagueness, finding.order or NEVER, rank, finding.line)


def _verdict_of_echo(echoes: list[Finding], evidence: Evidence) -> Verdict:
    first = echoes[0]
    node = first.node or _node_of(first.rank, evidence)
    same = {f.node or _node_of(f.rank, evidence) for f in echoes if f.cause is first.cause}
    suspects = (node,) if node and len(same) == 1 else ()
    where = f"rank {first.rank}" if first.rank is not None else first.node
    reason = f"nothing names the root; first seen by {where or 'srun'}: {first.line[:200]}"
    lines = tuple(dict.fromkeys(f.line for f in echoes[:4]))
    return Verdict(first.cause, reason, lines, first.rank, nodes=suspects, step=evidence.last_step)


def _with_silent_rank(verdict: Verdict, echoes: list[Finding], evidence: Evidence) -> Verdict:
    """In a collective that timed out for all but one, that one did not take part."""
    if verdict.cause is not Cause.HANG:
        return verdict
    late = {f.rank for f in echoes if f.cause is Cause.HANG and f.rank is not None}
    silent = sorted(set(range(evidence.world_size)) - late)
    if len(silent) != 1 or evidence.world_size < 3:
        return replace(verdict, rank=None, nodes=())
    node = _node_of(silent[0], evidence)
    words = f"{verdict.reason}; rank {silent[0]} alone did not time out"
    return replace(verdict, reason=words, rank=silent[0], nodes=(node,) if node else ())


def _node_of(rank: int | None, evidence: Evidence) -> str | None:
    return next((exit_.node for exit_ in evidence.rank_exits if exit_.rank == rank), None)


def _by_code(evidence: Evidence) -> Verdict | None:
    """srun's words about the first task that died; its own exit code is masked by its kills."""
    crashes = [exit_ for exit_ in evidence.rank_exits if exit_.outcome == "crash"]
    if evidence.task_failures:
        first = evidence.task_failures[0]
        cause = _CODES.get(first.code or 0, Cause.CRASH)
        if cause is Cause.CONFIG_ERROR and _on_one_node_alone(first, evidence):
            cause = Cause.NODE_FAILURE
        reason = f"task {first.tasks} on {first.node}: {first.what}"
        lines = _task_lines(evidence)
        nodes = (first.node,) if cause is Cause.NODE_FAILURE else ()
        rank = first.rank if cause is not Cause.CRASH else None
        suspicion = Suspicion.UNFIT if nodes else Suspicion.CAUSE
        return Verdict(cause, reason, lines, rank, nodes=nodes, suspicion=suspicion)
    if crashes:
        root = crashes[0]
        lines = (f"rank {root.rank} on {root.node}: {root.message}",)
        return Verdict(Cause.CRASH, f"rank {root.rank} failed: {root.message}", lines, root.rank)
    return None


def _on_one_node_alone(first: TaskFailure, evidence: Evidence) -> bool:
    """No other node of the launch has tasks that left with this code."""
    same = {one.node for one in evidence.task_failures if one.code == first.code}
    return len(evidence.nodes) > 1 and same == {first.node} and first.node in evidence.nodes


def _task_lines(evidence: Evidence) -> tuple[str, ...]:
    return tuple(f"{f.node}: task {f.tasks}: {f.what}" for f in evidence.task_failures[:3])
