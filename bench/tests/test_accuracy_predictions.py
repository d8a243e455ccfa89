"""Layers of stages, predictions for a file of rows, and which rows are kept for validation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import row_specimens as specimens

from bench.cases import row_case
from bench.memory_conventions import BY_SOURCE, IN_WORDS, UNKNOWN, convention_of
from bench.pipeline_layout import stage_layers
from bench.predictions import Predicted, bytes_on_ranks, predict_file
from bench.published import PublishedRow
from bench.rows_split import in_calibration
from hpctrain.plan.cost.memory import outside_allocator_bytes
from hpctrain.spec.loader import load_calibration, load_catalogue

CATALOGUE, CALIBRATION = load_catalogue(), load_calibration()


def row(**cells: Any) -> PublishedRow:
    return PublishedRow(**({"line": 2, "gpu": "A100-80GB SXM"} | cells))


class TestStageLayers:
    @pytest.mark.parametrize(
        ("layout", "layers", "pp", "expected"),
        [
            (None, 24, 1, (24, 24, 24)),
            (None, 24, 4, (6, 6, 6)),
            (None, 126, 16, (7, 8, 7)),  # embedding and loss count as a layer each
            (None, 30, 8, (3, 4, 3)),
            (None, 61, 4, (15, 16, 14)),
            ("Et|(tt|)*2tL", 6, 4, (1, 2, 1)),
            ("Ett|tt|tt|ttL", 8, 2, (4, 4, 4)),  # chunks 0 and 2, 1 and 3
            ("Et*3|t*4|t*3mL", 10, 3, (3, 4, 3)),
            ("Et*4|(t*4|)*14tmL", 61, 16, (4, 4, 1)),
            ("Et|tL", 24, 4, (6, 6, 6)),  # no chunk for every stage: by rule
            ("Et|tL", 24, 2, (12, 12, 12)),  # not the layers of the model: by rule
            ("E||tt|L", 2, 4, (0, 2, 0)),
        ],
    )
    def test_layouts(
        self, layout: str | None, layers: int, pp: int, expected: tuple[int, int, int]
    ) -> None:
        assert stage_layers(layout, layers, pp) == expected

    @pytest.mark.parametrize(
        ("layers", "pp", "expected"),
        [
            (40, 1, (40, 40, 40)),
            (40, 2, (21, 21, 19)),  # 22 and 21 modules: embedding, layers, norm and head
            (40, 4, (10, 11, 8)),
            (32, 8, (4, 5, 2)),  # 35 modules: three stages have one more
            (5, 8, (0, 1, 0)),
        ],
    )
    def test_stages_of_equally_many_modules(
        self, layers: int, pp: int, expected: tuple[int, int, int]
    ) -> None:
        assert stage_layers(None, layers, pp, equal_modules=True) == expected

    def test_never_fewer_than_none_and_no_layer_is_lost(self) -> None:
        for layers in range(1, 40):
            for pp in range(1, 20):
                first, middle, last = stage_layers(None, layers, pp)
                assert min(first, middle, last) >= 0
                total = layers if pp == 1 else first + (pp - 2) * middle + last
                assert total >= layers


class TestPredictions:
    def test_a_file(self, tmp_path: Path) -> None:
        records = (specimens.GPT, specimens.GPT | {"gpu": "TPUv4"}, specimens.ALEPH)
        predicted = predict_file(specimens.write(tmp_path / "t.csv", *records))
        assert predicted.count == 3
        assert predicted.refused == ["t.csv:3: GPU `TPUv4` is not in the catalogue"]
        assert [c.row.line for c in predicted.cases] == [2, 4]

    def test_a_cell_that_makes_no_sense_is_a_complaint(self, tmp_path: Path) -> None:
        odd = specimens.GPT | {"vocab": "many"}
        predicted = predict_file(specimens.write(tmp_path / "t.csv", odd))
        assert predicted.complaints == ["t.csv:2: vocab: `many` is not a number"]

    @pytest.mark.parametrize(
        ("cells", "convention"),
        [
            (dict(notes="Mem = nvidia-smi on first node"), "driver"),
            (dict(notes="max_memory_reserved of the log"), "reserved"),
            (dict(notes="GiB of max_memory_RESERVED; memory_allocated between steps"), "reserved"),
            (dict(notes="max_memory_allocated"), "allocated"),
            (dict(source="torchtitan docs"), "reserved"),
            (dict(source="torchtitan docs", notes="max_memory_allocated"), "allocated"),
            (dict(source="BLOOM prequel"), "driver"),
            (dict(source="SimuMax B200 real"), "allocated"),
            (dict(source="Megatron-LM CI memory_speed"), "allocated"),
            (dict(source="Zero-Bubble PP"), "allocated"),
            (dict(), "allocated"),
        ],
    )
    def test_what_memory_means(self, cells: dict[str, str], convention: str) -> None:
        assert convention_of(row(**cells)).kind == convention

    def test_the_ranks_are_those_that_the_source_looked_at(self) -> None:
        cells = dict(num_layers=24, hidden=2048, heads=16, vocab=1000, seq_len=2048, gpus=8)
        cells |= dict(tp=1, pp=4, dp=2, model="GPT", framework="Megatron-core", memory_gb=1.0)
        cells |= dict(micro_batch=1.0, global_batch=16)  # the first stage has four in flight
        sources = ("Megatron-LM CI memory_speed", "BLOOM", "SimuMax")
        rows = [row(source=source, notes="max_memory_allocated", **cells) for source in sources]
        cases = [row_case(one, CATALOGUE, CALIBRATION) for one in rows]
        found = Predicted(cases, [], [])
        exact = replace(found.case.software, context_bytes=0.0, communicator_bytes=0.0, slack=1.0)
        ranks = bytes_on_ranks(replace(found.case, software=exact))
        expected = [ranks["last"][0], ranks["ends"][1], ranks["fullest"][2]]
        assert list(found.gibibytes * 2**30) == pytest.approx(expected)
        assert ranks["last"][2] < ranks["fullest"][2]

    def test_every_convention_has_its_source(self) -> None:
        assert all(len(one.why) > 10 for one in (*IN_WORDS, *BY_SOURCE, UNKNOWN))

    def test_each_convention_counts_more(self) -> None:
        sizes = dict(num_layers=24, hidden=2048, heads=16, vocab=51200, seq_len=2048, gpus=16)
        one = row(source="BLOOM prequel sweep", memory_gb=40.0, **sizes)
        words = ("max_memory_allocated", "max_memory_reserved", "nvidia-smi")
        rows = [replace(one, notes=word) for word in words]
        predicted = Predicted([row_case(r, CATALOGUE, CALIBRATION) for r in rows], [], [])
        allocated, reserved, driver = predicted.gibibytes
        outside = outside_allocator_bytes(predicted.case)[0]
        assert allocated < reserved < driver
        assert driver - reserved == pytest.approx(outside / 2**30)


class TestSplit:
    def test_what_was_measured_does_not_matter(self, tmp_path: Path) -> None:
        for one in specimens.rows(tmp_path, *specimens.ALL):
            for share in (0.2, 0.6):
                other = replace(one, step_seconds=99.0, memory_gb=1.0, line=77)
                assert in_calibration(other, share) == in_calibration(one, share)

    def test_about_the_share(self) -> None:
        many = [row(model="GPT", gpus=n, tp=n % 8 + 1) for n in range(1000)]
        chosen = [one for one in many if in_calibration(one, 0.6)]
        assert 550 < len(chosen) < 650
        assert all(in_calibration(one, 0.8) for one in chosen)
        assert not any(in_calibration(one, 0.0) for one in many)
        assert all(in_calibration(one, 1.0) for one in many)
