"""Record of one candidate: a complete way to run a spec, which may not fit into memory.

Belongs here: the record and its description. Does not belong here: where candidates come from
(`layouts`) or what they cost (`plan_memory`, `predict`).
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.plan.divisors import or_list
from hpctrain.plan.documents import DEFAULT_ORDER, Layout, Recompute
from hpctrain.plan.mesh.layout import layout_of
from hpctrain.plan.mesh.stages import Split, split_layers
from hpctrain.spec.run import ParallelSpec, RunSpec


@dataclass(frozen=True)
class Candidate:
    """A layout on a fixed number of GPUs, with microbatch, recomputation and sharding.

    It must keep the rules of `mesh.rules`.
    `zero` is the ZeRO stage, `shard_gpus` over how many GPUs it shards (None: all replicas),
    `offload` whether `optimizer.offload` applies.
    """

    parallel: ParallelSpec
    layout: Layout
    split: Split
    micro_batch: int
    accumulation: int
    recompute: Recompute
    zero: int = 1
    shard_gpus: int | None = None
    offload: bool = False

    def __str__(self) -> str:
        return ", ".join([str(self.layout), f"micro {self.micro_batch}", *self.details])

    @property
    def details(self) -> list[str]:
        """The recomputation, and settings besides mesh and microbatch that are not the default."""
        parts = [f"recompute {self.recompute}"]
        parts += [f"zero {self.zero}"] if self.zero > 1 else []
        parts += [f"shards of {self.shard_gpus}"] if self.shard_gpus else []
        parts += ["offload"] if self.offload else []
        parts += [f"order {self.layout.order}"] if self.layout.order != DEFAULT_ORDER else []
        counted = ("count_embedding", "count_loss")
        if self.parallel.stages is not None:
            parts.append(f"stages of {or_list(sorted(set(self.parallel.stages)))} layers")
        return parts + [name for name in counted if getattr(self.parallel, name)]


def candidate_of(
    spec: RunSpec,
    parallel: ParallelSpec,
    gpus: int,
    micro_batch: int,
    recompute: Recompute,
    zero: int = 1,
    shard_gpus: int | None = None,
    offload: bool = False,
) -> Candidate:
    """Build the candidate for `parallel` on `gpus` GPUs."""
    layout = layout_of(parallel, gpus)
    return Candidate(
        parallel=parallel,
        layout=layout,
        split=split_layers(spec.model.layers, parallel),
        micro_batch=micro_batch,
        accumulation=spec.batch.global_ // (micro_batch * layout.dp),
        recompute=recompute,
        zero=zero,
        shard_gpus=shard_gpus,
        offload=offload,
    )
