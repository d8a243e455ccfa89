"""A candidate: one complete way to run a spec, before it is known whether it fits.

Belongs here: the record and its description. Does not belong here: where candidates come from
(`search`) or what they cost (`memory`).
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.plan.documents import Layout, Recompute
from hpctrain.plan.layout import layout_of
from hpctrain.plan.stages import Split, split_layers
from hpctrain.spec.run import ParallelSpec, RunSpec


@dataclass(frozen=True)
class Candidate:
    """An explicit layout on so many GPUs, with its microbatch and recomputation.

    `layout_problems`, `world_problems` and the divisibility of the batch must have been checked.
    """

    parallel: ParallelSpec
    layout: Layout
    split: Split
    micro_batch: int
    accumulation: int
    recompute: Recompute

    def __str__(self) -> str:
        parts = [str(self.layout), f"micro {self.micro_batch}", f"recompute {self.recompute}"]
        counted = [
            name for name in ("count_embedding", "count_loss") if getattr(self.parallel, name)
        ]
        return ", ".join(parts + counted)


def candidate_of(
    spec: RunSpec, parallel: ParallelSpec, gpus: int, micro_batch: int, recompute: Recompute
) -> Candidate:
    """The candidate for `parallel` on `gpus` GPUs."""
    layout = layout_of(parallel, gpus)
    return Candidate(
        parallel=parallel,
        layout=layout,
        split=split_layers(spec.model.layers, parallel),
        micro_batch=micro_batch,
        accumulation=spec.batch.global_ // (micro_batch * layout.dp),
        recompute=recompute,
    )
