"""What engines cannot do together, or would not read, is refused where it is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from wrong_specs import VALID, problems_of, shown

from hpctrain.spec.loader import load_run_spec

OPTIMIZER = "optimizer: {lr: 1e-3}"
ENGINE = "engine: {name: deepspeed}\n"

# (the optimizer's fields, lines at the end of the file, the problem)
WRONG = [
    ("offload: nvme, zero: 1", ENGINE,
     "5:32: `optimizer.offload`: offload to nvme needs ZeRO stage 3, not 1"
     " | set `optimizer.zero: 3`, or offload to `cpu`"),
    ("offload: nvme, zero: 2", ENGINE,
     "5:32: `optimizer.offload`: offload to nvme needs ZeRO stage 3, not 2"
     " | set `optimizer.zero: 3`, or offload to `cpu`"),
    ("offload: cpu, distributed: false", "precision: fp32\n" + ENGINE,
     "5:32: `optimizer.offload`: offload to cpu needs ZeRO stage 1, 2 or 3, not 0"
     " | set `optimizer.zero: 1`, or remove the offload"),
    ("zero: 0", ENGINE,
     "1:1: `precision`: with DeepSpeed bf16 drifts at ZeRO stage 0"
     " | set `optimizer.zero: 1`, or `fp32`"),
    ("distributed: false", "precision: bf16\n" + ENGINE,
     "8:12: `precision`: with DeepSpeed bf16 drifts at ZeRO stage 0"
     " | set `optimizer.zero: 1`, or `fp32`"),
    ("zero: 2", "parallel: {pp: 2}\n" + ENGINE,
     "5:29: `optimizer.zero`: ZeRO stage 2 cannot be combined with pp 2"
     " | use stage 1, or pp 1"),
    ("zero: 1", "parallel: {tp: 2, sequence_parallel: true}\n" + ENGINE,
     "8:38: `parallel.sequence_parallel`: DeepSpeed does not split norms over tp"
     " | remove it, or train with `engine.name: megatron`"),
    ("zero: 2", "engine: {name: deepspeed, deepspeed: {offload_parameters: cpu}}\n",
     "8:59: `engine.deepspeed.offload_parameters`: weights leave the GPU at ZeRO stage 3 only, "
     "not at 2 | set `optimizer.zero: 3`"),
    ("zero: 3", "engine: {name: deepspeed, deepspeed: {nvme_path: /scratch}}\n",
     "8:50: `engine.deepspeed.nvme_path`: nothing is offloaded to nvme"
     " | remove it, or set `optimizer.offload: nvme`"),
    ("zero: 1", "engine: {name: megatron, deepspeed: {adam: torch}}\n",
     "8:37: `engine.deepspeed`: these are settings of DeepSpeed, and megatron would not read them"
     " | remove them, or set `engine.name: deepspeed`"),
    ("zero: 3", "engine: {name: fsdp, ddp: {hook: bf16}}\n",
     "8:27: `engine.ddp`: these are settings of DDP, and fsdp would not read them"
     " | remove them, or set `engine.name: ddp`"),
    ("zero: 1", "engine: {name: deepspeed, deepspeed: {pin_memory: true}}\n",
     "8:39: `engine.deepspeed.pin_memory`: unknown key | known here: adam, "
     "gather_bucket, nvme_path, offload_parameters, reduce_bucket, reduce_precision"),
]  # fmt: skip


@pytest.mark.parametrize(("optimizer", "end", "expected"), WRONG)
def test_a_contradiction_has_a_place_and_a_hint(
    tmp_path: Path, optimizer: str, end: str, expected: str
) -> None:
    text = VALID.replace(OPTIMIZER, f"optimizer: {{lr: 1e-3, {optimizer}}}") + end
    assert shown(tmp_path, problems_of(tmp_path, text)) == [expected]


FINE = [
    ("offload: nvme", ENGINE),
    ("zero: 0", "precision: fp32\n" + ENGINE),
    ("zero: 1", "parallel: {pp: 2}\n" + ENGINE),
    ("offload: cpu, zero: 2", ENGINE),
    (
        "zero: 3",
        "engine: {name: deepspeed, deepspeed: {offload_parameters: nvme, nvme_path: /x}}\n",
    ),
]


@pytest.mark.parametrize(("optimizer", "end"), FINE)
def test_what_goes_together_is_taken(tmp_path: Path, optimizer: str, end: str) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(VALID.replace(OPTIMIZER, f"optimizer: {{lr: 1e-3, {optimizer}}}") + end)
    assert load_run_spec(file).document.engine.name == "deepspeed"


def test_what_an_option_contradicts_is_said_without_a_line(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path, VALID + ENGINE, "optimizer.zero=0")
    assert "bf16 drifts" in problem.message and problem.hint
