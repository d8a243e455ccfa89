"""Turn failures into evidence about nodes, and evidence into nodes to avoid.

Pure: evidence and times come in, decisions go out. Belongs here: who is blamed for what, adding
up, limits. Does not belong here: the file (`hpctrain.records.node_record`), and whether anything is
done (`hpctrain.judge.policy`).

Policy: a node is avoided while the weights against it add up to 100. A weight counts in full for
one half-life of its kind, half for the next, and nothing after the fourth. No more than a tenth
of the cluster (but two nodes) is avoided, and never so much that a job could not start any more:
a node that is blamed wrongly costs little, a job that waits for ever costs everything.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hpctrain.records.node_record import KINDS, NODE_NAME, EvidenceKind, NodeEvidence, short

EXCLUDE_SCORE = 100.0
_HALF_LIVES = 4
_LEAST_CAP, _CAPPED_SHARE = 2, 0.1
# A hundredth of what it takes to avoid a node; less is not worth a line in the ledger.
_LEAST_WEIGHT = 1.0
_EPSILON = 1e-9

# What the nodes that a verdict names are blamed for. Causes of which no node is guilty (the
# program, its data, its memory, a full disk, the scheduler) are not in here.
_BY_CAUSE = {
    "node_failure": EvidenceKind.LOST,
    "prolog_failure": EvidenceKind.PROLOG,
    "node_command": EvidenceKind.UNHEALTHY,
    "launch_failure": EvidenceKind.FIRST_FAILED,
    "gpu_error": EvidenceKind.GPU_ERROR,
    "hang": EvidenceKind.ODD_STACK,
    "crash": EvidenceKind.FIRST_FAILED,
    "fabric": EvidenceKind.FIRST_FAILED,
    "storage": EvidenceKind.FIRST_FAILED,
    "suspect_numerics": EvidenceKind.FIRST_FAILED,
}
# The kernel's line (`NVRM: Xid (PCI:0000:3b:00): 94, ...`) or the words of a verdict (`XID 94`).
_CONTAINED = re.compile(r"\bxid\b(?:\s*\([^)]*\))?[\s:]*94\b", re.IGNORECASE)


@dataclass(frozen=True)
class EvidenceSource:
    """The source of evidence: a run's job on a cluster at a time (seconds since the epoch)."""

    time: float
    cluster: str
    run_id: str
    job_id: int | None = None

    def evidence(
        self,
        kind: EvidenceKind,
        node: str,
        reason: str,
        *,
        gpu: str | None = None,
        weight: float | None = None,
    ) -> NodeEvidence:
        """Make a piece of evidence; its weight is that of its kind unless one is given."""
        return NodeEvidence(
            time=self.time,
            cluster=self.cluster,
            node=node,
            run_id=self.run_id,
            job_id=self.job_id,
            kind=kind,
            weight=KINDS[kind].weight if weight is None else weight,
            reason=short(reason),
            gpu=gpu,
        )


def blame(
    source: EvidenceSource,
    *,
    cause: str,
    reason: str,
    nodes: Sequence[str],
    job_nodes: Sequence[str],
    hard: bool = False,
    lost: Collection[str] = (),
    planned: Collection[str] = (),
    kind: EvidenceKind | None = None,
    short_launch: bool = False,
    gpu: str | None = None,
) -> tuple[NodeEvidence, ...]:
    """Collect the evidence about nodes that one failed launch gives.

    `cause` and `reason` are the verdict's, `nodes` its suspects, `hard` that their hardware is
    broken beyond doubt, `job_nodes` all nodes of the launch, `lost` those that do not answer any
    more, `kind` what the suspects are blamed for (None: what the cause says), `short_launch` that
    the launch failed without a new checkpoint. Where most of the nodes are lost at once, something
    between them is broken and nobody is blamed; nor is a node for being lost that administrators
    have taken out of service (`planned`).
    """
    gone = [node for node in _names(lost) if is_singular(lost, job_nodes)]
    if kind is None:
        kind = EvidenceKind.HARDWARE if hard else _BY_CAUSE.get(cause)
        if not hard and cause == "gpu_error" and _CONTAINED.search(reason):
            kind = EvidenceKind.GPU_ERROR_CONTAINED
    suspects = [node for node in _names(nodes) if node not in gone]
    if kind is EvidenceKind.LOST and not is_singular([*suspects, *gone], job_nodes):
        suspects = []
    if kind is EvidenceKind.LOST:
        suspects = [node for node in suspects if node not in planned]
    missed = [node for node in gone if node not in planned]
    found = [source.evidence(EvidenceKind.LOST, node, f"{cause}: {reason}") for node in missed]
    if kind is not None:
        found += [source.evidence(kind, node, reason, gpu=gpu) for node in suspects]
    if short_launch and cause in _BY_CAUSE:
        named = {one.node for one in found} | set(planned)
        found += _shared_evidence(source, reason, job_nodes, named)
    return tuple(found)


def blame_problem(
    source: EvidenceSource,
    node: str,
    problem: str,
    *,
    hard: bool,
    blocks: bool,
    gpu: str | None = None,
) -> NodeEvidence:
    """Make the evidence of a failed check of one node that has passed on others.

    `hard`: its hardware is broken beyond doubt; `blocks`: no launch can use it as it is.
    """
    soft = EvidenceKind.UNHEALTHY if blocks else EvidenceKind.DOUBTFUL
    return source.evidence(EvidenceKind.HARDWARE if hard else soft, node, problem, gpu=gpu)


def is_singular(some: Collection[str], job_nodes: Collection[str]) -> bool:
    """True if what some nodes of a job share may be the fault of these nodes.

    What most nodes share is the fault of something between them: storage, network, controller.
    """
    return len(some) <= 1 or 2 * len(some) <= len(job_nodes)


def _shared_evidence(
    source: EvidenceSource, reason: str, job_nodes: Sequence[str], named: Collection[str]
) -> list[NodeEvidence]:
    """Divide a weight among all other nodes of the launch, unless the share is too small."""
    kind = EvidenceKind.SHORT_ATTEMPT
    weight = KINDS[kind].weight / max(1, len(job_nodes))
    if weight < _LEAST_WEIGHT:
        return []
    others = [node for node in _names(job_nodes) if node not in named]
    words = f"in a launch that failed: {reason}"
    return [source.evidence(kind, node, words, weight=weight) for node in others]


def _names(nodes: Collection[str]) -> list[str]:
    """Plain names, once each: where Slurm was silent a whole node list may stand for its nodes."""
    return [node for node in dict.fromkeys(nodes) if re.fullmatch(NODE_NAME, node)]


# -- adding up -------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeScore:
    """The weights that count now against one node, and the evidence behind them, oldest first."""

    node: str
    weights: tuple[float, ...]
    evidence: tuple[NodeEvidence, ...]

    @property
    def score(self) -> float:
        return sum(self.weights)

    @property
    def is_bad(self) -> bool:
        return self.score >= EXCLUDE_SCORE - _EPSILON

    @property
    def is_proven(self) -> bool:
        """Bad by what only machines do, or by what several programs have met independently.

        Runs of one name are one program: what it does to a node again and again is its own doing.
        """
        machine, by_program = 0.0, defaultdict[str, float](float)
        for one, weight in zip(self.evidence, self.weights, strict=True):
            if KINDS[one.kind].of_machine:
                machine += weight
            else:
                program = program_of(one.run_id)
                by_program[program] = max(by_program[program], weight)
        return machine + sum(by_program.values()) >= EXCLUDE_SCORE - _EPSILON

    @property
    def runs(self) -> int:
        """How many runs have seen something."""
        return len({one.run_id for one in self.evidence})

    @property
    def heaviest(self) -> NodeEvidence:
        """The newest of the heaviest pieces of evidence."""
        return max(self.evidence, key=lambda one: (one.weight, one.time))


def weight_now(evidence: NodeEvidence, now: float) -> float:
    """What a piece of evidence weighs at `now` (seconds since the epoch).

    Halved after each whole half-life and not in between, so that 100 is 100 for a day (soft) or a
    week (hard). Evidence from the future (clocks differ) counts as new.
    """
    age_seconds = max(0.0, now - evidence.time)
    half_lives = math.floor(age_seconds / KINDS[evidence.kind].half_life_seconds)
    return 0.0 if half_lives >= _HALF_LIVES else float(evidence.weight / 2**half_lives)


def scores(
    evidence: Sequence[NodeEvidence],
    cluster: str,
    now: float,
    homes: Mapping[str, str] | None = None,
) -> tuple[NodeScore, ...]:
    """Nodes of `cluster` with anything against them now, the worst first.

    `evidence` is in the order in which it was written. `homes` tells in which node a GPU (by UUID)
    is now: evidence about a GPU follows it, since machines are renamed and parts moved.
    """
    by_node: dict[str, list[NodeEvidence]] = defaultdict(list)
    for one in evidence:
        if one.cluster != cluster:
            continue
        if one.kind is EvidenceKind.FORGIVEN:
            by_node.pop(one.node, None)
            continue
        by_node[(homes or {}).get(one.gpu or "", one.node)].append(one)
    found = []
    for node, seen in by_node.items():
        counted: dict[object, NodeEvidence] = {}
        for number, one in enumerate(seen):
            same = (one.run_id, one.kind, one.gpu) if not KINDS[one.kind].repeats else number
            counted.pop(same, None)
            counted[same] = one
        current = tuple(one for one in counted.values() if weight_now(one, now) > 0)
        found.append(NodeScore(node, tuple(weight_now(one, now) for one in current), current))
    return tuple(
        sorted((one for one in found if one.score > 0), key=lambda one: (-one.score, one.node))
    )


def program_of(run_id: str) -> str:
    """The name that people gave to the runs of one program: run ids are `NAME-xxxx`."""
    return run_id.rpartition("-")[0] or run_id


def nodes_against(
    evidence: Sequence[NodeEvidence], cluster: str, run_id: str, now: float, kind: EvidenceKind
) -> tuple[str, ...]:
    """Nodes with evidence of this kind by this run within a day, and not forgiven since."""
    own = [one for one in evidence if one.run_id == run_id or one.kind is EvidenceKind.FORGIVEN]
    return tuple(
        score.node
        for score in scores(own, cluster, now)
        if any(
            one.kind is kind and weight >= KINDS[kind].weight - _EPSILON
            for one, weight in zip(score.evidence, score.weights, strict=True)
        )
    )


# -- deciding --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Avoid:
    """`nodes` to avoid, the worst first; `dropped` are bad, too, but cannot be avoided.

    `here` are those of `nodes` that the job holds now. `why` says all of it in words, "" when
    there is no bad node.
    """

    nodes: tuple[str, ...] = ()
    here: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    why: str = ""


def nodes_to_avoid(
    evidence: Sequence[NodeEvidence],
    cluster: str,
    now: float,
    *,
    usable_nodes: int,
    needed_nodes: int,
    allocated: Collection[str] = (),
    cap: int | None = None,
    homes: Mapping[str, str] | None = None,
) -> Avoid:
    """The nodes that a job of `needed_nodes` should not run on, out of `usable_nodes` (0: unknown).

    Of equally bad ones those that the job holds come first. With so many needed that none may be
    left out, all are dropped and `why` says so.
    """
    bad = [one for one in scores(evidence, cluster, now, homes) if one.is_bad]
    bad.sort(key=lambda one: (-one.score, one.node not in allocated, one.node))
    limit = most_avoidable(usable_nodes, needed_nodes, cap)
    kept, dropped = bad[:limit], bad[limit:]
    return Avoid(
        nodes=tuple(one.node for one in kept),
        here=tuple(one.node for one in kept if one.node in allocated),
        dropped=tuple(one.node for one in dropped),
        why=_why(kept, dropped, usable_nodes, needed_nodes),
    )


def most_avoidable(usable_nodes: int, needed_nodes: int, cap: int | None = None) -> int:
    """How many nodes a job of `needed_nodes` may avoid, out of `usable_nodes` (0: unknown)."""
    if cap is None:
        cap = max(_LEAST_CAP, int(usable_nodes * _CAPPED_SHARE))
    if usable_nodes <= 0:
        return cap
    return max(0, min(cap, usable_nodes - needed_nodes))


def _why(kept: Sequence[NodeScore], dropped: Sequence[NodeScore], usable: int, needed: int) -> str:
    words = "; ".join(f"{one.node}: {story(one)}" for one in kept)
    if not dropped:
        return words
    names = ", ".join(one.node for one in dropped)
    if not kept:
        return f"{names} would be avoided, but the job needs {needed} of {usable} nodes"
    return f"{words}; {names} as well, but no more may be left out"


def story(one: NodeScore) -> str:
    """Summarise the evidence against a node: `XID 79 GPU fell off the bus, 2 runs, score 200`."""
    worst = one.heaviest
    runs = f", {one.runs} runs" if one.runs > 1 else ""
    return f"{worst.reason or KINDS[worst.kind].words}{runs}, score {one.score:.0f}"
