"""Upper bounds of how often one training step waits for the device: per step and per micro-batch.

A census on the CPU (see `host_reads`): it counts each read as one of the GPU, also of data that
would lie on the host. `test_fake_cuda_step` sees on which device each tensor is placed.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import host_reads
import pytest
import settings_sweep
from fresh_process import FreshProcess
from trial_runs import MODULE_GPT, MODULE_LLAMA
from variants import varied

FSDP = dict(engine="fsdp", shard_size=1, precision="bf16")
DDP = dict(engine="ddp", precision="bf16")
FEW, MANY = 2, 4
# Reads of a step, and further ones per micro-batch. megatron: two checks for nan of the only
# bucket, the gradient norm; BERT also sums its tokens. transformers looks once per micro-batch
# whether positions restart (masking_utils.py, find_packed_sequence_indices).
BOUNDS: dict[str, tuple[dict[str, Any], int, int]] = {
    "gpt": (settings_sweep.FAMILIES["gpt"], 3, 0),
    "llama": (settings_sweep.FAMILIES["llama"], 3, 0),
    "bert": (settings_sweep.FAMILIES["bert"], 4, 0),
    "latent attention": (settings_sweep.FAMILIES["latent attention"], 3, 0),
    # Three layers of experts: four masks and five lists of sizes each. On a GPU the lists are read
    # from one copy to the host per layer (token_dispatcher.py, maybe_move_tensor_to_cpu).
    "experts": (settings_sweep.FAMILIES["experts"], 3, 27),
    "gpt with fsdp": ({**MODULE_GPT, **FSDP}, 0, 1),
    "llama with fsdp": ({**MODULE_LLAMA, **FSDP}, 0, 1),
    "gpt with ddp": ({**MODULE_GPT, **DDP}, 0, 1),
    "llama with ddp": ({**MODULE_LLAMA, **DDP}, 0, 1),
}


@pytest.mark.parametrize("name", varied(BOUNDS, "experts", "llama with fsdp"))
def test_a_step_waits_seldom(name: str, engine_process: FreshProcess) -> None:
    document, per_step, per_microbatch = BOUNDS[name]
    few, many = (
        engine_process.call(
            host_reads.reads_at, document=json.dumps(document), microbatches=[number]
        )[0]
        for number in (FEW, MANY)
    )
    added = Counter(many)
    added.subtract(few)
    assert sum(added.values()) <= per_microbatch * (MANY - FEW), dict(+added)
    assert sum(few.values()) <= per_step + per_microbatch * FEW, few


def test_a_read_would_be_counted(engine_process: FreshProcess) -> None:
    """Each of these waits for a GPU."""
    found = engine_process.call(host_reads.reads_of_examples)
    assert found == [1, 1, 1, 1, 1, 1, 0, 0]
