"""The node ledger: many writers, torn lines, lines of others, a mode that keeps it private."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest
from pydantic import ValidationError

from hpctrain.records.node_record import (
    KINDS,
    EvidenceKind,
    NodeEvidence,
    NodeLedger,
    forgiveness,
    short,
)


def evidence(node: str = "n1", **fields: object) -> NodeEvidence:
    given = {"time": 5.0, "cluster": "c", "kind": "lost", "weight": 100.0, "node": node, **fields}
    return NodeEvidence.model_validate(given)


def test_what_is_written_is_read_in_order(tmp_path: Path) -> None:
    ledger = NodeLedger(tmp_path / "new" / "nodes.jsonl")
    first = [evidence("n1", gpu="GPU-1", run_id="r", job_id=3, reason="why"), evidence("n2")]
    ledger.append(first)
    ledger.append([evidence("n3")])
    assert ledger.read() == (*first, evidence("n3"))


def test_a_ledger_that_does_not_exist_is_empty_and_one_that_cannot_be_read_is_not(
    tmp_path: Path,
) -> None:
    assert NodeLedger(tmp_path / "none").read() == ()
    with pytest.raises(OSError):
        NodeLedger(tmp_path).read()


def test_nothing_is_created_for_no_evidence(tmp_path: Path) -> None:
    NodeLedger(tmp_path / "nodes.jsonl").append([])
    assert not (tmp_path / "nodes.jsonl").exists()


def test_the_file_is_private(tmp_path: Path) -> None:
    ledger = NodeLedger(tmp_path / "nodes.jsonl")
    ledger.append([evidence()])
    assert stat.S_IMODE(ledger.path.stat().st_mode) == 0o600


def test_torn_and_foreign_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "nodes.jsonl"
    whole = evidence().model_dump_json()
    later = whole.replace('"lost"', '"a_kind_of_a_later_version"')
    path.write_text("\n".join([whole, later, "", "nonsense", '{"node": 3}', whole[:40]]))
    ledger = NodeLedger(path)
    ledger.append([evidence("n9")])
    assert [one.node for one in ledger.read()] == ["n1", "n9"]


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "nodes.jsonl"

    def write(writer: int) -> None:
        for number in range(20):
            NodeLedger(path).append([evidence(f"w{writer}-{number}-{part}") for part in range(3)])

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = [one.node for one in NodeLedger(path).read()]
    assert len(set(names)) == len(names) == 4 * 20 * 3
    for first in range(0, len(names), 3):
        assert len({name.rpartition("-")[0] for name in names[first : first + 3]}) == 1


def test_a_very_long_ledger_is_read_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpctrain.records.node_record._MOST_BYTES", 1000)
    ledger = NodeLedger(tmp_path / "nodes.jsonl")
    ledger.append([evidence(f"n{number}") for number in range(100)])
    nodes = [one.node for one in ledger.read()]
    assert 5 < len(nodes) < 20
    assert nodes[-1] == "n99"
    assert nodes == [f"n{number}" for number in range(100 - len(nodes), 100)]


@pytest.mark.parametrize(
    "node", ["", "n[0-3]", "n1 State=DRAIN", "$(reboot)", "-n1", 'n1"', "n\n1"]
)
def test_a_name_is_a_name(node: str) -> None:
    """It ends up in a command that administrators paste."""
    with pytest.raises(ValidationError):
        evidence(node)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), 1e9])
def test_a_weight_is_a_weight(weight: float) -> None:
    with pytest.raises(ValidationError):
        evidence(weight=weight)


def test_a_reason_is_one_printable_line() -> None:
    assert short("a\n\tb  c") == "a b c"
    assert short("a\x1b[31mb") == "a?[31mb"
    assert len(short("x" * 1000)) == 300


def test_the_weights_of_the_policy() -> None:
    """100 excludes alone; what may be the program's fault takes several."""
    weights = {str(kind): facts.weight for kind, facts in KINDS.items()}
    assert weights == {
        "hardware": 100,
        "lost": 100,
        "prolog": 100,
        "unhealthy": 100,
        "doubtful": 50,
        "gpu_error_contained": 50,
        "gpu_error": 50,
        "first_failed": 30,
        "signalled": 10,
        "odd_stack": 30,
        "slow": 10,
        "slow_checked": 50,
        "short_attempt": 10,
        "forgiven": 0,
    }
    hard = {kind for kind, facts in KINDS.items() if facts.half_life_seconds == 7 * 86400}
    assert hard == {
        EvidenceKind.HARDWARE,
        EvidenceKind.GPU_ERROR_CONTAINED,
        EvidenceKind.FORGIVEN,
    }
    assert all(facts.half_life_seconds in (86400, 7 * 86400) for facts in KINDS.values())


def test_who_forgives_is_written_down(tmp_path: Path) -> None:
    ledger = NodeLedger(tmp_path / "nodes.jsonl")
    ledger.append([forgiveness(7.0, "c", "n1", "alice", "repaired")])
    (entry,) = ledger.read()
    assert (entry.user, entry.time, entry.node, entry.kind) == ("alice", 7.0, "n1", "forgiven")
