"""Record of one candidate: a complete way to run a spec, which may not fit into memory.

Belongs here: the record and its description. Does not belong here: where candidates come from
(`layouts`) or what they cost (`plan_memory`, `predict`).
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.plan.divisors import or_list
from hpctrain.plan.documents import Layout, Recompute
from hpctrain.plan.layout_words import DEFAULT_ORDER
from hpctrain.plan.mesh.layout import layout_of
from hpctrain.plan.mesh.recomputation import recompute_words
from hpctrain.plan.mesh.stages import Split, split_layers
from hpctrain.spec.engines.abilities import RecomputeModule
from hpctrain.spec.run import ParallelSpec, RunSpec


@dataclass(frozen=True)
class Candidate:
    """A layout on a fixed number of GPUs, with microbatch, recomputation and sharding.

    It must keep the rules of `mesh.rules`.
    `recompute_modules` are those of `selective`, `recompute_layers` so many of each chunk that
    `full` covers (None: all), `offloaded_layers` those whose activations wait on the host.
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
    recompute_modules: tuple[RecomputeModule, ...] = ("core_attn",)
    recompute_layers: int | None = None
    offloaded_layers: int = 0

    def __str__(self) -> str:
        return ", ".join([str(self.layout), f"micro {self.micro_batch}", *self.details])

    @property
    def recomputed(self) -> str:
        """The words for what is computed again."""
        return recompute_words(self.recompute, self.recompute_modules, self.recompute_layers)

    @property
    def details(self) -> list[str]:
        """The recomputation, and settings besides mesh and microbatch that are not the default."""
        parts = [f"recompute {self.recomputed}"]
        if self.offloaded_layers:
            parts.append(f"activations of {self.offloaded_layers} layers on the host")
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
    recompute_modules: tuple[RecomputeModule, ...] | None = None,
    recompute_layers: int | None = None,
    offloaded_layers: int | None = None,
) -> Candidate:
    """Build the candidate for `parallel` on `gpus` GPUs.

    `recompute_modules`, `recompute_layers` and `offloaded_layers` default to those of the spec.
    """
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
        recompute_modules=recompute_modules or spec.recompute_modules,
        recompute_layers=recompute_layers or spec.recompute_layers,
        offloaded_layers=spec.offloaded_layers if offloaded_layers is None else offloaded_layers,
    )
