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

from hpctrain.plan.mesh.candidate import Candidate, LayoutValues, Whole


@dataclass(frozen=True)
class Columns(LayoutValues[Whole]):
    """Candidates in columns.

    `layers_first`, `layers_middle`, `layers_last`: transformer layers of those pipeline stages (all
    chunks together); with pp 1 all three are the whole model, with pp 2 the middle is the longer
    one.
    """

    layers_first: Whole
    layers_middle: Whole
    layers_last: Whole

    def __len__(self) -> int:
        return len(self.tp)

    def take(self, rows: Any) -> Columns:
        """Select the rows of an index array, a mask or a slice."""
        return replace(self, **{name: getattr(self, name)[rows] for name in COLUMN_NAMES})

    def narrow(self) -> Columns:
        """Halve the memory of the table: 32 bits hold every number of a candidate."""
        narrowed = {name: getattr(self, name).astype(np.int32) for name in COLUMN_NAMES}
        return replace(self, **narrowed)

    def candidate(self, row: int) -> Candidate:
        """Convert one row to a candidate."""
        values = {name: getattr(self, name) for name in _SHARED}
        values |= {name: int(getattr(self, name)[row]) for name in _OWN}
        return Candidate(**values)

    @property
    def mesh(self) -> NDArray[np.int64]:
        """One number for each combination of tp, pp, cp and ep, to group by."""
        key = np.zeros(len(self), dtype=np.int64)
        for name in ("tp", "pp", "cp", "ep"):
            column = getattr(self, name).astype(np.int64)
            key = key * (int(column.max(initial=0)) + 1) + column
        return key


_SHARED = ("gpus", "batch", "layers", "stages")
_OWN = tuple(field.name for field in fields(Candidate) if field.name not in _SHARED)
COLUMN_NAMES = (*_OWN, "layers_first", "layers_middle", "layers_last")


def joined(parts: Sequence[Columns]) -> Columns:
    """Join the rows of one table or several, in order; what rows share is that of the first."""
    rows: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMN_NAMES
    }
    return replace(parts[0], **rows)


def columns_of(candidate: Candidate) -> Columns:
    """Convert a candidate to a table of one row."""
    pp, split = candidate.pp, candidate.split
    stages = [sum(split[index::pp]) for index in range(pp)]
    middle = max(stages[1:-1], default=max(stages))
    values = {name: getattr(candidate, name) for name in _SHARED}
    values |= {name: np.array([getattr(candidate, name)]) for name in _OWN}
    ends = zip(COLUMN_NAMES[-3:], (stages[0], middle, stages[-1]), strict=True)
    values |= {name: np.array([layers]) for name, layers in ends}
    return Columns(**values)
