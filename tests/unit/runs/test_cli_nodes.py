"""`hpctrain nodes` as it is typed."""

from __future__ import annotations

import json
import time
from pathlib import Path

from command_line import hpctrain

from hpctrain.records.node_record import EvidenceKind, NodeEvidence, NodeLedger

XID = "XID 79 GPU fell off the bus"


def fill(directory: Path, *more: NodeEvidence) -> Path:
    def seen(kind: EvidenceKind, node: str, reason: str, weight: float) -> NodeEvidence:
        return NodeEvidence(
            time=time.time() - 7200,
            cluster="a100x64",
            node=node,
            kind=kind,
            weight=weight,
            reason=reason,
            run_id="gpt-1a2b",
        )

    hard = seen(EvidenceKind.HARDWARE, "n17", XID, 100)
    slow = seen(EvidenceKind.SLOW, "n3", "rank 24 takes 1.3 times as long as the others", 10)
    NodeLedger(directory / "nodes.jsonl").append([hard, slow, *more])
    return directory


def test_the_table_fits_and_ends_with_words_for_a_ticket(tmp_path: Path) -> None:
    shown = hpctrain("nodes", "--runs", str(fill(tmp_path)))
    assert shown.exit_code == 0, shown.stderr
    head, *rows = shown.stdout.splitlines()
    assert head.split() == ["NODE", "SCORE", "AVOIDED", "RUNS", "AGE", "EVIDENCE"]
    assert rows[0].split()[:4] == ["n17", "100", "yes", "1"] and rows[0].endswith(XID)
    assert rows[1].split()[:4] == ["n3", "10", "no", "1"]
    assert all(len(line) <= 80 for line in (head, *rows[:2]))
    assert "users cannot drain nodes" in shown.stdout
    assert f'  scontrol update NodeName=n17 State=DRAIN Reason="hpctrain: {XID}, ' in shown.stdout
    assert "NodeName=n3" not in shown.stdout


def test_json(tmp_path: Path) -> None:
    shown = hpctrain("nodes", "--runs", str(fill(tmp_path)), "--json")
    body = json.loads(shown.stdout)
    assert body["schema_version"] == 1
    assert [row["node"] for row in body["nodes"]] == ["n17", "n3"]
    assert body["nodes"][0]["avoided"] is True


def test_a_cluster_of_a_profile_or_by_name(tmp_path: Path) -> None:
    other = NodeEvidence(
        time=time.time(), cluster="big", node="b1", kind=EvidenceKind.LOST, weight=100
    )
    runs = str(fill(tmp_path, other))
    every = hpctrain("nodes", "--runs", runs).stdout
    assert every.startswith("CLUSTER") and "b1" in every
    mine = hpctrain("nodes", "--runs", runs, "--profile", "a100x64").stdout
    assert mine.startswith("NODE") and "b1" not in mine and "n17" in mine
    theirs = hpctrain("nodes", "--runs", runs, "--cluster", "big").stdout
    assert "b1" in theirs and "n17" not in theirs
    both = hpctrain("nodes", "--profile", "a100x64", "--cluster", "big")
    assert both.exit_code == 2


def test_forgiving(tmp_path: Path) -> None:
    runs = str(fill(tmp_path))
    done = hpctrain("nodes", "--runs", runs, "--forgive", "n17")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "Forgave node `n17` of a100x64" in done.stderr
    assert "n17" not in hpctrain("nodes", "--runs", runs).stdout
    again = hpctrain("nodes", "--runs", runs, "--forgive", "n17")
    assert again.exit_code == 2 and "nothing against node `n17`" in again.stderr


def test_nothing_known(tmp_path: Path) -> None:
    shown = hpctrain("nodes", "--runs", str(tmp_path))
    assert (shown.exit_code, shown.stdout) == (0, "")
    assert "no run has evidence against a node" in shown.stderr
    assert json.loads(hpctrain("nodes", "--runs", str(tmp_path), "--json").stdout)["nodes"] == []
