"""Published tables as the sources write them: cells, precisions and notes."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from bench.published import (
    COLUMNS,
    PublishedRow,
    facts_of,
    fp8_granularity_of,
    precision_of,
    read_rows,
)


def row(**cells: object) -> PublishedRow:
    return PublishedRow(**({"line": 2, "gpu": "H100-80GB SXM"} | cells))


def table(path: Path, *records: dict[str, str], columns: tuple[str, ...] = COLUMNS) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(records)
    return path


class TestReading:
    def test_types_and_blanks(self, tmp_path: Path) -> None:
        cells = {"source": "S", "hidden": "4096", "sequence_parallel": "yes", "zero_stage": "0"}
        rows = read_rows(table(tmp_path / "t.csv", cells | {"step_seconds": "3.5", "vp": ""}))
        assert rows.complaints == []
        assert rows[0] == PublishedRow(
            line=2, source="S", hidden=4096, sequence_parallel=True, zero_stage=0, step_seconds=3.5
        )

    @pytest.mark.parametrize(
        ("text", "value", "complains"),
        [
            ("1,024", 1024, False),
            ("512.0", 512, False),
            ("~512", 512, True),
            ("256 (32 nodes)", 256, True),
            ("n/a", None, False),
            ("-", None, False),
            ("1.5", None, True),
            ("many", None, True),
        ],
    )
    def test_odd_numbers(
        self, tmp_path: Path, text: str, value: int | None, complains: bool
    ) -> None:
        rows = read_rows(table(tmp_path / "t.csv", {"source": "S", "gpus": text}))
        assert rows[0].gpus == value
        assert [c.line for c in rows.complaints] == ([2] if complains else [])

    def test_no_row_is_lost(self, tmp_path: Path) -> None:
        """Broken cells, an empty record and notes over several lines all give a row."""
        records = ({"gpus": "x", "tp": "y"}, {}, {"notes": "a\nb", "source": "S"}, {"source": "T"})
        rows = read_rows(table(tmp_path / "t.csv", *records))
        assert [r.source for r in rows] == ["", "", "S", "T"]
        assert [r.line for r in rows] == [2, 3, 4, 6]
        assert {c.line for c in rows.complaints} == {2}

    def test_missing_and_unknown_columns(self, tmp_path: Path) -> None:
        names = (*(n for n in COLUMNS if n != "vocab"), "colour")
        rows = read_rows(table(tmp_path / "t.csv", {"source": "S", "colour": "red"}, columns=names))
        assert rows[0].vocab is None
        assert [c.reason for c in rows.complaints] == [
            "no column `vocab`; taken as blank",
            "unknown column `colour` is not read",
        ]

    def test_cells_beyond_the_last_column(self, tmp_path: Path) -> None:
        path = tmp_path / "t.csv"
        path.write_text("source,tp\nS,8,9,10\n", encoding="utf-8")
        rows = read_rows(path)
        assert rows[0].tp == 8
        assert any("beyond" in c.reason for c in rows.complaints)

    def test_out_of_memory(self, tmp_path: Path) -> None:
        rows = read_rows(table(tmp_path / "t.csv", {"memory_gb": "OOM"}, {"memory_gb": "70.5"}))
        assert [(r.oom, r.memory_gb) for r in rows] == [(True, None), (False, 70.5)]
        assert rows.complaints == []

    def test_micro_batches(self) -> None:
        assert row(global_batch=512, micro_batch=2, dp=16).micro_batches == 16
        assert row(global_batch=512, micro_batch=2).micro_batches is None


@pytest.mark.parametrize(
    ("text", "gpu", "precision", "granularity"),
    [
        ("bf16", "H100", "bf16", None),
        ("", "H100", "bf16", None),
        ("", "V100", "fp16", None),
        ("fp8-cs", "B200", "fp8", "current"),
        ("fp8-mx", "B200", "mxfp8", "mx"),
        ("mxfp8", "GB300", "mxfp8", "mx"),
        ("NVFP4", "GB300", "nvfp4", None),
        ("fp8 (alt granularity in parentheses)", "GB200", "mxfp8", "mx"),
        ("fp8 (alt granularity in parentheses)", "H100-80GB SXM", "fp8", "block"),
        ("bf16 with fp8 delayed", "H100", "fp8", "delayed"),
    ],
)
def test_precision(text: str, gpu: str, precision: str, granularity: str | None) -> None:
    given = row(precision=text, gpu=gpu)
    assert (precision_of(given), fp8_granularity_of(given)) == (precision, granularity)


class TestNotes:
    def test_aleph_alpha(self) -> None:
        notes = "attention kernel: flash_attentionv1.0.8; activation checkpointing: every_layer; x"
        facts = facts_of(row(notes=notes))
        assert (facts.attention, facts.recompute, facts.rms_kernel) == ("flash1", "full", False)
        notes = "attention kernel: flash_attention2 + RMS kernel; activation checkpointing: none"
        facts = facts_of(row(notes=notes))
        assert (facts.attention, facts.recompute, facts.rms_kernel) == ("flash2", "none", True)

    def test_llm_foundry(self) -> None:
        facts = facts_of(row(notes="grad-accum 4; MP mode PURE; activation CPU offload False"))
        assert (facts.grad_accum, facts.mixed_precision) == (4, "PURE")
        assert facts.activation_offload is False

    def test_mtp_is_read_from_the_name(self) -> None:
        assert [facts_of(row(model=m)).mtp for m in ("A (w/o MTP)", "A (w/ MTP)", "A")] == [
            False,
            True,
            None,
        ]

    @pytest.mark.parametrize(
        ("notes", "mtp"),
        [
            ("MLA, 1 MTP layer, 1 dense layer", True),
            ("without MTP", False),
            ("0 MTP layers", False),
            ("MTP is not stated", None),
            ("MLA", None),
        ],
    )
    def test_mtp_is_read_from_the_notes(self, notes: str, mtp: bool | None) -> None:
        assert facts_of(row(notes=notes)).mtp is mtp

    def test_unfused_attention_of_transformer_engine_has_a_softmax_kernel(self) -> None:
        assert facts_of(row(notes="MLA; unfused attention")).attention == "fused"


class TestTimes:
    """A deterministic test or a broken release keeps its bytes and loses its seconds."""

    @pytest.mark.parametrize(
        ("cells", "timed"),
        [
            (dict(source="Megatron-LM CI memory_speed"), False),
            (dict(framework="Megatron-core (CI functional test)"), False),
            (dict(notes="deterministic mode"), False),
            (dict(notes="non-deterministic kernels"), True),
            (dict(source="Megatron-LM"), True),
            (dict(source="Megatron-Bridge 26.06.01", model="GPT OSS 120B"), False),
            (dict(source="Megatron-Bridge 26.06.01", model="GPT OSS 20B"), True),
            (dict(source="Megatron-Bridge 26.06", model="GPT OSS 120B"), True),
        ],
    )
    def test_what_is_a_measurement_of_speed(
        self, tmp_path: Path, cells: dict[str, str], timed: bool
    ) -> None:
        record = dict(model="GPT", step_seconds="1.5", memory_gb="40") | cells
        rows = read_rows(table(tmp_path / "t.csv", record))
        assert (rows[0].step_seconds, rows[0].memory_gb) == (1.5 if timed else None, 40.0)
        said = [c for c in rows.complaints if "time" in c.reason]
        assert len(said) == (0 if timed else 1)

    def test_experts(self) -> None:
        facts = facts_of(row(notes="32 experts top-4, moe_ffn 1024, MLA, 1 dense layer"))
        given = (facts.experts, facts.top_k, facts.expert_ffn, facts.dense_layers)
        assert given == (32, 4, 1024, 1)
