"""Seconds of an iteration as a table, so that a simulation can look up millions of them.

Belongs here: sampling a cost function, and looking up. Does not belong here: the cost function
(`step_time`), what is in an iteration (`batching`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hpctrain.plan.cost.case import Array
from hpctrain.serve.plan.step_time import IterationLoad

CostFunction: TypeAlias = Callable[[IterationLoad], Array]
_Grid: TypeAlias = npt.NDArray[np.float64]
_NODES_PER_DOUBLING = 4  # of prompt tokens and of sequences


class IterationTable:
    """Seconds of iterations of up to `most_prompt_tokens` and `most_sequences`.

    Between four sampled loads they are `start + per_prompt p + per_sequence n + both p n`, and
    beside that `per_key` for each key that decoding sequences read, `per_pair` for each pair of a
    prompt's token and a key that it sees: cost functions are linear in both. `cells[i][j]` has
    these six numbers, `prompt_cell[p]` and `sequence_cell[n]` are the indices.
    """

    def __init__(
        self,
        cost: CostFunction,
        most_prompt_tokens: int,
        most_sequences: int,
        usual_context_tokens: float,
    ) -> None:
        """Sample `cost`; what it takes per key is that at `usual_context_tokens`."""
        prompt_nodes, sequence_nodes = _nodes(most_prompt_tokens), _nodes(most_sequences)
        self.prompt_cell = _cell_indices(prompt_nodes)
        self.sequence_cell = _cell_indices(sequence_nodes)
        self._grid = _cells(cost, prompt_nodes, sequence_nodes, max(1.0, usual_context_tokens))
        self.cells: list[list[list[float]]] = self._grid.tolist()

    def slower(self, factor: float) -> IterationTable:
        """Return the table in which every iteration takes `factor` times as long."""
        other = object.__new__(IterationTable)
        other.prompt_cell, other.sequence_cell = self.prompt_cell, self.sequence_cell
        other._grid = self._grid * factor
        other.cells = other._grid.tolist()
        return other

    def seconds(
        self, prompt_tokens: int, pairs: float, sequences: int, context_tokens: float
    ) -> float:
        """Look up one iteration.

        `pairs`: of prompt tokens and the keys that they see; `context_tokens`: of all decoding
        sequences together.
        """
        row = self.cells[self.prompt_cell[prompt_tokens]]
        start, per_prompt, per_sequence, both, per_key, per_pair = row[
            self.sequence_cell[sequences]
        ]
        return (
            start
            + per_prompt * prompt_tokens
            + (per_sequence + both * prompt_tokens) * sequences
            + per_key * context_tokens
            + per_pair * pairs
        )


@cache
def _nodes(most: int) -> tuple[int, ...]:
    """Choose the sampled numbers from 0 to `most`."""
    step = 1 / _NODES_PER_DOUBLING
    spaced = np.unique(np.rint(2.0 ** np.arange(0, np.log2(max(most, 2)), step)))
    return (0, *(int(node) for node in spaced if node < most), most)


@cache
def _cell_indices(nodes: tuple[int, ...]) -> list[int]:
    """Return the index of the cell of each number from 0 to the last node.

    Cell 0 is 0 alone: an iteration with a single token of a prompt costs more than one without (no
    CUDA graph), so that nothing lies between them.
    """
    last = max(1, len(nodes) - 2)
    return [0] + [min(bisect_right(nodes, number) - 1, last) for number in range(1, nodes[-1] + 1)]


def _cells(
    cost: CostFunction,
    prompt_nodes: tuple[int, ...],
    sequence_nodes: tuple[int, ...],
    context_tokens: float,
) -> _Grid:
    """Compute the six numbers of all cells from samples at their corners."""
    prompts = np.asarray(prompt_nodes, dtype=float)[:, None]
    sequences = np.asarray(sequence_nodes, dtype=float)[None, :]
    shape = (len(prompt_nodes), len(sequence_nodes))

    def sample(prompt_keys: float, context: float) -> _Grid:
        load = IterationLoad(prompts, prompt_keys, sequences, context)
        return np.broadcast_to(np.asarray(cost(load), dtype=float), shape)

    bare = sample(0.0, 0.0)
    per_key = (sample(0.0, context_tokens) - bare) / np.maximum(1, sequences * context_tokens)
    per_pair = (sample(context_tokens, 0.0) - bare) / np.maximum(1, prompts * context_tokens)
    p0, p1 = _corners(shape[0])
    n0, n1 = _corners(shape[1])
    left, low = prompts[p0], sequences[:, n0]
    wide = np.maximum(prompts[p1] - left, 1)
    tall = np.maximum(sequences[:, n1] - low, 1)
    at = bare[np.ix_(p0, n0)]
    right, above, far = bare[np.ix_(p1, n0)], bare[np.ix_(p0, n1)], bare[np.ix_(p1, n1)]
    by_prompt, by_sequence = (right - at) / wide, (above - at) / tall
    both = (far - right - above + at) / (wide * tall)

    def mean(grid: _Grid) -> _Grid:
        pairs = grid[np.ix_(p0, n0)] + grid[np.ix_(p1, n0)] + grid[np.ix_(p0, n1)]
        return (pairs + grid[np.ix_(p1, n1)]) / 4

    return np.stack(
        [
            at - by_prompt * left - by_sequence * low + both * left * low,
            by_prompt - both * low,
            by_sequence - both * left,
            both,
            mean(per_key),
            mean(per_pair),
        ],
        axis=-1,
    )


def _corners(count: int) -> tuple[list[int], list[int]]:
    """Return lower and upper node of each cell; cell 0 has node 0 only."""
    if count == 2:
        return [0, 1], [0, 1]
    return [0, *range(1, count - 1)], [0, *range(2, count)]
