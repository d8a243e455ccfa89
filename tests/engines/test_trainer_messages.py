"""The messages of one step, measured on real engines with gloo: as many bytes as theory says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from deepspeed_trials import ZERO
from trial_runs import EVALUATING, GPT, MODULE_GPT, TP2_PP2, Trial, trained

from hpctrain.records.run_records import AxisMessages, CommunicationRecord, read_communication
from hpctrain.train import messages

FP32_BYTES = 4
OFTEN: dict[str, Any] = dict(messages_interval_steps=2)
TWO: dict[str, Any] = dict(data_parallel_size=2)
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


def test_gradients_of_ddp_that_cpp_sums(trial: Callable[..., Trial]) -> None:
    record = measured(trial(DDP, **OFTEN))
    (axis,) = record.axes
    assert (axis.axis, axis.ranks_per_group, axis.groups) == ("dp", 2, (0, 0))
    gradients = FP32_BYTES * parameters(DDP["model"])
    assert axis.bytes == (gradients + LOSS_BYTES,) * 2
    # between two ranks a ring passes on the whole message: 2 (n - 1) / n = 1
    ends = [(link.source, link.target, link.bytes) for link in record.links]
    assert ends == [(0, 1, axis.bytes[0]), (1, 0, axis.bytes[1])]


@pytest.mark.variant("test_gradients_of_ddp_that_cpp_sums")
def test_weights_that_fsdp_gathers(trial: Callable[..., Trial]) -> None:
    """Half of the weights for each pass of two microbatches, and all gradients once."""
    (axis,) = measured(trial(FSDP, **OFTEN)).axes
    weights = FP32_BYTES * parameters(FSDP["model"])
    assert axis.axis == "dp"
    for handed in axis.bytes:
        assert 0 <= handed - (4 * weights // 2 + weights) < 500, "and losses and norms"


@pytest.mark.variant("test_gradients_of_ddp_that_cpp_sums")
def test_deepspeed_sums_and_gathers_once(trial: Callable[..., Trial]) -> None:
    (axis,) = measured(trial(ZERO, **OFTEN)).axes
    weights = FP32_BYTES * parameters(ZERO["model"])
    assert axis.axis == "dp"
    for handed in axis.bytes:
        assert 0 <= handed - (weights + weights // 2) < 50, "and losses and norms"


@pytest.mark.variant("test_gradients_of_ddp_that_cpp_sums")
def test_tensors_and_pipeline_of_megatron(trial: Callable[..., Trial]) -> None:
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


def _third_read_fails() -> None:
    def row_of(*_arguments: Any) -> list[float]:
        raise ValueError("a surprise")

    messages.row_of = row_of


@pytest.mark.variant("test_gradients_of_ddp_that_cpp_sums")
def test_a_failure_ends_measuring_and_not_training(trial: Callable[..., Trial]) -> None:
    run = trial(DDP, messages_interval_steps=1)
    assert run.train(prepare=_third_read_fails) == [0] * 2
    assert len(run.rows) == 6 and not run.run.communication.exists()
    logs = "".join(path.read_text() for path in sorted(run.run.logs.rglob("*.log")))
    assert logs.count("event=messages") == 2, "each rank once"
    assert logs.count("a surprise") == 2
