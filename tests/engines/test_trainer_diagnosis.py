"""Runs that are slow for a reason that was put into them: the diagnosis names it first."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from trial_runs import Trial, keep_quietest_window

from hpctrain.diagnose.facts import TopicFinding
from hpctrain.diagnose.of_run import diagnose
from hpctrain.job.prepare import prepare
from hpctrain.job.run_directory import write_run_directory
from hpctrain.records.find import RunFiles
from hpctrain.train.datasets.token_samples import TokenSamples

# Large against what everything else takes here, so that a busy machine does not decide.
SLOW_SECONDS = 0.15
# A trace has two steps, and is not made again: large against a pause of the machine, too.
SENDING_SECONDS = 1.5
WINDOWS = "budget.steps=9"
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
def small(tmp_path: Path) -> Callable[..., Trial]:
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


def _read_slowly() -> None:
    keep_quietest_window()
    real = TokenSamples.microbatches

    def microbatches(self: TokenSamples, *place: Any) -> Iterator[Any]:
        for batch in real(self, *place):
            time.sleep(SLOW_SECONDS)
            yield batch

    TokenSamples.microbatches = microbatches


@pytest.mark.variant("test_the_time_of_each_rank")
def test_a_slow_loader_is_found(small: Callable[..., Trial]) -> None:
    slow = small(WINDOWS)
    assert slow.train(prepare=_read_slowly) == [0, 0]
    first = _findings(slow)[0]
    assert (first.topic, first.answer) == ("data", "yes"), first
    assert "every rank waits" in first.words
    assert first.gain_seconds is not None and first.gain_seconds >= 2 * SLOW_SECONDS


def _compute_slowly() -> None:
    from hpctrain.train.engines.native import assembly

    keep_quietest_window()
    if os.environ["RANK"] != "1":
        return
    real = assembly.loss_of

    def loss_of(config: Any) -> Any:
        def slow(*both: Any) -> Any:
            time.sleep(SLOW_SECONDS)
            return real(config)(*both)

        return slow

    assembly.loss_of = loss_of


@pytest.mark.variant("test_the_time_of_each_rank")
def test_a_slow_rank_is_found_and_not_its_peer_that_waits(small: Callable[..., Trial]) -> None:
    slow = small(WINDOWS)
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
def test_a_slow_link_is_found_by_a_trace(small: Callable[..., Trial]) -> None:
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
