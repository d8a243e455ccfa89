"""A whole attempt with a real webhook: what is told, once, and that nothing waits for it."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_evidence import config
from supervise_stage import Stage
from virtual_clock import ShiftedClock
from webhook_server import Webhook, webhook

from hpctrain.notify import channels
from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import EventKind
from hpctrain.records.notices import read_outbox
from hpctrain.records.supervise_config import ChannelSettings, NotifySettings
from hpctrain.runs.notify import send_notices
from hpctrain.slurm.records import RequeueAnswer
from hpctrain.supervise import loop

SECRET = "verysecretpath"


@pytest.fixture
def hook() -> Iterator[Webhook]:
    with webhook() as found:
        yield found


def tell(stage: Stage, *on: str, storm_failures: int = 5, **channel: object) -> None:
    """The run tells these events on one channel of kind slack."""
    slack = ChannelSettings.model_validate({"name": "slack", "kind": "slack", **channel})
    notify = NotifySettings(channels=(slack,), on=on or ("done", "failed", "held"))
    more = {"notify": notify, "storm_failures": storm_failures}
    stage.configure(config().model_copy(update=more))


def nowhere(stage: Stage, secret: str = SECRET) -> list[str]:
    """The files of the run and of its ranks that hold the secret."""
    return [
        str(path)
        for path in stage.layout.directory.rglob("*")
        if path.is_file() and secret.encode() in path.read_bytes()
    ]


def test_a_run_that_fails_for_good_is_told_once_with_what_to_do(
    stage: Stage, hook: Webhook, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tell(stage, url_file=str(hook.file(tmp_path)))
    assert stage.play("save:20 crash", "crash", "crash", "crash", "done") == 1
    (text,) = hook.texts
    stopped = stage.events(EventKind.ACTION)[-1]
    assert text.startswith("r1 has FAILED and will not start again by itself (")
    assert "Cause: crash: rank 0 failed: ValueError: bad batch" in text
    assert f"Done by itself: stop: {stopped.reason}" in text
    assert "newest checkpoint 20" in text
    assert f"  hpctrain resume r1 --runs {tmp_path}" in text
    assert send_notices([RunFiles(stage.layout)]) == (), "watch has nothing to add"
    assert len(hook.received) == 1
    assert nowhere(stage) == [] and SECRET not in "".join(capfd.readouterr())


def test_what_a_run_tells_is_chosen(stage: Stage, hook: Webhook, tmp_path: Path) -> None:
    tell(stage, "started", "restarted", "done", url_file=str(hook.file(tmp_path)))
    assert stage.play("save:20 crash", "done") == 0
    told = "\n".join(hook.texts)
    assert told.count("r1 has started (") == 1
    assert told.count("r1 has failed and is started again by itself (") == 1
    assert told.count("r1 is DONE (") == 1


def test_a_webhook_that_hangs_delays_no_requeue(
    stage: Stage, hook: Webhook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job asks Slurm for its requeue while the message is still on its way."""
    monkeypatch.setattr(loop, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(channels, "SEND_SECONDS", 300.0)
    hook.hold = threading.Event()
    requeue, states = stage.slurm.requeue, []

    def look(job_id: int) -> RequeueAnswer:
        hook.wait(lambda: bool(hook.received))
        states.extend(one.state for one in read_outbox(stage.layout).of_channel("slack"))
        return requeue(job_id)

    monkeypatch.setattr(stage.slurm, "requeue", look)
    tell(stage, "started", "requeued", url_file=str(hook.file(tmp_path)), storm_failures=2)
    assert stage.play("crash", "crash", "done") == 0
    assert stage.slurm.actions_at_requeue == [["relaunch", "requeue"]]
    assert (states, len(hook.received)) == (["sending"], 1)


def test_what_could_not_be_sent_is_sent_by_watch(
    stage: Stage, hook: Webhook, tmp_path: Path, shifted_clock: ShiftedClock
) -> None:
    tell(stage, url_file=str(hook.file(tmp_path)))
    hook.answer = 503
    assert stage.play("config") == 1
    run = RunFiles(stage.layout)
    assert send_notices([run]) == (), "not at once again"
    shifted_clock.ahead_seconds = 61.0
    (failed,) = send_notices([run])
    assert failed.problem == "the server answers HTTP 503"
    hook.answer = 200
    shifted_clock.ahead_seconds = 183.0
    (sent,) = send_notices([run])
    assert (sent.kinds, sent.problem) == (("failed",), None)
    shifted_clock.ahead_seconds = 1e5
    assert send_notices([run]) == () and len(hook.received) == 3
    assert len({text for text in hook.texts}) == 1, "the same message, whoever sends it"


def test_a_supervisor_that_died_while_sending_is_followed_by_watch(
    stage: Stage, hook: Webhook, tmp_path: Path, shifted_clock: ShiftedClock
) -> None:
    """Nobody can know whether its message arrived: it is repeated once, and says so."""
    tell(stage, url_file=str(hook.file(tmp_path)))
    stage.play("config")
    (path,) = stage.layout.notices.iterdir()
    path.write_text(path.read_text().replace('"state":"sent"', '"state":"sending"'))
    run = RunFiles(stage.layout)
    assert send_notices([run]) == ()
    shifted_clock.ahead_seconds = 301.0
    assert len(send_notices([run])) == 1
    assert "may be a repetition" in hook.texts[1] and "may be" not in hook.texts[0]


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EROFS])
def test_a_run_that_fails_with_its_disk_is_told(
    stage: Stage, hook: Webhook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Neither its end nor the message can be recorded, so that `watch` could not tell it."""

    def full(*words: object, **named: object) -> None:
        raise OSError(number, os.strerror(number))

    tell(stage, url_file=str(hook.file(tmp_path)))
    supervisor = stage.supervisor("await:full config")

    def fill() -> None:
        monkeypatch.setattr("hpctrain.base.durable.append_line", full)
        monkeypatch.setattr("hpctrain.records.notices.create_exclusive", full)
        (stage.layout.directory / "full").touch()

    monkeypatch.setattr("hpctrain.supervise.timeouts._PATIENCE_SECONDS", 1.0)
    stage.once(lambda: stage.events(EventKind.LAUNCH_STARTED), fill)
    assert supervisor.run() == 1
    assert stage.actions == [], "the file does not have it"
    (text,) = hook.texts
    assert "has FAILED" in text and "may be a repetition" in text


def test_a_run_that_tells_nobody_writes_nothing(stage: Stage) -> None:
    assert stage.play("done") == 0
    assert not stage.layout.notices.exists()
