"""Find slow ranks, and decide how many slow nodes a launch may give up. Pure.

The trainer measures and names slow parts (`hpctrain.train.speed_check`); it ends its launch only as
far as this module allows. Belongs here: these limits, the verdict, the text for the ledger, and
ranks that are slow while they train. Does not belong here: comparing measurements
(`hpctrain.train.slow_parts`), the action (`judge.policy`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import median, median_low

from hpctrain.judge.blame import most_avoidable
from hpctrain.judge.causes import Cause
from hpctrain.judge.documents import LaunchEvidence, Suspicion, UnfitNode, Verdict
from hpctrain.judge.launch_nodes import Placement
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.run_records import RankTimes
from hpctrain.records.speed_checks import SpeedCheck
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
    count = len(check.slow)
    verdict = "1 part is slow" if count == 1 else f"{count} parts are slow"
    parts.append(verdict if count else "nothing is slow")
    return ", ".join(parts)


# -- Find ranks that compute longer than their peers, window after window. Pure -----------------
# One slow GPU slows down every rank, because all wait for it, so the step time does not show which
# one it is; the time inside forward and backward passes does. Peers are the ranks of one pipeline
# stage: stages differ by what the plan gives them.


# Windows in a row. One window may be slow for a reason that has passed: a page fault, a monitor.
_WINDOWS = 3
StageOf = Callable[[int], int]


@dataclass(frozen=True)
class SlowRank:
    """A rank that computed `factor` times as long as the median of its peers, three times."""

    rank: int
    node: str
    factor: float


class Stragglers:
    """Counts slow windows, over all launches of an attempt."""

    def __init__(self, limit_factor: float) -> None:
        self._limit_factor = limit_factor
        self._last: tuple[int, int] | None = None
        self._streaks: dict[int, int] = {}
        self._current: dict[int, SlowRank] = {}
        self._reported: set[tuple[int, str]] = set()

    @property
    def current(self) -> tuple[SlowRank, ...]:
        """The ranks that are slow now, with their factor in the last window, in rank order."""
        return tuple(self._current[rank] for rank in sorted(self._current))

    def launched(self) -> None:
        """Reset all counts for a new launch, whose ranks may be on other nodes."""
        self._last = None
        self._streaks.clear()
        self._current.clear()

    def window(self, times: RankTimes, stage_of: StageOf) -> tuple[SlowRank, ...]:
        """Add one window, unless it was added before; return the ranks to report.

        Each rank is reported once per node.
        """
        if self._last == (times.epoch, times.last_step):
            return ()
        self._last = (times.epoch, times.last_step)
        factors = slowness(times.compute_seconds, stage_of)
        slow = {rank for rank, factor in enumerate(factors) if factor > self._limit_factor}
        self._streaks = {rank: self._streaks.get(rank, 0) + 1 for rank in slow}
        nodes = dict(enumerate(times.nodes))
        self._current = {
            rank: SlowRank(rank, nodes.get(rank, ""), factors[rank])
            for rank, streak in self._streaks.items()
            if streak >= _WINDOWS
        }
        new = [s for s in self.current if (s.rank, s.node) not in self._reported]
        self._reported.update((s.rank, s.node) for s in new)
        return tuple(new)


def slowness(compute_seconds: Sequence[float], stage_of: StageOf) -> list[float]:
    """For each rank its compute time over the median of its stage; 1 for a rank without peers.

    Of two middle ones the lower is taken: of two ranks the slower one is the slow one.
    """
    by_stage: dict[int, list[float]] = {}
    for rank, seconds in enumerate(compute_seconds):
        by_stage.setdefault(stage_of(rank), []).append(seconds)
    medians = {stage: median_low(seconds) for stage, seconds in by_stage.items()}
    return [
        seconds / medians[stage_of(rank)] if medians[stage_of(rank)] > 0 else 1.0
        for rank, seconds in enumerate(compute_seconds)
    ]


def one_stage(rank: int) -> int:
    """All ranks are peers."""
    return 0
