"""Leave one source out: no constant sees the rows that it predicts, and the fit's derivative."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import row_specimens as specimens

import bench.held_out as held_out
from bench.calibrate_planner import Fit, base_calibration, document
from bench.calibration_table import free_constants
from bench.cases import row_case
from bench.fit_jacobian import jacobian
from bench.published import PublishedRow, family_of
from hpctrain.spec.calibration import Calibration
from hpctrain.spec.engines.registry import abilities_of
from hpctrain.spec.loader import load_calibration, load_catalogue

OURS = {abilities_of(name).calibration for name in ("megatron", "fsdp", "deepspeed")} | {
    "megatron-2022",  # without TransformerEngine
    "hugging-face",  # eager
}


@pytest.mark.parametrize(
    ("source", "family"),
    [
        ("Megatron-Bridge 26.02.01", "Megatron-Bridge"),
        ("dgxc-benchmarking v25.04 memory log", "dgxc-benchmarking"),
        ("Megatron README H100 weak scaling", "Megatron README H100 weak scaling"),
        ("Nemotron-4 15B", "Nemotron-4 15B"),
        ("Narayanan2021 T1", "Narayanan2021 T1"),
    ],
)
def test_a_release_is_not_another_source(source: str, family: str) -> None:
    assert family_of(source) == family


def test_no_family_sees_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = specimens.rows(tmp_path, *specimens.ALL)
    seen: list[set[str]] = []

    def constants(given: list[PublishedRow]) -> Calibration:
        seen.append({family_of(row.source) for row in given})
        return load_calibration()

    monkeypatch.setattr(held_out, "constants_from", constants)
    families = list(dict.fromkeys(family_of(row.source) for row in rows))
    for family in families:
        own = held_out.unseen(family, rows)
        assert {family_of(case.row.source) for case in own} == {family}
        assert seen[-1] == set(families) - {family}
        assert {case.software for case in own} <= OURS


def test_a_user_has_no_constants_of_the_source(tmp_path: Path) -> None:
    """Another launch cost of one family changes its own rows, not what `plan` says."""
    aleph = specimens.rows(tmp_path, specimens.ALEPH)[0]
    before = load_calibration()
    entry = before.software["scaling"]
    own = entry.model_copy(update={"layer_overhead": entry.layer_overhead / 2})
    after = before.model_copy(update={"software": {**before.software, "scaling": own}})

    def overhead(calibration: Calibration, product: bool) -> float:
        case = row_case(aleph, load_catalogue(), calibration, product)
        return float(case.case.software.layer_overhead)

    assert overhead(before, False) == 2 * overhead(after, False)
    assert overhead(before, True) == overhead(after, True)


def test_without_rows_constants_are_what_is_believed() -> None:
    free = free_constants()
    expected = {one.name: one.start for one in free}
    found = held_out.constants_from([])
    start = expected["ampere.product_efficiency"]
    assert found.gpus["ampere"].product_efficiency == pytest.approx(start)


def test_the_derivative_is_that_of_the_residuals(tmp_path: Path) -> None:
    free = free_constants()
    calibration = document(base_calibration(free))
    rows = specimens.rows(tmp_path, *specimens.ALL)
    task = Fit([row_case(one, load_catalogue(), calibration) for one in rows], free)
    values = np.array([one.start * 1.01 for one in free])
    found = jacobian(task, values)
    before = task.residuals(values)
    for constant in range(len(free)):
        step = np.zeros(len(free))
        step[constant] = 1e-5 * max(values[constant], 1e-3)
        slope = (task.residuals(values + step) - before) / step[constant]
        assert found[:, constant] == pytest.approx(slope, rel=1e-3, abs=1e-3 * abs(slope).max())
