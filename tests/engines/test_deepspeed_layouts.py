"""A checkpoint of DeepSpeed's pipeline goes on with other stages, other replicas, or none."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
from deepspeed_trials import PLAIN, PLAIN_LLAMA, ROUNDING, ZERO, ZERO_TP2_PP2, words_of
from trial_runs import Trial, largest_difference, trained

from hpctrain.records.manifest import checkpoint_name

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("needs the deepspeed extra", allow_module_level=True)

# Three blocks. The words' weight is on the first stage and on the last one, where it is so large
# that both ranks have a part of it; on the first one rank has all.
GPT3: dict[str, Any] = dict(
    ZERO, vocab_size=1000, model={**PLAIN["model"], "layers": 3, "vocab": 1000}
)
LLAMA_BF16: dict[str, Any] = dict(ZERO, model=PLAIN_LLAMA["model"], precision="bf16")
BF16_ROUNDING = 2e-3


def gone_on(moved: Trial, source: Trial, step: int) -> Trial:
    """From a checkpoint of `source` to the end."""
    moved.adopt(source, step)
    assert moved.train(resume=step) == [0] * moved.world_size
    assert "random_state_re-seeded" in words_of(moved)
    return moved


def assert_near(moved: Trial, source: Trial, first_step: int) -> None:
    loss, norm = largest_difference(moved, source, first_step)
    assert loss <= ROUNDING and norm <= 10 * ROUNDING, moved.config.layout_words


@pytest.mark.variant("test_a_resume_is_exact")
def test_stages_are_cut_anew_and_joined(trial: Callable[..., Trial]) -> None:
    source = trained(GPT3, pipeline_stages=(2, 1))
    joined = gone_on(trial(GPT3, zero_stage=2), source, 4)
    # converted once: this one finds it in the checkpoint
    longer = trial(GPT3, data_parallel_size=1, pipeline_stages=(1, 1, 1))
    gone_on(longer, joined, 4)
    for moved in (joined, longer):
        assert_near(moved, source, 5)


@pytest.mark.variant("test_a_resume_is_exact")
def test_what_was_joined_is_divided(trial: Callable[..., Trial]) -> None:
    source = trained(GPT3, pipeline_stages=(2, 1))
    joined = gone_on(trial(GPT3, zero_stage=2, save_interval_steps=2), source, 2)
    divided = trial(GPT3, data_parallel_size=1, pipeline_stages=(1, 2))
    assert_near(gone_on(divided, joined, 4), source, 5)


@pytest.mark.variant("test_a_resume_is_exact")
def test_weights_in_bf16_go_on_from_those_in_fp32(trial: Callable[..., Trial]) -> None:
    """By another optimizer class of DeepSpeed's, and joined of two ranks' parts on each stage; a
    Llama has an output layer of its own."""
    source = trained(ZERO_TP2_PP2, precision="bf16")
    alone = gone_on(trial(LLAMA_BF16, data_parallel_size=1), source, 2)
    assert largest_difference(alone, source, 3)[0] <= BF16_ROUNDING
    assert (alone.run.checkpoints / checkpoint_name(2) / "universal").is_dir()
