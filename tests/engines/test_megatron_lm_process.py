"""Supervision of an external Megatron-LM, with a stand-in for it (`pretrain_stand_in`)."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from megatron_lm_trials import LmTrial, make_lm_trial
from trial_runs import LIMIT_SECONDS
from waiting import wait_until

from bench import prefork
from hpctrain.checkpoints.discover import select_for_resume
from hpctrain.checkpoints.publish import TRACKER_NAME, fence_off, published_steps
from hpctrain.records.epochs import claim_epoch
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import (
    DoneMarker,
    Progress,
    RankTimes,
    TrainerExit,
    read_record,
    read_saves,
)
from hpctrain.train.engines.megatron_lm.program_hooks import measure_steps, patch_on_import
from hpctrain.train.saving import program_saves, publication


@pytest.fixture
def lm(tmp_path: Path) -> Callable[..., LmTrial]:
    def make(**changes: Any) -> LmTrial:
        return make_lm_trial(tmp_path / "run", **changes)

    return make


def test_a_run_to_its_end(lm: Callable[..., LmTrial], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "_RETIRE_SECONDS", LIMIT_SECONDS)
    made = lm(keep_checkpoints=2)
    assert made.train() == [TrainerExit.DONE, TrainerExit.DONE]
    assert made.good == [6, 4], "retention keeps two"
    assert (made.run.checkpoints / TRACKER_NAME).read_text() == "6"
    assert not list(made.run.checkpoints.glob(".saving-*"))
    newest = select_for_resume(made.run.checkpoints, "sha256").checkpoint
    assert newest is not None and newest.manifest is not None
    assert (newest.manifest.engine, newest.manifest.consumed_samples) == ("megatron-lm", 48)
    assert {file.name for file in newest.manifest.files} == {
        *(f"__{rank}_{number}.distcp" for rank in (0, 1) for number in (0, 1)),
        *(".metadata", "common.pt", "metadata.json"),
    }
    done = read_record(made.run.done, DoneMarker)
    assert done is not None and (done.step, done.checkpoint) == (6, "iter_0000006")
    assert [save.step for save in read_saves(made.run)][-1] == 6
    assert [(record.rank, record.outcome) for record in made.exits()] == [(0, "done")]


def test_what_is_told_of_steps(lm: Callable[..., LmTrial]) -> None:
    made = lm()
    assert made.train() == [0, 0]
    assert [row.step for row in made.rows] == [1, 2, 3, 4, 5, 6]
    for row in made.rows:
        assert row.loss == pytest.approx(4.0 / row.step, rel=1e-6), "the second is its own mean"
        assert row.grad_norm == pytest.approx(1.0 / row.step, abs=1e-3)
        assert row.learning_rate == pytest.approx(1e-3 / row.step)
        assert (row.consumed_samples, row.step_seconds) == (8 * row.step, pytest.approx(0.02))
    losses = {row.step: row.eval_loss for row in made.rows if row.eval_loss is not None}
    assert losses == {3: pytest.approx(4 / 3 + 1), 6: pytest.approx(4 / 6 + 1)}
    progress = read_record(made.run.progress, Progress)
    assert progress is not None
    assert (progress.phase, progress.step, progress.target_step) == ("leaving", 6, 6)


def test_the_log_gets_as_many_steps_as_the_spec_says(lm: Callable[..., LmTrial]) -> None:
    made = lm(log_interval_steps=4, data_parallel_size=1)
    ranks = made.start()
    assert ranks.wait(LIMIT_SECONDS) == [0]
    told = [line for line in ranks.log().splitlines() if "elapsed time per iteration" in line]
    assert [line.split("iteration")[1].split("/")[0].strip() for line in told] == ["4"]
    assert "saving checkpoint at iteration       2" in ranks.log()
    assert [row.step for row in made.rows] == [1, 2, 3, 4, 5, 6]


def ask_by_signal(number: int) -> Callable[[LmTrial, prefork.Ranks], None]:
    return lambda made, ranks: ranks.signal(number, 1)


def ask_by_file(made: LmTrial, ranks: prefork.Ranks) -> None:
    made.run.stop_request.touch()


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(ask_by_signal(signal.SIGTERM), id="TERM"),
        pytest.param(ask_by_signal(signal.SIGUSR2), id="USR2", marks=pytest.mark.variant),
        pytest.param(ask_by_file, id="file", marks=pytest.mark.variant),
    ],
)
def test_asked_to_stop_and_resumed(
    lm: Callable[..., LmTrial], ask: Callable[[LmTrial, prefork.Ranks], None]
) -> None:
    """Megatron-LM leaves with 0 after a save on request, as after the last step."""
    made = lm(train_steps=60, lr_decay_steps=60, save_interval_steps=50)
    claim_epoch(made.run.epochs, "first")
    ranks = made.start(wish="asked@8", epoch=1)
    made.wait_for_step(2, ranks)
    ask(made, ranks)
    codes = ranks.wait(LIMIT_SECONDS)
    assert codes == [TrainerExit.YIELDED] * 2, ranks.log(0) + ranks.log(1)
    (step,) = made.good
    assert 2 <= step < 60
    assert read_record(made.run.done, DoneMarker) is None
    made.run.stop_request.unlink(missing_ok=True)
    claim_epoch(made.run.epochs, "second")
    assert made.train(resume=step, epoch=2) == [TrainerExit.DONE] * 2
    assert made.good[0] == 60
    assert [row.step for row in made.rows if row.epoch == 2] == list(range(step + 1, 61))


@pytest.mark.variant("test_a_run_to_its_end")
def test_a_resumed_run_that_has_nothing_left_to_do(lm: Callable[..., LmTrial]) -> None:
    made = lm()
    assert made.train() == [0, 0]
    made.run.done.unlink()
    assert made.train(resume=6) == [TrainerExit.DONE] * 2
    assert read_record(made.run.done, DoneMarker) is not None
    assert len(made.rows) == 6


@pytest.mark.parametrize(("code", "cause"), [(16, "suspect_numerics"), (17, "diverged")])
def test_results_that_cannot_be_trusted(lm: Callable[..., LmTrial], code: int, cause: str) -> None:
    """The rerun state machine saves the state before the step, to be resumed elsewhere."""
    made = lm(save_interval_steps=50)
    assert made.train(wish=f"exit:{code}@4") == [code, code]
    assert {record.cause for record in made.exits()} == {cause}
    assert made.good == [3], "what was saved before the end counts"


def test_a_crash_keeps_what_was_saved(
    lm: Callable[..., LmTrial], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_saves, "_DIGEST_TIMEOUT_AFTER_FAILURE_SECONDS", 100.0)
    made = lm()
    assert made.train(wish="raise@5") == [TrainerExit.CRASH] * 2
    assert made.good == [4, 2]
    words = {record.message for record in made.exits()}
    assert words == {"RuntimeError: CUDA error: an illegal memory access was encountered"}


def test_an_argument_that_it_does_not_know(lm: Callable[..., LmTrial]) -> None:
    made = lm(extra_arguments={"no-such-thing": True})
    assert made.train() == [TrainerExit.CONFIG_ERROR] * 2
    (record,) = {(one.outcome, one.message) for one in made.exits()}
    assert record[0] == "config_error"
    assert "refuses its arguments: unrecognized arguments: --no-such-thing" in str(record[1])


def test_a_checkout_that_is_not_there(lm: Callable[..., LmTrial]) -> None:
    made = lm(entry="pretrain_nothing.py")
    assert made.train() == [TrainerExit.CONFIG_ERROR] * 2
    assert "no such program" in made.message()


def test_an_end_without_a_word(lm: Callable[..., LmTrial]) -> None:
    """validate_args prints some refusals and calls exit(), whose code is 0."""
    made = lm()
    assert made.train(wish="silent") == [TrainerExit.CONFIG_ERROR] * 2
    assert "without an error and without a checkpoint" in made.message()


def test_a_save_that_is_not_complete_does_not_count(lm: Callable[..., LmTrial]) -> None:
    made = lm()
    codes = made.train(wish="torn@6")
    assert codes[0] == TrainerExit.CRASH
    assert "it is incomplete" in made.message()
    assert made.good == [4, 2]
    assert read_record(made.run.done, DoneMarker) is None


def test_a_newer_launch_takes_the_files_away(lm: Callable[..., LmTrial]) -> None:
    """What a stale launch saves lies in a directory that the newer one has moved."""
    made = lm(train_steps=60, lr_decay_steps=60)
    claim_epoch(made.run.epochs, "first")
    fenced = made.run.directory / "fenced"
    ranks = made.start(wish=f"until:{fenced}@8", epoch=1)
    wait_until(lambda: published_steps(made.run.checkpoints), ranks.log)
    newer = claim_epoch(made.run.epochs, "second")
    fence_off(made.run.checkpoints, newer)
    published = made.good
    fenced.touch()
    assert ranks.wait(LIMIT_SECONDS)[0] == TrainerExit.CRASH
    assert made.exits(1)[0].cause == "superseded"
    assert published and made.good == published, "those from before still count"


# -----------------------------------------------------------------------------------------------
# Following the functions of somebody's own Megatron-LM: what lacks them trains all the same.

TIMERS = """
class Timer:
    running = False
    def start(self, barrier=False):
        self.running = True
    def stop(self):
        self.running = False
    def elapsed(self):
        return 7.0

class Timers:
    def __init__(self):
        self.timer = Timer()
    def __call__(self, name, log_level=None):
        return self.timer
"""
LOOP = """
import time
from megatron.core.timers import Timers
from megatron.core.rerun_state_machine import RerunDataIterator
timers, batches = Timers(), RerunDataIterator()

def train_step(broken=False):
    timers("forward-compute", log_level=2).start()
    if broken:
        timers("forward-compute").start()
        timers("backward-compute").stop()
    timers("batch-generator").start()
    next(batches)
    timers("batch-generator").stop()
    time.sleep(0.02)
    timers("forward-compute").stop()
    timers("optimizer", log_level=1).start(barrier=True)
    time.sleep(0.01)
    if not broken:
        timers("optimizer").stop()
    return "trained"

def training_log(losses, iteration, more=None):
    return timers("interval-time").elapsed()
"""
READER = """
import time

class RerunDataIterator:
    def __next__(self):
        time.sleep(0.03)
        return "batch"
"""
FILES = {
    "core/timers.py": TIMERS,
    "core/rerun_state_machine.py": READER,
    "training/training.py": LOOP,
}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A program's packages; modules of this name that other tests have imported come back."""
    for name, text in FILES.items():
        path = tmp_path / "megatron" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        (path.parent / "__init__.py").touch()
    (tmp_path / "megatron" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    theirs = {name: sys.modules.pop(name) for name in [*sys.modules] if _of_megatron(name)}
    yield tmp_path
    for name in [name for name in sys.modules if _of_megatron(name)]:
        del sys.modules[name]
    sys.modules.update(theirs)


def _of_megatron(name: str) -> bool:
    return name == "megatron" or name.startswith("megatron.")


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def steps_of(
    tmp_path: Path, steps: int = 4, **keywords: Any
) -> tuple[RankTimes | None, ModuleType]:
    """What the steps of the program leave, with windows of two."""
    run = RunLayout(tmp_path / "run")
    run.create()
    launch = SimpleNamespace(rank=0, node="node1", epoch=3)
    job: Any = SimpleNamespace(
        run=run, launch=launch, config=SimpleNamespace(rank_times_interval_steps=2)
    )
    with measure_steps(job):
        from megatron.training import training

        for step in range(1, steps + 1):
            assert training.train_step(**keywords) == "trained"
            time.sleep(0.01)
            if hasattr(training, "training_log"):
                assert training.training_log({}, step) == 7.0
    return read_record(run.rank_times, RankTimes), training


@pytest.mark.usefixtures("checkout", "one_rank")
def test_parts_count_for_themselves(tmp_path: Path) -> None:
    times, _ = steps_of(tmp_path)
    assert times is not None
    assert (times.epoch, times.first_step, times.last_step, times.nodes) == (3, 2, 3, ("node1",))
    (compute,), (data,), (optimizer,) = (
        times.compute_seconds,
        times.data_seconds,
        times.optimizer_seconds,
    )
    assert compute >= 0.02 and data >= 0.03 and optimizer >= 0.01
    assert times.step_seconds[0] >= compute + data + optimizer + 0.01
    assert times.backward_seconds == (0.0,)


@pytest.mark.usefixtures("checkout", "one_rank")
def test_timers_that_do_not_pair_are_left_alone(tmp_path: Path) -> None:
    times, training = steps_of(tmp_path, broken=True)
    assert times is not None and times.compute_seconds[0] >= 0.02
    assert training.timers("optimizer").running, "its own timers do what they did"


LOGGED = LOOP[LOOP.index("def training_log") :]
OTHERWISE = [
    ("def training_log", "def another_log"),
    ("losses, iteration", "losses, number"),
    ("megatron.core.timers", "megatron.training.own_timers"),
    ("forward-compute", "forward"),
    (LOGGED, "import functools\ntraining_log = functools.partial(lambda *given: 7.0)"),
]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("words", "others"), OTHERWISE)
def test_a_fork_without_these_functions_trains(
    checkout: Path, tmp_path: Path, words: str, others: str
) -> None:
    loop = checkout / "megatron" / "training" / "training.py"
    loop.with_name("own_timers.py").write_text(TIMERS)
    loop.write_text(LOOP.replace(words, others))
    times, _ = steps_of(tmp_path)
    assert times is None


def test_modules_are_changed_when_they_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_late.py").write_text("value = 1\n")
    (tmp_path / "imported_early.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import imported_early

    def change(module: ModuleType) -> None:
        vars(module)["value"] += 1

    names = ("imported_late", "imported_early", "never_imported")
    with patch_on_import(dict.fromkeys(names, change)):
        assert "imported_late" not in sys.modules, "nothing is imported before its time"
        import imported_late

    assert (imported_late.value, imported_early.value) == (2, 2)
    for module in (imported_late, imported_early):
        del sys.modules[module.__name__]
