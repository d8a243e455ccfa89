"""Judge data loading and slow ranks, for which the other ranks wait.

All ranks synchronize in each step, so the slowest rank determines its time. Belongs here: those two
questions. Does not belong here: messages (`messages`).
"""

from __future__ import annotations

from statistics import median, median_low

from hpctrain.diagnose.facts import (
    DiagnosisInput,
    Measurement,
    Planned,
    Suggestion,
    TopicFinding,
    fine,
    stage_of,
    unknown,
)
from hpctrain.records.run_records import RankTimes

# Below these shares of a step no change is worth it.
_DATA_SHARE = 0.05
_SLOW_SHARE = 0.02
# A rank slower by less than that is within the usual spread of GPUs.
_SLOW_FACTOR = 1.1
NO_WINDOW = "no window of steps is through yet: ranks.json comes after 20 steps of a launch"
OLD_RECORD = "ranks.json is of an older version of hpctrain: it has compute times only"


def data_loading(facts: DiagnosisInput) -> TopicFinding:
    """Judge whether the step waits for the next batch on any rank."""
    ranks, step = facts.ranks, facts.step_seconds
    if ranks is None or step is None:
        return unknown("data", NO_WINDOW)
    if not ranks.data_seconds:
        return unknown("data", OLD_RECORD)
    worst = max(range(len(ranks.data_seconds)), key=lambda rank: ranks.data_seconds[rank])
    longest, middle = ranks.data_seconds[worst], median(ranks.data_seconds)
    proof = Measurement(
        words=f"waiting for the next batch: {longest:.4g} s of {step:.4g} s on "
        f"{ranks.named(worst)}, {middle:.4g} s in the middle of {len(ranks.data_seconds)} ranks",
        source=ranks.source,
    )
    if longest < _DATA_SHARE * step:
        return fine("data", f"at most {longest / step:.1%} of a step", proof)
    everywhere = middle >= 0.7 * longest
    who = "every rank waits" if everywhere else f"{ranks.named(worst)} waits, the others for it"
    return TopicFinding(
        topic="data",
        answer="yes",
        words=f"{who}: {longest / step:.0%} of a step",
        evidence=(proof,),
        remedies=tuple(_faster_reading(facts.planned, ranks, worst, everywhere)),
        gain_seconds=longest,
    )


def _faster_reading(
    planned: Planned | None, ranks: RankTimes, worst: int, everywhere: bool
) -> list[Suggestion]:
    if not everywhere:
        where = ranks.nodes[worst] if worst < len(ranks.nodes) else "its node"
        return [Suggestion(words=f"look at the file system and the other jobs of {where}")]
    found = []
    if planned is not None:
        share = max(1, planned.profile.cpus_for_tasks // planned.profile.gpu.per_node)
        cpus = planned.spec.resources.cpus_per_gpu or share
        if cpus < share:
            found.append(
                Suggestion(
                    words=f"ask for a GPU's share of the node's CPUs, {share} instead of {cpus}: "
                    "all but one of them read ahead",
                    changes=(f"resources.cpus_per_gpu={share}",),
                )
            )
        if local := [disk for disk in planned.profile.filesystems if disk.kind == "local"]:
            words = f"copy the dataset to {local[0].path} of each node before training"
            found.append(Suggestion(words=words))
    words = "prepare the data once (`hpctrain data prepare`), so that less is decoded while reading"
    return [*found, Suggestion(words=words)]


def imbalance(facts: DiagnosisInput) -> TopicFinding:
    """Judge whether a rank computes longer than its peers, those of its pipeline stage."""
    ranks, step = facts.ranks, facts.step_seconds
    if ranks is None or step is None:
        return unknown("imbalance", NO_WINDOW)
    layout = facts.planned.plan.layout if facts.planned else None
    compute = ranks.compute_seconds
    stages = [stage_of(layout, rank) for rank in range(len(compute))]
    by_stage: dict[int, list[float]] = {}
    for stage, seconds in zip(stages, compute, strict=True):
        by_stage.setdefault(stage, []).append(seconds)
    peers = [median_low(by_stage[stage]) for stage in stages]
    factors = [own / peer if peer > 0 else 1.0 for own, peer in zip(compute, peers, strict=True)]
    worst = max(range(len(factors)), key=factors.__getitem__)
    excess = compute[worst] - peers[worst]
    proof = Measurement(
        words=f"{ranks.named(worst)} computes {compute[worst]:.4g} s, the middle of its "
        f"peers {peers[worst]:.4g} s",
        source=ranks.source,
    )
    if len(factors) == 1:
        return fine("imbalance", "there is one rank only")
    if factors[worst] < _SLOW_FACTOR or excess < _SLOW_SHARE * step:
        words = f"at most {factors[worst] - 1:.0%} above the middle, {excess / step:.1%} of a step"
        return fine("imbalance", words, proof)
    slow = [rank for rank, factor in enumerate(factors) if factor >= _SLOW_FACTOR]
    nodes = ", ".join(sorted({ranks.nodes[rank] for rank in slow if rank < len(ranks.nodes)}))
    look = (
        f"have {nodes or 'its node'} looked at: clocks, temperature, other processes; "
        "`hpctrain nodes` shows what other runs met there"
    )
    return TopicFinding(
        topic="imbalance",
        answer="yes",
        words=_who_is_slow(ranks, slow, worst, factors[worst]),
        evidence=(proof, *_others_wait(ranks, worst)),
        remedies=(
            Suggestion(words=look),
            Suggestion(words="go on without it", changes=("supervise.exclude_nodes=act",)),
        ),
        gain_seconds=excess,
        at_least=bool(ranks.backward_seconds) and max(ranks.backward_seconds) > 0,
    )


def _who_is_slow(ranks: RankTimes, slow: list[int], worst: int, factor: float) -> str:
    nodes = sorted({ranks.nodes[rank] for rank in slow if rank < len(ranks.nodes)})
    whole = [
        node
        for node in nodes
        if all(rank in slow for rank, its in enumerate(ranks.nodes) if its == node)
        and list(ranks.nodes).count(node) > 1
    ]
    if whole and len(whole) == len(nodes):
        return f"all ranks on {', '.join(whole)} are slow, up to {factor:.2f} times the middle"
    others = f", and {len(slow) - 1} more ranks" if len(slow) > 1 else ""
    return f"{ranks.named(worst)} takes {factor:.2f} times the middle{others}"


def _others_wait(ranks: RankTimes, worst: int) -> tuple[Measurement, ...]:
    """Show that the other ranks wait in their backward passes (megatron-core: after them)."""
    if not ranks.backward_seconds or not ranks.rest_seconds:
        return ()
    waits = [b + r for b, r in zip(ranks.backward_seconds, ranks.rest_seconds, strict=True)]
    words = (
        f"the others wait for it: their backward passes and the rest take {median(waits):.4g} s, "
        f"its own {waits[worst]:.4g} s"
    )
    return (Measurement(words=words, source=ranks.source),) if median(waits) > waits[worst] else ()
