"""How a launch ends: done, yielded, refused, crashed, whatever it does when it is asked to stop."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_contract import assert_done, assert_yielded
from trial_runs import (
    COLLECTIVE_SECONDS,
    DDP2,
    EVALUATING,
    FSDP2,
    GPT,
    LIMIT_SECONDS,
    PP2,
    TWO,
    ZERO3,
    ZERO_PP2,
    MakeTrial,
    Trial,
    held_at,
    trained,
    wrap,
)
from variants import varied
from waiting import wait_until

from bench import prefork
from hpctrain.checkpoints.publish import published_steps
from hpctrain.records.epochs import claim_epoch, current_epoch
from hpctrain.records.run_records import (
    Progress,
    TrainerExit,
    append_metrics,
    read_metrics,
    read_record,
    read_saves,
)
from hpctrain.train import entry
from hpctrain.train.job import Job, read_config
from hpctrain.train.loop import EvaluationBatches
from hpctrain.train.numerics import evaluation_is_missing
from hpctrain.train.rank_environment import Launch
from hpctrain.train.report import Reporter
from hpctrain.train.saving import writer
from hpctrain.train.stop import StopSignals

YIELDED, CRASHED = TrainerExit.YIELDED, TrainerExit.CRASH
LONG = dict(train_steps=16, lr_decay_steps=16)
LOOP, SAVER = "hpctrain.train.loop:Loop", "hpctrain.train.saving.saver:Saver"


def asked_before(
    owner: str, name: str, when: Callable[[Any], bool] = lambda owner: True, wait: float = 0.0
) -> Callable[[], None]:
    """A `prepare`: ranks are asked to stop right before this method, as often as `when` says."""

    def prepare() -> None:
        @wrap(owner, name)
        def asked(real: Any, self: Any, *given: Any, **named: Any) -> Any:
            if when(self):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(wait)
            return real(self, *given, **named)

    return prepare


def test_done(gpt_reference: Trial) -> None:
    assert_done(gpt_reference.run, 6, epoch=0)


def test_a_run_that_resumes_is_never_reported_at_its_beginning(trial: MakeTrial) -> None:
    """From its first sign of life on, long before the checkpoint is loaded."""
    run = trial().run
    launch = Launch(rank=0, world_size=1, local_rank=0, node="n0", epoch=2, resume="iter_0000040")
    job = Job(read_config(run.train_config), launch, run, StopSignals())
    Reporter(job).phase("starting")
    progress = read_record(run.progress, Progress)
    assert progress is not None
    assert (progress.phase, progress.step, progress.checkpoint_step) == ("starting", 40, 40)


def test_a_finished_run_is_not_run_again(gpt_reference: Trial, trial: MakeTrial) -> None:
    finished = trial()
    shutil.copytree(gpt_reference.run.directory, finished.run.directory, dirs_exist_ok=True)
    assert finished.train(resume=6) == [0]
    assert finished.rows == gpt_reference.rows


@pytest.mark.parametrize("how", varied(["stop file", "SIGTERM", "SIGUSR1", "SIGUSR2"], "SIGUSR2"))
def test_stop_saves_and_the_resume_is_exact(how: str, trial: MakeTrial) -> None:
    """The signal goes to rank 1 only: all ranks must leave after the same step."""
    stopped = trial(async_save=True, save_interval_steps=3, **TWO)
    ranks = stopped.start(prepare=held_at(4, _is_asked_to_stop))
    stopped.wait_for_step(2, ranks)
    if how == "stop file":
        stopped.run.stop_request.touch()
    else:
        ranks.signal(getattr(signal, how), 1)
    assert ranks.wait(LIMIT_SECONDS) == [YIELDED, YIELDED], ranks.log()
    last = max(stopped.losses)
    assert last < 6
    assert_yielded(stopped.run, last, epoch=0)
    if how == "SIGTERM":
        stopped.run.stop_request.unlink(missing_ok=True)
        assert stopped.train(resume=last) == [0, 0]
        whole = trained(**TWO)
        assert stopped.exact == whole.exact
        assert len(whole.exact) == len(stopped.rows) == 6


def _is_asked_to_stop(loop: Any) -> bool:
    return bool(loop.job.stop.requested or loop.job.run.stop_request.exists())


def test_signal_during_start_up(trial: MakeTrial) -> None:
    """One rank is asked to stop before anything is trained: nothing is saved."""
    early = trial(**TWO)

    def terminate_second_rank() -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)

    assert early.train(prepare=terminate_second_rank) == [YIELDED, YIELDED]
    assert early.rows == []
    assert published_steps(early.run.checkpoints) == []


def test_stop_at_the_last_step_is_done(trial: MakeTrial) -> None:
    last = trial(train_steps=1)
    last.run.control.mkdir(exist_ok=True)
    assert last.train(prepare=asked_before(LOOP, "_propose")) == [0]
    assert last.run.done.exists()


def test_a_stale_launch_publishes_nothing(trial: MakeTrial) -> None:
    stale = trial(save_interval_steps=12, **LONG, **TWO)
    assert claim_epoch(stale.run.epochs, "first") == 1
    superseded = held_at(8, lambda loop: current_epoch(loop.job.run.epochs) > 1)
    ranks = stale.start(epoch=1, prepare=superseded)
    stale.wait_for_step(1, ranks)
    assert claim_epoch(stale.run.epochs, "second") == 2
    assert ranks.wait(LIMIT_SECONDS) == [CRASHED, CRASHED], ranks.log()
    assert published_steps(stale.run.checkpoints) == []
    records = stale.exits(epoch=1)
    assert [record.outcome for record in records] == ["crash", "crash"]
    assert all((record.message or "").startswith("stale epoch") for record in records)
    assert stale.train(epoch=1) == [CRASHED, CRASHED]
    assert "stale epoch" in stale.message(epoch=1)


def test_a_killed_rank_ends_the_others(trial: MakeTrial) -> None:
    killed = trial(**LONG, **TWO)
    ranks = killed.start(prepare=held_at(8, lambda loop: False))
    killed.wait_for_step(2, ranks)
    ranks.signal(signal.SIGKILL, 1)
    assert ranks.wait(LIMIT_SECONDS) == [CRASHED, -signal.SIGKILL]
    (record,) = killed.exits()
    assert (record.rank, record.outcome) == (0, "crash")
    assert record.traceback


@pytest.mark.variant("test_a_killed_rank_ends_the_others")
@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "exit code 9"), (300, "did not finish within")],
    ids=["dies", "hangs"],
)
def test_a_lost_writer_is_noticed(seconds: float, words: str, trial: MakeTrial) -> None:
    def loses_its_writer() -> None:
        if os.environ["RANK"] == "1":
            writer._write = lambda *arguments: (time.sleep(seconds), os._exit(9))
            writer.DEADLINE_SECONDS = 0.5 if seconds else writer.DEADLINE_SECONDS

    lost = trial(save_interval_steps=2, async_save=True, **LONG, **TWO)
    assert lost.train(prepare=loses_its_writer) == [CRASHED, CRASHED]
    assert "on another rank" in lost.message(0) and words in lost.message(1)
    assert published_steps(lost.run.checkpoints) == []


# -----------------------------------------------------------------------------------------------
# Stops that come while a launch does something else than train: evaluations, saves, starts.

# Before a collective gives up by itself, and before a slow rank gets on.
LEAVING_SECONDS = COLLECTIVE_SECONDS - 30
ENGINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "megatron pp 2": (GPT, dict(PP2, dropout=0.1)),
    "megatron dp 2": (
        GPT,
        dict(TWO, dropout=0.1, overlap_param_gather=True, overlap_grad_reduce=True),
    ),
    "fsdp": (FSDP2, {}),
    "ddp": (DDP2, {}),
    "deepspeed": (ZERO3, {}),
    "deepspeed pp 2": (ZERO_PP2, {}),
}


def stop_in_evaluation(number: int, batch: int, rank: int = 1) -> Callable[[], None]:
    """A `prepare`: while this batch of the launch's `number`th evaluation is computed, this rank
    alone is asked to stop. Each rank writes down which batches it computes."""

    def prepare() -> None:
        evaluations = [0]

        @wrap(EvaluationBatches, "__iter__")
        def noted(real: Any, batches: EvaluationBatches) -> Any:
            evaluations[0] += 1
            for one in real(batches):
                with Path(os.environ["COMPUTED"], os.environ["RANK"]).open("a") as stream:
                    stream.write(f"{evaluations[0]}:{one} ")
                if (evaluations[0], one) == (number, batch) and os.environ["RANK"] == str(rank):
                    os.kill(os.getpid(), signal.SIGTERM)
                yield one

    return prepare


@pytest.fixture(autouse=True)
def computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where ranks write down which batches they compute."""
    directory = tmp_path / "computed"
    directory.mkdir()
    monkeypatch.setenv("COMPUTED", str(directory))
    return directory


def go_on(trial: Trial, step: int, **launch: Any) -> list[int]:
    """The next launch of the run, from this step."""
    epoch = claim_epoch(trial.run.epochs, "the next launch")
    return trial.train(resume=step, epoch=epoch, **launch)


def evaluations(trial: Trial) -> dict[int, float | None]:
    return {row.step: row.eval_loss for row in trial.rows if row.step % 2 == 0}


@pytest.mark.variant("test_a_stop_after_the_start_saves")
@pytest.mark.parametrize("engine", ENGINES)
def test_an_evaluation_is_left_between_batches_and_made_up_for(
    engine: str, trial: MakeTrial, computed: Path
) -> None:
    base, changes = ENGINES[engine]
    settings = {**base, **changes, **EVALUATING}
    whole, stopped = trained(settings), trial(settings)
    assert set(stopped.train(prepare=stop_in_evaluation(2, batch=0))) == {YIELDED}
    first = "".join(f"1:{batch} " for batch in range(2))
    assert (computed / "1").read_text() == f"{first}2:0 ", "left within one batch"
    assert (computed / "0").read_text() == (computed / "1").read_text(), "at the same batch"
    assert published_steps(stopped.run.checkpoints) == [4]
    assert evaluations(stopped)[4] is None
    assert set(go_on(stopped, 4)) == {0}
    assert stopped.exact == whole.exact
    assert evaluations(stopped) == evaluations(whole)
    assert None not in evaluations(whole).values()
    assert [row.step for row in stopped.rows] == list(range(1, 7)), "no step is trained twice"


@pytest.mark.variant("test_a_stop_after_the_start_saves")
def test_no_evaluation_is_begun_once_a_stop_is_agreed(trial: MakeTrial, computed: Path) -> None:
    """The stop is proposed with step 2, which is followed by an evaluation."""

    def prepare() -> None:
        stop_in_evaluation(9, 9)()
        asked_before(LOOP, "_propose", lambda loop: loop.position.step == 1)()

    stopped = trial(**EVALUATING)
    assert stopped.train(prepare=prepare) == [YIELDED]
    assert not list(computed.iterdir())
    assert published_steps(stopped.run.checkpoints) == [2]
    again = stop_in_evaluation(1, batch=0, rank=0)
    assert go_on(stopped, 2, prepare=again) == [YIELDED]
    assert evaluations(stopped) == {2: None}, "left while it was made up for"
    assert go_on(stopped, 2) == [0]
    whole = trained(**EVALUATING)
    assert (stopped.exact, evaluations(stopped)) == (whole.exact, evaluations(whole))


@pytest.mark.variant("test_a_stop_after_the_start_saves")
def test_a_run_is_not_done_before_its_last_evaluation(trial: MakeTrial) -> None:
    settings = dict(PP2, dropout=0.1, **EVALUATING)
    last = trial(**settings)
    assert last.train(prepare=stop_in_evaluation(3, batch=0)) == [YIELDED, YIELDED]
    assert published_steps(last.run.checkpoints) == [6]
    assert not last.run.done.exists()
    assert go_on(last, 6) == [0, 0]
    assert last.run.done.exists()
    whole = trained(**settings)
    assert (last.exact, evaluations(last)) == (whole.exact, evaluations(whole))
    assert len(read_saves(last.run)) == 1, "the second launch has nothing new to save"


@pytest.mark.variant("test_a_stop_after_the_start_saves")
def test_a_save_under_way_counts_during_an_evaluation(trial: MakeTrial) -> None:
    """Of step 3, while the evaluation of step 4 goes on for as long as it takes."""

    def prepare() -> None:
        @wrap(EvaluationBatches, "__iter__")
        def until_published(real: Any, batches: EvaluationBatches) -> Any:
            end = time.monotonic() + LIMIT_SECONDS
            root = Path(os.environ["CHECKPOINTS"])
            yield from real(batches)
            while batches.count == 6 and missing_somewhere(root) and time.monotonic() < end:
                if batches.agree_to_stop():
                    break
            assert batches.count != 6 or published_steps(root) == [3]

    saving = trial(
        **TWO, eval_interval_steps=4, eval_batches=6, save_interval_steps=3, async_save=True
    )
    os.environ["CHECKPOINTS"] = str(saving.run.checkpoints)
    assert saving.train(prepare=prepare) == [0, 0]


def missing_somewhere(checkpoints: Path) -> bool:
    """The same on all ranks: whether one of them sees no published checkpoint yet."""
    missing = torch.tensor(int(published_steps(checkpoints) == []))
    torch.distributed.all_reduce(missing)
    return bool(missing)


@pytest.mark.variant("test_a_stop_after_the_start_saves")
def test_a_missing_evaluation_is_known_by_the_row_of_its_step(
    gpt_reference: Trial, trial: Any
) -> None:
    made = trial()
    assert not evaluation_is_missing(made.run, 2), "no metrics at all"
    rows = read_metrics(gpt_reference.run)[:4]
    for row in rows:
        append_metrics(
            made.run, row.model_copy(update={"eval_loss": 1.0 if row.step == 2 else None})
        )
    assert [evaluation_is_missing(made.run, step) for step in (2, 3, 4, 5)] == [
        *(False, True, True, False)
    ]
    append_metrics(made.run, rows[1].model_copy(update={"epoch": 1, "eval_loss": None}))
    assert evaluation_is_missing(made.run, 2), "a later launch has trained it again"


# -- saves -----------------------------------------------------------------------------------------
@pytest.mark.variant("test_a_stop_after_the_start_saves")
def test_a_stop_during_a_save_leaves_with_that_save(trial: MakeTrial) -> None:
    """Not with one more step and one more save."""
    busy = asked_before(SAVER, "finish", lambda saver: saver.busy and os.environ["RANK"] == "1")
    stopped = trial(**TWO, save_interval_steps=2)
    assert stopped.train(prepare=busy) == [YIELDED, YIELDED]
    assert [save.step for save in read_saves(stopped.run)] == [2]
    assert max(stopped.losses) == 2


@pytest.mark.variant("test_a_stop_after_the_start_saves")
def test_a_stop_during_an_asynchronous_save_finishes_it_first(trial: MakeTrial) -> None:
    stopped = trial(**TWO, save_interval_steps=2, async_save=True)
    assert stopped.train(prepare=asked_before(SAVER, "begin")) == [YIELDED, YIELDED]
    assert [save.step for save in read_saves(stopped.run)] == [2, 3]
    assert published_steps(stopped.run.checkpoints) == [2, 3]


# -- starts ----------------------------------------------------------------------------------------

# what the start does in which a rank does not get on, and that rank; the others wait for it
STARTS: dict[str, tuple[str, str, int]] = {
    "imports": ("hpctrain.train.entry", "check", 1),
    "data": ("hpctrain.train.engines.megatron.assembly", "open_data", 0),
    "loading": ("hpctrain.train.engines.megatron.snapshot:MegatronSnapshot", "restore", 1),
    "first": ("hpctrain.train.step_agreement:Control", "agree_to_stop", 1),
}


def slow_start(what: str) -> Callable[[], None]:
    """A `prepare`: one rank does not get on; each tells when it has come there."""
    owner, name, rank = STARTS[what]

    def prepare() -> None:
        entry.SETTLE_SECONDS = 0.2

        @wrap(owner, name)
        def slow(real: Any, *given: Any, **keywords: Any) -> Any:
            Path(os.environ["COMPUTED"], f"slow-{os.environ['RANK']}").touch()
            if os.environ["RANK"] == str(rank):
                time.sleep(LIMIT_SECONDS)
            return real(*given, **keywords)

    return prepare


def _started(trial: Trial, reference: Trial, what: str, computed: Path) -> prefork.Ranks:
    """A launch that resumes at step 2, one of whose ranks does not get on with its start."""
    trial.adopt(reference, 2)
    ranks = trial.start(resume=2, prepare=slow_start(what))
    wait_until(lambda: len(list(computed.glob("slow-*"))) == 2, ranks.log)
    return ranks


def _assert_left_the_start(trial: Trial, ranks: prefork.Ranks) -> None:
    assert ranks.wait(LEAVING_SECONDS) == [YIELDED, YIELDED], ranks.log(0) + ranks.log(1)
    assert [(one.outcome, one.step) for one in trial.exits()] == [("yielded", 2)] * 2
    assert published_steps(trial.run.checkpoints) == [2]


@pytest.mark.parametrize("what", varied(STARTS, "imports", "loading", "first"))
def test_a_stop_during_a_start_is_heard_by_all_ranks(
    what: str, trial: MakeTrial, gpt_reference: Trial, computed: Path
) -> None:
    """Also by those that wait for others in C++, where Python runs no signal handler."""
    starting = trial(**TWO)
    ranks = _started(starting, gpt_reference, what, computed)
    ranks.signal(signal.SIGTERM)
    _assert_left_the_start(starting, ranks)


@pytest.mark.parametrize("what", varied(["data", "loading", "first"], "loading"))
def test_who_waits_for_a_rank_that_has_left_a_start_leaves_too(
    what: str, trial: MakeTrial, gpt_reference: Trial, computed: Path
) -> None:
    """Only the slow rank is asked: losing it is no crash of the others. Who waits for a rank that
    has never been connected is ended by the supervisor."""
    starting = trial(**TWO)
    ranks = _started(starting, gpt_reference, what, computed)
    ranks.signal(signal.SIGUSR2, STARTS[what][2])
    _assert_left_the_start(starting, ranks)


def test_the_stop_file_ends_a_start(trial: MakeTrial, gpt_reference: Trial, computed: Path) -> None:
    starting = trial(**TWO)
    ranks = _started(starting, gpt_reference, "data", computed)
    starting.run.control.mkdir(exist_ok=True)
    starting.run.stop_request.touch()
    _assert_left_the_start(starting, ranks)


@pytest.mark.variant("test_a_stop_after_the_start_saves")
def test_a_launch_that_ends_while_it_writes_an_index_leaves_no_half_of_it(
    trial: MakeTrial, tmp_path: Path
) -> None:
    """megatron-core would take it for a complete one, in each launch that follows."""

    def prepare() -> None:
        from numpy.lib import format

        @wrap(format, "write_array")
        def write_array(real: Any, file: Any, array: Any, *given: Any, **keywords: Any) -> None:
            if "sample_index" in str(file.name):
                real(file, array[:1], *given, **keywords)
                file.flush()
                os._exit(9)
            real(file, array, *given, **keywords)

    ended = trial(data_cache=str(tmp_path / "cache"))
    assert ended.train(prepare=prepare) == [9]
    assert list((tmp_path / "cache").glob("*document_index.npy"))
    assert not list((tmp_path / "cache").glob("*-sample_index.npy"))
    assert ended.train() == [0]


def test_an_error_in_a_start_that_nobody_stops_is_a_crash(trial: MakeTrial) -> None:
    def prepare() -> None:
        def fail(job: Any) -> None:
            raise RuntimeError("no such device")

        entry.check = fail

    failed = trial(**TWO)
    assert failed.train(prepare=prepare) == [TrainerExit.CRASH, TrainerExit.CRASH]
    assert {one.outcome for one in failed.exits()} == {"crash"}


def test_a_stop_after_the_start_saves(trial: MakeTrial) -> None:
    """The thread that leaves starts is gone once the loop has begun."""

    def prepare() -> None:
        entry.SETTLE_SECONDS = 0.2
        asked_before(LOOP, "one_step", lambda loop: loop.position.step == 1, wait=1.0)()

    stopped = trial(**TWO)
    assert stopped.train(prepare=prepare) == [YIELDED, YIELDED]
    assert published_steps(stopped.run.checkpoints) == [2]
