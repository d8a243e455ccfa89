"""What `plan` advises without being asked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpctrain.job.plan import Advice, Inputs, advise, freed, load, plan_option, with_gpus

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    return load(ROOT / "examples/gpt175b.yaml", "a100x64")


def advice(inputs: Inputs) -> tuple[Advice, ...]:
    return advise(inputs, plan_option(inputs, "time"), "time", "-p a100x64 gpt.yaml")


def test_a_better_layout_and_a_node_left_free(inputs: Inputs) -> None:
    """What the first says is what a plan of its own says."""
    layout, size = advice(inputs)
    assert (
        layout.command == "hpctrain plan -p a100x64 gpt.yaml --apply"
        and "cheaper" in layout.sentence
    )
    assert layout.saves_seconds > 86400 and layout.saves_gpu_hours > 10_000
    assert "takes all 64 nodes of a100x64" in size.sentence
    assert size.command is not None
    assert re.fullmatch(r"hpctrain plan -p a100x64 gpt.yaml --gpus 4\d\d --apply", size.command)
    assert size.saves_seconds > layout.saves_seconds
    mine = plan_option(inputs, "time").forecast
    other = plan_option(
        Inputs(freed(inputs.spec), inputs.profile, inputs.knowledge), "time"
    ).forecast
    assert mine is not None and other is not None
    assert layout.saves_gpu_hours == mine.gpu_hours - other.gpu_hours


def test_nodes_that_are_left_free_are_not_counted(inputs: Inputs) -> None:
    spec = with_gpus(freed(inputs.spec), 504)
    said = advice(Inputs(spec, inputs.profile, inputs.knowledge))
    assert any("the run takes 63 of the 64 nodes of a100x64" in one.sentence for one in said), said


def test_the_best_plan_with_free_nodes_gets_none(inputs: Inputs) -> None:
    spec = with_gpus(freed(inputs.spec), 256)
    assert advice(Inputs(spec, inputs.profile, inputs.knowledge)) == ()


def test_nothing_is_said_without_a_forecast() -> None:
    tiny = load(ROOT / "examples/gpt-tiny.yaml", "sandbox")
    option = plan_option(tiny, "time")
    assert option.plan is not None and advise(tiny, option, "time") == ()


def test_fewer_gpus_that_end_as_early_are_said(tmp_path: Path) -> None:
    """Seven nodes leave a pipeline of 7 stages of 4 and 5 layers; six divide the batch of 192."""
    path = tmp_path / "seven.yaml"
    path.write_text(SEVEN_NODES)
    seven = load(path, "h100x16")
    (size,) = advice(seven)
    assert "48 GPUs (1 node less) end" in size.sentence and "cheaper" in size.sentence
    assert size.command == "hpctrain plan -p a100x64 gpt.yaml --gpus 48 --apply"
    assert size.saves_gpu_hours > 0
    mine, other = (plan_option(seven, "time", gpus).forecast for gpus in (56, 48))
    assert mine is not None and other is not None
    assert other.times.total_seconds < 1.05 * mine.times.total_seconds
    assert size.saves_gpu_hours == mine.gpu_hours - other.gpu_hours


def test_one_node_has_no_smaller_number(tmp_path: Path) -> None:
    path = tmp_path / "one.yaml"
    path.write_text(SEVEN_NODES.replace("gpus: 56", "gpus: 8"))
    assert not any("GPUs (" in one.sentence for one in advice(load(path, "h100x16")))


SEVEN_NODES = """\
name: seven
model: {family: llama, layers: 32, hidden: 4096, ffn: 11008, heads: 32, vocab: 32000, seq: 4096}
batch: {global: 192}
budget: {tokens: 100B}
optimizer: {lr: 1e-4}
parallel: auto
checkpoint: {every: 30min}
resources: {gpus: 56}
"""
