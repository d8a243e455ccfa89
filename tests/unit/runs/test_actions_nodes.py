"""What people see of the node ledger: rows, forgiving, and a line that root may paste."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path

import pytest
from command_line import hpctrain

from hpctrain.base.errors import InvalidInputError, UsageError
from hpctrain.records.node_record import KINDS, EvidenceKind, NodeEvidence, NodeLedger
from hpctrain.runs.node_evidence import forgive, node_rows

NOW = 1_795_219_200.0  # 2026-11-21 00:00 UTC
K = EvidenceKind


def seen(kind: EvidenceKind, node: str, **fields: object) -> NodeEvidence:
    told: dict[str, object] = {
        "time": NOW - 3600,
        "cluster": "c",
        "node": node,
        "kind": kind,
        "weight": KINDS[kind].weight,
        "run_id": "r1",
        "reason": "why",
        **fields,
    }
    return NodeEvidence.model_validate(told)


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    path = tmp_path / "nodes.jsonl"
    NodeLedger(path).append(
        [
            seen(K.SLOW, "n3", run_id="r2", reason="rank 3 is slow"),
            seen(K.HARDWARE, "n17", reason="XID 79 GPU fell off the bus", gpu="GPU-1"),
            seen(
                K.HARDWARE, "n17", reason="XID 79 GPU fell off the bus", run_id="r2", time=NOW - 60
            ),
            seen(K.LOST, "b1", cluster="big"),
        ]
    )
    return path


def test_rows_worst_first_of_each_cluster(ledger: Path) -> None:
    rows = node_rows(ledger, now=NOW)
    assert [(row.cluster, row.node, row.score) for row in rows] == [
        ("c", "n17", 200),
        ("c", "n3", 10),
        ("big", "b1", 100),
    ]
    first = rows[0]
    assert (first.avoided, first.spared, first.runs, first.gpus) == (
        *(True, False, ("r1", "r2"), ("GPU-1",)),
    )
    assert (first.kind, first.reason) == ("hardware", "XID 79 GPU fell off the bus")
    assert (first.last_time, first.age_seconds) == (NOW - 60, 60)
    assert not rows[1].avoided and rows[1].admin_hint is None
    assert [row.node for row in node_rows(ledger, "big", now=NOW)] == ["b1"]
    assert node_rows(ledger, "none", now=NOW) == ()
    assert node_rows(ledger.with_name("absent")) == ()


def test_what_is_too_much_is_spared(tmp_path: Path) -> None:
    path = tmp_path / "nodes.jsonl"
    NodeLedger(path).append([seen(K.LOST, f"n{number}") for number in range(4)])
    assert [row.avoided for row in node_rows(path, now=NOW)] == [True, True, False, False]
    rows = node_rows(path, "c", usable_nodes=30, now=NOW)
    assert [(row.avoided, row.spared) for row in rows] == [(True, False)] * 3 + [(False, True)]


def test_the_hint_for_administrators(ledger: Path) -> None:
    (row, *_) = node_rows(ledger, now=NOW)
    assert row.admin_hint == (
        "scontrol update NodeName=n17 State=DRAIN "
        'Reason="hpctrain: XID 79 GPU fell off the bus, 2 runs, 2026-11-20"'
    )


def test_no_hint_for_what_one_program_does(tmp_path: Path) -> None:
    """Avoided by runs that may, but nothing that an administrator could act on."""
    path = tmp_path / "nodes.jsonl"
    NodeLedger(path).append([seen(K.FIRST_FAILED, "n1") for _ in range(4)])
    (row,) = node_rows(path, now=NOW)
    assert (row.avoided, row.admin_hint) == (True, None)


@pytest.mark.parametrize(
    "reason",
    [
        '"; reboot; "',
        "$(reboot)",
        "`reboot`",
        "a\\",
        "!!",
        "x=y State=RESUME",
        "é\x1b[2J",
        "x" * 900,
    ],
)
def test_a_log_cannot_put_a_command_into_the_hint(tmp_path: Path, reason: str) -> None:
    path = tmp_path / "nodes.jsonl"
    NodeLedger(path).append([seen(K.HARDWARE, "n1", reason=reason[:300])])
    (row,) = node_rows(path, now=NOW)
    assert row.admin_hint is not None
    assert not set('$`\\!"=\x1b') & set(row.admin_hint.partition('Reason="')[2][:-1])
    words = shlex.split(row.admin_hint)
    assert words[:4] == ["scontrol", "update", "NodeName=n1", "State=DRAIN"]
    assert len(words) == 5 and words[4].startswith("Reason=hpctrain: ")
    assert len(row.admin_hint) < 280


def test_forgiving_clears_a_node_and_stays_in_the_ledger(ledger: Path) -> None:
    entry = forgive(ledger, "n17", "alice")
    assert [row.node for row in node_rows(ledger, "c", now=NOW)] == ["n3"]
    assert NodeLedger(ledger).read()[-1] == entry
    assert (entry.user, entry.cluster, entry.reason) == ("alice", "c", "forgiven by alice")


def test_nothing_to_forgive(ledger: Path) -> None:
    with pytest.raises(UsageError, match="nothing against node `n99`"):
        forgive(ledger, "n99", "alice")
    with pytest.raises(UsageError, match="of big"):
        forgive(ledger, "n17", "alice", "big")
    assert len(NodeLedger(ledger).read()) == 4


def test_one_name_in_two_clusters(ledger: Path) -> None:
    now = time.time()
    NodeLedger(ledger).append(
        [seen(K.LOST, "n1", time=now), seen(K.LOST, "n1", cluster="big", time=now)]
    )
    with pytest.raises(UsageError, match="c and big"):
        forgive(ledger, "n1", "alice")
    assert forgive(ledger, "n1", "alice", "big").cluster == "big"


def test_a_ledger_that_cannot_be_read_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="cannot be read: Is a directory"):
        node_rows(tmp_path)


def test_a_ledger_that_cannot_be_written_is_one_clear_error(
    ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(NodeLedger, "append", refuse)
    with pytest.raises(InvalidInputError, match="cannot be written: Permission denied"):
        forgive(ledger, "n17", "alice")


# -- `hpctrain nodes` as it is typed -------------------------------------------------------------


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
