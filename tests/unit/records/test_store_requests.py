"""Requests by files: which one counts, whose it is, and what becomes of it."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from hpctrain.records.layout import RunLayout
from hpctrain.records.requests import (
    ask_trainer_to_leave,
    clear_followed_requests,
    clear_stale_requests,
    read_request,
)


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / "r1")
    layout.create()
    return layout


def test_nobody_asks(run: RunLayout) -> None:
    assert read_request(run) is None
    (run.control / "save").touch()
    assert read_request(run) is None


def test_the_strongest_request_counts(run: RunLayout) -> None:
    for name in ("stop", "hold", "stop-now"):
        (run.control / name).write_text(f"ada: {name} please\n")
        request = read_request(run)
        assert request is not None
        assert (request.kind, request.by) == (name, f"ada: {name} please")


def test_a_touched_file_is_a_request(run: RunLayout) -> None:
    run.stop_request.touch()
    request = read_request(run)
    me = pwd.getpwuid(os.getuid()).pw_name
    assert request is not None and request.by == f"{me} (the file control/stop)"


def test_what_the_supervisor_asks_for_is_no_request_of_a_person(run: RunLayout) -> None:
    ask_trainer_to_leave(run, "the time limit is near")
    assert run.stop_request.exists()
    assert read_request(run) is None
    clear_stale_requests(run)
    assert not run.stop_request.exists()


def test_a_person_s_request_outlives_the_supervisor_s(run: RunLayout) -> None:
    run.stop_request.write_text("ada: enough\n")
    ask_trainer_to_leave(run, "the time limit is near")
    clear_stale_requests(run)
    request = read_request(run)
    assert request is not None and request.by == "ada: enough"


def test_followed_requests_are_gone(run: RunLayout) -> None:
    for name in ("stop", "hold", "stop-now", "save"):
        (run.control / name).touch()
    clear_followed_requests(run)
    assert not list(run.control.iterdir())


def test_what_cannot_be_removed_does_not_keep_the_job_from_ending(run: RunLayout) -> None:
    run.stop_request.mkdir()
    (run.control / "hold").touch()
    clear_followed_requests(run)
    request = read_request(run)
    assert request is not None and request.kind == "stop"


def test_what_is_in_a_file_is_untrusted(run: RunLayout, tmp_path: Path) -> None:
    run.stop_request.write_bytes(b"\x1b[2Jevil\xff" + b"x" * 100_000)
    request = read_request(run)
    assert request is not None
    assert request.words.isprintable() and len(request.words) <= 200
    run.stop_request.unlink()
    secret = tmp_path / "secret"
    secret.write_text("password")
    os.symlink(secret, run.stop_request)
    request = read_request(run)
    assert request is not None and "password" not in request.by
    run.stop_request.unlink()
    os.mkfifo(run.stop_request)
    assert read_request(run) is not None  # and it has not waited for a writer
