"""Decide whether a launch checks its speed, and how many slow nodes it may give up. Pure.

The trainer measures and names slow parts (`hpctrain.train.speed_check`); it ends its launch only as
far as this module allows. Belongs here: these limits, the verdict, the text for the ledger. Does
not belong here: comparing measurements (`hpctrain.train.slow_parts`), the action
(`judge.policy`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import median

from hpctrain.judge.blame import most_avoidable
from hpctrain.judge.causes import Cause
from hpctrain.judge.documents import LaunchEvidence, Suspicion, UnfitNode, Verdict
from hpctrain.judge.launch_nodes import Placement
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.speed_checks import SlowPart, SpeedCheck
from hpctrain.records.supervise_config import SuperviseConfig

# Launches in a row, without a new checkpoint, that may end because of slow nodes. Each costs a
# start; where the second set of nodes is slow again, the cluster is like that. It is below every
# budget of node failures, which therefore never stops a run because of slow nodes.
_MOST_ENDED = 2
LEAVE, REPORT = "leave", "report"
_MOST_LINES = 4


def replaceable_nodes(
    config: SuperviseConfig,
    placement: Placement,
    nodes: Collection[str],
    checked: Collection[str],
    events: Sequence[Event],
) -> int | None:
    """Return how many slow nodes the launch on `nodes` may give up; None: it does not check.

    It does not check `nodes` that an earlier launch of this attempt has `checked`. A spare node
    takes the place of a slow one. Without spares the job is requeued once, with the slow nodes
    excluded; but a run of flexible size would shrink instead, so it keeps its nodes.
    """
    if config.speed_check == "off" or (checked and set(nodes) <= set(checked)):
        return None
    if config.speed_check == "report":
        return 0
    ended = launches_ended(events)
    if ended >= _MOST_ENDED:
        return 0
    most = most_avoidable(config.cluster_nodes, len(nodes))
    requeues = config.continuation == "requeue" and len(config.shapes) <= 1 and ended == 0
    return min(most, max(placement.spares, most if requeues else 0))


def launches_ended(events: Sequence[Event]) -> int:
    """Count the launches that slow nodes have ended since the last new checkpoint."""
    count = 0
    for event in events:
        if event.event is EventKind.SPEED_CHECKED and event.action == LEAVE:
            count += 1
        progressed = (event.checkpoint_step or 0) > (event.resume_step or 0)
        if event.event is EventKind.LAUNCH_ENDED and progressed:
            count = 0
        if event.event is EventKind.CONTROL and event.action == "resume":
            count = 0
    return count


def slow_nodes_of(check: SpeedCheck | None) -> tuple[UnfitNode, ...]:
    """List the nodes whose speed ended the launch; empty where it trained on."""
    return certain_nodes(check) if check is not None and check.leaves else ()


def certain_nodes(check: SpeedCheck) -> tuple[UnfitNode, ...]:
    """List the nodes that are certainly slow, each with its slowest part, the slowest first."""
    found: dict[str, UnfitNode] = {}
    for part in check.slow:
        for node in part.nodes if part.certain else ():
            found.setdefault(node, UnfitNode(node, part.message))
    return tuple(found.values())


def by_speed(evidence: LaunchEvidence) -> Verdict | None:
    """Judge a launch whose ranks ended it because of slow nodes."""
    ended = [exit_ for exit_ in evidence.rank_exits if exit_.cause == Cause.NODE_FAILURE]
    slow = evidence.slow_nodes
    if not ended:
        return None
    if not slow:  # their record cannot be read: the next launch measures again
        return Verdict(Cause.NODE_FAILURE, ended[0].words, suspicion=Suspicion.NONE)
    nodes = tuple(one.node for one in slow)
    return Verdict(
        Cause.NODE_FAILURE,
        f"slow before training: {slow[0].problem}",
        tuple(one.problem for one in slow[:_MOST_LINES]),
        nodes=nodes,
        suspicion=Suspicion.SLOW,
    )


def summary(check: SpeedCheck) -> str:
    """Summarise a check in one line for the ledger and the log."""
    products = [rate for rate in check.product_flops_per_second if rate]
    parts = [f"{len(check.nodes)} ranks checked in {check.seconds:.0f} s"]
    if products:
        parts.append(f"median of matrix products {median(products) / 1e12:.3g} TFLOP/s")
    for axis in check.axes:
        rates = [rate for rate in axis.bus_bytes_per_second if rate]
        if rates:
            parts.append(f"{axis.axis} {median(rates) / 1e9:.3g} GB/s")
    parts.append(_verdict_of(check.slow))
    return ", ".join(parts)


def _verdict_of(slow: Sequence[SlowPart]) -> str:
    if not slow:
        return "nothing is slow"
    return "1 part is slow" if len(slow) == 1 else f"{len(slow)} parts are slow"
