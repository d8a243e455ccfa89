"""Statistics of predicted against measured, by hand, and the command that prints them."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import row_specimens as specimens

from bench.accuracy_figures import (
    CELL,
    GROUP,
    Report,
    cells,
    error_figures,
    macro,
    memory_figures,
    oom_report,
    per_source,
    ranking_figures,
    report_of,
    time_figures,
)
from bench.predictions import Predicted, predict_file

BENCH = Path(__file__).resolve().parents[1]


def table(*rows: tuple[str, float, float], **others: Any) -> pd.DataFrame:
    """Rows of (layout, measured seconds, predicted seconds) of one model on one machine."""
    columns = ("layout", "measured_seconds", "predicted_seconds")
    frame = pd.DataFrame([dict(zip(columns, row, strict=True)) for row in rows])
    return frame.assign(**{n: "same" for n in {*GROUP, *CELL} - {"layout"}} | others)


class TestErrors:
    def test_by_hand(self) -> None:
        # errors -10, 0, 10, 20 and 40 percent: sizes 0, 10, 10, 20, 40; the 90th percentile lies
        # at 3.6 of 4 steps: 20 + 0.6 x 20
        found = error_figures(pd.Series([0.1, -0.1, 0.4, 0.0, 0.2]))
        assert found == pytest.approx(
            {"rows": 5, "median %": 10, "p90 %": 32, "worst %": 40, "bias %": 10}
        )

    def test_bias_has_a_sign(self) -> None:
        found = error_figures(pd.Series([-0.3, -0.2, 0.1]))
        assert found["bias %"] == pytest.approx(-20)
        assert found["median %"] == pytest.approx(20)

    def test_no_rows(self) -> None:
        assert error_figures(pd.Series([], dtype=float)) == {"rows": 0}

    def test_error_is_relative_to_what_was_measured(self) -> None:
        assert time_figures(table(("a", 10.0, 12.0)))["median %"] == pytest.approx(20)
        sizes = pd.DataFrame({"measured_gib": [40.0], "predicted_gib": [30.0]})
        assert memory_figures(sizes)["bias %"] == pytest.approx(-25)


class TestRanking:
    def test_regret_is_of_the_layout_that_the_prediction_puts_first(self) -> None:
        # predicted best is b, which measured 12 against 10 of a
        found = ranking_figures(table(("a", 10.0, 9.5), ("b", 12.0, 9.0), ("c", 20.0, 30.0)))
        assert found["groups"] == 1
        assert found["regret %"] == pytest.approx(20)

    def test_rank_correlation_of_spearman(self) -> None:
        # measured ranks 1 2 3 4, predicted 2 1 3 4: 1 - 6 x 2 / (4 x 15)
        rows = (("a", 1.0, 2.5), ("b", 2.0, 2.0), ("c", 3.0, 3.0), ("d", 4.0, 9.0))
        assert ranking_figures(table(*rows))["rank"] == pytest.approx(0.8)
        turned = [(layout, seconds, -predicted) for layout, seconds, predicted in rows]
        assert ranking_figures(table(*turned))["rank"] == pytest.approx(-0.8)

    def test_three_layouts_have_an_order(self) -> None:
        rows = (("a", 1.0, 1.0), ("b", 2.0, 5.0), ("c", 3.0, 4.0))
        assert ranking_figures(table(*rows))["rank"] == pytest.approx(0.5)

    def test_groups_are_of_one_model_gpus_and_batch(self) -> None:
        one = table(("a", 1.0, 1.0), ("b", 2.0, 2.0))
        for name in GROUP:
            apart = pd.concat([one, one.assign(**{name: "other"})])
            assert ranking_figures(apart)["groups"] == 2, name

    def test_blanks_are_a_group_of_their_own(self) -> None:
        assert ranking_figures(table(("a", 1.0, 1.0), ("b", 2.0, 2.0), gpus=None))["groups"] == 1

    def test_a_layout_that_was_measured_twice_counts_with_its_median(self) -> None:
        # a took 10 and 14: 12, which is what b took
        rows = (("a", 10.0, 9.0), ("a", 14.0, 9.0), ("b", 12.0, 9.5))
        assert ranking_figures(table(*rows))["regret %"] == pytest.approx(0)

    def test_trials_of_another_day_or_kernel_are_another_group(self, tmp_path: Path) -> None:
        layouts = [dict(tp="4", dp="8"), dict(tp="2", dp="16")]
        records = [specimens.BLOOM | {"notes": specimens.BLOOM["notes"]} | one for one in layouts]
        same = specimens.write(tmp_path / "a.csv", *records)
        dated = [r | {"notes": f"source date 02-2{n}"} for n, r in enumerate(records)]
        kernels = [
            r | {"notes": f"attention kernel: {k}"}
            for k, r in zip(("torch", "fused"), records, strict=True)
        ]
        apart = specimens.write(tmp_path / "b.csv", *dated, *kernels)
        assert report_of(predict_file(same)).parts["step time"].lines["all"]["groups"] == 1
        assert report_of(predict_file(apart)).parts["step time"].lines["all"]["groups"] == 0

    def test_mean_and_worst_over_groups(self) -> None:
        good = table(("a", 1.0, 1.0), ("b", 2.0, 2.0))
        bad = table(("a", 1.0, 2.0), ("b", 1.5, 1.0), model="other")
        found = ranking_figures(pd.concat([good, bad], ignore_index=True))
        assert found["regret %"] == pytest.approx(25)
        assert found["worst regret %"] == pytest.approx(50)
        assert math.isnan(found["rank"])  # two layouts have no order to speak of

    def test_one_layout_is_no_choice(self) -> None:
        assert ranking_figures(table(("a", 1.0, 1.0), ("a", 1.1, 1.0))) == {"groups": 0}

    def test_equal_measurements_have_no_order(self) -> None:
        rows = (("a", 1.0, 1.0), ("b", 1.0, 2.0), ("c", 1.0, 3.0))
        found = ranking_figures(table(*rows))
        assert math.isnan(found["rank"]) and found["regret %"] == 0


class TestReports:
    def test_sources_in_their_order_and_all_of_them(self) -> None:
        rows = table(("a", 1.0, 1.1), ("b", 1.0, 1.3), source=["Z", "A"])
        lines = per_source(rows, time_figures)
        assert list(lines) == ["Z", "A", "all"]
        assert lines["Z"]["median %"] == pytest.approx(10)
        assert lines["all"]["median %"] == pytest.approx(20)

    def test_text_leaves_out_what_there_is_not(self) -> None:
        report = Report("step time", {"A": {"rows": 12, "rank": float("nan")}, "all": {"x": 1.234}})
        head, first, last = report.text().splitlines()
        assert head.split() == ["step", "time", "rows", "rank", "x"]
        assert first.split() == ["A", "12", "-", "-"]
        assert last.split() == ["all", "-", "-", "1.23"]
        assert report.figures() == {"A": {"rows": 12.0}, "all": {"x": 1.234}}

    def test_rows_without_a_measurement_do_not_count(self, tmp_path: Path) -> None:
        without = specimens.GPT | {"step_seconds": "", "memory_gb": ""}
        predicted = predict_file(specimens.write(tmp_path / "t.csv", specimens.GPT, without))
        parts = report_of(predicted).parts
        assert parts["step time"].lines["all"]["rows"] == 1
        assert parts["memory"].lines["all"]["rows"] == 1

    def test_rows_that_print_their_layout_are_told_apart(self, tmp_path: Path) -> None:
        partly = specimens.GPT | {"tp": ""}
        predicted = predict_file(specimens.write(tmp_path / "t.csv", specimens.GPT, partly))
        parts = report_of(predicted).parts
        assert parts["step time"].lines["all"]["rows"] == 2
        assert parts["step time, layout stated"].lines["all"]["rows"] == 1

    def test_the_figures_of_a_file(self, tmp_path: Path) -> None:
        path = specimens.write(tmp_path / "t.csv", specimens.GPT)
        predicted = predict_file(path)
        error = float(predicted.seconds[0]) / 10 - 1
        line = report_of(predicted).parts["step time"].lines["Narayanan2021 T1"]
        assert line["bias %"] == pytest.approx(100 * error)

    def test_the_middle_source_counts_each_source_once(self) -> None:
        rows = [("a", 1.0, 1.02)] * 9 + [("a", 1.0, 1.10), ("a", 1.0, 0.7)]
        table_of = table(*rows, source=["many"] * 9 + ["few", "odd"])
        found = macro(Report("step time", per_source(table_of, time_figures)))
        assert found == pytest.approx(
            {"sources": 3, "median %": 10, "p90 %": 10, "worst median %": 30}
        )
        assert macro(Report("step time", {"all": {"rows": 0}})) == {"sources": 0}

    def test_a_configuration_counts_once_with_its_middle_row(self) -> None:
        rows = table(("a", 1.0, 1.1), ("a", 1.0, 1.3), ("a", 1.0, 0.8), ("b", 1.0, 1.5))
        none = rows.iloc[:0].assign(predicted_gib=[], measured_gib=[])
        found = cells(rows, none)
        assert found["step time"]["rows"] == 2
        assert found["step time"]["worst %"] == pytest.approx(50)
        assert found["step time"]["bias %"] == pytest.approx(30)  # of 10 and 50
        assert found["memory"] == {"rows": 0}

    def test_releases_of_one_family_are_one_configuration(self, tmp_path: Path) -> None:
        releases = [
            specimens.HYBRID | {"source": f"Megatron-Bridge {n}"} for n in ("26.06", "26.08")
        ]
        other = specimens.HYBRID | {"source": "Megatron-Bridge 26.08", "micro_batch": "2"}
        path = specimens.write(tmp_path / "t.csv", *releases, other)
        parts = report_of(predict_file(path)).parts
        assert parts["cells"].lines["step time"]["rows"] == 2
        assert parts["macro"].lines["step time"]["sources"] == 2


class TestOutOfMemory:
    @staticmethod
    def predicted(folder: Path, *counts: tuple[str, int]) -> Predicted:
        """Rows of a source with so many GPUs to share a GPT of 7.5B without recomputation."""
        records = [
            specimens.GPT
            | dict(source=source, tp="1", gpus=str(dp), dp=str(dp), recompute="none", zero_stage=z)
            for source, dp in counts
            for z in ("1",)
        ]
        return predict_file(specimens.write(folder / f"{len(counts)}.csv", *records))

    def test_by_hand(self, tmp_path: Path) -> None:
        runs = self.predicted(tmp_path, ("SimuMax", 64), ("SimuMax", 1), ("mcore", 64))
        failed = self.predicted(tmp_path, ("SimuMax", 1), ("SimuMax", 64))
        # one replica needs 18 bytes x 7.5e9, more than the GPU has; 64 of them share 12 of these
        for predicted, too_much in ((runs, [False, True, False]), (failed, [True, False])):
            assert list(predicted.total_gibibytes > 80) == too_much
        found = oom_report(runs, failed).lines
        assert list(found) == ["SimuMax", "sources with both", "and stated", "all"]
        assert found["SimuMax"] == {
            "ran": 2,
            "failed": 2,
            "alarms": 2,
            "precision": 0.5,
            "recall": 0.5,
        }
        assert found["all"]["ran"] == 3
        # mcore has no row that failed
        assert found["sources with both"]["ran"] == found["and stated"]["ran"] == 2

    def test_rows_that_leave_recomputation_or_microbatch_blank(self, tmp_path: Path) -> None:
        blank = specimens.GPT | {"recompute": ""}
        noted = blank | {"notes": "full activation checkpointing"}
        path = specimens.write(tmp_path / "t.csv", specimens.GPT, blank, noted)
        runs = predict_file(path)
        assert oom_report(runs, runs).lines["and stated"]["ran"] == 2

    def test_without_alarms_there_is_no_precision(self, tmp_path: Path) -> None:
        runs = self.predicted(tmp_path, ("SimuMax", 64))
        found = oom_report(runs, runs).lines["all"]
        assert found["alarms"] == 0 and found["recall"] == 0
        assert math.isnan(found["precision"])


def accuracy(*arguments: str | Path) -> str:
    """What the command prints."""
    command = [sys.executable, str(BENCH / "planner_accuracy.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


UNKNOWN = (specimens.GPT | {"gpu": "TPUv4"}, {"source": "S", "model": "Mystery", "gpu": "H100"})


class TestCommand:
    @pytest.fixture
    def runs(self, tmp_path: Path) -> Path:
        known = (specimens.GPT, specimens.GPT | {"tp": "8", "dp": "16"}, specimens.BUBBLE)
        return specimens.write(tmp_path / "runs.csv", *known, *UNKNOWN)

    @pytest.fixture
    def oom(self, tmp_path: Path) -> Path:
        columns = tuple(n for n in specimens.COLUMNS if not n.startswith("step_seconds"))
        big = specimens.GPT | {"memory_gb": "OOM", "recompute": "none", "tp": "1", "dp": "1"}
        big |= {"gpus": "1"}
        return specimens.write(tmp_path / "oom.csv", big, UNKNOWN[0], columns=columns)

    def test_text(self, runs: Path, oom: Path) -> None:
        text = accuracy("--runs", runs, "--oom", oom, "--quick")
        lines = text.splitlines()
        ours = [line.split() for line in lines if line.startswith("Narayanan2021 T1")]
        # of each view step time, memory and what ran; of `product` both intervals
        assert [words[2] for words in ours] == ["2"] * 8
        assert [line for line in lines if line.endswith(": all rows")] == [
            "product: all rows",
            "software of each source: all rows",
        ]
        assert "2 of 5 rows not modelled" in text
        assert "  runs.csv:5: GPU `TPUv4` is not in the catalogue" in lines
        assert any(line.startswith("  runs.csv:6: model `Mystery`") for line in lines)
        assert "1 of 2 rows not modelled" in text
        assert "out of memory" in text

    def test_document(self, runs: Path, oom: Path) -> None:
        document = json.loads(accuracy("--runs", runs, "--oom", oom, "--json", "--quick"))
        times = document["all rows"]["step time"]
        assert list(times) == ["Narayanan2021 T1", "Zero-Bubble PP", "all"]
        assert times["all"]["rows"] == 3
        assert times["Narayanan2021 T1"]["groups"] == 1
        assert document["all rows"]["memory"]["all"]["rows"] == 3
        assert [reason.split(":")[1] for reason in document["not modelled"]] == ["5", "6"]
        found = {"ran": 3.0, "failed": 1.0, "alarms": 1.0, "precision": 1.0, "recall": 1.0}
        assert document["out of memory"]["all"] == found
        assert document["out of memory"]["product"]["all"] == found
        assert document["product"]["all rows"]["step time"]["all"]["rows"] == 3
        for key in ("macro", "cells", "memory", "regret"):
            assert set(document[key]) == {"product", "software of each source"}
        assert list(document["regret"]["product"]) == ["Narayanan2021 T1", "all"]
        assert document["macro"]["product"]["step time"]["sources"] == 2
        intervals = document["intervals"]["product"]
        assert intervals["step time"]["all"]["rows"] == 3
        assert 0 <= intervals["memory"]["all"]["inside %"] <= 100
        assert len(document["out of memory, not modelled"]) == 1

    def test_every_row_is_predicted_without_its_source(self, runs: Path) -> None:
        document = json.loads(accuracy("--runs", runs, "--json"))
        whole, unseen = document["product"], document["leave one source out"]
        assert unseen["all rows"]["step time"]["all"]["rows"] == 3
        assert list(unseen["all rows"]["step time"]) == list(whole["all rows"]["step time"])
        assert unseen["all rows"]["step time"] != whole["all rows"]["step time"]

    def test_missing_columns_are_blank_and_named(self, tmp_path: Path) -> None:
        columns = tuple(n for n in specimens.COLUMNS if n not in ("vp", "notes"))
        text = accuracy(
            *("--runs", specimens.write(tmp_path / "t.csv", specimens.GPT, columns=columns)),
            "--quick",
        )
        assert "  complaint: t.csv:1: no column `vp`; taken as blank" in text.splitlines()
        assert "0 of 1 rows not modelled" in text

    @pytest.mark.parametrize("records", [(), UNKNOWN])
    def test_nothing_to_compare(self, tmp_path: Path, records: tuple[dict[str, str], ...]) -> None:
        empty = specimens.write(tmp_path / "t.csv", *records)
        text = accuracy("--runs", empty, "--oom", empty, "--quick")
        assert f"{len(records)} of {len(records)} rows not modelled" in text
        document = json.loads(accuracy("--runs", empty, "--oom", empty, "--json"))
        assert document["all rows"]["step time"]["all"]["rows"] == 0

    def test_parts_of_the_split_add_up(self, runs: Path) -> None:
        document = json.loads(accuracy("--runs", runs, "--json", "--split", "0.5", "--quick"))
        parts = [document["calibration rows"], document["validation rows (not fitted to)"]]
        assert sum(part["step time"]["all"]["rows"] for part in parts) == 3

    def test_a_line_for_each_row(self, runs: Path, tmp_path: Path) -> None:
        accuracy("--runs", runs, "--rows", tmp_path / "out.csv", "--quick")
        written = pd.read_csv(tmp_path / "out.csv")
        assert list(written.line) == [2, 3, 4]
        assert list(written.measured_seconds) == [10, 10, 2.5]
        assert np.isfinite(written.predicted_seconds).all()
