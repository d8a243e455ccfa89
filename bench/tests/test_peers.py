"""Other planners' figures beside ours: which rows they are of, and the errors."""

from __future__ import annotations

import pandas as pd
import pytest
import row_specimens as specimens

from bench import held_out, peers
from bench.predictions import predict_file
from bench.published import PublishedRow, read_rows
from hpctrain.spec.loader import load_calibration

CASE = "deepseekv2_tp1_ep8_pp1_dp8_l4_mbc4_cef"  # a name; the row below is made up
ROW = dict(
    specimens.SHARED,
    source="SimuMax B200 real",
    framework="Megatron-LM",
    model="DeepSeek-V2 4-layer",
    num_layers="4",
    gpu="B200-SXM",
    gpus="8",
    tp="1",
    pp="1",
    ep="8",
    dp="8",
    global_batch="64",
    step_seconds="0.5",
    memory_gb="50",
    source_url_or_repo_path=f"docs/b200 case {CASE}",
)


def test_every_row_of_table_5_has_a_figure_of_calculon() -> None:
    rows = read_rows(peers.KORTHIKANTI)
    assert rows.complaints == []
    known = peers.printed_figures()
    assert [known[peers.case_of(row) or ""].peer for row in rows] == ["Calculon"] * 8
    assert {figure.peer for figure in known.values()} == set(peers.SOURCES)


def test_table_5_is_run_as_it_says() -> None:
    """arXiv 2205.05198: full recomputation without, the present work with sequence parallelism."""
    predicted = predict_file(peers.KORTHIKANTI)
    assert predicted.refused == []
    meshes = [case.case.mesh for case in predicted.cases]
    assert [mesh.sequence_parallel for mesh in meshes] == [0, 1] * 4
    assert [mesh.again_core_attn for mesh in meshes] == [0, 1] * 4
    assert [(mesh.pp, mesh.vpp, mesh.accumulation) for mesh in meshes[::2]] == [
        (1, 1, 1),
        (8, 3, 64),
        (35, 3, 280),
        (64, 1, 512),
    ]
    assert all(mesh.gradient_bytes == 2 and mesh.zero == 0 for mesh in meshes)


def test_calculon_prints_the_mean_that_its_rows_have() -> None:
    rows, known = read_rows(peers.KORTHIKANTI), peers.printed_figures()
    errors = [
        known[peers.case_of(row) or ""].seconds / float(row.step_seconds or 0) - 1 for row in rows
    ]
    assert 100 * sum(map(abs, errors)) / 8 == pytest.approx(3.65, abs=0.01)
    assert 100 * max(map(abs, errors)) == pytest.approx(8.87, abs=0.01)


def test_a_row_without_a_case() -> None:
    assert peers.case_of(PublishedRow(line=2, source_url_or_repo_path="a table")) is None
    assert peers.case_of(PublishedRow(line=2, source_url_or_repo_path="x case a_b c")) == "a_b"


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    others = [
        specimens.GPT,
        specimens.ALEPH,
        specimens.GPT | {"source_url_or_repo_path": "case no"},
    ]
    path = specimens.write(tmp_path_factory.mktemp("peers") / "t.csv", ROW, *others)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held_out, "constants_from", lambda _: load_calibration())
        return peers.compared(path)


def test_rows_that_no_peer_prints_are_left_out(table: pd.DataFrame) -> None:
    assert list(table.peer) == ["Calculon"] * 8 + ["SimuMax"]
    assert table.iloc[8].case == CASE
    assert table.iloc[8]["measured seconds"] == 0.5
    assert table.iloc[8]["peer seconds"] == pytest.approx(0.34359)


def test_every_view_of_ours_has_a_figure(table: pd.DataFrame) -> None:
    for view in peers.OURS:
        assert (table[f"{view} seconds"] > 0).all()
        assert (table[f"{view} gib"] > 0).all()
    assert (table["own seconds"] != table["product seconds"]).any()


def test_errors_by_hand() -> None:
    lines = {"peer": "P", "measured seconds": [1.0, 2.0], "peer seconds": [1.1, 1.4]}
    ours = {f"{view} seconds": [1.05, 2.1] for view in peers.OURS}
    found = peers.report(pd.DataFrame({**lines, **ours}), "seconds").lines
    assert found["P: P"]["mean %"] == pytest.approx(20)  # of 10 and 30
    assert found["P: P"]["to the peer"] == pytest.approx(1)
    assert found["P: ours, product"]["mean %"] == pytest.approx(5)
    assert found["P: ours, product"]["to the peer"] == pytest.approx(0.25)
    assert found["P: ours, product"]["bias %"] == pytest.approx(5)
    ours["own seconds"] = [1.05, None]
    found = peers.report(pd.DataFrame({**lines, **ours}), "seconds").lines
    assert found["P: P"]["mean %"] == pytest.approx(10), "of the row that all have"
    nothing = {f"{one} gib": [None] for one in ("measured", "peer", *peers.OURS)}
    assert peers.report(pd.DataFrame({"peer": ["P"], **nothing}), "gib").lines == {}
