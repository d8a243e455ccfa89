"""Enumerate the ways to make one replica: ranks, number formats, what an iteration may hold.

Belongs here: which ones an engine and a GPU can do, and their memory. Does not belong here: how
many replicas a service needs (`search`), what an iteration takes (`step_time`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from hpctrain.plan.cost.case import Array, Shape
from hpctrain.serve.plan.batching import BatchLimits
from hpctrain.serve.plan.measured_speed import AS_PREDICTED, MeasuredSpeed
from hpctrain.serve.plan.served_model import (
    PartFormats,
    ReplicaLayout,
    ServedModel,
    served_model,
    weight_bytes,
)
from hpctrain.serve.plan.serving_machine import Offer, ReplicaCase
from hpctrain.serve.plan.step_time import (
    IterationLoad,
    IterationTable,
    activation_bytes,
    free_bytes,
    iteration_seconds,
    sequence_bytes,
)
from hpctrain.spec.calibration import ServingEngineCalibration
from hpctrain.spec.service import KvPrecision, ServingEngineSpec, WeightPrecision

# Tokens of one iteration: from where prompts hardly disturb decoding to where products are as fast
# as they get. Sequences: as vLLM's default for large GPUs.
BATCH_TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
MOST_SEQUENCES = 1024
_FEWEST_SEQUENCES = 8


@dataclass(frozen=True)
class ModelFacts:
    """The weights as they are: shape, number format, and their size in bytes if it is known.

    `block_scales`: FP8 with a scale for each block of weights, as DeepSeek publishes it.
    """

    shape: Shape
    layers: int
    heads: int
    longest_tokens: int
    stored: WeightPrecision
    stored_bytes: float | None = None
    block_scales: bool = False


@dataclass(frozen=True)
class EngineFacts:
    """An engine with its constants and the choices of the spec that concern it.

    `speed`: what the site has measured of it. `shares_prefixes`: it keeps what prompts share.
    """

    spec: ServingEngineSpec
    constants: ServingEngineCalibration
    speed: MeasuredSpeed = AS_PREDICTED
    shares_prefixes: bool = True

    def request_seconds(self, prompt_tokens: float) -> float:
        """What a request with a prompt of so many tokens takes outside of iterations."""
        measured = self.speed.request_seconds
        if measured is not None:
            return measured
        constants = self.constants
        return float(constants.request_seconds + constants.token_seconds * prompt_tokens)

    def limits(self, batch_tokens: int, max_sequences: int) -> ServingEngineCalibration:
        """The constants with the limits of an iteration, and the spec's share of the memory."""
        given = {
            "token_budget": float(batch_tokens),
            "max_sequences": float(max_sequences),
            "memory_share": self.spec.memory_fraction,
        }
        return self.constants.model_copy(update=given)


@dataclass(frozen=True)
class ReplicaShape:
    """One way to place a model on GPUs. `decided`: the spec allows it as it is.

    Number formats that differ from those of the checkpoint change the answers: they are looked at,
    and chosen by people.
    """

    offer: Offer
    model: ModelFacts
    engine: EngineFacts
    tp: int
    pp: int
    precision: WeightPrecision
    kv_precision: KvPrecision
    decided: bool = True

    @property
    def gpus(self) -> int:
        return self.tp * self.pp

    @property
    def hourly(self) -> float:
        """What one replica costs per hour."""
        return self.offer.hourly(self.offer.billed_gpus(self.gpus))

    def __str__(self) -> str:
        formats = f"{self.precision} weights"
        if self.kv_precision != usual_kv_precision(self.precision):
            formats += f" and {self.kv_precision} keys"
        pipeline = f" x pp {self.pp}" if self.pp > 1 else ""
        return f"{self.offer.gpu.name}, tp {self.tp}{pipeline}, {formats}"

    @cached_property
    def served(self) -> ServedModel:
        head = self.precision if self.precision in ("bf16", "fp16", "fp32") else "bf16"
        own: str = self.precision
        if own == self.model.stored == "fp8" and self.model.block_scales:
            own = "fp8-blocks"
        formats = PartFormats(own, own, own, cache=self.kv_precision, head=head)
        return served_model(self.model.shape, formats, self.offer.gpu)

    @cached_property
    def layout(self) -> ReplicaLayout:
        return ReplicaLayout(tp=float(self.tp), pp=float(self.pp))

    @cached_property
    def weight_bytes(self) -> float:
        """Bytes of weights on one GPU; as many as the files have where they are served as stored.

        What a checkpoint keeps in other formats than the rest (norms, parts left out of
        quantisation) is in its size and not in the count.
        """
        counted = float(weight_bytes(self.served, self.layout))
        size = self.model.stored_bytes
        if size is None or self.precision != self.model.stored:
            return counted
        whole = float(weight_bytes(self.served, ReplicaLayout(tp=1.0)))
        return counted * size / whole

    def kv_capacity_tokens(self, batch_tokens: int, max_sequences: int, mean: float) -> float:
        """Return the tokens whose keys fit beside the weights, for sequences of `mean` tokens."""
        limited = self._case(self.engine.limits(batch_tokens, max_sequences))
        counted = float(weight_bytes(self.served, self.layout))
        room = float(free_bytes(limited))
        room += counted - self.weight_bytes
        each = float(sequence_bytes(self.served, self.layout, mean)) / mean
        return max(0.0, room / each)

    def activation_bytes(self, batch_tokens: int, max_sequences: int) -> float:
        return float(activation_bytes(self._case(self.engine.limits(batch_tokens, max_sequences))))

    def table(self, mean_context: float) -> IterationTable:
        """Sample the seconds of its iterations."""
        cost = self.engine.speed.corrected(self.predicted_seconds)
        most_tokens, most_sequences = max(self.batch_choices), max(self.sequence_choices)
        return IterationTable(cost, most_tokens, most_sequences, mean_context)

    def predicted_seconds(self, load: IterationLoad) -> Array:
        """Predict an iteration without what the site has measured."""
        return iteration_seconds(self._case(self.engine.constants), load)

    def _case(self, engine: ServingEngineCalibration) -> ReplicaCase:
        return ReplicaCase(self.served, self.offer.machine, self.layout, engine)

    @property
    def batch_choices(self) -> tuple[int, ...]:
        given = self.engine.spec.batch_tokens
        return BATCH_TOKENS if given == "auto" else (given,)

    @property
    def sequence_choices(self) -> tuple[int, ...]:
        given = self.engine.spec.max_sequences
        return (MOST_SEQUENCES,) if given == "auto" else (given,)

    def limits(self, batch_tokens: int, sequences: float, mean: float) -> BatchLimits:
        """Choose the limits of an iteration for about `sequences` at a time.

        Twice as many may come at a time; no more than memory holds, because sequences that are
        preempted are computed twice, and no more than an iteration has tokens.
        """
        given = self.engine.spec.max_sequences
        if given != "auto":
            most = given
        else:
            wanted = 2 ** math.ceil(math.log2(max(_FEWEST_SEQUENCES, 2 * sequences)))
            most = min(MOST_SEQUENCES, wanted)
        tokens = self.kv_capacity_tokens(batch_tokens, most, mean)
        if given == "auto":
            held = int(tokens / mean) // _FEWEST_SEQUENCES * _FEWEST_SEQUENCES
            most = max(_FEWEST_SEQUENCES, min(most, held))
        return BatchLimits(min(most, batch_tokens), batch_tokens, tokens)


@dataclass(frozen=True)
class Unusable:
    """A shape that cannot serve, and why; `tightness`: seconds over limit where it is too slow."""

    shape: ReplicaShape
    reason: str
    tightness: float = math.inf


def usual_kv_precision(precision: WeightPrecision) -> KvPrecision:
    """Return the format of keys and values where nobody chose: that of activations."""
    return precision if precision in ("fp16", "fp32") else "bf16"


def replica_shapes(offer: Offer, model: ModelFacts, engine: EngineFacts) -> Iterator[ReplicaShape]:
    """Enumerate shapes: those of the spec, then those with fewer bits.

    Ranks of tensor parallelism stay inside a node and its NVLink domain, and divide the heads.
    Pipelines join nodes where one is too small: `fitting` tells.
    """
    spec = engine.spec
    stored = model.stored if spec.precision == "auto" else spec.precision
    kv = usual_kv_precision(stored) if spec.kv_precision == "auto" else spec.kv_precision
    formats: list[tuple[WeightPrecision, KvPrecision, bool]] = [(stored, kv, True)]
    if "fp8" in offer.gpu.peak and stored in ("bf16", "fp16"):
        keys = kv if spec.kv_precision != "auto" else "fp8"
        if spec.precision == "auto":
            formats.append(("fp8", kv, False))
            formats.append(("fp8", keys, False))
        elif spec.kv_precision == "auto":
            formats.append((stored, "fp8", False))
    seen = set()
    for precision, keys, decided in formats:
        for tp, pp in _ranks(offer, model, spec):
            if (precision, keys, tp, pp) not in seen:
                seen.add((precision, keys, tp, pp))
                yield ReplicaShape(offer, model, engine, tp, pp, precision, keys, decided)


def _ranks(offer: Offer, model: ModelFacts, spec: ServingEngineSpec) -> Iterator[tuple[int, int]]:
    most_tp = min(offer.per_node, offer.gpu.nvlink_domain, offer.most_replica_gpus)
    if spec.tp != "auto":
        sizes: Sequence[int] = (spec.tp,)
    else:
        sizes = [2**n for n in range(10) if 2**n <= most_tp and model.heads % 2**n == 0]
    for tp in sizes:
        if spec.pp != "auto":
            yield tp, spec.pp
            continue
        yield tp, 1
        if tp == max(sizes):
            most = min(offer.most_replica_gpus // tp, model.layers, 16)
            yield from ((tp, 2**n) for n in range(1, 5) if 2**n <= most)


def unusable(shape: ReplicaShape, longest_tokens: int, mean: float) -> str | None:
    """Tell why a shape cannot serve at all; None if it can."""
    offer, model, spec = shape.offer, shape.model, shape.engine.spec
    if model.heads % shape.tp:
        return f"{model.heads} heads cannot be divided among {shape.tp} ranks"
    if shape.pp > model.layers:
        return f"{model.layers} layers cannot be divided among {shape.pp} stages"
    if shape.gpus > offer.most_replica_gpus:
        return f"{shape.gpus} GPUs are more than the {offer.most_replica_gpus} of one job"
    if shape.kv_precision == "fp8" and "fp8" not in offer.gpu.peak:
        return f"{offer.gpu.name} has no 8-bit numbers for keys and values"
    batch = min(shape.batch_choices)
    sequences = _FEWEST_SEQUENCES if spec.max_sequences == "auto" else spec.max_sequences
    tokens = shape.kv_capacity_tokens(batch, sequences, mean)
    if tokens <= 0:
        memory = float(offer.machine.memory) * spec.memory_fraction / 2**30
        return (
            f"{shape.weight_bytes / 2**30:.0f} GiB of weights per GPU leave nothing of "
            f"{memory:.0f} GiB for keys and values"
        )
    if tokens < longest_tokens:
        return f"keys of {tokens:,.0f} tokens fit, the longest request has {longest_tokens:,}"
    return None
