"""A ledger whose file is away for a while: nothing of it is lost, doubled, or written elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import BufferedLedger, EventKind, Ledger


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
