"""Why the winner wins: what every other mesh and every single change of the winner would lose.

Belongs here: choosing the runners-up worth knowing and their differences. Does not belong here:
text for the terminal (`hpctrain.cli.explain_text`), or the choice itself (`ranking`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hpctrain.plan.cost.plan_memory import TIGHT_SHARE, candidate_memory
from hpctrain.plan.cost.prediction import step_parts
from hpctrain.plan.documents import (
    ORDERS,
    RECOMPUTES,
    Change,
    Explanation,
    FrontPoint,
    MemoryBreakdown,
    RunnerUp,
    Shortage,
    StepParts,
)
from hpctrain.plan.mesh.candidate import Candidate
from hpctrain.plan.mesh.columns import Columns, columns_of, joined
from hpctrain.plan.planner import Decision
from hpctrain.plan.search.layouts import Found
from hpctrain.plan.search.ranking import pareto, preferred

Rows = NDArray[np.intp]
FREE_FIELDS = ("vpp", "micro_batch", "recompute", "zero", "shard_gpus", "offload", "order")
TOO_LARGE_SHOWN = 3
WORTH_KNOWING = 1.5  # of the winner's step: nobody would buy memory for anything slower


def explain(decision: Decision, top: int = 8, given: Candidate | None = None) -> Explanation:
    """The winner, up to `top` other meshes and up to `top` variants of the winner.

    Of each mesh the best candidate is shown; of meshes that do not fit at all, which are at most
    three, the leanest candidate, with what it lacks. `given`: a layout to compare besides.
    """
    found, row = decision.found, decision.row
    best = group_winners(found, decision)
    mesh = found.columns.mesh
    others = _shown(decision, best[mesh[best] != mesh[row]], top)
    changed = variants(found, row, top)
    rows = [row, *map(int, others), *map(int, changed)]
    labels = [""] * (1 + len(others)) + [_difference(found.columns, row, int(n)) for n in changed]
    candidates = [found.candidate(number) for number in rows]
    told = _runners(decision, [*candidates, *([given] if given else [])], [*labels, ""])
    cut = 1 + len(others)
    return Explanation(
        goal=decision.request.goal,
        counts=found.counts,
        groups=len(best),
        winner=told[0],
        given=told[len(rows)] if given else None,
        others=tuple(told[1:cut]),
        variants=tuple(told[cut : len(rows)]),
        front=_front(found),
    )


def group_winners(found: Found, decision: Decision) -> Rows:
    """The best row of each mesh (tp, pp, cp, ep), best mesh first; those that do not fit last,
    by what they lack."""
    ranked = preferred(found)
    chosen = np.concatenate([[decision.row], ranked[ranked != decision.row]])
    tight = np.flatnonzero(found.fits & ~found.roomy)
    key = found.step_seconds if found.timed else found.peak_bytes
    rest = np.flatnonzero(~found.fits)
    order = np.concatenate(
        [
            chosen,
            tight[np.argsort(key[tight], kind="stable")],
            rest[np.argsort(found.peak_bytes[rest], kind="stable")],
        ]
    ).astype(np.intp)
    _, first = np.unique(found.columns.mesh[order], return_index=True)
    return np.asarray(order[np.sort(first)], dtype=np.intp)


def _shown(decision: Decision, others: Rows, top: int) -> Rows:
    """The first `top` of other meshes. Up to a third of them do not fit: of those that would not be
    much slower than the winner, the ones that lack least."""
    found = decision.found
    fits = found.fits[others]
    large = others[~fits]
    if found.timed and len(large):
        parts = _parts(decision, found.columns.take(large))
        seconds = np.array([part.total_seconds for part in parts])
        slow = seconds > WORTH_KNOWING * found.step_seconds[decision.row]
        large = large[np.lexsort((found.peak_bytes[large], slow))]
    large = large[: min(TOO_LARGE_SHOWN, top // 3)]
    return np.concatenate([others[fits][: max(0, top - len(large))], large])


def variants(found: Found, row: int, top: int) -> Rows:
    """Rows with the winner's mesh and exactly one other thing changed, the fastest first."""
    columns = found.columns
    same = np.flatnonzero(columns.mesh == columns.mesh[row])
    differences = sum(
        (getattr(columns, name)[same] != getattr(columns, name)[row]).astype(int)
        for name in FREE_FIELDS
    )
    single = same[np.asarray(differences) == 1]
    key = found.step_seconds if found.timed else found.peak_bytes
    return np.asarray(single[np.argsort(key[single], kind="stable")][:top], dtype=np.intp)


def _runners(
    decision: Decision, candidates: Sequence[Candidate], labels: Sequence[str]
) -> list[RunnerUp]:
    """One document for each candidate; the first one is what the others are compared with."""
    parts = _parts(decision, joined([columns_of(candidate) for candidate in candidates]))
    told = []
    for number, (candidate, label) in enumerate(zip(candidates, labels, strict=False)):
        memory = candidate_memory(decision.request, candidate)
        pair = (parts[0], parts[number]) if parts else None
        told.append(_runner(candidate, label, memory, decision.found.capacity_bytes, pair))
    return told


def _parts(decision: Decision, columns: Columns) -> list[StepParts]:
    """Step times of a few rows, also of those that do not fit; empty without a known GPU."""
    if not decision.found.timed:
        return []
    return step_parts(decision.request, columns, decision.found.freedom.stages)


def _runner(
    candidate: Candidate,
    label: str,
    memory: tuple[MemoryBreakdown, ...],
    capacity: int,
    pair: tuple[StepParts, StepParts] | None,
) -> RunnerUp:
    peak = max(stage.total_bytes for stage in memory)
    winner, own = pair if pair else (None, None)
    return RunnerUp(
        description=str(candidate),
        differs=label or str(candidate.layout),
        layout=candidate.layout,
        micro_batch=candidate.micro_batch,
        recompute=candidate.recompute,
        step_seconds=own.total_seconds if own else None,
        peak_bytes=peak,
        slower=own.total_seconds / winner.total_seconds - 1 if own and winner else None,
        changes=_changes(winner, own) if own and winner else (),
        shortage=_shortage(memory, capacity),
        tight=TIGHT_SHARE * capacity < peak <= capacity,
    )


def _changes(winner: StepParts, own: StepParts) -> tuple[Change, ...]:
    """Every part that differs, the largest difference first."""
    whole = winner.total_seconds
    found = [
        Change(
            part=name.removesuffix("_seconds"),
            share=(getattr(own, name) - getattr(winner, name)) / whole,
        )
        for name in StepParts.model_fields
    ]
    return tuple(sorted((one for one in found if one.share), key=lambda one: -abs(one.share)))


def _shortage(memory: tuple[MemoryBreakdown, ...], capacity: int) -> Shortage | None:
    stage = max(range(len(memory)), key=lambda index: memory[index].total_bytes)
    missing = memory[stage].total_bytes - capacity
    if missing <= 0:
        return None
    parts = memory[stage].model_dump(exclude={"reserved_bytes"})
    largest = max(parts, key=lambda name: parts[name])
    return Shortage(missing_bytes=missing, stage=stage, component=largest.removesuffix("_bytes"))


def _difference(columns: Columns, winner: int, row: int) -> str:
    """`vpp 3`, `micro 2`, `recompute full`: the one thing that a variant has changed."""
    (name,) = [
        name
        for name in FREE_FIELDS
        if getattr(columns, name)[row] != getattr(columns, name)[winner]
    ]
    value = int(getattr(columns, name)[row])
    words = {
        "micro_batch": f"micro {value}",
        "recompute": f"recompute {RECOMPUTES[value]}" if name == "recompute" else "",
        "order": f"order {ORDERS[value]}" if name == "order" else "",
        "offload": "with offload" if value else "without offload",
        "shard_gpus": f"shards of {value} GPUs" if value else "shards over all GPUs",
    }
    return words.get(name, f"{name} {value}")


def _front(found: Found) -> tuple[FrontPoint, ...]:
    return tuple(
        FrontPoint(
            description=str(found.candidate(int(row))),
            gpus=found.freedom.gpus,
            step_seconds=float(found.step_seconds[row]),
            peak_bytes=round(float(found.peak_bytes[row])),
        )
        for row in pareto(found)
    )
