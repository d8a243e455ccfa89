"""Numbers of layouts, and the record of one candidate: a complete way to run a spec.

A candidate may not fit into memory. Belongs here: the numbers of one layout or of many, and the
description of one candidate. Does not belong here: where candidates come from (`layouts`) or what
they cost (`plan_memory`, `predict`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpctrain.plan.abilities.sharding import zero_choices
from hpctrain.plan.divisors import or_list
from hpctrain.plan.documents import RECOMPUTES, Layout, Recompute
from hpctrain.plan.layout_words import DEFAULT_ORDER, ORDERS
from hpctrain.plan.mesh.layout import layout_of
from hpctrain.plan.mesh.recomputation import module_bits, modules_of, recompute_words
from hpctrain.plan.mesh.stages import Split, split_layers, spread_layers
from hpctrain.spec.engines.abilities import MODEL_AXES, RecomputeModule
from hpctrain.spec.run import ParallelSpec, RunSpec

Whole = NDArray[np.int64]
Number = TypeVar("Number", int, Whole)


@dataclass(frozen=True)
class LayoutValues(Generic[Number]):
    """Layouts as numbers for one, as arrays of shape [layouts] for many. Flags are 0 or 1.

    The same for all of them: `gpus`, the global `batch` in sequences, `layers` of the model, and
    `stages`, the split that a spec lists.

    `etp`: 0 where it is the default. `uneven`: the stages are listed, by the spec or as
    `spread_layers` has them. `zero` is the ZeRO stage, `shard_gpus` over how many GPUs it shards
    (0: all replicas). `offload` is 1 where `optimizer.offload` applies. `recompute` and `order` are
    positions in RECOMPUTES and ORDERS. `recompute_modules`: bits (`recomputation`),
    `recompute_layers`: 0 where `full` covers all. `offloaded_layers`: those whose activations wait
    in the host's memory.
    """

    gpus: int
    batch: int
    layers: int
    stages: Split | None
    tp: Number
    pp: Number
    vpp: Number
    cp: Number
    ep: Number
    etp: Number
    sequence_parallel: Number
    count_embedding: Number
    count_loss: Number
    uneven: Number
    micro_batch: Number
    recompute: Number
    recompute_modules: Number
    recompute_layers: Number
    offloaded_layers: Number
    zero: Number
    shard_gpus: Number
    offload: Number
    order: Number

    @cached_property
    def model_gpus(self) -> Number:
        """GPUs that hold one copy of the model."""
        return self.tp * self.cp * self.pp

    @cached_property
    def dp(self) -> Number:
        """Data parallel size; valid where `model_gpus` divides the GPUs."""
        return self.gpus // self.model_gpus

    @property
    def accumulation(self) -> Number:
        """Microbatches of a step on each data parallel rank."""
        return self.batch // (self.micro_batch * self.dp)

    @cached_property
    def expert_tp(self) -> Number:
        """Ranks that split one expert (`parameters.expert_tp`)."""
        default = np.where(np.asarray(self.ep) > 1, 1, self.tp)
        return np.where(np.asarray(self.etp) > 0, self.etp, default)  # type: ignore[return-value]

    @property
    def chunks(self) -> Number:
        """Virtual pipeline stages."""
        return self.pp * self.vpp


@dataclass(frozen=True)
class Candidate(LayoutValues[int]):
    """One layout on a fixed number of GPUs, with microbatch, recomputation and sharding.

    What is derived from it exists where it keeps the rules of `mesh.rules`.
    """

    def __str__(self) -> str:
        return ", ".join([str(self.layout), f"micro {self.micro_batch}", *self.details])

    @cached_property
    def parallel(self) -> ParallelSpec:
        """The layout as a spec would have it."""
        stages = self.stages
        if stages is None and self.uneven:
            stages = spread_layers(self.layers, self.pp)
        return ParallelSpec(
            **{axis: getattr(self, axis) for axis in MODEL_AXES},
            etp=self.etp or None,
            order=ORDERS[self.order],
            sequence_parallel=bool(self.sequence_parallel) if self.tp > 1 else None,
            stages=stages,
            count_embedding=bool(self.count_embedding),
            count_loss=bool(self.count_loss),
        )

    @cached_property
    def layout(self) -> Layout:
        return layout_of(self.parallel, self.gpus)

    @cached_property
    def split(self) -> Split:
        """The layers of each virtual stage."""
        return split_layers(self.layers, self.parallel)

    @property
    def mode(self) -> Recompute:
        """How activations are computed again."""
        return RECOMPUTES[self.recompute]

    @property
    def modules(self) -> tuple[RecomputeModule, ...]:
        """What `selective` computes again."""
        return modules_of(self.recompute_modules)

    @property
    def recomputed(self) -> str:
        """The words for what is computed again."""
        return recompute_words(self.mode, self.modules, self.recompute_layers)

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
        if self.uneven:
            parts.append(f"stages of {or_list(sorted(set(self.split)))} layers")
        return parts + [name for name in counted if getattr(self, name)]


def candidate_of(spec: RunSpec, parallel: ParallelSpec, gpus: int) -> Candidate:
    """Collect the numbers of an explicit layout on `gpus` GPUs, whatever rules it breaks.

    What the spec leaves to be chosen counts as the least demanding choice.
    """
    layout = layout_of(parallel, gpus)
    return Candidate(
        gpus=gpus,
        batch=spec.batch.global_,
        layers=spec.model.layers,
        stages=parallel.stages,
        **{axis: getattr(layout, axis) for axis in MODEL_AXES},
        etp=layout.etp or 0,
        sequence_parallel=int(layout.sequence_parallel),
        count_embedding=int(parallel.count_embedding),
        count_loss=int(parallel.count_loss),
        uneven=int(parallel.stages is not None),
        micro_batch=1 if spec.batch.micro == "auto" else spec.batch.micro,
        recompute=0 if spec.recompute == "auto" else RECOMPUTES.index(spec.recompute),
        recompute_modules=module_bits(spec.recompute_modules),
        recompute_layers=spec.recompute_layers or 0,
        offloaded_layers=spec.offloaded_layers,
        zero=min(zero_choices(spec)),
        shard_gpus=spec.optimizer.shard_gpus or 0,
        offload=0,
        order=ORDERS.index(layout.order),
    )
