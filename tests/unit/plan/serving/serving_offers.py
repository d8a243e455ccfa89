"""Offers of GPUs, models and demands for tests of the search, from what is packaged."""

from __future__ import annotations

from dataclasses import replace

from hpctrain.plan.cost.from_spec import shape_of
from hpctrain.serve.plan.candidates import EngineFacts, ModelFacts
from hpctrain.serve.plan.promises import ModelError, Objective
from hpctrain.serve.plan.search import Demand
from hpctrain.serve.plan.serving_machine import Offer, serving_machine
from hpctrain.serve.plan.traffic import Lengths, Traffic
from hpctrain.spec.catalogue import match_gpu
from hpctrain.spec.loader import (
    load_calibration,
    load_catalogue,
    load_presets,
    load_serving_calibration,
)
from hpctrain.spec.model import ModelSpec
from hpctrain.spec.service import ServingEngineSpec

TTFT, TPOT = Objective("ttft", "p99", 0.5), Objective("tpot", "p99", 0.05)
CHAT = Traffic(Lengths(512, 2000), Lengths(128, 512))


def offer(gpu: str = "H100-80GB SXM", **changes: object) -> Offer:
    found = match_gpu(load_catalogue(), gpu)
    assert found is not None
    training = load_calibration()
    machine = serving_machine(
        found, load_serving_calibration(), training, training.fabrics["infiniband"]
    )
    made = Offer("site", found, machine, 8, 512, 64, 2.0, "USD", float(found.network_bandwidth))
    return replace(made, **changes)  # type: ignore[arg-type]


def model(name: str = "llama-3-70b") -> ModelFacts:
    preset = load_presets().named(name)
    assert preset is not None
    spec = ModelSpec.model_validate(preset.shape)
    return ModelFacts(shape_of(spec), spec.layers, spec.heads, spec.seq, "bf16")


def engine(**choices: object) -> EngineFacts:
    spec = ServingEngineSpec.model_validate(choices)
    return EngineFacts(spec, load_serving_calibration().engine("vllm"))


def demand(rate: float = 30.0, **changes: object) -> Demand:
    made = Demand(rate, CHAT, (TTFT, TPOT), error=ModelError(0.1))
    return replace(made, **changes)  # type: ignore[arg-type]
