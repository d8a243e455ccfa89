"""Collect the inputs of the restart policy: nodes, blame, checkpoints.

Belongs here: reading the node ledger and the run directory, and recording blame. Does not belong
here: deciding (`judge.policy`), weighing evidence against nodes (`hpctrain.judge.blame`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.base import clock
from hpctrain.base.errors import SlurmError, StorageError
from hpctrain.checkpoints.discover import good_steps
from hpctrain.judge.blame import (
    EvidenceSource,
    blame,
    blame_problem,
    most_avoidable,
    nodes_against,
    nodes_to_avoid,
)
from hpctrain.judge.causes import FAILURE_CAUSES, Cause
from hpctrain.judge.documents import Situation, Suspicion, Verdict
from hpctrain.judge.launch_nodes import Allocation, full_nodes, least_nodes
from hpctrain.judge.probe_results import ProbeResult
from hpctrain.judge.slow_nodes import certain_nodes
from hpctrain.records.jobs import generation, started_ids, successor_ids
from hpctrain.records.ledger import Event
from hpctrain.records.node_record import KINDS, EvidenceKind, NodeEvidence, NodeLedger
from hpctrain.supervise.act.execute import read_skip_list
from hpctrain.supervise.context import AttemptContext, log_message
from hpctrain.supervise.evidence.gather import keeps_nodes

if TYPE_CHECKING:
    from hpctrain.supervise.srun_launch import Ended

_GOOD_CHECKPOINTS = 16
# Causes after which the run may go back to another checkpoint than the newest. For all others the
# files of checkpoints are not looked at again.
_GOES_BACK = frozenset(
    {Cause.BAD_CHECKPOINT, Cause.LOAD_FAILED, Cause.DIVERGED, Cause.SUSPECT_NUMERICS}
)
# Kind of evidence against a node where it does not follow from the cause.
_KINDS = {
    Suspicion.OUTSIDE: EvidenceKind.SIGNALLED,
    Suspicion.UNFIT: EvidenceKind.UNHEALTHY,
    Suspicion.SLOW: EvidenceKind.SLOW_CHECKED,
}


def allocation_of(context: AttemptContext) -> Allocation:
    """The nodes that Slurm has allocated to this attempt, in Slurm's order."""
    nodes = context.attempt.nodes
    try:
        return Allocation(tuple(context.slurm.hostnames(nodes)))
    except SlurmError:
        return Allocation((nodes,))


def assess(
    context: AttemptContext,
    allocation: Allocation,
    verdict: Verdict,
    ended: Ended | None = None,
) -> Situation:
    """Record the launch's evidence against nodes, then describe the situation after it."""
    config = context.config
    evidence = ended.evidence if ended is not None else None
    if ended is not None:
        _record_blame(context, allocation, ended)
    probe = ended.probe if ended is not None else None
    good_checkpoints: tuple[int, ...] = ()
    if verdict.cause in _GOES_BACK:
        with contextlib.suppress(OSError):
            good_checkpoints = good_steps(context.run_layout.checkpoints, _GOOD_CHECKPOINTS)
    if verdict.cause is Cause.STORAGE:
        context.ledger.write_on()  # whether it can be written decides
    skip_list_problem = ""
    try:
        read_skip_list(context.run_layout)
    except StorageError as error:
        skip_list_problem = str(error)
    except OSError:
        pass  # a fault of storage, which may pass
    past: tuple[NodeEvidence, ...] = ()
    ledger = _ledger(context)
    if ledger is not None:
        with contextlib.suppress(OSError):
            past = ledger.read()
    avoid = nodes_to_avoid(
        past,
        config.cluster,
        clock.now(),
        usable_nodes=config.cluster_nodes,
        needed_nodes=least_nodes(config, allocation),
        allocated=allocation.nodes,
        homes=probe.homes if probe is not None else None,
    )
    keeps = evidence is None or keeps_nodes(evidence)
    return Situation(
        keeps_nodes=keeps and not context.signals.final,
        allocated_nodes=len(allocation.nodes),
        healthy_nodes=len(allocation.healthy),
        needed_nodes=full_nodes(config, allocation),
        least_nodes=least_nodes(config, allocation),
        exclude=avoid.nodes,
        exclude_here=tuple(node for node in avoid.here if node in allocation.healthy),
        why_exclude=avoid.why,
        unfit=_unfit(context, allocation, verdict, probe, past),
        good_checkpoints=good_checkpoints,
        followed=_has_successor(context),
        storage_away=context.ledger.flush() is not None,
        skip_list_problem=skip_list_problem,
        restarts=context.attempt.restart_count,
    )


def _has_successor(context: AttemptContext) -> bool:
    """Whether another job of the run waits for this one to end, where Slurm does not requeue.

    True where Slurm requeues, and where the ledger cannot be read.
    """
    config = context.config
    if config.continuation not in ("chain", "singleton", "array"):
        return True
    try:
        events = context.ledger.events()
    except OSError:
        return True
    if config.continuation == "chain":
        return bool(successor_ids(events, context.job_id))
    return len(started_ids(generation(events))) < config.continuation_jobs


def _ledger(context: AttemptContext) -> NodeLedger | None:
    path = context.config.node_ledger
    return NodeLedger(Path(path)) if path else None


def _record_blame(context: AttemptContext, allocation: Allocation, ended: Ended) -> None:
    """Append the launch's evidence against nodes to the node ledger."""
    ledger = _ledger(context)
    verdict, evidence = ended.verdict, ended.evidence
    if ledger is None or verdict.cause not in FAILURE_CAUSES:
        return
    if verdict.cause is Cause.STORAGE and evidence is None:
        return  # nothing was launched: no node has been tried
    source = _evidence_source(context)
    progressed = evidence is not None and (evidence.checkpoint_step or 0) > evidence.resume_step
    lost = evidence.lost_nodes if evidence is not None else ()
    names_lost_nodes = verdict.cause is Cause.NODE_FAILURE and bool(verdict.nodes)
    blamed = blame(
        source,
        cause=str(verdict.cause),
        reason=verdict.reason,
        nodes=() if verdict.suspicion is Suspicion.NONE else verdict.nodes,
        job_nodes=allocation.nodes,
        hard=verdict.hard,
        lost=lost,
        planned=_planned(context, {*verdict.nodes, *lost}) if lost or names_lost_nodes else (),
        kind=_KINDS.get(verdict.suspicion),
        short_launch=verdict.suspicion is Suspicion.CAUSE and not progressed,
    )
    broken = ended.probe.broken if ended.probe is not None else ()
    checks = [
        blame_problem(
            source,
            report.node,
            str(problem),
            hard=problem.hard,
            blocks=problem.blocks,
            gpu=problem.gpu,
        )
        for report in broken
        for problem in report.problems
    ]
    slow = [
        source.evidence(
            EvidenceKind.SLOW, rank.node, f"rank {rank.rank} computes {rank.factor:.2f} x"
        )
        for rank in ended.slow_ranks
        if rank.node
    ]
    check = ended.speed_check
    reported = [
        source.evidence(EvidenceKind.SLOW_CHECKED, one.node, one.problem)
        for one in (certain_nodes(check) if check is not None and not check.leaves else ())
    ]
    _append(ledger, [*blamed, *checks, *slow, *reported])


def _planned(context: AttemptContext, nodes: Collection[str]) -> frozenset[str]:
    """Those of `nodes` that administrators are taking out of service.

    Empty if Slurm does not answer. Also empty if Slurm is ending the job: then every second is
    needed for the requeue.
    """
    if context.signals.final:
        return frozenset()
    try:
        states = context.slurm.node_states(nodes)
    except SlurmError:
        return frozenset()
    return frozenset(node for node, state in states.items() if state.planned)


def blame_lost_attempt(
    context: AttemptContext, lost: Event, verdict: Verdict, gone: Sequence[str]
) -> None:
    """Record which node an attempt was lost with, when its supervisor recorded no end.

    `gone`: nodes that are down or have booted since, according to Slurm. Without any, the batch
    node is blamed with half the weight, because its supervisor is gone.
    """
    ledger = _ledger(context)
    if ledger is None or verdict.cause is not Cause.NODE_FAILURE or not lost.nodes:
        return
    try:
        nodes = tuple(context.slurm.hostnames(lost.nodes))
        states = context.slurm.node_states(nodes)
    except SlurmError:
        return
    planned = frozenset(state.node for state in states.values() if state.planned)
    source = _evidence_source(context)
    if gone:
        evidence = list(
            blame(
                source,
                cause=str(verdict.cause),
                reason=verdict.reason,
                nodes=(),
                job_nodes=nodes,
                lost=gone,
                planned=planned,
            )
        )
    else:
        weight = KINDS[EvidenceKind.LOST].weight / 2
        batch = nodes[0]
        entry = source.evidence(EvidenceKind.LOST, batch, verdict.reason, weight=weight)
        evidence = [] if batch in planned else [entry]
    _append(ledger, evidence)


def _evidence_source(context: AttemptContext) -> EvidenceSource:
    config = context.config
    return EvidenceSource(clock.now(), config.cluster, config.run_id, context.job_id)


def _append(ledger: NodeLedger, evidence: list[NodeEvidence]) -> None:
    """Append to the node ledger; a ledger that cannot be written is no reason to stop."""
    try:
        ledger.append(evidence)
    except OSError as error:
        log_message(f"the node ledger cannot be written: {error.strerror}")


def _unfit(
    context: AttemptContext,
    allocation: Allocation,
    verdict: Verdict,
    probe: ProbeResult | None,
    past: Sequence[NodeEvidence],
) -> tuple[str, ...]:
    """Nodes on which this run cannot work as they are, at most as many as a job may exclude.

    Found unfit by this probe, or within the last day and not probed again since; or measured to be
    slow within the last day, where the spec excludes slow nodes.
    """
    config = context.config
    now_unfit = [report.node for report in probe.unfit_with_reason] if probe is not None else []
    usable = probe.usable if probe is not None else ()
    known = (past, config.cluster, config.run_id, clock.now())
    before = nodes_against(*known, EvidenceKind.UNHEALTHY)
    # a probe measures no speed
    excludes = config.speed_check == "exclude"
    slow = nodes_against(*known, EvidenceKind.SLOW_CHECKED) if excludes else ()
    nodes = dict.fromkeys(
        (*verdict.unfit_nodes, *now_unfit, *(node for node in before if node not in usable), *slow)
    )
    return tuple(nodes)[: most_avoidable(config.cluster_nodes, least_nodes(config, allocation))]
