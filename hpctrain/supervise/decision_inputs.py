"""What there is to work with when the supervisor decides: nodes, blame, checkpoints.

Belongs here: putting it together from the ledger of nodes and the run directory. Does not belong
here: deciding (`policy`), weighing what is in the ledger of nodes (`hpctrain.nodes`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.checkpoints.discover import checkpoints
from hpctrain.errors import SlurmError
from hpctrain.nodes.blame import (
    Avoid,
    Witness,
    blame,
    blame_problem,
    most_avoidable,
    nodes_to_avoid,
    unfit_nodes,
)
from hpctrain.nodes.record import KINDS, EvidenceKind, NodeEvidence, NodeLedger
from hpctrain.store.jobs import generation, started_ids, successor_ids
from hpctrain.store.ledger import Event
from hpctrain.supervise.context import AttemptContext, say
from hpctrain.supervise.evidence.gather import keeps_nodes
from hpctrain.supervise.judge.causes import FAILURE_CAUSES, Cause
from hpctrain.supervise.judge.documents import Situation, Suspicion, Verdict
from hpctrain.supervise.judge.launch_nodes import Allocation, full_nodes, least_nodes
from hpctrain.supervise.judge.probe_answers import ProbeResult

if TYPE_CHECKING:
    from hpctrain.supervise.launching import Ended

_GOOD_CHECKPOINTS = 16
# What a node is blamed for where that does not follow from the cause.
_KINDS = {Suspicion.OUTSIDE: EvidenceKind.SIGNALLED, Suspicion.UNFIT: EvidenceKind.UNHEALTHY}


def allocation_of(context: AttemptContext) -> Allocation:
    """The nodes that Slurm has given to this attempt, in its order."""
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
    """The situation after a launch. What it says about nodes goes into their ledger first."""
    config = context.config
    evidence = ended.evidence if ended is not None else None
    if ended is not None:
        _blame(context, allocation, ended)
    probe = ended.probe if ended is not None else None
    avoid = _avoid(context, allocation, probe)
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
        unfit=_unfit(context, allocation, verdict, probe),
        good_checkpoints=_good_checkpoints(context),
        followed=_is_followed(context),
        storage_away=context.ledger.flush() is not None,
        restarts=context.attempt.restart_count,
    )


def _good_checkpoints(context: AttemptContext) -> tuple[int, ...]:
    with contextlib.suppress(OSError):
        found = checkpoints(context.run_layout.checkpoints)
        return tuple(one.step for one in found if one.good)[:_GOOD_CHECKPOINTS]
    return ()


def _is_followed(context: AttemptContext) -> bool:
    """Where Slurm does not requeue: another job of the run waits for this one to end. True where
    the ledger cannot tell."""
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


def _blame(context: AttemptContext, allocation: Allocation, ended: Ended) -> None:
    """Write down what the launch says about nodes."""
    ledger = _ledger(context)
    if ledger is None or ended.verdict.cause not in FAILURE_CAUSES:
        return
    if ended.verdict.cause is Cause.STORAGE and ended.evidence is None:
        return  # nothing was launched: no node has been tried
    _append(ledger, _evidence(context, allocation, ended))


def _evidence(context: AttemptContext, allocation: Allocation, ended: Ended) -> list[NodeEvidence]:
    verdict, evidence = ended.verdict, ended.evidence
    witness = _witness(context)
    progressed = evidence is not None and (evidence.checkpoint_step or 0) > evidence.resume_step
    lost = evidence.lost_nodes if evidence is not None else ()
    names_lost_nodes = verdict.cause is Cause.NODE_FAILURE and bool(verdict.nodes)
    found = blame(
        witness,
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
            witness,
            one.node,
            str(problem),
            hard=problem.hard,
            blocks=problem.blocks,
            gpu=problem.gpu,
        )
        for one in broken
        for problem in one.problems
    ]
    slow = [
        witness.says(EvidenceKind.SLOW, one.node, f"rank {one.rank} computes {one.factor:.2f} x")
        for one in ended.slow_ranks
        if one.node
    ]
    return [*found, *checks, *slow]


def _planned(context: AttemptContext, nodes: Collection[str]) -> frozenset[str]:
    """Those of `nodes` that administrators are taking out of service.

    None if Slurm is silent, or ends the job: then every second is needed to put it back.
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
    """Write down which node an attempt was lost with that has left no word, if one was.

    `gone`: those that are down or have booted since, by Slurm's word. Where none is known it was
    the batch node, whose supervisor is gone; that weighs half.
    """
    ledger = _ledger(context)
    if ledger is None or verdict.cause is not Cause.NODE_FAILURE or not lost.nodes:
        return
    try:
        nodes = tuple(context.slurm.hostnames(lost.nodes))
        states = context.slurm.node_states(nodes)
    except SlurmError:
        return
    planned = frozenset(one.node for one in states.values() if one.planned)
    witness = _witness(context)
    if gone:
        found = list(
            blame(
                witness,
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
        entry = witness.says(EvidenceKind.LOST, batch, verdict.reason, weight=weight)
        found = [] if batch in planned else [entry]
    _append(ledger, found)


def _witness(context: AttemptContext) -> Witness:
    config = context.config
    return Witness(time.time(), config.cluster, config.run_id, context.job_id)


def _append(ledger: NodeLedger, evidence: list[NodeEvidence]) -> None:
    """A ledger that cannot be written is no reason to stop."""
    try:
        ledger.append(evidence)
    except OSError as error:
        say(f"the node ledger cannot be written: {error.strerror}")


def _unfit(
    context: AttemptContext, allocation: Allocation, verdict: Verdict, probe: ProbeResult | None
) -> tuple[str, ...]:
    """Nodes on which this run cannot work as they are, no more than a job may avoid.

    Found unfit now, or within a day and not asked again since.
    """
    ledger, config = _ledger(context), context.config
    now_unfit = [one.node for one in probe.unfit_with_reason] if probe is not None else []
    usable = probe.usable if probe is not None else ()
    before: tuple[str, ...] = ()
    if ledger is not None:
        with contextlib.suppress(OSError):
            before = unfit_nodes(ledger.read(), config.cluster, config.run_id, time.time())
    nodes = dict.fromkeys(
        (*verdict.unfit_nodes, *now_unfit, *(node for node in before if node not in usable))
    )
    most = most_avoidable(config.cluster_nodes, least_nodes(config, allocation))
    return tuple(nodes)[:most]


def _avoid(context: AttemptContext, allocation: Allocation, probe: ProbeResult | None) -> Avoid:
    ledger, config = _ledger(context), context.config
    if ledger is None:
        return Avoid()
    try:
        evidence = ledger.read()
    except OSError:
        return Avoid()
    return nodes_to_avoid(
        evidence,
        config.cluster,
        time.time(),
        usable_nodes=config.cluster_nodes,
        needed_nodes=least_nodes(config, allocation),
        allocated=allocation.nodes,
        homes=probe.homes if probe is not None else None,
    )
