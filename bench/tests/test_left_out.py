"""Which GPUs constants know: of plans, and of fits without the family of a row."""

from __future__ import annotations

from pathlib import Path

import row_specimens as specimens

from bench.cases import row_case
from bench.interval_figures import memory_intervals, time_intervals
from bench.left_out import known_gpus
from bench.predictions import predict_file
from hpctrain.spec.loader import load_calibration, load_catalogue


def test_another_release_of_a_source_teaches_nothing_about_its_gpu(tmp_path: Path) -> None:
    """It is left out with it; another family's rows stay."""
    own = [dict(specimens.LLAMA, source=f"Bench {release}") for release in ("25.04", "26.02")]
    other = dict(specimens.LLAMA, source="Somebody else", gpu="B200-SXM")
    calibration, catalogue = load_calibration(), load_catalogue()

    def known(*records: dict[str, str]) -> list[bool]:
        rows = specimens.rows(tmp_path, *records)
        found = known_gpus([row_case(row, catalogue, calibration) for row in rows])
        return [bool(one) for one in found]

    assert known(*own, other) == [False, False, False]
    same = dict(other, gpu=specimens.LLAMA["gpu"])
    assert known(*own, same) == [True, True, True]


def test_plans_know_the_gpus_that_they_name(tmp_path: Path) -> None:
    """One family has the GPU: left out nothing is known of it, in plans its rows are."""
    file = specimens.write(tmp_path / "rows.csv", specimens.LLAMA)
    predicted = predict_file(file, product=True)
    plan, unseen = (time_intervals(predicted, one).lines["all"]["+- %"] for one in (False, True))
    assert unseen > plan + 0.5


def test_what_a_source_does_not_count_is_no_reason_to_doubt_its_figure(tmp_path: Path) -> None:
    """Bytes that PyTorch has allocated, reserved, and that the driver sees besides."""
    widths = []
    for words in ("max_memory_allocated", "max_memory_reserved", "Mem = nvidia-smi on first node"):
        row = dict(specimens.LLAMA, memory_gb="40", notes=words)
        predicted = predict_file(specimens.write(tmp_path / "rows.csv", row), product=True)
        widths.append(memory_intervals(predicted, unseen=False).lines["all"]["+- %"])
    allocated, reserved, driver = widths
    assert allocated < reserved < driver
