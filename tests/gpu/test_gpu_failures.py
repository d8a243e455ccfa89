"""What goes wrong on a real GPU, and whether its own words are understood."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from gpu_runs import ENGINES, LIMIT_SECONDS, gpu_trial

from hpctrain.judge.catalogue import load_signatures
from hpctrain.judge.causes import Cause
from hpctrain.records.manifest import checkpoint_name
from hpctrain.records.run_records import TrainerExit
from hpctrain.supervise.evidence.log_scan import Scanner

ASSERTION = """
import torch
table = torch.nn.Embedding(10, 4, device="cuda")
print(table(torch.tensor([11], device="cuda")).sum().item())
"""


def causes_in(log: str) -> set[Cause]:
    findings = Scanner(load_signatures()).lines(log.splitlines(), "rank", rank=0)
    return {finding.cause for finding in findings if finding.role == "root"}


# Logits of bf16: 2^14 samples x 128 tokens x 2^17 words x 2 bytes = 550 GB, more than any GPU has,
# from samples that are read in seconds.
SAMPLES, WORDS = 2**14, 2**17


@pytest.mark.whole_gpu
@pytest.mark.usefixtures("real_gpu")
@pytest.mark.parametrize("name", ["ddp", "fsdp", "ZeRO 3", "megatron"])
def test_a_gpu_that_is_full_is_called_that(name: str, tmp_path: Path) -> None:
    """A microbatch whose logits alone are larger than any GPU."""
    huge: dict[str, Any] = dict(
        micro_batch_size=SAMPLES, global_batch_size=SAMPLES, vocab_size=WORDS
    )
    if "model" in ENGINES[name]:
        huge["model"] = dict(ENGINES[name]["model"], vocab=WORDS)
    else:
        huge["padded_vocab_size"] = WORDS
    run = gpu_trial(tmp_path / "run", ENGINES[name], **huge, precision="bf16")
    process = run.launch()
    assert process.wait() == TrainerExit.CRASH, process.log[-2000:]
    assert Cause.GPU_OOM in causes_in(process.log), process.log[-2000:]
    [record] = run.exits()
    assert "out of memory" in (record.message or "")


@pytest.mark.usefixtures("real_gpu")
def test_an_assertion_in_a_kernel_is_no_broken_gpu() -> None:
    """A word that the vocabulary does not have."""
    command = [sys.executable, "-c", ASSERTION]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert ended.returncode != 0
    assert causes_in(ended.stderr) == {Cause.CRASH}, ended.stderr


@pytest.mark.parametrize("name", ["fsdp", "ZeRO 2", "megatron"])
def test_a_run_asked_to_leave_saves_its_last_step(name: str, tmp_path: Path) -> None:
    long = dict(train_steps=2000, lr_decay_steps=2000, deterministic_mode=True, precision="bf16")
    run = gpu_trial(tmp_path / "run", ENGINES[name], **long)
    process = run.launch()
    end = time.monotonic() + LIMIT_SECONDS
    while not any(row.step >= 3 for row in run.rows):
        assert process.popen.poll() is None and time.monotonic() < end, process.log[-2000:]
        time.sleep(0.05)
    process.popen.send_signal(signal.SIGTERM)
    assert process.wait() == TrainerExit.YIELDED, process.log[-2000:]
    last = run.rows[-1].step
    assert [path.name for path in run.run.checkpoints.glob("iter_*")] == [checkpoint_name(last)]
