"""What a step holds in memory where two ranks split each weight, counted, against what a plan says.

Counted as in `test_kept_by_modules`, on one of two ranks whose other one is not there: its process
group sends nothing (torch's `fake` backend), which changes no tensor's size.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import test_kept_by_modules as kept
import torch.distributed as dist
from test_kept_by_modules import stand_ins as stand_ins
from torch.testing._internal.distributed.fake_pg import FakeStore
from trial_runs import LIMIT_SECONDS

from hpctrain.train.engines.models.tasks import loss_of

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("needs the deepspeed extra", allow_module_level=True)

WIDE = dict(kept.LLAMA, vocab=50000)
CASES: dict[str, tuple[dict[str, Any], float]] = {
    "bf16": (kept.of(WIDE, "deepspeed", **kept.BF16), 0.02),
    "fp32": (kept.of(kept.LLAMA, "deepspeed", **kept.FP32), 0.02),
    "recomputed": (kept.of(kept.LLAMA, "deepspeed", recompute="full", **kept.BF16), 0.1),
}
SPLIT: dict[str, Any] = dict(
    parallel={"tp": 2}, resources={"gpus": 2}, optimizer={"lr": 1e-3, "zero": 1}
)


def count(directory: Path) -> None:
    """In a process of its own, which joins a process group."""
    from hpctrain.train.engines.deepspeed import mesh
    from hpctrain.train.engines.deepspeed.tensor_parallel import split_weights, token_losses_of

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh.join(timedelta(minutes=1))
    group, whole = dist.group.WORLD, kept.build_module

    def build(*given: Any, **named: Any) -> Any:
        module = whole(*given, **named)
        split_weights(module, group)
        return module

    kept.build_module = build
    kept.loss_function = lambda config: loss_of(config, token_losses_of(group, config.vocab_size))
    told = {}
    for name, (document, _) in CASES.items():
        plan, config = kept.planned(directory, {**document, **SPLIT}, "a100x64")
        held = plan.memory[0]
        said = held.activations_bytes + held.logits_bytes
        told[name] = (said, kept.counted_bytes(config, plan))
    (directory / "told.json").write_text(json.dumps(told))


@pytest.mark.variant("test_a_plan_says_what_a_step_holds")
@pytest.mark.usefixtures("stand_ins")
def test_a_plan_says_what_a_rank_of_two_holds(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=count, args=(tmp_path,))
    process.start()
    process.join(LIMIT_SECONDS)
    assert process.exitcode == 0
    for name, (said, counted) in json.loads((tmp_path / "told.json").read_text()).items():
        apart = said / counted - 1
        print(
            f"{name}: planned {said / 2**20:.0f} MiB, counted {counted / 2**20:.0f}: {apart:+.1%}"
        )
        assert -0.03 <= apart <= CASES[name][1]
