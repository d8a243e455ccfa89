"""Split the global batch: micro x accumulation x dp.

Belongs here: the split, and possible microbatches. Does not belong here: which of them a layout
allows (`rules`), which fit into memory (`layouts`).
"""

from __future__ import annotations

from hpctrain.plan.documents import BatchSplit, Layout
from hpctrain.spec.run import RunSpec

LOW_BUBBLE = 0.10


def batch_split(spec: RunSpec, dp: int, micro_batch: int) -> BatchSplit:
    """Split the global batch; the layout has to keep the rules first."""
    global_batch = spec.batch.global_
    return BatchSplit(
        global_batch=global_batch,
        micro_batch=micro_batch,
        accumulation=global_batch // (micro_batch * dp),
        train_steps=spec.train_steps,
        tokens_per_step=global_batch * spec.model.seq,
    )


def micro_choices(spec: RunSpec) -> tuple[int, ...]:
    """List the spec's microbatch, else the powers of two that divide the global batch."""
    if spec.batch.micro != "auto":
        return (spec.batch.micro,)
    batch = spec.batch.global_
    return tuple(2**n for n in range(batch.bit_length()) if batch % 2**n == 0)


def bubble_fraction(layout: Layout, accumulation: int) -> float:
    """Compute the idle share of a step relative to its work: (pp - 1) / (vpp m).

    Narayanan et al. 2021 (arXiv 2104.04473), section 2.2: bubble time over ideal time.
    """
    return (layout.pp - 1) / (layout.vpp * accumulation)
