"""The record of what was sent: one sender per try, and what happens after one that died."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hpctrain.records import notices
from hpctrain.records.layout import RunLayout
from hpctrain.records.notices import Outbox, SendRecord, SendState, read_outbox

NOW = 1_000_000.0


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / "r1")
    layout.create()
    layout.supervise_config.write_text("{}")
    return layout


def record(state: SendState = "sending", time: float = NOW, by: str = "job 1") -> SendRecord:
    return SendRecord(
        notice="5-failed", channel="slack", kind="failed", state=state, try_time=time,
        message="m", by=by,
    )  # fmt: skip


def tried(run: RunLayout, *states: SendState, time: float = NOW) -> Outbox:
    for state in states:
        outbox = read_outbox(run)
        assert outbox.claim(record(time=time))
        outbox.finish(record(state, time))
    return read_outbox(run)


def test_one_of_many_senders_may_send(run: RunLayout) -> None:
    barrier, won = threading.Barrier(16), []

    def sender(number: int) -> None:
        outbox = read_outbox(run)
        barrier.wait()
        if outbox.claim(record(by=f"sender {number}")):
            won.append(number)

    threads = [threading.Thread(target=sender, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    (tried,) = read_outbox(run).tries("5-failed", "slack").records
    assert tried.by == f"sender {won[0]}" and tried.state == "sending"


def test_what_was_sent_is_not_sent_again(run: RunLayout) -> None:
    tries = tried(run, "failed", "sent").tries("5-failed", "slack")
    assert tries.sent and [one.state for one in tries.records] == ["failed", "sent"]
    assert not read_outbox(run).tries("5-failed", "mail").sent, "each channel by itself"


def test_pauses_after_failures_grow(run: RunLayout) -> None:
    pauses = []
    for _ in range(notices._MOST_TRIES):
        tries = tried(run, "failed").tries("5-failed", "slack")
        pauses.append(tries.next_time - NOW)
    assert pauses[:3] == [60, 120, 240] and max(pauses) == 6 * 3600
    assert tries.given_up and sum(pauses) > 2 * 86400, "a webhook may be away for days"


def test_a_sender_that_died_is_followed_once(run: RunLayout) -> None:
    first = tried(run, "sending").tries("5-failed", "slack")
    assert not first.given_up and first.next_time > NOW + 60, "it may still be sending"
    second = tried(run, "sending", time=first.next_time).tries("5-failed", "slack")
    assert second.lost == 2 and second.given_up


@pytest.mark.parametrize("text", ["", '{"notice": "5-fa'])
def test_a_file_without_a_record_does_not_block_its_notice(run: RunLayout, text: str) -> None:
    """Nobody knows what became of it: as of a sender that died, it is followed once."""
    tried(run, "sent")
    (path,) = run.notices.iterdir()
    path.write_text(text)
    outbox = read_outbox(run)
    tries = outbox.tries("5-failed", "slack")
    assert (tries.lost, tries.given_up, tries.next_time) == (1, False, 0.0)
    assert outbox.claim(record()) and not outbox.claim(record(by="another"))
    outbox.finish(record("sent"))
    after = read_outbox(run).tries("5-failed", "slack")
    assert after.sent and path.read_text() == text
    for one in run.notices.iterdir():
        one.write_text(text)
    assert read_outbox(run).tries("5-failed", "slack").given_up


def test_files_are_private_or_shared_like_the_run(run: RunLayout) -> None:
    tried(run, "sent")
    modes = {path.stat().st_mode & 0o777 for path in run.notices.iterdir()}
    assert modes == {0o600} and run.notices.stat().st_mode & 0o777 == 0o700
    shared = RunLayout(run.directory.parent / "r2")
    shared.create(run.directory.stat().st_gid)
    shared.supervise_config.write_text("{}")
    tried(shared, "sent")
    assert {path.stat().st_mode & 0o777 for path in shared.notices.iterdir()} == {0o640}


def test_without_a_run_directory_nothing_may_be_sent(tmp_path: Path) -> None:
    outbox = read_outbox(RunLayout(tmp_path / "away"))
    with pytest.raises(OSError):
        outbox.claim(record())
