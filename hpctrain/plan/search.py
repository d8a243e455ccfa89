"""Which layouts there are, which of them fit, and which fitting one is chosen.

`candidates` is the seam for a planner that predicts time: it enumerates, whoever calls it ranks.
The rule here knows memory only (see `choose`). Belongs here: enumeration and ranking. Does not
belong here: memory formulas, or wording.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import log2

from hpctrain.plan.batch import LOW_BUBBLE, MICRO_BATCHES, bubble_fraction, group_size
from hpctrain.plan.candidate import Candidate, candidate_of
from hpctrain.plan.divisors import divisors
from hpctrain.plan.documents import Recompute
from hpctrain.plan.layout import layout_of, layout_problems, tensor_sizes
from hpctrain.plan.memory import TIGHT_SHARE, floor_bytes, peak_bytes, used_share
from hpctrain.plan.parameters import total_parameters
from hpctrain.plan.placement import stays_inside
from hpctrain.plan.stages import split_problems
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import ParallelSpec, RunSpec

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
_COUNTED = ((False, False), (True, True), (False, True), (True, False))


@dataclass(frozen=True)
class Freedom:
    """What a search may change; everything else is as the spec says."""

    gpus: int
    cp: int
    vpps: tuple[int, ...]
    micro_batches: tuple[int, ...]
    recomputes: tuple[Recompute, ...]


def auto_freedom(spec: RunSpec) -> Freedom:
    """What `parallel: auto` leaves open: tp and pp, and the microbatch if that is `auto` too."""
    micro = spec.batch.micro
    return Freedom(
        gpus=spec.resources.gpus,
        cp=1,
        vpps=(1,),
        micro_batches=MICRO_BATCHES if micro == "auto" else (micro,),
        recomputes=(spec.recompute,),
    )


def hint_freedom(spec: RunSpec, gpus: int) -> Freedom:
    """What a hint may propose: also another microbatch, recomputation or vpp."""
    explicit = spec.parallel if spec.parallel != "auto" else ParallelSpec()
    micro = () if spec.batch.micro == "auto" else (spec.batch.micro,)
    return Freedom(
        gpus=gpus,
        cp=explicit.cp,
        vpps=tuple({1, explicit.vpp}),
        micro_batches=tuple(sorted({*MICRO_BATCHES, *micro}, reverse=True)),
        recomputes=RECOMPUTES,
    )


def candidates(
    spec: RunSpec, profile: ClusterProfile, freedom: Freedom | None = None
) -> Iterator[Candidate]:
    """All layouts that model, batch and number of GPUs allow; memory is not looked at.

    tp: powers of two (and what the heads allow) inside the NVLink domain; pp: divisors of the
    remaining GPUs. Ordered by tp x pp, then larger tp, then larger microbatch. Default freedom:
    that of `parallel: auto`.
    """
    freedom = freedom or auto_freedom(spec)
    for parallel in _parallels(spec, profile, freedom):
        layout = layout_of(parallel, freedom.gpus)
        step = layout.dp * group_size(layout)
        for micro in freedom.micro_batches:
            if spec.batch.global_ % (micro * step) == 0:
                for recompute in freedom.recomputes:
                    yield candidate_of(spec, parallel, freedom.gpus, micro, recompute)


def _parallels(spec: RunSpec, profile: ClusterProfile, freedom: Freedom) -> Iterator[ParallelSpec]:
    for tp, pp in _meshes(spec, profile, freedom):
        for vpp in freedom.vpps:
            if vpp == 1 or pp > 1:
                parallel = _even_split(spec, tp, pp, vpp, freedom.cp)
                if parallel is not None and not layout_problems(spec, parallel):
                    yield parallel


def _meshes(spec: RunSpec, profile: ClusterProfile, freedom: Freedom) -> list[tuple[int, int]]:
    """(tp, pp) by ascending product; of equal products the larger tp first.

    Narayanan et al. 2021, section 3.2: tensor parallelism up to the size of a server, pipeline
    parallelism beyond.
    """
    domain = profile.nvlink.domain
    sizes = [
        tp
        for tp in tensor_sizes(spec.model)
        if tp & (tp - 1) == 0 and stays_inside(1, tp, freedom.gpus, domain)
    ]
    meshes = [
        (tp, pp)
        for tp in sizes
        if freedom.gpus % (tp * freedom.cp) == 0
        for pp in divisors(freedom.gpus // (tp * freedom.cp))
        if pp <= spec.model.layers + 2
    ]
    return sorted(meshes, key=lambda mesh: (mesh[0] * mesh[1], -mesh[0]))


def _even_split(spec: RunSpec, tp: int, pp: int, vpp: int, cp: int) -> ParallelSpec | None:
    """An even split, counting embedding and loss as layers only where nothing else divides.

    Llama 3 405B has 126 layers so that 126 + 2 divides (arXiv 2407.21783, section 3.3.2).
    """
    asked = spec.parallel.sequence_parallel if spec.parallel != "auto" else None
    for embedding, loss in _COUNTED:
        parallel = ParallelSpec(
            tp=tp,
            pp=pp,
            vpp=vpp,
            cp=cp,
            sequence_parallel=asked if tp > 1 else None,
            count_embedding=embedding,
            count_loss=loss,
        )
        if not split_problems(spec.model.layers, parallel):
            return parallel
    return None


def choose(spec: RunSpec, profile: ClusterProfile, found: Sequence[Candidate]) -> Candidate | None:
    """The first layout, in the order given, with a microbatch that fits; None when nothing fits.

    With `candidates` that is the smallest tp x pp: model parallelism costs communication and
    bubbles, data parallelism hardly any. Time is not predicted. Layouts that would fill more than
    94 % of the memory are taken only when there are no others.
    """
    tight: Candidate | None = None
    for _, group in groupby(found, key=lambda candidate: candidate.parallel):
        rated = [(used_share(spec, profile, candidate), candidate) for candidate in group]
        roomy = [candidate for share, candidate in rated if share <= TIGHT_SHARE]
        if roomy:
            return best_micro(roomy)
        fitting = [candidate for share, candidate in rated if share <= 1]
        if fitting and tight is None:
            tight = best_micro(fitting)
    return tight


def best_micro(fitting: Sequence[Candidate]) -> Candidate:
    """The largest microbatch that keeps the pipeline bubble under 10 %, else the least bubble.

    Larger microbatches make larger, more efficient matrix multiplications; fewer of them make a
    larger bubble (Narayanan et al. 2021, section 3.4).
    """
    ordered = sorted(fitting, key=lambda candidate: -candidate.micro_batch)
    quiet = [candidate for candidate in ordered if bubble_of(candidate) <= LOW_BUBBLE]
    return quiet[0] if quiet else ordered[-1]


def bubble_of(candidate: Candidate) -> float:
    """The pipeline bubble as a share of the ideal step time."""
    return bubble_fraction(candidate.layout, candidate.accumulation)


def nearest_fits(
    spec: RunSpec, profile: ClusterProfile, gpus: int | None = None, count: int = 3
) -> tuple[Candidate, ...]:
    """Up to `count` fitting candidates of different layouts, the most similar to the spec first."""
    freedom = hint_freedom(spec, gpus or spec.resources.gpus)
    parameters, capacity = total_parameters(spec.model), int(profile.gpu.memory)
    possible = [
        candidate
        for candidate in candidates(spec, profile, freedom)
        if floor_bytes(spec, candidate.layout, parameters) < capacity
    ]
    ranked = sorted(possible, key=lambda candidate: distance(spec, candidate))
    found: dict[ParallelSpec, Candidate] = {}
    for candidate in ranked:
        known = candidate.parallel in found
        if not known and used_share(spec, profile, candidate) <= TIGHT_SHARE:
            found[candidate.parallel] = candidate
        if len(found) == count:
            break
    return tuple(found.values())


def distance(spec: RunSpec, candidate: Candidate) -> float:
    """How far a candidate is from the spec, for ranking.

    A doubling of an axis counts 1, of the microbatch 0.5, a step of recomputation 0.6; among
    equals a small bubble and a large microbatch come first.
    """
    wanted = spec.parallel if spec.parallel != "auto" else candidate.parallel
    micro = candidate.micro_batch if spec.batch.micro == "auto" else spec.batch.micro
    axes = sum(
        abs(log2(getattr(candidate.parallel, name) / getattr(wanted, name)))
        for name in ("tp", "pp", "vpp")
    )
    steps = RECOMPUTES.index(candidate.recompute) - RECOMPUTES.index(spec.recompute)
    change = axes + 0.5 * abs(log2(candidate.micro_batch / micro)) + 0.6 * abs(steps)
    return change + 0.1 * bubble_of(candidate) - 0.001 * log2(candidate.micro_batch)


def larger_fit(spec: RunSpec, profile: ClusterProfile, limit: int) -> Candidate | None:
    """A fitting candidate on more GPUs than asked for, doubling up to `limit`; None if none."""
    gpus = spec.resources.gpus * 2
    while gpus <= limit:
        whole = gpus <= profile.gpu.per_node or gpus % profile.gpu.per_node == 0
        found = nearest_fits(spec, profile, gpus, count=1) if whole else ()
        if found:
            return found[0]
        gpus *= 2
    return None


def leanest(spec: RunSpec, profile: ClusterProfile, found: Sequence[Candidate]) -> Candidate | None:
    """The candidate that needs the least memory; None when there are no candidates."""
    return min(found, key=lambda candidate: peak_bytes(spec, profile, candidate), default=None)
