"""Stops that come while a launch does something else than train: evaluations, saves, starts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_trials import ZERO3, ZERO_PP2
from trial_runs import (
    COLLECTIVE_SECONDS,
    DDP2,
    EVALUATING,
    FSDP2,
    GPT,
    LIMIT_SECONDS,
    PP2,
    Trial,
    trained,
)
from variants import varied

from bench import prefork
from hpctrain.checkpoints.publish import published_steps
from hpctrain.records.epochs import claim_epoch
from hpctrain.records.run_records import TrainerExit, append_metrics, read_metrics, read_saves
from hpctrain.train import entry, loop
from hpctrain.train.loop import EvaluationBatches
from hpctrain.train.numerics import evaluation_is_missing

YIELDED = TrainerExit.YIELDED
DP2 = dict(data_parallel_size=2)
# Before a collective gives up by itself, and before a slow rank gets on.
LEAVING_SECONDS = COLLECTIVE_SECONDS - 30
# By what is slow in a start: the rank that does not get on.
SLOW_RANK = {"imports": 1, "data": 0, "loading": 1, "first": 1}
ENGINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "megatron pp 2": (GPT, dict(PP2, dropout=0.1)),
    "megatron dp 2": (
        GPT,
        dict(DP2, dropout=0.1, overlap_param_gather=True, overlap_grad_reduce=True),
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
        real, evaluations = EvaluationBatches.__iter__, [0]

        def noted(batches: EvaluationBatches) -> Any:
            evaluations[0] += 1
            for one in real(batches):
                with _computed(os.environ["RANK"]).open("a") as stream:
                    stream.write(f"{evaluations[0]}:{one} ")
                if (evaluations[0], one) == (number, batch) and os.environ["RANK"] == str(rank):
                    os.kill(os.getpid(), signal.SIGTERM)
                yield one

        loop.EvaluationBatches.__iter__ = noted  # type: ignore[method-assign]

    return prepare


def _computed(rank: str) -> Path:
    return Path(os.environ["COMPUTED"], rank)


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
@pytest.mark.parametrize("engine", varied(ENGINES, "megatron pp 2"))
def test_an_evaluation_is_left_between_batches_and_made_up_for(
    engine: str, trial: Callable[..., Trial], computed: Path
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
def test_no_evaluation_is_begun_once_a_stop_is_agreed(
    trial: Callable[..., Trial], computed: Path
) -> None:
    """The stop is proposed with step 2, which is followed by an evaluation."""

    def prepare() -> None:
        from hpctrain.train.loop import Loop

        stop_in_evaluation(9, 9)()
        real = Loop._propose

        def propose(loop: Any) -> None:
            if loop.position.step == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            real(loop)

        Loop._propose = propose  # type: ignore[method-assign]

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
def test_a_run_is_not_done_before_its_last_evaluation(trial: Callable[..., Trial]) -> None:
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
def test_a_save_under_way_counts_during_an_evaluation(trial: Callable[..., Trial]) -> None:
    """Of step 3, while the evaluation of step 4 goes on for as long as it takes."""

    def prepare() -> None:
        real = EvaluationBatches.__iter__

        def until_published(batches: EvaluationBatches) -> Any:
            end = time.monotonic() + LIMIT_SECONDS
            root = Path(os.environ["CHECKPOINTS"])
            yield from real(batches)
            while batches.count == 6 and missing_somewhere(root) and time.monotonic() < end:
                if batches.agree_to_stop():
                    break
            assert batches.count != 6 or published_steps(root) == [3]

        loop.EvaluationBatches.__iter__ = until_published  # type: ignore[method-assign]

    saving = trial(
        **DP2, eval_interval_steps=4, eval_batches=6, save_interval_steps=3, async_save=True
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
def test_a_stop_during_a_save_leaves_with_that_save(trial: Callable[..., Trial]) -> None:
    """Not with one more step and one more save."""

    def prepare() -> None:
        from hpctrain.train.saving.saver import Saver

        real = Saver.finish

        def finish(saver: Any) -> None:
            if saver.busy and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGTERM)
            real(saver)

        Saver.finish = finish  # type: ignore[method-assign]

    stopped = trial(**DP2, save_interval_steps=2)
    assert stopped.train(prepare=prepare) == [YIELDED, YIELDED]
    assert [save.step for save in read_saves(stopped.run)] == [2]
    assert max(stopped.losses) == 2


@pytest.mark.variant("test_a_stop_after_the_start_saves")
def test_a_stop_during_an_asynchronous_save_finishes_it_first(trial: Callable[..., Trial]) -> None:
    def prepare() -> None:
        from hpctrain.train.saving.saver import Saver

        real = Saver.begin

        def begin(saver: Any, position: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            real(saver, position)

        Saver.begin = begin  # type: ignore[method-assign]

    stopped = trial(**DP2, save_interval_steps=2, async_save=True)
    assert stopped.train(prepare=prepare) == [YIELDED, YIELDED]
    assert [save.step for save in read_saves(stopped.run)] == [2, 3]
    assert published_steps(stopped.run.checkpoints) == [2, 3]


# -- starts ----------------------------------------------------------------------------------------


def _quickly() -> None:
    entry.SETTLE_SECONDS = 0.2


def _says_that_it_starts() -> None:
    Path(os.environ["COMPUTED"], f"slow-{os.environ['RANK']}").touch()


def slow_import() -> None:
    """Rank 1 is not through with its imports, and the others wait for it."""
    _quickly()
    _says_that_it_starts()
    if os.environ["RANK"] == "1":
        from hpctrain.train import entry

        entry.check = lambda job: time.sleep(LIMIT_SECONDS)


def slow_data() -> None:
    """Rank 0 builds indexes, and the others wait for them."""
    _quickly()
    from hpctrain.train.engines.megatron import assembly

    real = assembly.open_data

    def slow(*given: Any, **keywords: Any) -> Any:
        _says_that_it_starts()
        if os.environ["RANK"] == "0":
            time.sleep(LIMIT_SECONDS)
        return real(*given, **keywords)

    assembly.open_data = slow


def slow_loading() -> None:
    """One rank reads its shard and the others wait for it."""
    _quickly()
    from hpctrain.train.engines.megatron.snapshot import MegatronSnapshot

    real = MegatronSnapshot.restore

    def slow(*given: Any, **keywords: Any) -> Any:
        _says_that_it_starts()
        if os.environ["RANK"] == "1":
            time.sleep(LIMIT_SECONDS)
        return real(*given, **keywords)

    MegatronSnapshot.restore = slow  # type: ignore[method-assign]


def slow_first() -> None:
    """One rank comes late to the first collective of the loop."""
    _quickly()
    from hpctrain.train.step_agreement import Control

    real = Control.agree_to_stop

    def slow(control: Any, stop: bool) -> bool:
        _says_that_it_starts()
        if os.environ["RANK"] == "1":
            time.sleep(LIMIT_SECONDS)
        return real(control, stop)

    Control.agree_to_stop = slow  # type: ignore[method-assign]


STARTS = {"imports": slow_import, "data": slow_data, "loading": slow_loading, "first": slow_first}


def _started(trial: Trial, reference: Trial, what: str, computed: Path) -> prefork.Ranks:
    """A launch that resumes at step 2, one of whose ranks does not get on with its start."""
    trial.adopt(reference, 2)
    ranks = trial.start(resume=2, prepare=STARTS[what])
    end = time.monotonic() + LIMIT_SECONDS
    while len(list(computed.glob("slow-*"))) < 2:
        assert time.monotonic() < end, ranks.log(0) + ranks.log(1)
        time.sleep(0.02)
    return ranks


def _assert_left_the_start(trial: Trial, ranks: prefork.Ranks) -> None:
    assert ranks.wait(LEAVING_SECONDS) == [YIELDED, YIELDED], ranks.log(0) + ranks.log(1)
    assert [(one.outcome, one.step) for one in trial.exits()] == [("yielded", 2)] * 2
    assert published_steps(trial.run.checkpoints) == [2]


@pytest.mark.parametrize("what", varied(STARTS, "imports", "loading", "first"))
def test_a_stop_during_a_start_is_heard_by_all_ranks(
    what: str, trial: Callable[..., Trial], gpt_reference: Trial, computed: Path
) -> None:
    """Also by those that wait for others in C++, where Python runs no signal handler."""
    starting = trial(**DP2)
    ranks = _started(starting, gpt_reference, what, computed)
    ranks.signal(signal.SIGTERM)
    _assert_left_the_start(starting, ranks)


@pytest.mark.parametrize("what", varied(["data", "loading", "first"], "loading"))
def test_who_waits_for_a_rank_that_has_left_a_start_leaves_too(
    what: str, trial: Callable[..., Trial], gpt_reference: Trial, computed: Path
) -> None:
    """Only the slow rank is asked: losing it is no crash of the others. Who waits for a rank that
    has never been connected is ended by the supervisor."""
    starting = trial(**DP2)
    ranks = _started(starting, gpt_reference, what, computed)
    ranks.signal(signal.SIGUSR2, SLOW_RANK[what])
    _assert_left_the_start(starting, ranks)


def test_the_stop_file_ends_a_start(
    trial: Callable[..., Trial], gpt_reference: Trial, computed: Path
) -> None:
    starting = trial(**DP2)
    ranks = _started(starting, gpt_reference, "data", computed)
    starting.run.control.mkdir(exist_ok=True)
    starting.run.stop_request.touch()
    _assert_left_the_start(starting, ranks)


@pytest.mark.variant("test_a_stop_after_the_start_saves")
def test_a_launch_that_ends_while_it_writes_an_index_leaves_no_half_of_it(
    trial: Callable[..., Trial], tmp_path: Path
) -> None:
    """megatron-core would take it for a complete one, in each launch that follows."""

    def prepare() -> None:
        from numpy.lib import format

        real = format.write_array

        def write_array(file: Any, array: Any, *given: Any, **keywords: Any) -> None:
            if "sample_index" in str(file.name):
                real(file, array[:1], *given, **keywords)
                file.flush()
                os._exit(9)
            real(file, array, *given, **keywords)

        format.write_array = write_array

    ended = trial(data_cache=str(tmp_path / "cache"))
    assert ended.train(prepare=prepare) == [9]
    assert list((tmp_path / "cache").glob("*document_index.npy"))
    assert not list((tmp_path / "cache").glob("*-sample_index.npy"))
    assert ended.train() == [0]


def test_an_error_in_a_start_that_nobody_stops_is_a_crash(trial: Callable[..., Trial]) -> None:
    def prepare() -> None:
        from hpctrain.train import entry

        def fail(job: Any) -> None:
            raise RuntimeError("no such device")

        entry.check = fail

    failed = trial(**DP2)
    assert failed.train(prepare=prepare) == [TrainerExit.CRASH, TrainerExit.CRASH]
    assert {one.outcome for one in failed.exits()} == {"crash"}


def test_a_stop_after_the_start_saves(trial: Callable[..., Trial]) -> None:
    """The thread that leaves starts is gone once the loop has begun."""

    def prepare() -> None:
        from hpctrain.train.loop import Loop

        _quickly()
        real = Loop.one_step

        def one_step(loop: Any) -> Any:
            if loop.position.step == 1:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(1.0)
            return real(loop)

        Loop.one_step = one_step  # type: ignore[method-assign]

    stopped = trial(**DP2)
    assert stopped.train(prepare=prepare) == [YIELDED, YIELDED]
    assert published_steps(stopped.run.checkpoints) == [2]
