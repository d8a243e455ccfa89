"""A data-parallel rank that has only the padding of a bucket saves and resumes."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

from fake_worlds import visit
from test_worlds import apart
from trial_runs import LLAMA, make_trial

from hpctrain.engines.train_json import parse_train_config
from hpctrain.train.engines.megatron import fixes

REPLACED = (
    "get_parameter_state_dp_reshardable",
    "load_parameter_state_from_dp_reshardable",
)
LAYOUT: dict[str, Any] = dict(
    share_embeddings_and_output_weights=True,
    engine="megatron",
    transformer_impl="local",
    pipeline_model_parallel_size=2,
    pipeline_layer_split=((2,), (2,)),
    data_parallel_size=2,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
    optimizer_sharding="dp_reshardable",
    train_steps=4,
    lr_decay_steps=4,
)


def start_of_last_parameter() -> int:
    """Return where the first stage's last parameter before the embedding, a norm, begins.

    megatron-core has several buckets on the first stage only, and gives an embedding that the last
    stage shares a bucket of its own.
    """
    config: Any = parse_train_config(json.dumps({**LLAMA, **LAYOUT}))
    (buffer,) = visit(config, 0).buffers
    return max(start for name, (start, _, _) in buffer["ranges"].items() if "embedding" not in name)


def without_the_fix() -> None:
    """Whoever ran in this process before may have installed it, and ranks are forks of it."""
    fixes.allow_shards_of_padding = lambda: None
    loaded = sys.modules.get("megatron.core.optimizer.distrib_optimizer")
    if loaded is not None:
        optimizer = loaded.DistributedOptimizer
        for name in REPLACED:
            setattr(optimizer, name, inspect.unwrap(getattr(optimizer, name)))


def test_a_norm_in_a_bucket_of_its_own_is_saved(tmp_path: Path) -> None:
    """64 elements over two ranks: the bucket is padded to 128, and the second rank has none."""
    bucket = apart(start_of_last_parameter) - 1
    shape = {**LAYOUT, "ddp_bucket_size": bucket}
    whole = make_trial(tmp_path / "whole", LLAMA, **shape, save_interval_steps=2)
    assert whole.train() == [0] * 4
    resumed = make_trial(tmp_path / "resumed", LLAMA, **shape)
    resumed.adopt(whole, 2)
    assert resumed.train(resume=2) == [0] * 4
    assert resumed.exact == {step: whole.exact[step] for step in (3, 4)}
    bare = make_trial(
        tmp_path / "bare", LLAMA, **shape, save_interval_steps=2, distributed_timeout_seconds=20
    )
    ranks = bare.start(prepare=without_the_fix)
    assert any(ranks.wait(120))
    assert any("empty bucket encountered" in ranks.log(rank) for rank in range(4))
