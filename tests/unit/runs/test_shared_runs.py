"""A directory of runs that several people share: what one may do to the runs of another."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from another_user import AnotherUser, public_directory
from command_line import hpctrain
from fabricated_runs import LAUNCHED, STARTED, SUBMITTED, fabricate, published

from hpctrain.records.find import RunFiles
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind
from hpctrain.records.requests import make_request, read_request
from hpctrain.runs import control
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.states import JobState

# What only reads, and what would change a run.
READING = ("status", "describe", "why", "goodput", "logs", "checkpoints")
TAKING = (("rm", "-y"), ("clean", "-y"))


@pytest.fixture
def runs() -> Iterator[Path]:
    with public_directory() as place:
        yield place


def readable(run: RunFiles) -> RunFiles:
    for path in (run.layout.directory, *run.layout.directory.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return run


def done_run(runs: Path, run_id: str = "shared-0001") -> RunFiles:
    run = fabricate(runs, run_id, [*SUBMITTED, STARTED, LAUNCHED], steps=60, done=True)
    published(run, 60)
    return readable(run)


def content(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """Everything below, with modes and times: what a command that only reads leaves alone."""
    found = {}
    for path in sorted(directory.rglob("*")):
        seen = path.lstat()
        data = path.read_bytes() if stat.S_ISREG(seen.st_mode) else b""
        found[str(path)] = (seen.st_mode, seen.st_mtime_ns, data)
    return found


def test_reading_a_run_of_somebody_else_writes_nothing(
    runs: Path, another_user: AnotherUser
) -> None:
    done_run(runs)
    before = content(runs)
    for verb in READING:
        told = another_user.hpctrain(verb, "shared", "--runs", str(runs))
        assert told.exit_code == 0, told.transcript()
    assert content(runs) == before


def test_a_run_of_somebody_else_is_not_removed(runs: Path, another_user: AnotherUser) -> None:
    """One refusal each, which names the owner, also where the directory of runs is open to all."""
    done_run(runs)
    runs.chmod(0o777)
    before = content(runs)
    for words in TAKING:
        told = another_user.hpctrain(words[0], "shared", *words[1:], "--runs", str(runs))
        assert told.exit_code == 2, told.transcript()
        verb = "remove" if words[0] == "rm" else words[0]
        assert f"you cannot {verb} run `shared-0001`, which belongs to root" in told.stderr
        assert "unexpected" not in told.stderr
    assert content(runs) == before


def test_an_archive_of_somebody_else_s_run_is_ones_own(
    runs: Path, another_user: AnotherUser
) -> None:
    """It lies where its maker says; where they may not write, they are told, and nothing stays."""
    done_run(runs)
    before = content(runs)
    refused = another_user.hpctrain("archive", "shared", "--runs", str(runs))
    assert refused.exit_code in (2, 7) and "Permission denied" in refused.stderr, refused
    assert "unexpected" not in refused.stderr and content(runs) == before


def test_a_private_run_is_shown_with_its_owner(runs: Path, another_user: AnotherUser) -> None:
    fabricate(runs, "closed-0001")
    done_run(runs)
    listed = another_user.hpctrain("status", "-a", "--runs", str(runs))
    assert listed.exit_code == 0 and "shared-0001" in listed.stdout
    (line,) = [line for line in listed.stdout.splitlines() if line.startswith("closed-0001")]
    assert line.endswith("cannot be read: Permission denied; it belongs to root")
    for words in (("describe", "closed"), ("rm", "closed", "-y"), ("stop", "closed")):
        told = another_user.hpctrain(*words, "--runs", str(runs))
        assert told.exit_code == 2 and "it belongs to root" in told.stderr, told.transcript()
        shares = f"setfacl -R -m u:{another_user.name}:rX,d:u:{another_user.name}:rX {runs}/closed-"
        assert shares in told.stderr, "what its owner types"
    watched = another_user.hpctrain("watch", "--runs", str(runs))
    assert watched.exit_code == 2 and "hint: `--heartbeat FILE`" in watched.stderr


READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'


def on_read_only(runs: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command whose processes alone see `runs` as a mount that is read-only."""
    argv = ["unshare", "--mount", "sh", "-c", READ_ONLY, str(runs)]
    argv += [sys.executable, "-m", "hpctrain", *words, "--runs", str(runs)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)


def test_a_read_only_mount_is_enough_to_look(runs: Path) -> None:
    """As login nodes see the scratch of another cluster. Verbs that write are refused in words."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root can mount")
    done_run(runs)
    before = content(runs)
    for verb in READING:
        told = on_read_only(runs, verb, "shared")
        assert told.returncode == 0, told.stderr
    for words in TAKING:
        told = on_read_only(runs, words[0], "shared", *words[1:])
        assert told.returncode == 2 and "you cannot" in told.stderr, told.stderr
        assert "read-only" in told.stderr, told.stderr
    assert content(runs) == before


# -- steering ----------------------------------------------------------------------------------


def test_who_may_not_steer_is_told_who_can_allow_it(runs: Path, another_user: AnotherUser) -> None:
    run = readable(fabricate(runs, "shared-0001", [*SUBMITTED, STARTED, LAUNCHED], steps=12))
    for verb in (control.stop, control.hold, control.save):
        with pytest.raises(RuntimeError, match="which belongs to root"):
            another_user.call(verb, run, running())
    assert list(run.layout.control.iterdir()) == []
    assert not [event for event in run.ledger.events() if event.event is EventKind.CONTROL]


def running() -> FakeSlurm:
    slurm = FakeSlurm()
    slurm.submit("#!/bin/sh\n")
    slurm.records[1] = replace(slurm.records[1], state=JobState.RUNNING)
    return slurm


def test_a_colleague_asks_a_run_that_waits(runs: Path, another_user: AnotherUser) -> None:
    """Slurm lets only the owner touch the job, so the request stands until the job starts."""
    run = readable(fabricate(runs, "shared-0001"))
    run.layout.control.chmod(0o777)
    for verb, kind in ((control.hold, "hold"), (control.stop, "stop")):
        told = another_user.call(verb, run, Untouchable.waiting())
        assert told.changed and "when its job starts; only the owner" in told.message
        request = read_request(run.layout)
        assert request is not None and (request.kind, request.owner) == (kind, another_user.name)
    with pytest.raises(RuntimeError, match="cannot resume run `shared-0001`, which belongs to"):
        another_user.call(control.resume, run, Untouchable.held())
    assert read_request(run.layout) is not None, "nothing was taken back"


class Untouchable(FakeSlurm):
    """Slurm as somebody else meets it: jobs can be seen, and not changed."""

    @classmethod
    def waiting(cls) -> Untouchable:
        slurm = cls()
        slurm.submit("#!/bin/sh\n")
        return slurm

    @classmethod
    def held(cls) -> Untouchable:
        slurm = cls.waiting()
        FakeSlurm.hold(slurm, 1)
        return slurm

    def hold(self, job_id: int) -> None:
        raise AssertionError("Access/permission denied")

    release = cancel_waiting = hold


def test_the_name_of_who_asks_is_told_once(runs: Path) -> None:
    layout = RunLayout(runs / "run")
    layout.create()
    for reason, expected in (("", ""), ("lunch", "lunch")):
        make_request(layout, "stop", reason)
        request = read_request(layout)
        assert request is not None and request.reason == expected
    layout.stop_request.write_text("by hand\n")
    request = read_request(layout)
    assert request is not None and request.reason == "by hand"


def test_a_group_that_controls(runs: Path, another_user: AnotherUser) -> None:
    layout = RunLayout(runs / "run")
    layout.create(another_user.account.pw_gid, group_controls=True)
    writable = [
        path
        for path in (layout.directory, *layout.directory.rglob("*"))
        if another_user.call(os.access, path, os.W_OK)
    ]
    assert writable == [layout.control]
    another_user.call(make_request, layout, "save", "demo")
    assert layout.save_request.read_text() == f"{another_user.name} (demo)\n"


# -- two at once -------------------------------------------------------------------------------


def test_both_look_after_their_own_runs(runs: Path, another_user: AnotherUser) -> None:
    """Each has a lock and a heartbeat, whoever comes first."""
    runs.chmod(0o777)
    ours = ("watch", "--act", "--runs", str(runs))
    first, second = another_user.hpctrain(*ours), another_user.hpctrain(*ours)
    assert (first.exit_code, second.exit_code) == (0, 0), second.transcript()
    assert hpctrain(*ours).exit_code == 0
    owners = {path.stat().st_uid for path in runs.rglob("heartbeat.json")}
    assert owners == {another_user.account.pw_uid, os.getuid()}
