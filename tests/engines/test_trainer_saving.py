"""When checkpoints are made, what is written about them, and writers as ranks with GPUs have."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trial_runs import (
    GPT,
    LIMIT_SECONDS,
    MODULE_GPT,
    PP2,
    TWO,
    ZERO,
    MakeTrial,
    Trial,
    assert_resumes_exactly,
    config_of,
    held_at,
    make_trial,
    once,
    trained,
    wrap,
)
from waiting import wait_until

from hpctrain.checkpoints.publish import Retention, published_steps
from hpctrain.plan.forecast.intervals import daly_seconds
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import checkpoint_name, partial_name, read_manifest
from hpctrain.records.run_records import SaveRecord, read_saves
from hpctrain.train.saving import publication, save_interval, saver, writer
from hpctrain.train.saving.host_buffers import BufferReader, HostBuffers
from hpctrain.train.saving.save_interval import SaveInterval


@pytest.mark.parametrize(
    "async_save",
    [pytest.param(False, marks=pytest.mark.variant), True],
    ids=["sync", "async"],
)
def test_a_save_on_request(async_save: bool, trial: MakeTrial) -> None:
    asked = trial(async_save=async_save, train_steps=16, lr_decay_steps=16, **TWO)
    go_on = asked.run.directory / "go-on"
    ranks = asked.start(prepare=held_at(8, lambda loop: go_on.exists()))
    asked.wait_for_step(2, ranks)
    asked.run.save_request.touch()
    go_on.touch()
    wait_until(lambda: "event=save_requested" in ranks.log(), ranks.log)
    assert ranks.wait(LIMIT_SECONDS) == [0, 0], ranks.log()
    assert not asked.run.save_request.exists()
    first, *others = published_steps(asked.run.checkpoints)
    assert 2 <= first <= 15 and others == [16]
    assert ranks.log().count("event=save_requested") == 1


def _writes_until(path: Path) -> None:
    """The first save lasts until half a second after `path` is there. Training waits for the first
    request at its second step, and is slow while it saves, lest it ends before."""
    held_at(2, lambda loop: loop.job.run.save_request.exists(), rank=0)()

    @wrap(writer, "write_rank_digests")
    def slowly(real: Any, *given: Any) -> None:
        wait_until(path.exists)
        time.sleep(0.5)
        real(*given)

    @wrap("hpctrain.train.loop:Loop", "one_step")
    def one_step(real: Any, self: Any) -> Any:
        if self.saver.busy:
            time.sleep(0.5)
        return real(self)


@pytest.mark.variant("test_a_save_on_request")
def test_a_request_during_a_save_is_kept_until_after_it(trial: MakeTrial) -> None:
    """It asks for the state of now, which the save under way does not have."""
    asked = trial(async_save=True, train_steps=25, lr_decay_steps=25)
    twice = asked.run.directory / "twice"
    ranks = asked.start(prepare=lambda: _writes_until(twice))
    asked.wait_for_step(1, ranks)
    asked.run.save_request.touch()
    wait_until(lambda: "event=save_requested" in ranks.log(), ranks.log)
    asked.run.save_request.touch()
    twice.touch()
    assert ranks.wait(LIMIT_SECONDS) == [0], ranks.log()
    assert ranks.log().count("event=save_requested") == 2
    lines = [line.split()[0] for line in ranks.log().splitlines()]
    asked_at, saved_at = lines.index("event=save_requested"), lines.index("event=checkpoint")
    assert "event=step" in lines[asked_at + 1 : saved_at], "nobody waited for the first one"
    events = [line for line in lines if line != "event=step"]
    assert events[:4] == [
        "event=start",
        "event=save_requested",
        "event=checkpoint",
        "event=save_requested",
    ]
    assert not asked.run.save_request.exists()


def _waited_for(place: Path) -> None:
    """No save is written, nor then published, before rank 0 has waited for that for 0.4 s."""

    @wrap(saver.Saver, "_agree_or_rest")
    def wait(real: Any, self: Any) -> Any:
        pending = self._pending
        step, stage = pending.position.step, "published" if pending.publishing else "written"
        waited = place / f"{partial_name(step, 0)}-{stage}"
        if os.environ["RANK"] == "0" and not waited.exists():
            time.sleep(0.4)
            waited.touch()
        return real(self)

    @wrap(writer, "write_rank_digests")
    def write(real: Any, directory: Path, *given: Any) -> None:
        wait_until((place / f"{directory.name}-written").exists)
        real(directory, *given)

    @wrap(publication, "publish")
    def publish(real: Any, root: Path, manifest: Any, fence: Any) -> Path:
        wait_until((place / f"{partial_name(manifest.step, manifest.epoch)}-published").exists)
        return real(root, manifest, fence)


@pytest.mark.variant("test_a_save_on_request")
def test_each_save_is_written_down(trial: MakeTrial) -> None:
    made = trial(save_interval_steps=2, async_save=True, **TWO)
    assert made.train(prepare=lambda: _waited_for(made.run.directory)) == [0, 0]
    saves = read_saves(made.run)
    assert [save.step for save in saves] == [2, 4, 6]
    for save in saves:
        manifest = read_manifest(made.run.checkpoints / checkpoint_name(save.step))
        assert manifest is not None and save.size_bytes == manifest.total_bytes
        assert save.publish_seconds > 0.7
    assert saves[1].stall_seconds > 0.7, "for the save before, which waits for that"
    assert made.run.saves.stat().st_mode & 0o777 == 0o600


@pytest.mark.variant("test_a_save_on_request")
def test_a_synchronous_save_stalls_until_it_counts(trial: MakeTrial) -> None:
    made = trial(save_interval_steps=3, **TWO)
    ranks = made.start(prepare=lambda: _waited_for(made.run.directory))
    assert ranks.wait(LIMIT_SECONDS) == [0, 0], ranks.log()
    saves = read_saves(made.run)
    assert [save.step for save in saves] == [3, 6]
    assert all(save.stall_seconds > 0.7 for save in saves), "for its writers and for publishing"
    events = [line.split()[0] for line in ranks.log().splitlines()]
    three = ["event=step"] * 3 + ["event=checkpoint"]
    assert events == ["event=start", *three, *three], "no step before the save counts"


@pytest.mark.variant("test_a_save_on_request")
def test_plans_are_used_again_and_the_files_are_right(trial: MakeTrial) -> None:
    """From the third save on megatron-core plans nothing; resuming from a late one is exact."""
    whole = trial(save_interval_steps=1, async_save=True, dropout=0.1, **PP2)
    assert set(whole.train(prepare=_count_plans)) == {0}
    plans = (whole.run.directory / "plans").read_text().split()
    assert plans == ["1", "2"], "planned for the first two of six saves"
    for step in (3, 5):
        assert_resumes_exactly(trial(dropout=0.1, **PP2), whole, step)


def _count_plans() -> None:
    """Rank 0 notes each time when plans of all ranks are gathered."""
    from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner

    saving: list[Any] = []

    @wrap(MCoreSavePlanner, "create_global_plan")
    def note(real: Any, self: Any, plans: Any) -> Any:
        with (saving[-1].job.run.directory / "plans").open("a") as stream:
            stream.write(f"{saving[-1].position.step}\n")
        return real(self, plans)

    @wrap("hpctrain.train.loop:Loop", "_save")
    def remember(real: Any, self: Any, *, wait: bool) -> None:
        saving.append(self)
        real(self, wait=wait)


def _patient_retirement() -> None:
    """Deleting lasts until the next checkpoint counts, which nothing but the training makes."""

    @wrap(Retention, "retire")
    def patiently(real: Any, self: Retention, *arguments: Any) -> list[int]:
        root = self._root
        newest, end = published_steps(root)[-1], time.monotonic() + LIMIT_SECONDS / 2
        while newest < 6 and published_steps(root)[-1] == newest:
            if time.monotonic() > end:
                (root.parent / "stopped-by-deleting").touch()
                break
            time.sleep(0.01)
        return real(self, *arguments)


@pytest.mark.variant("test_checkpoint_files_are_as_the_manifest_says")
def test_deleting_old_checkpoints_stops_nobody(trial: MakeTrial) -> None:
    made = trial(save_interval_steps=1, keep_checkpoints=1)
    assert made.train(prepare=_patient_retirement) == [0]
    assert not (made.run.directory / "stopped-by-deleting").exists()
    assert published_steps(made.run.checkpoints)[-1] == 6


# -- the clock -------------------------------------------------------------------------------
def _save(stall: float, publish: float, step: int = 1) -> SaveRecord:
    return SaveRecord(
        step=step,
        epoch=1,
        time=0.0,
        stall_seconds=stall,
        publish_seconds=publish,
        size_bytes=1,
    )


def test_the_interval_follows_the_costs(trial: MakeTrial) -> None:
    config = trial(save_interval_auto=True, save_interval_seconds=600.0).config
    interval = SaveInterval(config, 36000.0)
    assert interval.seconds == 600.0
    interval.published(_save(2.0, 5.0))
    assert interval.seconds == pytest.approx(daly_seconds(2.0, 36000.0))
    for stall in (4.0, 4.0, 4.0, 100.0, 4.0):
        interval.published(_save(stall, 5.0))
    assert interval.seconds == pytest.approx(daly_seconds(4.0, 36000.0)), "median of five"
    for _ in range(3):
        interval.published(_save(4.0, 7200.0))
    assert interval.seconds == 7200.0, "not before the last one counts"
    resumed = SaveInterval(config, 36000.0, [_save(2.0, 5.0)] * 9)
    assert resumed.seconds == pytest.approx(daly_seconds(2.0, 36000.0))


def test_without_a_failure_rate_or_auto_the_interval_stays(trial: MakeTrial) -> None:
    auto = trial(save_interval_auto=True, save_interval_seconds=600.0).config
    fixed = trial(save_interval_seconds=300.0).config
    for config, mttf, expected in ((auto, float("inf"), 600.0), (fixed, 3600.0, 300.0)):
        interval = SaveInterval(config, mttf, [_save(2.0, 5.0)])
        assert interval.seconds == expected
    assert SaveInterval(trial().config, 3600.0).seconds is None
    assert not SaveInterval(trial().config, 3600.0).overdue


def _clock_of_steps() -> None:
    """By the clock of the interval a step takes 50 ms and a save costs 10 ms, whatever the machine
    does meanwhile."""
    now = 0.0

    @wrap("hpctrain.train.loop:Loop", "one_step")
    def one_step(real: Any, self: Any) -> Any:
        nonlocal now
        now += 0.05
        return real(self)

    @wrap(SaveInterval, "published")
    def published(real: Any, self: SaveInterval, save: SaveRecord) -> None:
        costs = dict(stall_seconds=0.01, publish_seconds=0.01)
        real(self, save.model_copy(update=costs))

    setattr(save_interval, "time", SimpleNamespace(monotonic=lambda: now))  # noqa: B010


@pytest.mark.variant("test_checkpoint_files_are_as_the_manifest_says")
def test_the_launch_s_failure_rate_sets_the_interval(
    trial: MakeTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first save by the initial interval the measured costs allow many more."""
    monkeypatch.setenv("HPCTRAIN_MTTF_SECONDS", "0.2")
    settings = dict(save_interval_auto=True, save_interval_seconds=0.5)
    often = trial(**settings, train_steps=18, lr_decay_steps=18)
    assert often.train(prepare=_clock_of_steps) == [0]
    monkeypatch.setenv("HPCTRAIN_MTTF_SECONDS", "1e9")
    seldom = trial(**settings, train_steps=18, lr_decay_steps=18)
    assert seldom.train(prepare=_clock_of_steps) == [0]
    assert len(read_saves(seldom.run)) == 2, "by the initial interval, and at the end"
    assert len(read_saves(often.run)) > 3


def _count_copied_bytes() -> None:
    """Each rank writes down how much `Snapshot.plan` copies, while training waits for it."""
    import torch

    from hpctrain.train.saving.saver import Saver

    @wrap(Saver, "begin")
    def begin(real: Any, self: Any, position: Any) -> None:
        copied_bytes, clone = 0, torch.Tensor.clone

        @wrap(torch.Tensor, "clone")
        def counted(_: Any, tensor: torch.Tensor, **options: Any) -> torch.Tensor:
            nonlocal copied_bytes
            copied_bytes += tensor.numel() * tensor.element_size()
            return clone(tensor, **options)

        try:
            real(self, position)
        finally:
            torch.Tensor.clone = clone  # type: ignore[method-assign]
        name = f"copied-{os.environ['RANK']}"
        (self._job.run.directory / name).write_text(str(copied_bytes))


@pytest.mark.variant("test_a_save_on_request")
def test_training_waits_for_no_copies_on_a_cpu(trial: MakeTrial) -> None:
    """Its state is snapshotted by forking; what has to be copied, the writers copy."""
    made = trial(save_interval_steps=3, async_save=True, **TWO)
    assert made.train(prepare=_count_copied_bytes) == [0, 0]
    (save, *_) = read_saves(made.run)
    for rank in (0, 1):
        copied_bytes = int((made.run.directory / f"copied-{rank}").read_text())
        assert copied_bytes < save.size_bytes / 100


# -----------------------------------------------------------------------------------------------
# Writers as ranks with GPUs have them: a process that is not forked, and reads copies of tensors.
# CUDA cannot be had here; memory that the process shares with the rank behaves as pinned memory
# does: what the rank changes later, the process sees.

OVERLAPPED = dict(overlap_param_gather=True, overlap_grad_reduce=True)
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "megatron": (GPT, dict(TWO, **OVERLAPPED, precision="bf16", dropout=0.1)),
    "fsdp": (MODULE_GPT, dict(TWO, engine="fsdp", shard_size=2)),
    "deepspeed, offloaded": (ZERO, dict(precision="bf16", offload_optimizer="cpu")),
}


def _copies() -> None:
    """Every rank writes as with a GPU."""
    writer.needs_copies = lambda: True


def _copies_sent_late() -> None:
    """The process gets the tensors when the rank has trained on for steps."""
    _copies()

    @wrap(writer.SpawnedWriter, "_send")
    def late(send: Any, self: Any, job: Any) -> None:
        time.sleep(1.0)
        send(self, job)


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
@pytest.mark.parametrize("kind", ["megatron", "fsdp"])
def test_a_resume_from_it_is_exact(kind: str, trial: MakeTrial) -> None:
    base, changes = RUNS[kind]
    whole = written(kind)
    again = trial(base, **changes, save_interval_steps=2)
    assert_resumes_exactly(again, whole, prepare=_copies)


@pytest.mark.variant("test_tensors_are_read_where_they_were_copied")
def test_a_writer_that_dies_loses_no_save(trial: MakeTrial) -> None:
    """The rank writes the same copies, and after two deaths starts no process any more."""
    plain = trained(**TWO)
    lost = trial(**TWO, save_interval_steps=2, async_save=True)
    assert lost.train(prepare=_copies_and_deaths) == [0, 0]
    assert published_steps(lost.run.checkpoints) == [2, 4, 6]
    assert content(lost) == content(plain)
    assert lost.said.count("the rank writes by itself") == 2


@pytest.mark.variant("test_tensors_are_read_where_they_were_copied")
def test_no_process_outlives_its_rank(trial: MakeTrial) -> None:
    made = trial(save_interval_steps=2)
    assert made.train(prepare=_copies) == [0]
    wait_until(lambda: not _writing_processes(made.run.directory), "the end of all writers")


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
