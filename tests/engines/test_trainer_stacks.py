"""Stacks on request: of every thread, whatever a rank is stuck in; they name the odd one."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from trial_runs import LIMIT_SECONDS, PP2, TP2, TWO, MakeTrial, held_at, trained
from waiting import wait_until

from bench import prefork
from hpctrain.judge.odd_stacks import odd_ranks, places
from hpctrain.records.epochs import claim_epoch
from hpctrain.records.run_records import TrainerExit
from hpctrain.supervise.evidence.stack_inquiry import read_dumps, sizes, wait_for_dumps
from hpctrain.train import stacks
from hpctrain.train.rank_environment import Launch
from hpctrain.train.saving import writer
from hpctrain.train.stacks import flight_recorder

LONG = dict(train_steps=400, lr_decay_steps=400)


@contextmanager
def _running(ranks: prefork.Ranks) -> Iterator[prefork.Ranks]:
    try:
        yield ranks
    finally:
        for number in (signal.SIGCONT, signal.SIGKILL):
            ranks.signal(number)
        ranks.wait(LIMIT_SECONDS)


def _dump(path: Path, place: str, ranks: prefork.Ranks) -> str:
    """The dump, once it has this pattern; ranks that had not come there are asked again."""
    end = time.monotonic() + LIMIT_SECONDS
    while not path.exists() or not re.search(place, path.read_text()):
        assert time.monotonic() < end, ranks.log()
        ranks.signal(signal.SIGQUIT)
        time.sleep(0.5)
    return path.read_text()


def _hold_the_lock() -> None:
    """From the second step on rank 1 never gives Python's lock back."""
    import ctypes

    from hpctrain.train.loop import Loop

    original = Loop.one_step

    def hold(self: Loop) -> object:
        if os.environ["RANK"] == "1" and self.position.step == 1:
            mutex = ctypes.create_string_buffer(64)
            lock = ctypes.PyDLL(None).pthread_mutex_lock  # PyDLL: the call keeps the lock
            lock(mutex)
            lock(mutex)
        return original(self)

    Loop.one_step = hold  # type: ignore[method-assign,assignment]


def test_stacks_of_ranks_that_are_stuck(trial: MakeTrial) -> None:
    """Rank 1 keeps Python's lock for ever, rank 0 waits for it in a collective of gloo."""
    stuck = trial(**TWO, **LONG)
    assert claim_epoch(stuck.run.epochs, "this launch") == 1
    ranks = stuck.start(prepare=_hold_the_lock, epoch=1)
    with _running(ranks):
        stuck.wait_for_step(1, ranks)
        waiting = _dump(stuck.run.stack_dump(1, 0), r"distributed_c10d\.py", ranks)
        innermost = r"most recent call first\):\n  File .* in hold\n"
        holding = _dump(stuck.run.stack_dump(1, 1), innermost, ranks)
    header, _, body = waiting.partition("\n")
    assert header.startswith("rank=0 node=") and " epoch=1 package=" in header
    assert f"pid={ranks.pids[0]} " in header
    assert "most recent call first" in body
    assert "distributed_c10d.py" in body, "rank 0 is in a collective"
    assert holding.startswith("rank=1 ")
    mode = stuck.run.stack_dump(1, 1).stat().st_mode & 0o777
    assert mode == 0o600


@pytest.mark.variant("test_stacks_of_ranks_that_are_stuck")
def test_a_dump_disturbs_nothing_and_unused_files_go(trial: MakeTrial) -> None:
    asked = trial(**TWO)
    ranks = asked.start(prepare=held_at(3, _has_given_its_stack))
    asked.wait_for_step(1, ranks)
    ranks.signal(signal.SIGQUIT, 1)
    assert ranks.wait(LIMIT_SECONDS) == [0, 0], ranks.log()
    assert "most recent call first" in asked.run.stack_dump(0, 1).read_text()
    assert not asked.run.stack_dump(0, 0).exists(), "nobody asked rank 0"
    assert asked.exact == trained(**TWO).exact


def _has_given_its_stack(loop: Any) -> bool:
    path = loop.job.run.stack_dump(0, 1)
    return path.exists() and "most recent call first" in path.read_text()


def _writer_waits(asked: Path) -> None:
    """It tells its process id, and goes on when it has been asked."""
    real = writer.write_rank_digests

    def slowly(directory: Path, rank: int, names: list[str]) -> None:
        (directory / "digests").mkdir(exist_ok=True)
        (directory / "digests" / "pid").write_text(str(os.getpid()))
        wait_until(asked.exists)
        (directory / "digests" / "pid").unlink()
        real(directory, rank, names)

    writer.write_rank_digests = slowly


def test_a_writer_does_not_answer_in_its_rank_s_file(trial: MakeTrial) -> None:
    saving = trial(train_steps=1)
    asked = saving.run.directory / "asked"
    ranks = saving.start(prepare=lambda: _writer_waits(asked))

    def told() -> list[str]:
        found = [path.read_text() for path in saving.run.checkpoints.glob("*/digests/pid")]
        return [text for text in found if text]

    wait_until(told, ranks.log)
    os.kill(int(told()[0]), signal.SIGQUIT)
    asked.touch()
    assert ranks.wait(LIMIT_SECONDS) == [0], "the writer survives the request, too"
    assert not saving.run.stack_dump(0, 0).exists()


@pytest.mark.variant("test_stacks_of_ranks_that_are_stuck")
def test_without_a_file_training_goes_on(trial: MakeTrial) -> None:
    made = trial()
    made.run.stacks.rmdir()
    made.run.stacks.write_text("in the way")
    asked = made.run.directory / "asked"
    ranks = made.start(prepare=held_at(3, lambda loop: asked.exists(), rank=0))
    made.wait_for_step(1, ranks)
    ranks.signal(signal.SIGQUIT)  # must not end it either
    asked.touch()
    assert ranks.wait(LIMIT_SECONDS) == [TrainerExit.DONE], ranks.log()
    assert "stacks cannot be written" in ranks.log()


def test_flight_recorder(trial: MakeTrial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trial().run
    launch = Launch(3, 4, 3, "n1", 7, "")
    monkeypatch.setattr(stacks, "_GPU_FILES", (tmp_path / "absent",))
    assert flight_recorder(run, launch, {}) == {}
    monkeypatch.setattr(stacks, "_GPU_FILES", (tmp_path,))
    found = flight_recorder(run, launch, {})
    assert found["TORCH_FR_DUMP_TEMP_FILE"] == str(run.stacks / "e000007" / "nccl-rank-")
    assert int(found["TORCH_FR_BUFFER_SIZE"]) > 0
    for chosen in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        taken = {chosen: "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
        assert flight_recorder(run, launch, taken).keys() == {"TORCH_FR_DUMP_TEMP_FILE"}
    for name in found:
        monkeypatch.delenv(name, raising=False)
    assert flight_recorder(run, launch) == found, "a rank's own environment takes no None"
    monkeypatch.setattr(stacks, "version", lambda name: "2.7.1+cu128")
    assert "TORCH_NCCL_TRACE_BUFFER_SIZE" in flight_recorder(run, launch), "the name of older torch"


# -----------------------------------------------------------------------------------------------
# The rank that hangs is named from the stacks of a real trainer, whatever the others wait in.


def _hangs(rank: int, where: str) -> Callable[[], None]:
    """From the third step on `rank` sleeps in a forward pass, or while it reads its data."""

    def prepare() -> None:
        from megatron.core.models.gpt import GPTModel

        from hpctrain.train.loop import Loop

        original_step, original_forward = Loop.one_step, GPTModel.forward
        hangs = False

        def one_step(self: Loop) -> object:
            nonlocal hangs
            hangs = os.environ["RANK"] == str(rank) and self.position.step >= 2
            if hangs and where == "loop":
                time.sleep(1000)
            return original_step(self)

        def forward(self: Any, *arguments: Any, **more: Any) -> object:
            if hangs:
                time.sleep(1000)
            return original_forward(self, *arguments, **more)

        Loop.one_step = one_step  # type: ignore[method-assign,assignment]
        GPTModel.forward = forward  # type: ignore[method-assign,assignment]

    return prepare


@pytest.mark.parametrize(
    ("layout", "rank", "where"),
    [
        (TWO, 1, "loop"),
        pytest.param(TP2, 0, "forward", marks=pytest.mark.variant),
        (PP2, 0, "forward"),
        pytest.param({**PP2, **TWO}, 3, "forward", marks=pytest.mark.variant),
        pytest.param({**PP2, **TWO}, 0, "loop", marks=pytest.mark.variant),
    ],
)
def test_one_rank_hangs(trial: MakeTrial, layout: dict[str, Any], rank: int, where: str) -> None:
    stuck = trial(**layout, **LONG)
    run = stuck.run
    assert claim_epoch(run.epochs, "this launch") == 1
    ranks = stuck.start(prepare=_hangs(rank, where), epoch=1)
    try:
        stuck.wait_for_step(2, ranks)
        end = time.monotonic() + LIMIT_SECONDS
        while True:  # until all have come to where they stay
            time.sleep(1.0)
            before = sizes(run, 1)
            assert len(before) == stuck.world_size
            ranks.signal(signal.SIGQUIT)
            wait_for_dumps(run, 1, before, 15.0)
            given = read_dumps(run, 1, before)
            found = odd_ranks(given.texts, given.nodes, stuck.world_size, given.packages)
            if [odd.rank for odd in found] == [rank] or time.monotonic() > end:
                break
    finally:
        ranks.signal(signal.SIGKILL)
        ranks.wait(LIMIT_SECONDS)
    assert [odd.rank for odd in found] == [rank], places(given.texts, given.packages)
    assert found[0].where.startswith(("one_step (", "forward (")), found[0].where
