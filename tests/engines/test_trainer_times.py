"""How long each rank computes and sends, and what a diagnosis makes of it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from trial_runs import (
    EVALUATING,
    GPT,
    MODULE_GPT,
    PP2,
    TP2_PP2,
    TWO,
    ZERO,
    MakeTrial,
    Trial,
    keep_quietest_window,
    trained,
    wrap,
)

from hpctrain.diagnose.facts import TopicFinding
from hpctrain.diagnose.of_run import diagnose
from hpctrain.job.prepare import prepare
from hpctrain.job.run_directory import write_run_directory
from hpctrain.records.find import RunFiles
from hpctrain.records.run_records import (
    AxisMessages,
    CommunicationRecord,
    RankTimes,
    read_communication,
    read_record,
)
from hpctrain.train import messages
from hpctrain.train.datasets.token_samples import TokenSamples
from hpctrain.train.step_agreement import Control
from hpctrain.train.times import ComputeTimers, EventClock, RankClock, StepClock

SLOW_RANK = 2
# Large against what computing takes here (milliseconds), so that a busy machine does not decide;
# of several windows the quietest is looked at, so that its pauses do not either.
USUAL_SECONDS, SLOW_SECONDS = 0.05, 0.3
WINDOWS = dict(rank_times_interval_steps=2, train_steps=8, lr_decay_steps=8)


def reads_slowly(seconds: float, *ranks: int) -> Callable[[], None]:
    """A `prepare`: each batch takes these ranks so long."""

    def prepare() -> None:
        keep_quietest_window()
        slow = int(os.environ["RANK"]) in ranks

        @wrap(TokenSamples, "microbatches")
        def microbatches(real: Any, self: TokenSamples, *place: Any) -> Iterator[Any]:
            for batch in real(self, *place):
                time.sleep(seconds if slow else 0)
                yield batch

    return prepare


@pytest.mark.variant("test_the_launch_ends_where_the_node_can_be_replaced")
def test_a_slow_rank_shows_and_only_it(trial: MakeTrial) -> None:
    """Its pipeline neighbour and its data-parallel one wait for it in every step. An evaluation
    in each window, of twice as many microbatches, is not counted."""

    def one_is_slow() -> None:
        keep_quietest_window()
        slow = os.environ["RANK"] == str(SLOW_RANK)

        @wrap("hpctrain.train.engines.megatron.engine", "forward_step")
        def step(real: Any, iterator: Any, model: Any) -> Any:
            time.sleep(SLOW_SECONDS if slow else USUAL_SECONDS)
            return real(iterator, model)

    slow = trial(eval_interval_steps=2, eval_batches=4, **WINDOWS, **PP2, data_parallel_size=2)
    assert slow.train(prepare=one_is_slow) == [0] * 4
    times = read_record(slow.run.rank_times, RankTimes)
    assert times is not None
    assert (times.epoch, times.last_step) == (0, times.first_step + 1)
    assert times.first_step in (2, 4, 6)
    assert len(times.nodes) == 4 and all(times.nodes)
    others = list(times.compute_seconds)
    its_own = others.pop(SLOW_RANK)
    assert min(others) > 2 * USUAL_SECONDS, "two microbatches in each step"
    assert its_own > 2 * SLOW_SECONDS and its_own > max(others), times.compute_seconds


@pytest.mark.variant("test_the_time_of_each_rank")
@pytest.mark.parametrize("base", [GPT, MODULE_GPT, ZERO], ids=lambda base: base.get("engine", ""))
def test_waiting_for_data_is_told_apart(base: dict[str, Any], trial: MakeTrial) -> None:
    slow = trial({**base, **WINDOWS}, data_parallel_size=2)
    assert slow.train(prepare=reads_slowly(SLOW_SECONDS, 1)) == [0] * 2
    times = read_record(slow.run.rank_times, RankTimes)
    assert times is not None
    quick, waited = times.data_seconds
    assert waited >= 2 * SLOW_SECONDS, "two microbatches in each step"
    assert quick < waited, "only the other rank reads slowly"
    others = times.compute_seconds, times.backward_seconds, times.optimizer_seconds
    assert times.compute_seconds[0] > 0 and times.optimizer_seconds[0] > 0
    parts = (*others, times.data_seconds, times.rest_seconds)
    for rank in range(2):
        assert sum(each[rank] for each in parts) == pytest.approx(times.step_seconds[rank])
    assert min(times.peak_memory_bytes) > 10**7 and len(times.reserved_memory_bytes) == 2


def test_a_record_of_an_older_version_is_read() -> None:
    old = RankTimes.model_validate_json(
        '{"epoch":1,"first_step":2,"last_step":4,"time":0,"compute_seconds":[1,2],"nodes":["a","b"]}'
    )
    assert old.compute_seconds == (1, 2) and old.rest_seconds == old.data_seconds == ()


@pytest.mark.variant("test_the_time_of_each_rank")
def test_timing_changes_no_numbers(trial: MakeTrial) -> None:
    settings = dict(PP2, dropout=0.1, **EVALUATING)
    often, never = trial(rank_times_interval_steps=1, **settings), trained(**settings)
    assert never.config.rank_times_interval_steps > 6
    assert often.train() == [0] * 2
    assert often.exact == never.exact
    assert often.run.rank_times.exists() and not never.run.rank_times.exists()


class _Event:
    """An event in a stream whose clock the test turns."""

    now_ms = 0.0
    made = 0

    def __init__(self) -> None:
        type(self).made += 1

    def record(self) -> None:
        self.at = self.now_ms

    def elapsed_time(self, end: _Event) -> float:
        return end.at - self.at


def test_events_are_paired_and_used_again() -> None:
    clock = EventClock(_Event)
    for step in range(3):
        for _ in range(4):
            clock.start()
            _Event.now_ms += 250 * (step + 1)
            clock.stop()
            _Event.now_ms += 1000  # waiting
        assert clock.take_seconds() == step + 1
    assert clock.take_seconds() == 0
    assert _Event.made == 8


class _Alone(Control):
    """Control of one rank, for a test without processes."""

    def __init__(self) -> None:
        self.work = type("Work", (), {"wait": lambda self: None})()

    def start_sum(self, vector: Any) -> Any:
        return self.work


def test_steps_that_do_not_count_are_in_no_window() -> None:
    told: list[RankTimes] = []
    clock = RankClock(StepClock(), _Alone(), 0, ("n0",), 1, 3, told.append)
    for step in range(1, 9):
        clock.finished_step(step, 9.0 if step in (1, 3, 4) else 1.0, counts=step not in (3, 4))
    assert [(one.first_step, one.last_step, one.step_seconds) for one in told] == [(2, 6, (1.0,))]


def test_measuring_costs_next_to_nothing() -> None:
    """In a step with 16 microbatches 1500 calls of functions, of Python and of C, which are
    0.1 % of a step of 100 ms."""
    inner = StepClock()
    timers = ComputeTimers(inner)
    clock = RankClock(inner, _Alone(), 0, ("n0",), 1, 10**9, lambda times: None)
    batches = inner.reading(iter(range(10**6)))

    def step(number: int) -> None:
        for _ in range(16):
            for name in ("forward-compute", "backward-compute"):
                timers(name, log_level=2).start()
                next(batches)
                timers(name).stop()
        clock.finished_step(number, 0.1)

    assert calls_of(lambda: step(1)) <= 1500


def calls_of(work: Callable[[], None]) -> int:
    events: list[str] = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        work()
    finally:
        sys.setprofile(None)
    return sum(event in ("call", "c_call") for event in events)


# -----------------------------------------------------------------------------------------------
# The messages of one step, measured on real engines with gloo: as many bytes as theory says.

FP32_BYTES = 4
OFTEN: dict[str, Any] = dict(messages_interval_steps=2)
DDP: dict[str, Any] = dict(MODULE_GPT, **TWO)
FSDP: dict[str, Any] = dict(DDP, engine="fsdp", shard_size=2)
LOSS_BYTES = 8  # the sum of losses of a step, and their number


def parameters(model: dict[str, Any]) -> int:
    """Count those of a GPT: tables, and of each layer four matrices with biases and two norms."""
    hidden, ffn = model["hidden"], model["ffn"]
    layer = 4 * hidden * hidden + 2 * hidden * ffn + 4 * hidden + ffn + hidden + 4 * hidden
    return int((model["vocab"] + model["seq"]) * hidden + model["layers"] * layer + 2 * hidden)


def measured(trial: Trial, prepare: Callable[[], None] | None = None) -> CommunicationRecord:
    assert trial.train(prepare=prepare) == [0] * trial.world_size
    record = read_communication(trial.run)
    assert record is not None
    assert (record.epoch, record.step, len(record.nodes)) == (0, 5, trial.world_size)
    for axis in record.axes:
        assert all(0 < seconds < record.step_seconds for seconds in axis.seconds), axis
    return record


def the_axis(record: CommunicationRecord, name: str) -> AxisMessages:
    return next(axis for axis in record.axes if axis.axis == name)


def test_gradients_of_ddp_that_cpp_sums(trial: MakeTrial) -> None:
    record = measured(trial(DDP, **OFTEN))
    (axis,) = record.axes
    assert (axis.axis, axis.ranks_per_group, axis.groups) == ("dp", 2, (0, 0))
    gradients = FP32_BYTES * parameters(DDP["model"])
    assert axis.bytes == (gradients + LOSS_BYTES,) * 2
    # between two ranks a ring passes on the whole message: 2 (n - 1) / n = 1
    ends = [(link.source, link.target, link.bytes) for link in record.links]
    assert ends == [(0, 1, axis.bytes[0]), (1, 0, axis.bytes[1])]


# of FSDP half of the weights for each pass of two microbatches, and all gradients once; ZeRO sums
# and gathers once
@pytest.mark.variant("test_gradients_of_ddp_that_cpp_sums")
@pytest.mark.parametrize(
    ("base", "times", "others"), [(FSDP, 3.0, 500), (ZERO, 1.5, 50)], ids=["fsdp", "deepspeed"]
)
def test_weights_that_are_gathered(
    base: dict[str, Any], times: float, others: int, trial: MakeTrial
) -> None:
    (axis,) = measured(trial(base, **OFTEN)).axes
    assert axis.axis == "dp"
    for handed in axis.bytes:
        surplus = handed - times * FP32_BYTES * parameters(base["model"])
        assert 0 <= surplus < others, "losses and norms"


@pytest.mark.variant("test_gradients_of_ddp_that_cpp_sums")
def test_tensors_and_pipeline_of_megatron(trial: MakeTrial) -> None:
    """Measured or not, training is the same bit for bit, also where sends are watched."""
    settings = dict(TP2_PP2, dropout=0.1, async_save=True, **EVALUATING)
    run, plain = trial(**settings, **OFTEN), trained(**settings)
    record = measured(run)
    assert [axis.axis for axis in record.axes] == ["tp", "pp", "other"]
    tensors, stages = the_axis(record, "tp"), the_axis(record, "pp")
    assert tensors.groups == (0, 0, 2, 2) and stages.groups == (0, 1, 0, 1)
    size = run.config.micro_batch_size
    microbatches = GPT["global_batch_size"] // size
    activations = FP32_BYTES * GPT["seq_length"] * size * GPT["hidden_size"]
    # between a sender and its receiver nothing else passes but weights that both have
    shared = FP32_BYTES * GPT["padded_vocab_size"] * GPT["hidden_size"] // 2
    sent = {(link.source, link.target): link.bytes for link in record.links}
    for ends in ((0, 2), (1, 3), (2, 0), (3, 1)):
        assert 0 <= sent[ends] - microbatches * activations - shared < 100, sent
    # two all-reduces a layer and pass, one for the embedding or the gradient in front of the logits
    for rank in range(4):
        least = 2 * 2 * 2 * microbatches * activations
        assert least < tensors.bytes[rank] < 1.5 * least
    assert plain.exact == run.exact
    assert not plain.run.communication.exists()


@pytest.mark.variant("test_gradients_of_ddp_that_cpp_sums")
def test_a_failure_ends_measuring_and_not_training(trial: MakeTrial) -> None:
    def reading_fails() -> None:
        def row_of(*_arguments: Any) -> list[float]:
            raise ValueError("a surprise")

        messages.row_of = row_of

    run = trial(DDP, messages_interval_steps=1)
    assert run.train(prepare=reading_fails) == [0] * 2
    assert len(run.rows) == 6 and not run.run.communication.exists()
    assert run.said.count("event=messages") == 2, "each rank once"
    assert run.said.count("a surprise") == 2


# -- Runs that are slow for a reason that was put into them: the diagnosis names it first -------

# Large against what everything else takes here, so that a busy machine does not decide.
SLOWED_SECONDS = 0.15
# A trace has two steps, and is not made again: large against a pause of the machine, too.
SENDING_SECONDS = 1.5
NINE_STEPS = "budget.steps=9"
SPEC = """\
name: small
model: {family: gpt, layers: 2, hidden: 64, heads: 4, vocab: 250, seq: 32, tied: true}
batch: {global: 8, micro: 2}
budget: {steps: 5}
optimizer: {lr: 1e-3}
checkpoint: {every_steps: 100}
precision: fp32
engine: {name: ddp}
resources: {gpus: 2}
"""
TRACED = ["profile.steps=[3, 4]", "profile.ranks=[0, 1]"]


@pytest.fixture
def small(tmp_path: Path) -> MakeTrial:
    """A run directory as `submit` makes it, with windows of two steps."""

    def make(*changes: str) -> Trial:
        (tmp_path / "small.yaml").write_text(SPEC)
        prepared = prepare(tmp_path / "small.yaml", "sandbox", changes, runs=tmp_path / "runs")
        layout = write_run_directory(prepared, tmp_path / "runs")
        config = prepared.train.model_copy(update={"rank_times_interval_steps": 2})
        layout.train_config.write_text(config.model_dump_json())
        return Trial(layout, config)

    return make


def _findings(made: Trial) -> tuple[TopicFinding, ...]:
    return diagnose(RunFiles(made.run)).findings


@pytest.mark.variant("test_the_time_of_each_rank")
def test_a_slow_loader_is_found(small: MakeTrial) -> None:
    slow = small(NINE_STEPS)
    assert slow.train(prepare=reads_slowly(SLOWED_SECONDS, 0, 1)) == [0, 0]
    first = _findings(slow)[0]
    assert (first.topic, first.answer) == ("data", "yes"), first
    assert "every rank waits" in first.words
    assert first.gain_seconds is not None and first.gain_seconds >= 2 * SLOWED_SECONDS


def _compute_slowly() -> None:
    from hpctrain.train.engines.native import assembly

    keep_quietest_window()
    if os.environ["RANK"] != "1":
        return

    @wrap(assembly, "loss_of")
    def loss_of(real: Any, config: Any) -> Any:
        def slow(*both: Any) -> Any:
            time.sleep(SLOWED_SECONDS)
            return real(config)(*both)

        return slow


@pytest.mark.variant("test_the_time_of_each_rank")
def test_a_slow_rank_is_found_and_not_its_peer_that_waits(small: MakeTrial) -> None:
    slow = small(NINE_STEPS)
    assert slow.train(prepare=_compute_slowly) == [0, 0]
    found = {one.topic: one for one in _findings(slow)}
    first = _findings(slow)[0]
    assert (first.topic, first.answer) == ("imbalance", "yes"), first
    assert first.words.startswith("rank 1 ")
    assert found["data"].answer == "no"
    assert found["communication"].answer == "no", "the slow rank itself waits for nobody"


def _send_slowly() -> None:
    """A slow link: a pause where DDP sends a bucket, shown as gloo shows its messages."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.profiler import record_function

    from hpctrain.train.engines.native import assembly

    def send(state: Any, bucket: Any) -> Any:
        with record_function("gloo:all_reduce"):
            time.sleep(SENDING_SECONDS)
        return allreduce_hook(state, bucket)

    # DDP wants real types as annotations, or none
    assembly.register_hook = lambda config, wrapped: wrapped.register_comm_hook(
        None, lambda state, bucket: send(state, bucket)
    )


@pytest.mark.variant("test_the_time_of_each_rank")
def test_a_slow_link_is_found_by_a_trace(small: MakeTrial) -> None:
    slow = small(*TRACED)
    assert slow.train(prepare=_send_slowly) == [0, 0]
    told = diagnose(RunFiles(slow.run))
    assert told.findings[0].topic == "communication"
    found = {one.topic: one for one in told.findings}
    sent, buckets = found["communication"], found["buckets"]
    assert sent.answer == "yes" and sent.evidence[0].source.startswith("e000000-rank-00000")
    assert "while nothing was computed" in sent.evidence[0].words
    assert any("engine.ddp.hook=bf16" in one.changes for one in sent.remedies), sent
    assert "messages of gradients in a step, 0.451 MiB" in buckets.evidence[0].words
    read = [one.words for one in told.read if one.file.startswith("traces/")]
    assert [words.split(",")[0] for words in read] == ["rank 0", "rank 1"]
