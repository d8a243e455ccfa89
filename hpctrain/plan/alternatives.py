"""Compare the winner of a search with other meshes and with single changes of the winner.

Belongs here: selecting the runners-up and their differences. Does not belong here: text for the
terminal (`hpctrain.job.plan_text`), or the choice itself (`search.layouts`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hpctrain.plan.cost.from_spec import case_of
from hpctrain.plan.cost.prediction import candidate_memory, step_parts
from hpctrain.plan.documents import (
    Change,
    Explanation,
    FrontPoint,
    RunnerUp,
    Shortage,
    StepParts,
)
from hpctrain.plan.layout_words import ORDERS
from hpctrain.plan.mesh.candidate import Candidate, Columns, columns_of, joined
from hpctrain.plan.planner import Decision
from hpctrain.plan.search.layouts import (
    Found,
    comfortable,
    deviations,
    pareto,
    preferred,
    probabilities,
    winner_faster,
)
from hpctrain.plan.uncertainty.intervals import belief_of

Rows = NDArray[np.intp]
# What can differ beside the mesh; which modules and layers is a part of how to recompute.
RECOMPUTATION: tuple[str, ...] = ("recompute", "recompute_modules", "recompute_layers")
FREE_FIELDS: tuple[tuple[str, ...], ...] = (
    *(("vpp",), ("etp",), ("micro_batch",), RECOMPUTATION, ("offloaded_layers",)),
    *(("zero",), ("shard_gpus",), ("offload",), ("order",)),
)
TOO_LARGE_SHOWN = 3
MAX_SLOWDOWN = 1.5  # of the winner's step: more memory is not worth it for slower layouts


def explain(decision: Decision, top: int = 8, given: Candidate | None = None) -> Explanation:
    """Describe the winner, up to `top` other meshes and up to `top` variants of the winner.

    Each mesh is represented by its best candidate. At most three meshes do not fit; each is
    represented by its leanest candidate, with the memory it lacks. `given`: one more layout to
    compare.
    """
    found, row = decision.found, decision.row
    best = group_winners(found, decision)
    mesh = found.columns.mesh
    others = _select_meshes(decision, best[mesh[best] != mesh[row]], top)
    changed = variants(found, row, top)
    rows = [row, *map(int, others), *map(int, changed)]
    labels = [""] * (1 + len(others)) + [_difference(found.columns, row, int(n)) for n in changed]
    candidates = [found.candidate(number) for number in rows]
    documents = _describe(decision, [*candidates, *([given] if given else [])], [*labels, ""])
    cut = 1 + len(others)
    return Explanation(
        goal=decision.request.goal,
        counts=found.counts,
        groups=len(best),
        winner=documents[0],
        given=documents[len(rows)] if given else None,
        others=tuple(documents[1:cut]),
        variants=tuple(documents[cut : len(rows)]),
        front=tuple(
            FrontPoint(
                description=str(found.candidate(int(point))),
                gpus=found.freedom.gpus,
                step_seconds=float(found.step_seconds[point]),
                peak_bytes=round(float(found.peak_bytes[point])),
            )
            for point in pareto(found)
        ),
    )


def group_winners(found: Found, decision: Decision) -> Rows:
    """Find the best row of each mesh (tp, pp, cp, ep), best mesh first.

    Meshes that do not fit are last, in the order of the memory they lack.
    """
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


def _select_meshes(decision: Decision, others: Rows, top: int) -> Rows:
    """Select `top` of the other meshes.

    Up to a third of them do not fit: of those that would not be much slower than the winner, the
    ones that lack least.
    """
    found = decision.found
    fits = found.fits[others]
    large = others[~fits]
    if found.timed and len(large):
        parts = _parts(decision, found.columns.take(large))
        seconds = np.array([part.total_seconds for part in parts])
        slow = seconds > MAX_SLOWDOWN * found.step_seconds[decision.row]
        large = large[np.lexsort((found.peak_bytes[large], slow))]
    large = large[: min(TOO_LARGE_SHOWN, top // 3)]
    return np.concatenate([others[fits][: max(0, top - len(large))], large])


def variants(found: Found, row: int, top: int) -> Rows:
    """Find rows with the winner's mesh and exactly one other thing changed, the fastest first."""
    columns = found.columns
    same = np.flatnonzero(columns.mesh == columns.mesh[row])
    changed = [_changed(columns, names, same, row) for names in FREE_FIELDS]
    single = same[np.sum(changed, axis=0) == 1]
    key = found.step_seconds if found.timed else found.peak_bytes
    return np.asarray(single[np.argsort(key[single], kind="stable")][:top], dtype=np.intp)


def _describe(
    decision: Decision, candidates: Sequence[Candidate], labels: Sequence[str]
) -> list[RunnerUp]:
    """Make one document for each candidate; all are compared with the first one."""
    capacity = decision.found.capacity_bytes
    request = decision.request
    columns = joined([columns_of(candidate) for candidate in candidates])
    parts = _parts(decision, columns)
    odds: list[float] = []  # that the first candidate is faster; empty without intervals
    if parts and belief_of(request) is not None:
        seconds = np.array([part.total_seconds for part in parts])
        odds = [float(value) for value in winner_faster(request, columns, seconds)]
    documents = []
    for number, (candidate, label) in enumerate(zip(candidates, labels, strict=False)):
        memory = candidate_memory(request, candidate)
        stage = max(range(len(memory)), key=lambda index: memory[index].total_bytes)
        peak = memory[stage].total_bytes
        shortage = None
        if peak > capacity:
            components = memory[stage].model_dump(exclude={"reserved_bytes"})
            largest = max(components, key=lambda name: components[name])
            shortage = Shortage(
                missing_bytes=peak - capacity,
                stage=stage,
                component=largest.removesuffix("_bytes"),
            )
        slower, changes = None, list[Change]()
        if parts:
            own, winner = parts[number], parts[0]
            slower = own.total_seconds / winner.total_seconds - 1
            for name in StepParts.model_fields:
                share = (getattr(own, name) - getattr(winner, name)) / winner.total_seconds
                changes.append(Change(part=name.removesuffix("_seconds"), share=share))
        # it fits, but is less sure to do so than others are preferred to be
        exact = np.array([float(peak)])
        deviation = deviations(request, case_of(request, columns_of(candidate)), exact)
        sure = float(probabilities(exact, deviation, capacity)[0]) >= comfortable(request)
        documents.append(
            RunnerUp(
                description=str(candidate),
                differs=label or str(candidate.layout),
                layout=candidate.layout,
                micro_batch=candidate.micro_batch,
                recompute=candidate.mode,
                step_seconds=parts[number].total_seconds if parts else None,
                peak_bytes=peak,
                slower=slower,
                changes=tuple(sorted((c for c in changes if c.share), key=lambda c: -abs(c.share))),
                shortage=shortage,
                tight=peak <= capacity and not sure,
                winner_faster=odds[number] if odds else None,
            )
        )
    return documents


def _parts(decision: Decision, columns: Columns) -> list[StepParts]:
    """Compute step times of a few rows, fitting or not; empty without a known GPU."""
    if not decision.found.timed:
        return []
    return step_parts(decision.request, columns)


def _changed(columns: Columns, names: Sequence[str], rows: Rows, row: int) -> NDArray[np.bool_]:
    """Tell which of some rows differ from one in any of these fields."""
    own = [getattr(columns, name)[rows] != getattr(columns, name)[row] for name in names]
    return np.asarray(np.any(own, axis=0), dtype=bool)


def _difference(columns: Columns, winner: int, row: int) -> str:
    """Format the one thing that a variant has changed: `vpp 3`, `recompute selective (mlp)`."""
    one = np.array([row], dtype=np.intp)
    (names,) = [names for names in FREE_FIELDS if _changed(columns, names, one, winner)[0]]
    if names == RECOMPUTATION:
        return f"recompute {columns.candidate(row).recomputed}"
    (name,) = names
    value = int(getattr(columns, name)[row])
    texts = {
        "micro_batch": f"micro {value}",
        "offloaded_layers": f"activations of {value} layers on the host",
        "etp": f"etp {value}" if value else "etp as by default",
        "order": f"order {ORDERS[value]}" if name == "order" else "",
        "offload": "with offload" if value else "without offload",
        "shard_gpus": f"shards of {value} GPUs" if value else "shards over all GPUs",
    }
    return texts.get(name, f"{name} {value}")
