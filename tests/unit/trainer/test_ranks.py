"""Signals to real small processes, the shim of scontrol, and the words that a launch puts in."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from waiting import wait_until

from hpctrain.spec.trainer import PLACEHOLDERS, filled_in, placeholders_of, without_resume
from hpctrain.train.launchers.rank_processes import Rank
from hpctrain.trainer.ranks import SaveSignal, write_scontrol

# Says "ready" when it catches USR1, and what it has caught: a line is one write(2), for several
# processes have one pipe.
CATCHES = """
import signal, sys, time, os
def caught(number, frame):
    os.write(1, f"caught {os.environ.get('RANK', '-')}\\n".encode())
    raise SystemExit
time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 0)
signal.signal(signal.SIGUSR1, caught)
os.write(1, b"ready\\n")
time.sleep(60)
"""
LAUNCHES = """
import os, signal, subprocess, sys, time
if sys.argv[1] == "catches":
    signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"launcher caught\\n"))
ranks = [
    subprocess.Popen([sys.executable, "-c", sys.argv[2]], env={**os.environ, "RANK": str(rank)})
    for rank in range(2)
]
for rank in ranks:
    while rank.poll() is None:
        time.sleep(0.05)
"""
WORKERS = """
import os, signal, subprocess, sys, time
def caught(number, frame):
    os.write(1, b"parent caught\\n")
    os.killpg(0, signal.SIGKILL)
signal.signal(signal.SIGUSR1, caught)
worker = 'import os, signal, time; signal.signal(signal.SIGUSR1, print); '
worker += 'os.write(1, b"worker\\\\n"); time.sleep(60)'
subprocess.Popen([sys.executable, "-c", worker])
os.write(1, b"ready\\n")
time.sleep(60)
"""
Started = Callable[..., Rank]


@pytest.fixture
def started() -> Iterator[tuple[Started, list[str]]]:
    """Start ranks, and what they print."""
    ranks: list[Rank] = []
    lines: list[str] = []
    log = os.open(os.devnull, os.O_WRONLY)

    def start(*words: str, number: int | None = 0) -> Rank:
        ranks.append(Rank(number, words, "/", dict(os.environ), log, b"", lines.append))
        return ranks[-1]

    yield start, lines
    for rank in ranks:
        rank.signal(signal.SIGKILL)
        rank.finish_reading(5.0)
    os.close(log)


def send_until_over(save: SaveSignal, rank: Rank) -> None:
    def is_over() -> bool:
        save.send([rank])
        return rank.poll() is not None

    wait_until(is_over)
    rank.finish_reading(5.0)


def test_a_process_that_catches_it_later_gets_it_once_and_lives(
    started: tuple[Started, list[str]],
) -> None:
    start, lines = started
    rank = start(sys.executable, "-c", CATCHES, "0.5")
    save = SaveSignal("USR1", to_launcher=False)
    save.send([rank])
    assert not save.sent
    send_until_over(save, rank)
    assert lines == ["ready", "caught -"] and rank.poll() == 0 and len(save.sent) == 1


def test_bash_around_it_is_passed_by(started: tuple[Started, list[str]]) -> None:
    start, lines = started
    rank = start("bash", "-c", '"$0" -c "$1"; echo after', sys.executable, CATCHES)
    send_until_over(SaveSignal("USR1", to_launcher=False), rank)
    assert lines == ["ready", "caught -", "after"]


@pytest.mark.parametrize("launcher", ["catches", "does not"])
def test_ranks_below_a_launcher_get_it_and_not_the_launcher(
    started: tuple[Started, list[str]], launcher: str
) -> None:
    """torch.distributed.run catches TERM itself, and ends its ranks."""
    start, lines = started
    rank = start(sys.executable, "-c", LAUNCHES, launcher, CATCHES, number=None)
    wait_until(lambda: lines.count("ready") == 2)
    send_until_over(SaveSignal("USR1", to_launcher=False), rank)
    assert sorted(lines) == ["caught 0", "caught 1", "ready", "ready"]


def test_the_launcher_gets_it_where_the_spec_says_so(started: tuple[Started, list[str]]) -> None:
    start, lines = started
    rank = start(sys.executable, "-c", LAUNCHES, "catches", CATCHES, number=None)
    wait_until(lambda: lines.count("ready") == 2)
    save = SaveSignal("USR1", to_launcher=True)
    for _ in range(3):
        save.send([rank])
    wait_until(lambda: "launcher caught" in lines)
    assert save.sent == {rank.pid} and not any("caught 0" in line for line in lines)


def test_workers_of_a_data_loader_get_none(started: tuple[Started, list[str]]) -> None:
    start, lines = started
    rank = start(sys.executable, "-c", WORKERS)
    wait_until(lambda: {"ready", "worker"} <= {*lines})
    save = SaveSignal("USR1", to_launcher=False)
    send_until_over(save, rank)
    assert "parent caught" in lines and save.sent == {rank.pid}


# -- The shim of scontrol ------------------------------------------------------------------------


def test_a_requeue_is_refused_and_marked_and_all_else_passes(tmp_path: Path) -> None:
    own, slurm = tmp_path / "own dir", tmp_path / "slurm"
    own.mkdir()
    slurm.mkdir()
    (slurm / "scontrol").write_text('#!/bin/sh\necho "slurm: $*"\nexit 3\n')
    (slurm / "scontrol").chmod(0o755)
    mark = write_scontrol(own)
    environment = {**os.environ, "PATH": f"{own}:{slurm}:{os.environ['PATH']}"}

    def scontrol(*words: str) -> tuple[int, str]:
        done = subprocess.run(
            ["scontrol", *words], env=environment, capture_output=True, text=True, timeout=60
        )
        return done.returncode, done.stdout

    assert scontrol("show", "job", "a b") == (3, "slurm: show job a b\n") and not mark.exists()
    for word in ("requeue", "requeuehold"):
        assert scontrol(word, "41") == (0, "")
        assert mark.exists()
        mark.unlink()


# -- Words ---------------------------------------------------------------------------------------

VALUES = {name: f"<{name}>" for name in PLACEHOLDERS}
FRESH = {**VALUES, "resume": "", "resume_step": ""}


@pytest.mark.parametrize(
    ("words", "fresh"),
    [
        (("--resume", "{resume}", "x"), ("x",)),
        (("--resume={resume}", "x"), ("x",)),
        (("resume_from={resume}",), ()),
        (("--resume", "--from", "{resume}"), ("--resume",)),
        (("--a=1", "{resume}"), ("--a=1",)),
        (("train.py", "{resume}"), ("train.py",)),
        (("--load", "{resume}", "--step", "{resume_step}"), ()),
        (("--out", "{output}"), ("--out", "<output>")),
        (("{{resume}}",), ("{<resume>}",)),
        (("{unknown}", "${HOME}", "{}"), ("{unknown}", "${HOME}", "{}")),
    ],
)
def test_a_fresh_start_has_no_word_of_a_checkpoint(
    words: tuple[str, ...], fresh: tuple[str, ...]
) -> None:
    if words == ("{{resume}}",):
        assert filled_in(words, VALUES) == fresh and filled_in(words, FRESH) == ()
    else:
        assert filled_in(words, FRESH) == fresh


def test_words_of_any_form_keep_their_order_and_everything_else() -> None:
    dice = random.Random(5)
    pieces = ("--a", "-b", "c", "=", "{output}", "{resume}", "{resume_step}", "{x}", "{", "}", "é ")
    for _ in range(2000):
        words = tuple(
            "".join(dice.choices(pieces, k=dice.randint(1, 3))) for _ in range(dice.randint(0, 6))
        )
        full, fresh = filled_in(words, VALUES), filled_in(words, FRESH)
        assert len(full) == len(words)
        assert not any(name in PLACEHOLDERS for word in full for name in placeholders_of(word))
        assert "<resume>" not in "".join(fresh) and "<resume_step>" not in "".join(fresh)
        left = iter(filled_in(without_resume(words), VALUES))
        assert all(word in left for word in fresh) and not [*left]
        rest = iter(full)
        assert all(any(word == one for one in rest) for word in fresh), (words, fresh)
