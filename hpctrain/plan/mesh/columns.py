"""Hold many candidates in columns: one array of shape [candidates] for each property.

Belongs here: the record, selecting rows from it, and one row as a `Candidate`. Does not belong
here: which rows there are (`grid`), what they cost (`hpctrain.plan.cost`) or which one is
taken (`ranking`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.plan.documents import RECOMPUTES
from hpctrain.plan.layout_words import ORDERS
from hpctrain.plan.mesh.candidate import Candidate, candidate_of
from hpctrain.plan.mesh.recomputation import module_bits, modules_of
from hpctrain.plan.mesh.stages import Split
from hpctrain.spec.run import ParallelSpec, RunSpec

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Columns:
    """Candidates in columns. `recompute` and `order` are positions in RECOMPUTES and ORDERS.

    `recompute_modules`: bits (`recomputation`), `recompute_layers`: 0 where `full` covers all.
    `offloaded_layers`: those whose activations wait in the host's memory.

    `etp`: 0 where it is the default. `uneven`: the stages are listed, by the spec or as
    `spread_layers` has them. `layers_first`, `layers_middle`, `layers_last`: transformer layers of
    those pipeline stages (all chunks together); with pp 1 all three are the whole model, with
    pp 2 the middle is the longer one.
    """

    tp: Ints
    pp: Ints
    vpp: Ints
    cp: Ints
    ep: Ints
    etp: Ints
    dp: Ints
    sequence_parallel: Ints
    count_embedding: Ints
    count_loss: Ints
    uneven: Ints
    layers_first: Ints
    layers_middle: Ints
    layers_last: Ints
    micro_batch: Ints
    accumulation: Ints
    recompute: Ints
    recompute_modules: Ints
    recompute_layers: Ints
    offloaded_layers: Ints
    zero: Ints
    shard_gpus: Ints
    offload: Ints
    order: Ints

    def __len__(self) -> int:
        return len(self.tp)

    def take(self, rows: Any) -> Columns:
        """Select the rows of an index array, a mask or a slice."""
        return replace(self, **{name: getattr(self, name)[rows] for name in COLUMN_NAMES})

    @property
    def gpus(self) -> Ints:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def mesh(self) -> NDArray[np.int64]:
        """One number for each combination of tp, pp, cp and ep, to group by."""
        key = np.zeros(len(self), dtype=np.int64)
        for name in ("tp", "pp", "cp", "ep"):
            column = getattr(self, name).astype(np.int64)
            key = key * (int(column.max(initial=0)) + 1) + column
        return key


COLUMN_NAMES = tuple(field.name for field in fields(Columns))


def joined(parts: Sequence[Columns]) -> Columns:
    """Join the rows of several tables, in order; an empty table for none."""
    if not parts:
        return Columns(**{name: np.zeros(0, dtype=np.int32) for name in COLUMN_NAMES})
    return Columns(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMN_NAMES}
    )


def spread_layers(layers: int, pp: int) -> Split:
    """Split layers into stages that differ by one layer at most.

    The first and the last stage are the last to get one more, because they also compute embedding
    and loss.
    """
    each, more = divmod(layers, pp)
    order = [*range(1, pp - 1), 0, pp - 1]
    longer = set(order[:more])
    return tuple(each + (index in longer) for index in range(pp))


def candidate_at(spec: RunSpec, columns: Columns, row: int, stages: Split | None) -> Candidate:
    """Convert one row to a candidate; `stages` is the split that the spec lists, if any."""
    value = {name: int(getattr(columns, name)[row]) for name in COLUMN_NAMES}
    if stages is None and value["uneven"]:
        stages = spread_layers(spec.model.layers, value["pp"])
    parallel = ParallelSpec(
        tp=value["tp"],
        pp=value["pp"],
        vpp=value["vpp"],
        cp=value["cp"],
        ep=value["ep"],
        etp=value["etp"] or None,
        order=ORDERS[value["order"]],
        sequence_parallel=bool(value["sequence_parallel"]) if value["tp"] > 1 else None,
        stages=stages,
        count_embedding=bool(value["count_embedding"]),
        count_loss=bool(value["count_loss"]),
    )
    gpus = value["tp"] * value["pp"] * value["cp"] * value["dp"]
    return candidate_of(
        spec,
        parallel,
        gpus,
        value["micro_batch"],
        RECOMPUTES[value["recompute"]],
        zero=value["zero"],
        shard_gpus=value["shard_gpus"] or None,
        offload=bool(value["offload"]),
        recompute_modules=modules_of(value["recompute_modules"]),
        recompute_layers=value["recompute_layers"] or None,
        offloaded_layers=value["offloaded_layers"],
    )


def columns_of(candidate: Candidate) -> Columns:
    """Convert a candidate to a table of one row."""
    parallel, layout, split = candidate.parallel, candidate.layout, candidate.split
    stages = [sum(split[index :: layout.pp]) for index in range(layout.pp)]

    def row(value: int) -> Ints:
        return np.array([value], dtype=np.int32)

    return Columns(
        tp=row(layout.tp),
        pp=row(layout.pp),
        vpp=row(layout.vpp),
        cp=row(layout.cp),
        ep=row(layout.ep),
        etp=row(layout.etp or 0),
        dp=row(layout.dp),
        sequence_parallel=row(layout.sequence_parallel),
        count_embedding=row(parallel.count_embedding),
        count_loss=row(parallel.count_loss),
        uneven=row(parallel.stages is not None),
        layers_first=row(stages[0]),
        layers_middle=row(max(stages[1:-1], default=max(stages))),
        layers_last=row(stages[-1]),
        micro_batch=row(candidate.micro_batch),
        accumulation=row(candidate.accumulation),
        recompute=row(RECOMPUTES.index(candidate.recompute)),
        recompute_modules=row(module_bits(candidate.recompute_modules)),
        recompute_layers=row(candidate.recompute_layers or 0),
        offloaded_layers=row(candidate.offloaded_layers),
        zero=row(candidate.zero),
        shard_gpus=row(candidate.shard_gpus or 0),
        offload=row(candidate.offload),
        order=row(ORDERS.index(layout.order)),
    )
