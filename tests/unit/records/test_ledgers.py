"""The ledgers of a run and of nodes: many writers, torn lines, a file that is away for a while."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest
from pydantic import ValidationError

from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import BufferedLedger, EventKind, Ledger
from hpctrain.records.node_record import (
    KINDS,
    EvidenceKind,
    NodeEvidence,
    NodeLedger,
    forgiveness,
    short,
)


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / "run")
    layout.create()
    layout.supervise_config.write_text("{}")
    return layout


def reasons(ledger: Ledger) -> list[str | None]:
    return [event.reason for event in ledger.events()]


def test_lines_wait_in_their_order_and_with_their_times(run: RunLayout) -> None:
    ledger = BufferedLedger(run)
    ledger.append(EventKind.OBSERVED, reason="first")
    assert reasons(ledger) == ["first"]
    away = run.directory.with_name("away")
    run.directory.rename(away)
    second = ledger.append(EventKind.OBSERVED, reason="second")
    third = ledger.append(EventKind.OBSERVED, reason="third")
    assert not run.directory.exists(), "a ghost of the run"
    assert reasons(ledger) == ["first", "second", "third"], "history counts what waits, too"
    assert len(ledger.waiting) == 2
    away.rename(run.directory)
    fourth = ledger.append(EventKind.OBSERVED, reason="fourth")
    assert ledger.waiting == ()
    assert Ledger(run.ledger).events()[1:] == [second, third, fourth]
    assert os.stat(run.ledger).st_mode & 0o777 == 0o600


def test_reading_is_enough_to_write_what_waits(run: RunLayout) -> None:
    ledger = BufferedLedger(run)
    ledger.append(EventKind.OBSERVED, reason="first")
    assert reasons(ledger) == ["first"]
    kept = run.directory / "kept"
    run.ledger.rename(kept)
    run.ledger.mkdir()
    ledger.append(EventKind.OBSERVED, reason="second")
    assert reasons(ledger) == ["first", "second"]
    assert ledger.flush() is not None
    run.ledger.rmdir()
    kept.rename(run.ledger)
    assert reasons(ledger) == ["first", "second"]
    assert reasons(Ledger(run.ledger)) == ["first", "second"]


@pytest.mark.parametrize("written", [True, False])
def test_a_line_is_there_once_whether_or_not_the_failed_try_has_written_it(
    run: RunLayout, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    """fsync(2) may fail after write(2) has gone through."""
    ledger = BufferedLedger(run)
    ledger.append(EventKind.OBSERVED, reason="first")
    name = "fsync" if written else "write"
    with monkeypatch.context() as broken:

        def fail(*_: object) -> int:
            raise OSError(5, "Input/output error")

        broken.setattr(f"hpctrain.base.durable.os.{name}", fail)
        ledger.append(EventKind.OBSERVED, reason="second")
        assert len(ledger.waiting) == 1
        assert reasons(ledger) == ["first", "second"]
    assert reasons(ledger) == ["first", "second"]
    assert reasons(Ledger(run.ledger)) == ["first", "second"]


def test_a_past_that_could_never_be_read_is_not_taken_for_none(run: RunLayout) -> None:
    assert BufferedLedger(run).events() == [], "a run that has written nothing"
    run.ledger.mkdir()
    with pytest.raises(IsADirectoryError):
        BufferedLedger(run).events()
    run.directory.rename(run.directory.with_name("away"))
    ledger = BufferedLedger(run)
    with pytest.raises(OSError, match="is away"):
        ledger.events()
    ledger.append(EventKind.OBSERVED, reason="all the same")
    assert not run.directory.exists()


def test_a_ledger_that_is_gone_is_not_begun_anew(run: RunLayout) -> None:
    """Whoever took it away may bring it back, and would write over what was begun."""
    ledger = BufferedLedger(run)
    ledger.append(EventKind.OBSERVED, reason="first")
    assert reasons(ledger) == ["first"]
    kept = run.directory / "kept"
    run.ledger.rename(kept)
    ledger.append(EventKind.OBSERVED, reason="second")
    assert not run.ledger.exists() and reasons(ledger) == ["first", "second"]
    kept.rename(run.ledger)
    assert ledger.flush() is None
    assert reasons(Ledger(run.ledger)) == ["first", "second"]


def test_memory_is_bounded(run: RunLayout) -> None:
    ledger = BufferedLedger(run, most_lines=3)
    run.directory.rename(run.directory.with_name("away"))
    for _ in range(3):
        ledger.append(EventKind.OBSERVED)
    with pytest.raises(OSError, match="is away"):
        ledger.append(EventKind.OBSERVED)


def test_a_kind_of_another_version_is_passed_over(run: RunLayout) -> None:
    """Older versions knew `stop_requested`, and newer ones may have kinds of their own."""
    ledger = Ledger(run.ledger)
    ledger.append(EventKind.OBSERVED, reason="first")
    with run.ledger.open("a") as stream:
        stream.write('{"event": "stop_requested", "time": 1.0}\n')
    ledger.append(EventKind.OBSERVED, reason="second")
    assert reasons(ledger) == ["first", "second"]


def test_deferred_events_are_known_and_written_later(run: RunLayout) -> None:
    """Whoever decides sees them; the file does not, until there is time."""
    ledger = BufferedLedger(run)
    ledger.append(EventKind.ATTEMPT_STARTED, nodes="n0")
    ledger.defer()
    ledger.append(EventKind.LAUNCH_ENDED, cause="time_limit")
    assert [one.event for one in ledger.events()] == ["attempt_started", "launch_ended"]
    assert ledger.flush() is None
    assert [one.event for one in Ledger(run.ledger).events()] == ["attempt_started"]
    ledger.append(EventKind.ACTION, action="requeue")
    ledger.write_on()
    ledger.append(EventKind.ACTION_RESULT, action="requeue")
    kinds = ["attempt_started", "launch_ended", "action", "action_result"]
    assert [one.event for one in Ledger(run.ledger).events()] == kinds
    assert ledger.waiting == ()


# The node ledger: many writers, torn lines, lines of others, a mode that keeps it private.


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
