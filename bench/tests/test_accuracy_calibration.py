"""The fit of the cost model's constants: on rows made up with known constants it finds them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import row_specimens as specimens

from bench.calibrate_planner import (
    MISTRUST,
    Fit,
    _softened,
    base_calibration,
    document,
    filled,
    fit,
    load_cases,
    with_provenance,
)
from bench.calibration_table import free_constants
from bench.cases import RowCase, row_case
from hpctrain.plan.cost.step import step_seconds
from hpctrain.spec.calibration import Calibration
from hpctrain.spec.loader import load_catalogue

FREE = free_constants()
MORE = (  # other kernels, dispatchers, precisions and schedules of the same models
    specimens.ALEPH | {"notes": "attention kernel: flash_attention2 + RMS kernel"},
    specimens.ALEPH | {"notes": "attention kernel: flash_attention1"},
    specimens.DEEPSEEK | {"gpu": "B200-SXM", "precision": "nvfp4"},
    specimens.DEEPSEEK | {"gpu": "H100-80GB SXM", "precision": "bf16"},
    specimens.BUBBLE | {"notes": "no comm overlap"},
)


def cases_of(folder: Path, calibration: Calibration) -> list[RowCase]:
    found = specimens.rows(folder, *specimens.ALL, *MORE)
    return [row_case(one, load_catalogue(), calibration) for one in found]


def drawn_values(seed: int) -> np.ndarray:
    """A value within the bounds of every free constant, of four digits as they are written."""
    dice = np.random.default_rng(seed)
    between = [one.low + (one.high - one.low) * dice.uniform(0.1, 0.9) for one in FREE]
    return np.array([float(f"{value:.4g}") for value in between])


def test_free_constants_are_within_their_bounds_and_told_apart() -> None:
    assert len({one.name for one in FREE}) == len(FREE)
    targets = [(one.section, one.key, one.field) for free in FREE for one in free.targets]
    assert len(set(targets)) == len(targets)
    assert all(one.low <= one.start <= one.high and one.weight > 0 for one in FREE)


def test_products_of_blackwell_are_as_fast_as_its_power() -> None:
    """1000, 1100, 1200 and 1400 W, for 2250 or 2500 TFLOP/s in 16 bits and twice that in 8."""
    gpus = document(base_calibration(FREE)).gpus
    per_watt = {
        "blackwell": 2.25,
        "B300-SXM": 2250 / 1100,
        "GB200": 2500 / 1200,
        "GB300": 2500 / 1400,
    }
    for field in ("product_efficiency", "fp8_efficiency"):
        reached = [getattr(gpus[name], field) * peak for name, peak in per_watt.items()]
        assert reached == pytest.approx([reached[0]] * 4, rel=1e-5)


def test_blackwell_ultra_has_twice_the_exponentials() -> None:
    """A pair costs the products of heads of 128 besides those of its exponential."""
    gpus = document(base_calibration(FREE)).gpus
    plain, ultra = gpus["GB200"], gpus["GB300"]
    assert plain.half_head == 2 * ultra.half_head
    pairs = [(128 + one.half_head) * one.flash_efficiency for one in (plain, ultra)]
    assert pairs[0] == pytest.approx(pairs[1], rel=1e-3)


def test_the_constants_before_the_fit_are_a_calibration() -> None:
    calibration = document(base_calibration(FREE))
    assert {"megatron-core", "fsdp"} <= set(calibration.software)
    assert {"none", "layer", "full"} == set(calibration.graphs)


@pytest.mark.parametrize("seed", [1, 2])
def test_what_is_fitted_is_what_is_predicted_with_it(tmp_path: Path, seed: int) -> None:
    """The fit sets constants in stacked cases; predictions build cases from the document."""
    values = drawn_values(seed)
    task = Fit(cases_of(tmp_path, document(base_calibration(FREE))), FREE)
    seen = step_seconds(task.with_values(values)).total
    calibration = document(filled(base_calibration(FREE), FREE, values))
    expected = [float(step_seconds(one.case).total) for one in cases_of(tmp_path, calibration)]
    assert seen == pytest.approx(expected, rel=1e-5)


def test_the_fit_finds_the_constant_that_the_rows_were_made_with(tmp_path: Path) -> None:
    chosen = [one for one in FREE if one.name == "ampere.product_efficiency"]
    cases = cases_of(tmp_path, document(base_calibration(FREE)))
    made = step_seconds(Fit(cases, chosen).with_values(np.array([0.47]))).total
    rows = [
        replace(one, row=replace(one.row, step_seconds=float(seconds)))
        for one, seconds in zip(cases, made, strict=True)
    ]
    assert chosen[0].start > 0.5
    assert fit(rows, chosen) == pytest.approx([0.47], rel=0.02)


def test_odd_rows_count_less() -> None:
    # up to three tolerances as they are; beyond sqrt(3 (2 r - 3)): sqrt(19) for 14/3, 9 for 15
    found = _softened(np.array([0.5, -2.0, 3.0, 14.0 / 3, 15.0, -15.0]))
    assert found == pytest.approx([0.5, -2, 3, np.sqrt(19), 9, -9])
    assert MISTRUST == 3


def test_only_rows_of_the_share_with_a_time_are_fitted_to(tmp_path: Path) -> None:
    records = [specimens.GPT | {"gpus": str(128 * n), "dp": str(32 * n)} for n in range(1, 41)]
    blank = specimens.GPT | {"step_seconds": ""}
    unknown = specimens.GPT | {"gpu": "TPUv4"}
    path = specimens.write(tmp_path / "t.csv", *records, blank, unknown)
    calibration = document(base_calibration(FREE))
    cases, refused = load_cases([path], calibration, 1.0)
    assert len(cases) == 40
    assert refused == ["t.csv:43: GPU `TPUv4` is not in the catalogue"]
    part, _ = load_cases([path], calibration, 0.5)
    assert 10 <= len(part) <= 30


def test_entries_name_their_sources(tmp_path: Path) -> None:
    cases = cases_of(tmp_path, document(base_calibration(FREE)))
    sections = with_provenance(base_calibration(FREE), cases)
    assert "Aleph Alpha layouts (3)" in sections["gpus"]["ampere"]["provenance"]
    assert sections["gpus"]["volta"]["provenance"].startswith("default")
    assert "dgxc-benchmarking v25.04 (1)" in sections["software"]["megatron-core"]["provenance"]
