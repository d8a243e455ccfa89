"""How many replicas have to be up so that enough of them answer for the wanted share of time.

Belongs here: outages of one replica from the profile's rates, spares, what a preemption breaks off,
what successors before the time limit cost. Does not belong here: how many replicas carry the
traffic (`search`), drawing outages: with independent nodes the probability has a closed form, which
tests compare with drawn ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hpctrain.base.units import Duration, short_duration
from hpctrain.plan.forecast.rates import (
    RESTART_SECONDS,
    SPOT_PREEMPTION_SECONDS,
    SPOT_WAIT_SECONDS,
    node_mtbf_seconds,
)
from hpctrain.serve.plan.traffic import Floats
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.service import DrainSpec

# A successor is submitted so early that it answers before its predecessor ends, although loading
# takes half as long again as it did.
OVERLAP_OF_LOAD = 1.5
# From the end of reading weights to the first answer: memory profile, compilation, CUDA graphs.
# vLLM logs 60 to 120 s for 70B on eight GPUs ("init engine ... took"); assumed in the middle.
ENGINE_START_SECONDS = 90.0
_MOST_SPARES = 64


@dataclass(frozen=True)
class Outages:
    """How one replica and its nodes are away: shares of time, and where that comes from.

    `node_share`: because a node has failed, with all replicas on it. `own_share`: because Slurm has
    taken this replica's GPUs.
    """

    node_share: float
    own_share: float
    replicas_per_node: int
    reasons: tuple[str, ...] = ()

    @property
    def away_share(self) -> float:
        return 1 - (1 - self.node_share) * (1 - self.own_share)


def load_seconds(
    profile: ClusterProfile, weight_bytes: float, nodes: int, given: Duration | None
) -> float:
    """Return the time from the start of a job to its first answer.

    Weights are read at the rate of the site's first file system, limited by the cards of the nodes.
    """
    if given is not None:
        return float(given)
    filesystem = profile.filesystems[0]
    rate = float(filesystem.read_bandwidth)
    if filesystem.kind != "local":
        network = profile.network
        rate = min(rate, nodes * network.nics_per_node * float(network.nic_bandwidth))
    return weight_bytes / rate + ENGINE_START_SECONDS


def outages(
    profile: ClusterProfile, partition: str | None, *, gpus: int, load: float, drain: float
) -> Outages:
    """Compute how long one replica is away, from the rates of the profile, else published ones.

    After the failure of a node the job starts on another one. A preempted job waits until GPUs are
    free; the profile does not say how long, and that wait is nothing where its own rate is given.
    """
    reliability = profile.reliability
    nodes = -(-gpus // profile.gpu.per_node)
    failure = node_mtbf_seconds(profile) / nodes
    restart = max(float(reliability.restart) if reliability else RESTART_SECONDS, load)
    text = (
        f"a replica's node{'s fail' if nodes > 1 else ' fails'} once in "
        f"{short_duration(failure)}, and it is back after {short_duration(restart)}"
    )
    reasons = [text]
    own = 0.0
    chosen = profile.slurm.partition(partition)
    emulated = profile.gpu.emulated  # nobody rents it out
    if chosen is not None and chosen.preemption.mode != "off" and not emulated:
        known = reliability is not None and reliability.preemption_mtbf is not None
        mtbf, wait = SPOT_PREEMPTION_SECONDS, SPOT_WAIT_SECONDS
        if reliability is not None and reliability.preemption_mtbf is not None:
            mtbf, wait = float(reliability.preemption_mtbf), 0.0
        lost = min(drain, float(chosen.preemption.grace)) + wait + load
        own = lost / (mtbf + lost)
        source = "" if known else " (published for spot: the profile has no preemption_mtbf)"
        reasons.append(
            f"Slurm takes its GPUs once in {short_duration(mtbf)}{source}, and it is back after "
            f"{short_duration(lost)}"
        )
    return Outages(
        node_share=restart / (failure + restart),
        own_share=own,
        replicas_per_node=max(1, profile.gpu.per_node // gpus),
        reasons=tuple(reasons),
    )


def availability(outages: Outages, needed: int, count: int) -> float:
    """Return the probability that at least `needed` of `count` replicas answer.

    Nodes fail independently, and take all replicas on them along; replicas are taken independently.
    With one replica per node that is the binomial distribution.
    """
    each = min(outages.replicas_per_node, count)
    whole, rest = divmod(count, each)
    node = _answering_of_node(outages, each)
    distribution = np.ones(1)
    for _ in range(whole):
        distribution = np.convolve(distribution, node)
    if rest:
        distribution = np.convolve(distribution, _answering_of_node(outages, rest))
    return float(min(1.0, distribution[needed:].sum()))


def _answering_of_node(outages: Outages, replicas: int) -> Floats:
    """Return the probabilities that 0, 1, ... of the replicas on one node answer."""
    up = 1 - outages.own_share
    own = [
        math.comb(replicas, k) * up**k * outages.own_share ** (replicas - k)
        for k in range(replicas + 1)
    ]
    found = (1 - outages.node_share) * np.asarray(own)
    found[0] += outages.node_share
    return found


def spares_for(outages: Outages, needed: int, wanted: float) -> int | None:
    """Return the least number of spare replicas for the wanted availability; None: beyond reach."""
    for spare in range(_MOST_SPARES + 1):
        if availability(outages, needed, needed + spare) >= wanted:
            return spare
    return None


@dataclass(frozen=True)
class Drained:
    """What a preempted replica can finish: seconds that it has, and requests that it cannot."""

    seconds: float
    lost_requests: float
    warning: str | None = None


def drained(
    profile: ClusterProfile,
    partition: str | None,
    drain: DrainSpec,
    *,
    replica_rate: float,
    e2e_seconds: Floats,
) -> Drained:
    """Compute what a preemption breaks off: requests that need longer than the grace leaves.

    A replica that gets r requests per second has r E[max(0, X - g)] of them whose remaining time is
    above g, with X the time of a request (the remaining time of a stationary renewal process;
    Ross, "Introduction to Probability Models", section 7.5.3).
    """
    longest, notice = float(drain.longest), float(drain.notice)
    chosen = profile.slurm.partition(partition)
    seconds, grace = longest, None
    if chosen is not None and chosen.preemption.mode != "off":
        grace = float(chosen.preemption.grace)
        seconds = min(longest, max(0.0, grace - notice))
    lost = replica_rate * float(np.maximum(0.0, e2e_seconds - seconds).mean())
    warning = None
    if grace is not None and grace < notice + longest:
        what = (
            f"{lost:,.1f} requests that have begun are broken off each time"
            if lost >= 0.05
            else "that is enough for the requests of this plan"
        )
        warning = (
            f"the grace of {short_duration(grace)} of partition {chosen.name if chosen else ''} "
            f"does not hold `drain` ({short_duration(notice)} notice and "
            f"{short_duration(longest)}): a preempted replica has {short_duration(seconds)}, and "
            f"{what}"
        )
    return Drained(seconds, lost, warning)


def shares_of_day(hours: Mapping[str, float]) -> list[tuple[float, float]]:
    """Turn a table of times of day into hours and the share of traffic in them.

    Before the first time of the day the share of the last one holds.
    """
    starts = sorted((int(time[:2]) + int(time[3:]) / 60, share) for time, share in hours.items())
    ends = [start for start, _ in starts[1:]] + [starts[0][0] + 24]
    return [(end - start, share) for (start, share), end in zip(starts, ends, strict=True)]


def overlap_share(walltime: float | None, load: float) -> float:
    """Return how many more replica-hours successors take that load before the time limit."""
    if walltime is None:
        return 0.0
    overlap = OVERLAP_OF_LOAD * load
    return math.inf if overlap >= walltime else overlap / (walltime - overlap)
