"""The global batch: micro x accumulation x dp.

Belongs here: which microbatches divide, and what to propose when none does. Does not belong
here: which of them fit into memory (`layouts` asks that).
"""

from __future__ import annotations

from hpctrain.plan.divisors import divisors, multiples_around, nearest, or_list
from hpctrain.plan.documents import BatchSplit, Layout
from hpctrain.spec.run import RunSpec

LOW_BUBBLE = 0.10


def batch_split(spec: RunSpec, dp: int, micro_batch: int) -> BatchSplit:
    """The split; call `batch_problems` first."""
    global_batch = spec.batch.global_
    return BatchSplit(
        global_batch=global_batch,
        micro_batch=micro_batch,
        accumulation=global_batch // (micro_batch * dp),
        train_steps=spec.train_steps,
        tokens_per_step=global_batch * spec.model.seq,
    )


def group_size(layout: Layout) -> int:
    """Microbatches per step must be a multiple of this.

    The interleaved schedule moves microbatches through the chunks in groups of pp
    (megatron/core/pipeline_parallel/schedules.py:995-1015); 1F1B takes any number.
    """
    return layout.pp if layout.vpp > 1 else 1


def micro_choices(spec: RunSpec) -> tuple[int, ...]:
    """The microbatch that the spec gives, else the powers of two that divide the global batch."""
    if spec.batch.micro != "auto":
        return (spec.batch.micro,)
    batch = spec.batch.global_
    return tuple(2**n for n in range(batch.bit_length()) if batch % 2**n == 0)


def micro_batches(spec: RunSpec, layout: Layout) -> tuple[int, ...]:
    """Those of `micro_choices` that the layout allows, ascending."""
    step = layout.dp * group_size(layout)
    return tuple(size for size in micro_choices(spec) if spec.batch.global_ % (size * step) == 0)


def bubble_fraction(layout: Layout, accumulation: int) -> float:
    """Idle share of a step relative to its work: (pp - 1) / (vpp m).

    Narayanan et al. 2021 (arXiv 2104.04473), section 2.2: bubble time over ideal time.
    """
    return (layout.pp - 1) / (layout.vpp * accumulation)


def batch_problems(spec: RunSpec, layout: Layout) -> list[str]:
    """Why no microbatch divides the global batch; empty when one does."""
    if micro_batches(spec, layout):
        return []
    global_batch, micro = spec.batch.global_, spec.batch.micro
    size = 1 if micro == "auto" else micro
    names = [("micro", size)] * (micro != "auto") + [("dp", layout.dp)]
    if global_batch % (size * layout.dp) == 0:
        names.append(("pp", layout.pp))
    step = size * layout.dp * group_size(layout)
    product = " x ".join(f"{name} {number}" for name, number in names)
    why = " (the interleaved schedule takes microbatches in groups of pp)" * ("pp" in dict(names))
    return [
        f"global batch {global_batch} is not divisible by {product}{why}: "
        f"nearest {_proposals(spec, layout, step)}"
    ]


def _proposals(spec: RunSpec, layout: Layout, step: int) -> str:
    global_batch, micro = spec.batch.global_, spec.batch.micro
    proposals = [f"global batch {or_list(multiples_around(global_batch, step))}"]
    per_gpu, rest = divmod(global_batch, layout.dp * group_size(layout))
    if micro != "auto" and rest == 0 and per_gpu:
        proposals.append(f"micro {or_list(nearest(micro, divisors(per_gpu)))}")
    return ", or ".join(proposals)
