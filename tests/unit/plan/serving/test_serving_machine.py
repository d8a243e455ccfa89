"""Constants by GPU and engine: what an unknown one takes."""

from __future__ import annotations

from typing import get_args

import pytest

from hpctrain.serve.plan.serving_machine import serving_machine
from hpctrain.spec.catalogue import Gpu
from hpctrain.spec.loader import load_calibration, load_catalogue, load_serving_calibration
from hpctrain.spec.service import ServingEngineName


def gpu(name: str) -> Gpu:
    return next(one for one in load_catalogue().gpus if one.name == name)


def test_a_gpu_takes_its_generations_constants() -> None:
    known = load_serving_calibration()
    training = load_calibration()
    fabric = training.fabrics["infiniband"]
    h200 = serving_machine(gpu("H200-141GB SXM"), known, training, fabric)
    assert h200.shares.product_8 == known.gpus["hopper"].product_8
    assert h200.memory_bandwidth == 4.8e12 and h200.peak_8 == pytest.approx(1.9789e15)


def test_a_generation_without_rows_takes_those_of_other() -> None:
    known = load_serving_calibration()
    volta = gpu("V100-16GB SXM")
    assert known.gpu(volta.name, volta.generation) == known.gpus["other"]


def test_a_gpu_without_low_precision_has_the_peak_of_the_next() -> None:
    training = load_calibration()
    fabric = training.fabrics["infiniband"]
    a100 = serving_machine(gpu("A100-80GB SXM"), load_serving_calibration(), training, fabric)
    assert a100.peak_4 == a100.peak_8 == a100.peak_16 == 312e12


@pytest.mark.parametrize("name", get_args(ServingEngineName))
def test_every_engine_of_a_spec_has_constants(name: str) -> None:
    known = load_serving_calibration()
    assert name in known.engines
    assert known.engine(name).token_budget > 0


def test_an_unknown_engine_takes_those_of_other() -> None:
    known = load_serving_calibration()
    assert known.engine("none") == known.engine("other")
