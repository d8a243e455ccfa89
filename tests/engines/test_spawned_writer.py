"""Writers as ranks with GPUs have them: a process that is not forked, and reads copies of tensors.

CUDA cannot be had here; memory that the process shares with the rank behaves as pinned memory does:
what the rank changes later, the process sees.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_trials import ZERO, words_of
from trial_runs import GPT, MODULE_GPT, Trial, config_of, make_trial, once, trained
from variants import varied

from hpctrain.checkpoints.publish import published_steps
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import checkpoint_name, read_manifest
from hpctrain.train.saving import writer
from hpctrain.train.saving.host_buffers import BufferReader, HostBuffers

DP2 = dict(data_parallel_size=2)
OVERLAPPED = dict(overlap_param_gather=True, overlap_grad_reduce=True)
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "megatron": (GPT, dict(DP2, **OVERLAPPED, precision="bf16", dropout=0.1)),
    "fsdp": (MODULE_GPT, dict(DP2, engine="fsdp", shard_size=2)),
    "deepspeed, offloaded": (ZERO, dict(precision="bf16", offload_optimizer="cpu")),
}


def _copies() -> None:
    """Every rank writes as with a GPU."""
    writer.needs_copies = lambda: True


def _copies_sent_late() -> None:
    """The process gets the tensors when the rank has trained on for steps."""
    _copies()
    send = writer.SpawnedWriter._send

    def late(self: Any, job: Any) -> None:
        time.sleep(1.0)
        send(self, job)

    writer.SpawnedWriter._send = late


def _copies_and_deaths() -> None:
    """The process of rank 0 dies as it gets a job."""
    _copies()

    def dies(self: Any, job: Any) -> None:
        self._process.kill()

    if os.environ["RANK"] == "0":
        writer.SpawnedWriter._send = dies


def content(run: Trial) -> dict[str, str]:
    """Everything in the first checkpoint, each file of DeepSpeed as a hash of its tensors.

    What stands around them differs after pickling, as `.metadata` differs by the run's directory.
    """
    directory = run.run.checkpoints / checkpoint_name(2)
    manifest = read_manifest(directory)
    assert manifest is not None
    files = {file.name: file.sha256 for file in manifest.files if file.name != ".metadata"}
    for name in [name for name in files if name.endswith(".pt")]:
        state = torch.load(directory / name, weights_only=False)
        files[name] = hashlib.sha256(repr(_comparable(state)).encode()).hexdigest()
    return files


def _comparable(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return str(state.dtype), tuple(state.shape), state.flatten().view(torch.uint8).tolist()
    if isinstance(state, dict):
        return {key: _comparable(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [_comparable(value) for value in state]
    return state if isinstance(state, int | float | str | bool | None) else type(state)


def test_a_rank_with_a_gpu_does_not_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots ask `needs_copies`, and what they answer with decides on the writer."""
    monkeypatch.setattr(writer, "on_cpu", lambda: False)
    assert writer.needs_copies()
    run = RunLayout(tmp_path)
    assert isinstance(writer.open_writer(0, run, HostBuffers()), writer.SpawnedWriter)
    monkeypatch.setattr(writer, "on_cpu", lambda: True)
    assert not writer.needs_copies()
    assert isinstance(writer.open_writer(0, run, None), writer.ForkedWriter)


def written(kind: str) -> Trial:
    """A run whose files another process writes, late; made once for each kind."""
    base, changes = RUNS[kind]
    changes = dict(changes, save_interval_steps=2, async_save=True)

    def train(directory: Path) -> None:
        made = make_trial(directory, base, **changes)
        assert made.train(prepare=_copies_sent_late) == [0, 0]

    return Trial(RunLayout(once(f"spawned writer, {kind}", train)), config_of(base, **changes))


@pytest.mark.variant("test_tensors_are_read_where_they_were_copied")
@pytest.mark.parametrize("kind", RUNS)
def test_the_files_are_those_of_a_forked_writer(kind: str) -> None:
    """Also where training goes on before the process has seen a tensor."""
    base, changes = RUNS[kind]
    plain, beside = trained(base, **changes), written(kind)
    assert beside.exact == plain.exact
    assert content(beside) == content(plain)


@pytest.mark.variant("test_tensors_are_read_where_they_were_copied")
@pytest.mark.parametrize("kind", varied(["megatron", "fsdp"], "megatron"))
def test_a_resume_from_it_is_exact(kind: str, trial: Callable[..., Trial]) -> None:
    base, changes = RUNS[kind]
    whole = written(kind)
    again = trial(base, **changes, save_interval_steps=2)
    again.adopt(whole, 4)
    assert again.train(resume=4, prepare=_copies) == [0, 0]
    assert again.exact == {step: row for step, row in whole.exact.items() if step > 4}


@pytest.mark.variant("test_tensors_are_read_where_they_were_copied")
def test_a_writer_that_dies_loses_no_save(trial: Callable[..., Trial]) -> None:
    """The rank writes the same copies, and after two deaths starts no process any more."""
    plain = trained(**DP2)
    lost = trial(**DP2, save_interval_steps=2, async_save=True)
    assert lost.train(prepare=_copies_and_deaths) == [0, 0]
    assert published_steps(lost.run.checkpoints) == [2, 4, 6]
    assert content(lost) == content(plain)
    assert words_of(lost).count("the rank writes by itself") == 2


@pytest.mark.variant("test_tensors_are_read_where_they_were_copied")
def test_no_process_outlives_its_rank(trial: Callable[..., Trial]) -> None:
    made = trial(save_interval_steps=2)
    assert made.train(prepare=_copies) == [0]
    deadline = time.monotonic() + 300
    while _writing_processes(made.run.directory):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _writing_processes(directory: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words, cwd = (path / "cmdline").read_bytes().split(b"\0"), os.readlink(path / "cwd")
        except OSError:
            continue
        if b"hpctrain.train.saving.writing_process" in words and cwd == str(directory):
            found.append(int(path.name))
    return found


def test_tensors_are_read_where_they_were_copied() -> None:
    buffers = HostBuffers()
    sources = [
        torch.arange(1000, dtype=torch.float32),
        torch.ones(3, 5, dtype=torch.bfloat16)[:, ::2],  # not contiguous
        torch.tensor(7),
        torch.empty(0, 4),
    ]
    copies = buffers.copy(sources)
    expected = [source.clone() for source in sources]
    data = buffers.dumps({"copies": copies, "beside": torch.zeros(2)})
    assert len(data) < 2000, "places, not tensors"
    for source in sources:
        source.add_(1)
    found = BufferReader(buffers.descriptor).loads(data, buffers.size_bytes)
    for copy, one in zip(found["copies"], expected, strict=True):
        assert torch.equal(copy, one) and copy.dtype == one.dtype
        assert copy.untyped_storage().size() == copy.numel() * copy.element_size()
    assert torch.equal(found["beside"], torch.zeros(2))


def test_buffers_grow_and_are_used_again() -> None:
    buffers, reader = HostBuffers(), None
    reader = BufferReader(buffers.descriptor)
    for size in (10, 100_000, 50):
        (copy,) = buffers.copy([torch.full((size,), float(size))])
        (found,) = reader.loads(buffers.dumps([copy]), buffers.size_bytes)
        assert torch.equal(found, torch.full((size,), float(size)))
    assert buffers.size_bytes >= 400_000
