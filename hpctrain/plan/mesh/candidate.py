"""Layouts, one or many: the mesh, the batch split, recomputation, and a complete way to run a spec.

A candidate may not fit into memory. Belongs here: the numbers of one layout or of many, and the
description of one candidate. Does not belong here: what a layout has to keep (`rules`), layers per
stage (`stages`), which candidates there are (`hpctrain.plan.search`), what they cost
(`hpctrain.plan.cost`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from hpctrain.plan.abilities.sharding import zero_choices
from hpctrain.plan.divisors import common_divisors, or_list
from hpctrain.plan.documents import RECOMPUTES, BatchSplit, Layout, Recompute
from hpctrain.plan.layout_words import DEFAULT_ORDER, ORDERS
from hpctrain.plan.mesh.axes import LayoutSettings
from hpctrain.plan.mesh.stages import Split, split_layers, spread_layers
from hpctrain.spec.engines.abilities import MODEL_AXES, RecomputeModule
from hpctrain.spec.run import ModelSpec, ParallelSpec, RunSpec

# -- The mesh of an explicit layout, and what tensor parallelism splits -------------------------


def settled(spec: RunSpec, parallel: ParallelSpec) -> ParallelSpec:
    """Switch sequence parallelism off for an engine without it, such as DeepSpeed."""
    if not spec.engine.abilities.sequence_parallel:
        return parallel.model_copy(update={"sequence_parallel": False})
    return parallel


def layout_of(parallel: ParallelSpec, gpus: int) -> Layout:
    """Build the mesh of an explicit layout; dp takes all GPUs that the other axes leave.

    By default sequence parallelism is on when tp > 1, which saves memory at no cost in traffic.
    """
    split = parallel.sequence_parallel
    return Layout(
        **{axis: getattr(parallel, axis) for axis in MODEL_AXES},
        dp=gpus // (parallel.tp * parallel.pp * parallel.cp),
        sequence_parallel=parallel.tp > 1 if split is None else split,
        etp=parallel.etp,
        order=DEFAULT_ORDER if parallel.order == "auto" else parallel.order,
    )


def split_widths(model: ModelSpec) -> dict[str, int]:
    """Return what tensor parallelism splits in every layer, whatever ep is: heads and MLPs."""
    widths = {"heads": model.heads}
    if model.moe is None or model.moe.dense_layers:
        widths["ffn"] = model.ffn_size
    if model.moe is not None and model.moe.shared_ffn:
        widths["moe.shared_ffn"] = model.moe.shared_ffn
    return widths


def tensor_sizes(model: ModelSpec) -> tuple[int, ...]:
    """List all tp that heads, MLPs and kv_heads allow, ascending."""
    groups = model.key_value_heads
    return tuple(
        tp
        for tp in common_divisors(*split_widths(model).values())
        if (groups % tp == 0 or tp % groups == 0)
        and (model.heads + 2 * groups) * model.head_size % tp == 0
    )


# -- The global batch: micro x accumulation x dp -------------------------------------------------


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
    batch = spec.batch.sizes.common_divisor
    return tuple(2**n for n in range(batch.bit_length()) if batch % 2**n == 0)


def bubble_fraction(layout: Layout, accumulation: int) -> float:
    """Compute the idle share of a step relative to its work: (pp - 1) / (vpp m).

    Narayanan et al. 2021 (arXiv 2104.04473), section 2.2: bubble time over ideal time.
    """
    return (layout.pp - 1) / (layout.vpp * accumulation)


# -- Ways to compute activations again, or to keep them on the host, that a search tries --------


MODULES: tuple[RecomputeModule, ...] = get_args(RecomputeModule)
# Layers of each model chunk that `full` may cover instead of all, in quarters of the chunk.
QUARTERS = (1, 2, 3)


@dataclass(frozen=True)
class Recomputation:
    """One way: a position in RECOMPUTES, and what of it.

    `modules`: what `selective` computes again, one bit for each of MODULES. `full` covers `layers`
    of each chunk, or so many `quarters` of it; all where both are 0. `offloaded`: layers whose
    activations wait on the host, or so many `offloaded_quarters` of the model.
    """

    mode: int
    modules: int
    layers: int = 0
    quarters: int = 0
    offloaded: int = 0
    offloaded_quarters: int = 0


def module_bits(modules: Iterable[RecomputeModule]) -> int:
    """Write modules as one number, a bit for each of MODULES."""
    return sum(1 << MODULES.index(module) for module in set(modules))


def modules_of(bits: int) -> tuple[RecomputeModule, ...]:
    """Read the modules of such a number, in the order of MODULES."""
    return tuple(module for index, module in enumerate(MODULES) if bits >> index & 1)


def whole_recomputations(spec: RunSpec, modes: Iterable[Recompute]) -> tuple[Recomputation, ...]:
    """List these modes, each as the spec has it: what a hint can name in one word."""
    modules, layers = module_bits(spec.recompute_modules), spec.recompute_layers or 0
    numbers = (RECOMPUTES.index(mode) for mode in modes)
    full = RECOMPUTES.index("full")
    away = spec.offloaded_layers
    return tuple(
        Recomputation(n, modules, layers if n == full else 0, offloaded=away) for n in numbers
    )


def recomputations(spec: RunSpec, modes: Iterable[Recompute]) -> tuple[Recomputation, ...]:
    """List what a search tries of these modes; what the spec says itself is fixed.

    With `auto`, `selective` also computes whole MLPs again (MoE blocks where all layers have
    experts), and `full` some layers of each chunk, where the engine can. Modules whose outputs
    alone are discarded, such as norms, need newer libraries and are left to the spec.
    """
    found = list(whole_recomputations(spec, modes := tuple(modes)))
    given = module_bits(spec.recompute_modules)
    if spec.recompute == "auto" and "recompute_modules" not in spec.model_fields_set:
        dense = spec.model.moe is None or spec.model.moe.dense_layers > 0
        more = module_bits(["mlp" if dense else "moe"])
        found += [Recomputation(RECOMPUTES.index("selective"), more)] * ("selective" in modes)
    some = spec.engine.abilities.recomputes_some and spec.recompute_layers is None
    if spec.recompute == "auto" and some and "full" in modes:
        number = RECOMPUTES.index("full")
        found += [Recomputation(number, given, quarters=quarters) for quarters in QUARTERS]
    engine = spec.engine
    # transformer_block.py: TransformerEngine offloads; transformer_config.py: not with CUDA graphs
    able = engine.implementation != "local" and engine.megatron.cuda_graph_impl == "none"
    if spec.activation_offload_layers == "auto" and "none" in modes and able:
        number = RECOMPUTES.index("none")
        found += [
            Recomputation(number, given, offloaded_quarters=quarters) for quarters in QUARTERS
        ]
    return tuple(found)


def recompute_words(
    mode: Recompute, modules: tuple[RecomputeModule, ...], layers: int | None
) -> str:
    """Name one way: `selective (mlp)`, `full of 3 layers a chunk`, or the mode alone."""
    if mode == "selective" and modules != ("core_attn",):
        return f"{mode} ({', '.join(modules)})"
    if mode == "full" and layers:
        return f"{mode} of {layers} layer{'s' if layers > 1 else ''} a chunk"
    return mode


# -- One candidate -------------------------------------------------------------------------------


Whole = NDArray[np.int64]
Number = TypeVar("Number", int, Whole)


@dataclass(frozen=True)
class LayoutValues(LayoutSettings[Number]):
    """Layouts as numbers for one, as arrays of shape [layouts] for many. Flags are 0 or 1.

    The same for all of them: `gpus`, the global `batch` in sequences, `layers` of the model, and
    `stages`, the split that a spec lists.

    `uneven`: the stages are listed, by the spec or as `spread_layers` has them. `offload` is 1
    where `optimizer.offload` applies. `order` is a position in ORDERS. `recompute_modules`: bits
    (`module_bits`), `recompute_layers`: 0 where `full` covers all. `offloaded_layers`: those whose
    activations wait in the host's memory.
    """

    gpus: int
    batch: int
    layers: int
    stages: Split | None
    count_embedding: Number
    count_loss: Number
    uneven: Number
    recompute_modules: Number
    recompute_layers: Number
    offloaded_layers: Number
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


# -- Many candidates in columns: one array of shape [candidates] for each property ---------------


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
