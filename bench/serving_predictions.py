"""Predicted latencies of published inference rows, all at once.

Belongs here: stacking rows into the cases of `hpctrain.serve.plan`, and which closed form prices
which kind of load. Does not belong here: rows (`serving_rows`), errors (`serving_accuracy`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from bench.serving_protocols import Protocol
from bench.serving_rows import (
    NotPriced,
    ServingCase,
    ServingRow,
    read_serving_rows,
    serving_case,
)
from bench.serving_steady_state import (
    ClosedLoad,
    Latencies,
    OpenLoad,
    closed_loop,
    disaggregated,
    open_loop,
)
from hpctrain.plan.cost.case import Floats, stack
from hpctrain.serve.plan.served_model import stack_served
from hpctrain.serve.plan.serving_machine import ReplicaCase, ServingMachine, serving_machine
from hpctrain.serve.plan.step_time import fits, largest_batch
from hpctrain.spec.calibration import (
    ServingCalibration,
    ServingEngineCalibration,
    ServingGpuCalibration,
)
from hpctrain.spec.loader import load_calibration, load_catalogue, load_serving_calibration

CLOSED, SPLIT, OPEN, OFFLINE = "closed", "split", "open", "offline"
OFFLINE_STREAMS = 2.0  # times the largest batch: what offline runs have waiting at least
FABRIC = "infiniband"  # of training's calibration
Constants = TypeVar("Constants", ServingEngineCalibration, ServingGpuCalibration)


@dataclass(frozen=True)
class Prediction:
    """One row with what is predicted for it; seconds, and requests per second of all replicas."""

    case: ServingCase
    ttft_mean: float
    ttft_p99: float
    tpot_mean: float
    request_rate: float
    fits: bool


@dataclass
class RowGroup:
    """Rows of one kind of load, stacked. `prefill` is there for separate pools."""

    kind: str
    cases: list[ServingCase]
    replicas: ReplicaCase
    prefill: ReplicaCase | None
    load: Any
    masks: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)


def kind_of(row: ServingRow) -> str:
    """The kind of load of a row. Raises NotPriced for loads that no formula describes."""
    if row.prompt_tokens is None or row.output_tokens is None:
        raise NotPriced("the lengths of prompts or answers are not said")
    if row.load_kind == "concurrency" and row.load_value:
        return CLOSED
    if row.load_kind in ("server", "request_rate") and row.load_value:
        return OPEN
    if row.load_kind == "offline":
        return OFFLINE
    raise NotPriced(f"load `{row.load_kind} {row.load_value or ''}` is neither streams nor a rate")


def read_cases(path: Path) -> tuple[list[ServingCase], list[tuple[ServingRow, str]]]:
    """Rows that can be priced, and others with the reason."""
    catalogue, priced, refused = load_catalogue(), [], []
    for row in read_serving_rows(path):
        try:
            case = serving_case(row, catalogue)
            kind_of(case.row)
        except NotPriced as error:
            refused.append((row, str(error)))
            continue
        priced.append(case)
    return priced, refused


def grouped(cases: Iterable[ServingCase], serving: ServingCalibration) -> list[RowGroup]:
    """Stack rows by kind of load."""
    parts: dict[str, list[ServingCase]] = {}
    for case in cases:
        kind = kind_of(case.row)
        split = kind == CLOSED and case.prefill is not None
        parts.setdefault(SPLIT if split else kind, []).append(case)
    return [_group(kind, members, serving) for kind, members in parts.items()]


def _group(kind: str, cases: list[ServingCase], serving: ServingCalibration) -> RowGroup:
    replicas = _replicas(cases, [case.pool.layout for case in cases], serving)
    prefill = None
    if kind == SPLIT:
        layouts = [case.prefill.layout for case in cases if case.prefill]
        prefill = _replicas(cases, layouts, serving)
    return RowGroup(kind, cases, replicas, prefill, _load(kind, cases, replicas))


def _replicas(
    cases: Sequence[ServingCase], layouts: Sequence[Any], serving: ServingCalibration
) -> ReplicaCase:
    training = load_calibration()
    fabric = training.fabrics[FABRIC]
    machines = {
        case.gpu.name: serving_machine(case.gpu, serving, training, fabric) for case in cases
    }
    engines = {case.engine: serving.engine(case.engine) for case in cases}
    set_up = [_set_up(engines[case.engine], case.protocol) for case in cases]
    return ReplicaCase(
        stack_served([case.served for case in cases]),
        _stacked_machines([machines[case.gpu.name] for case in cases]),
        stack(list(layouts)),
        _stacked(set_up),
    )


def _stacked_machines(machines: Sequence[ServingMachine]) -> ServingMachine:
    """Stack machines into one whose fields are arrays of shape [len(machines)]."""
    bare = [replace(one, links=0.0, shares=0.0) for one in machines]  # type: ignore[arg-type]
    links, shares = [one.links for one in machines], [one.shares for one in machines]
    return replace(stack(bare), links=stack(links), shares=_stacked(shares))


def _stacked(constants: Sequence[Constants]) -> Constants:
    """Stack constants into arrays, which the formulas take in place of numbers."""
    names = [name for name, value in constants[0] if isinstance(value, float)]
    columns = {name: np.array([getattr(one, name) for one in constants]) for name in names}
    return constants[0].model_copy(update=columns)


def _set_up(engine: ServingEngineCalibration, protocol: Protocol) -> ServingEngineCalibration:
    """The engine with what the benchmark's script sets."""
    settings = {"token_budget": protocol.token_budget, "memory_share": protocol.memory_share}
    given = {name: value for name, value in settings.items() if value}
    return engine.model_copy(update=given)


def _load(kind: str, cases: Sequence[ServingCase], replicas: ReplicaCase) -> Any:
    def column(value: Callable[[ServingCase], float | None]) -> Floats:
        return np.array([value(case) for case in cases], dtype=float)

    share = column(lambda case: case.protocol.length_share)
    prompt = column(lambda case: case.row.prompt_tokens) * share
    output = column(lambda case: case.row.output_tokens) * share
    pools = column(lambda case: case.pool.replicas)
    if kind == OPEN:
        return OpenLoad(prompt, output, column(lambda case: case.row.load_value) / pools)
    if kind == OFFLINE:
        streams = OFFLINE_STREAMS * _batch(replicas, prompt, output)
    else:
        streams = column(lambda case: case.row.load_value)
    protocols = [case.protocol for case in cases]
    return ClosedLoad(
        prompt_tokens=prompt,
        output_tokens=output,
        streams=np.maximum(1.0, streams),
        requests_per_stream=np.array([one.requests_per_stream for one in protocols]),
        equal_lengths=np.array([float(one.equal_lengths) for one in protocols]),
        drafted_tokens=column(lambda case: case.drafted_tokens),
        waited_iterations=np.array([one.waited_iterations for one in protocols]),
    )


def _batch(replicas: ReplicaCase, prompt: Floats, output: Floats) -> Floats:
    counted = prompt + output * replicas.engine.reserved_output
    room = largest_batch(replicas, counted)
    return np.asarray(room, dtype=float)


def latencies(group: RowGroup) -> Latencies:
    """Price all rows of a group."""
    if group.kind == OPEN:
        return open_loop(group.replicas, group.load)
    if group.kind == SPLIT:
        assert group.prefill is not None
        counts = [
            (case.prefill.replicas, case.pool.replicas) for case in group.cases if case.prefill
        ]
        prefillers, decoders = np.array(counts, dtype=float).T
        return disaggregated(group.prefill, group.replicas, (prefillers, decoders), group.load)
    return closed_loop(group.replicas, group.load)


def with_engines(group: RowGroup, changes: dict[str, Any], machine: dict[str, Any]) -> RowGroup:
    """The group with other constants of engines and GPUs, by field."""

    def changed(case: ReplicaCase) -> ReplicaCase:
        shares = case.gpu.shares.model_copy(update=machine)
        engine = case.engine.model_copy(update=changes)
        return replace(case, engine=engine, gpu=replace(case.gpu, shares=shares))

    prefill = changed(group.prefill) if group.prefill else None
    return replace(group, replicas=changed(group.replicas), prefill=prefill)


def predictions(
    cases: Iterable[ServingCase], serving: ServingCalibration | None = None
) -> list[Prediction]:
    """Predict all rows."""
    found = []
    for group in grouped(cases, serving or load_serving_calibration()):
        priced = latencies(group)
        load = group.load
        own = group.replicas
        held = fits(own, load.prompt_tokens)
        pools = np.array([case.pool.replicas for case in group.cases], dtype=float)
        if group.kind == SPLIT:
            pools = np.ones_like(pools)
        columns = (
            priced.ttft_mean,
            priced.ttft_p99,
            priced.tpot_mean,
            priced.request_rate * pools,
            held,
        )
        shaped = [np.broadcast_to(np.asarray(c, dtype=float), pools.shape) for c in columns]
        for case, values in zip(group.cases, zip(*shaped, strict=True), strict=True):
            figures = [float(value) for value in values]
            found.append(Prediction(case, *figures[:-1], fits=bool(figures[-1])))
    return found
