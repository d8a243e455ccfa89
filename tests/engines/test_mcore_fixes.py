"""The corrections of megatron-core that would otherwise give wrong numbers without a word.

Each is also left out once: when such a test fails, megatron-core has learnt it and the correction
can go.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from trial_runs import DP2, LIMIT_SECONDS, Trial, largest_difference, trained

from bench import prefork
from hpctrain.train.engines.megatron import fixes


def test_tensor_parallel_ranks_draw_different_masks(trial: Callable[..., Trial]) -> None:
    """cpu._rng_trackers: without it the tracker never switches and both ranks draw the same."""
    drawn = trial(tensor_model_parallel_size=2)
    answers = drawn.run.directory

    def draw() -> None:
        from megatron.core import tensor_parallel

        from hpctrain.train.engines.megatron.mesh import open_mesh
        from hpctrain.train.rank_environment import read_launch

        mesh = open_mesh(drawn.config, read_launch(os.environ))
        outside = torch.rand(3).tolist()
        with tensor_parallel.get_cuda_rng_tracker().fork():
            inside = torch.rand(3).tolist()
        again = torch.rand(3).tolist()
        text = json.dumps([outside, inside, again])
        (answers / f"drawn-{mesh.tensor_rank}").write_text(text)
        torch.distributed.barrier()  # rank 0 serves the store that the other may still need

    codes = prefork.fork(draw, 2, drawn.run.logs).wait(LIMIT_SECONDS)
    assert codes == [0, 0]
    first, second = (json.loads((answers / f"drawn-{rank}").read_text()) for rank in (0, 1))
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert first[2] == second[2]
    assert first[0] != first[2]


# Another test may have installed the fixes in this process before ranks are forked from it.
_UNFIXED_PARAM_STATE = DistributedOptimizer.sharded_param_state_fully_reshardable
_UNFIXED_LOAD = DistributedOptimizer.load_state_dict


def _without_the_fix() -> None:
    fixes.keep_bucket_padding = lambda: None
    DistributedOptimizer.sharded_param_state_fully_reshardable = _UNFIXED_PARAM_STATE


def _shared_steps() -> None:
    fixes.separate_adam_steps = lambda: None
    DistributedOptimizer.load_state_dict = _UNFIXED_LOAD


def _resumed(source: Trial, target: Trial, load: Any = None) -> float:
    """Largest loss difference of a resume on one process against the uninterrupted run."""
    target.adopt(source, 2)
    assert target.train(resume=2, prepare=load) == [0]
    return largest_difference(target, source, 3)[0]


@pytest.mark.variant("test_resume_is_exact")
def test_padded_buckets_are_saved_wrongly_without_the_fix(trial: Callable[..., Trial]) -> None:
    """With it: test_trainer_resume.py, test_resume_at_other_layouts."""
    source = trial(save_interval_steps=2, **DP2, ddp_bucket_size=3000)
    assert source.train(prepare=_without_the_fix) == [0, 0]
    assert _resumed(source, trial()) > 1e-3


@pytest.mark.variant("test_resume_is_exact")
def test_steps_are_shared_without_the_fix(trial: Callable[..., Trial]) -> None:
    """With it: every test of test_trainer_layouts.py."""
    assert _resumed(trained(**DP2), trial(), _shared_steps) > 1e-3


@pytest.mark.variant("test_resume_is_exact")
@pytest.mark.parametrize("settings", [{}, {"use_distributed_optimizer": False}])
def test_both_kinds_of_optimizer_resume_exactly(
    settings: dict[str, Any], trial: Callable[..., Trial]
) -> None:
    """prime_adam and the two corrections of `step`; the second kind is one without sharding."""
    whole = trained(precision="bf16", **settings)
    resumed = trial(precision="bf16", **settings)
    resumed.adopt(whole, 4)
    assert resumed.train(resume=4) == [0]
    assert resumed.exact == {step: whole.exact[step] for step in (5, 6)}
