"""Batches that grow: what each step reads, and that neither a stop nor other ranks show.

megatron's losses are those of ddp from the same weights: test_models_convert_families.
"""

from __future__ import annotations

import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator
from megatron_lm_trials import PACKAGE, UNMEASURED, make_real_trial
from test_trainer_stops import _is_asked_to_stop
from trial_runs import (
    GPT,
    LIMIT_SECONDS,
    PLAIN,
    PLAIN_LLAMA,
    TOLERANCE,
    ZERO,
    ZERO_TP2_PP2,
    MakeTrial,
    assert_near,
    assert_resumes_exactly,
    held_at,
    trained,
    wrap,
)
from variants import varied

from hpctrain.records.epochs import claim_epoch
from hpctrain.records.manifest import checkpoint_name, read_manifest
from hpctrain.records.run_records import TrainerExit
from hpctrain.spec.batch import batch_sizes
from hpctrain.train.schedule import learning_rate

# Steps of 2, 2, 4, 6, 8 and 8 samples.
RAMP: dict[str, Any] = dict(rampup_batch_size=(2, 2, 12), micro_batch_size=1)
CONSUMED = [2, 4, 8, 14, 22, 30]
TWO: dict[str, Any] = dict(RAMP, data_parallel_size=2)
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": dict(PLAIN, **TWO),
    "fsdp": dict(PLAIN, **TWO, engine="fsdp", shard_size=2),
    "megatron": dict(GPT, **TWO, overlap_grad_reduce=True, overlap_param_gather=True),
    "deepspeed, ZeRO 1": dict(ZERO, **RAMP),
    "deepspeed, ZeRO 2": {**ZERO, **RAMP, "zero_stage": 2},
    "deepspeed, ZeRO 3": {**ZERO, **RAMP, "zero_stage": 3},
    "deepspeed, tp 2, two stages": dict(ZERO_TP2_PP2, **RAMP),
}


def test_stages_are_those_of_megatron_core() -> None:
    """Its calculator, asked for each step; it divides in floats."""
    draw = random.Random(7)
    for _ in range(300):
        start, increment, count = draw.randint(1, 30), draw.randint(1, 9), draw.randint(1, 49)
        samples = draw.choice([draw.randint(1, 50), draw.randint(1, 5000)])
        size, consumed = start + count * increment, 0
        calculator = RampupBatchsizeNumMicroBatchesCalculator(
            size, 1, 1, False, 1, start, increment, samples
        )
        sizes = batch_sizes(size, (start, increment, samples))
        for step in range(100):
            calculator.update(consumed, False)
            assert sizes.size_after(step) == calculator.current_global_batch_size
            assert (sizes.samples_after(step), sizes.steps_for(consumed)) == (consumed, step)
            consumed += calculator.current_global_batch_size


def note_samples() -> None:
    """A `prepare`: each rank prints which samples it reads."""

    @wrap("hpctrain.train.datasets.token_samples:TokenSamples", "_read")
    def read(real: Any, self: Any, samples: range) -> Any:
        print("read", *samples, flush=True)
        return real(self, samples)


def read_by(said: str) -> list[int]:
    lines = [line.split()[1:] for line in said.splitlines() if line.startswith("read ")]
    return sorted(int(number) for line in lines for number in line)


@pytest.mark.parametrize("name", varied(ENGINES, "fsdp"))
def test_a_stop_amid_the_ramp_does_not_show(name: str, trial: MakeTrial) -> None:
    settings = ENGINES[name]
    whole, resumed = trained(settings), trial(settings, save_interval_steps=2)
    assert [row.consumed_samples for row in whole.rows] == CONSUMED
    assert_resumes_exactly(resumed, whole, 2)
    assert [row.consumed_samples for row in resumed.rows] == CONSUMED[2:]
    assert [row.learning_rate for row in resumed.rows] == [r.learning_rate for r in whole.rows[2:]]


@pytest.mark.variant("test_a_stop_amid_the_ramp_does_not_show")
@pytest.mark.parametrize("name", list(ENGINES))
def test_a_growing_batch_has_the_losses_of_one_process(name: str) -> None:
    whole = trained(ENGINES[name])
    base = {"megatron": GPT, "deepspeed, tp 2, two stages": PLAIN_LLAMA}
    one = trained(base.get(name, PLAIN), **RAMP)
    assert_near(whole, one, 1, norm=10 * TOLERANCE)
    by_samples = [learning_rate(whole.config, step) for step in range(len(CONSUMED))]
    assert [row.learning_rate for row in whole.rows] == pytest.approx(by_samples, rel=1e-12)


@pytest.mark.variant("test_a_stop_amid_the_ramp_does_not_show")
@pytest.mark.parametrize("name", ["ddp", "megatron"])
def test_preempted_and_resumed_on_fewer_ranks(name: str, trial: MakeTrial) -> None:
    """Between steps of 4 and 6 samples: each is read once, and none twice."""
    stopped = trial(ENGINES[name])
    ranks = stopped.start(
        prepare=lambda: (note_samples(), held_at(4, _is_asked_to_stop)())  # type: ignore[func-returns-value]
    )
    stopped.wait_for_step(2, ranks)
    ranks.signal(signal.SIGTERM, 1)
    assert ranks.wait(LIMIT_SECONDS) == [TrainerExit.YIELDED] * 2, ranks.log()
    step = max(stopped.losses)
    assert step < 5, "inside the ramp"
    first = read_by(stopped.said)
    assert first == [*range(CONSUMED[step - 1])]
    whole = trained(ENGINES[name])
    fewer = trial(ENGINES[name], data_parallel_size=1).goes_on(stopped, step, prepare=note_samples)
    assert_near(fewer, whole, step + 1, norm=10 * TOLERANCE)
    assert first + read_by(fewer.said) == [*range(30)]
    assert stopped.train(resume=step) == [0, 0]
    assert stopped.exact == whole.exact


@pytest.mark.variant("test_a_stop_amid_the_ramp_does_not_show")
def test_another_ramp_is_another_order_of_samples(trial: MakeTrial) -> None:
    whole = trained(ENGINES["fsdp"])
    other = trial(ENGINES["fsdp"], rampup_batch_size=(4, 2, 12))
    other.adopt(whole, 2)
    assert other.train(resume=2) == [TrainerExit.CONFIG_ERROR] * 2
    assert "rampup_batch_size" in other.message()


@pytest.mark.skipif(not PACKAGE.is_dir(), reason="`make install` unpacks it")
@pytest.mark.variant("test_a_stop_amid_the_ramp_does_not_show")
def test_the_newest_megatron_lm_has_the_same_stages(tmp_path: Path) -> None:
    """It ignores `--rampup-batch-size`, and saves whenever the batch has grown."""
    ramp = dict(RAMP, lr_warmup_steps=3)
    whole = make_real_trial(tmp_path / "whole", 8, entry=UNMEASURED, **ramp)
    assert whole.train(epoch=claim_epoch(whole.run.epochs, "first")) == [TrainerExit.DONE] * 2
    assert [row.consumed_samples for row in whole.rows] == [*CONSUMED, 38, 46]
    assert whole.good == [8, 4, 3, 2]
    kept = [read_manifest(whole.run.checkpoints / checkpoint_name(step)) for step in whole.good]
    assert [one and one.consumed_samples for one in kept] == [46, 14, 8, 4]
    resumed = make_real_trial(tmp_path / "resumed", 8, entry=UNMEASURED, **ramp)
    source = whole.run.checkpoints / checkpoint_name(3)
    shutil.copytree(source, resumed.run.checkpoints / checkpoint_name(3))
    epoch = claim_epoch(resumed.run.epochs, "first")
    assert resumed.train(resume=3, epoch=epoch) == [TrainerExit.DONE] * 2
    computed = {2, 5}  # from two rows (`OwnMeans`), not printed
    for row, same in zip(resumed.rows, whole.rows[3:], strict=True):
        assert row.loss == pytest.approx(same.loss, rel=0, abs=3e-6 * (row.step in computed))
        assert (row.learning_rate, row.consumed_samples, row.grad_norm) == (
            same.learning_rate,
            same.consumed_samples,
            same.grad_norm,
        )
