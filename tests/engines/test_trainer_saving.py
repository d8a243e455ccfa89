"""When checkpoints are made and what is written down about them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trial_runs import LIMIT_SECONDS, PP2, Trial, held_at

from bench import prefork
from hpctrain.checkpoints.publish import Retention, published_steps
from hpctrain.plan.forecast.intervals import daly_seconds
from hpctrain.records.manifest import checkpoint_name, partial_name, read_manifest
from hpctrain.records.run_records import SaveRecord, read_saves
from hpctrain.train.saving import save_interval, saver, writer
from hpctrain.train.saving.save_interval import SaveInterval

DP2 = dict(data_parallel_size=2)


def _wait_for_log(ranks: prefork.Ranks, word: str) -> None:
    end = time.monotonic() + LIMIT_SECONDS
    while word not in ranks.log():
        assert time.monotonic() < end, ranks.log()
        time.sleep(0.02)


@pytest.mark.parametrize(
    "async_save",
    [pytest.param(False, marks=pytest.mark.variant), True],
    ids=["sync", "async"],
)
def test_a_save_on_request(async_save: bool, trial: Callable[..., Trial]) -> None:
    asked = trial(async_save=async_save, train_steps=16, lr_decay_steps=16, **DP2)
    go_on = asked.run.directory / "go-on"
    ranks = asked.start(prepare=held_at(8, lambda loop: go_on.exists()))
    asked.wait_for_step(2, ranks)
    asked.run.save_request.touch()
    go_on.touch()
    _wait_for_log(ranks, "event=save_requested")
    assert ranks.wait(LIMIT_SECONDS) == [0, 0], ranks.log()
    assert not asked.run.save_request.exists()
    first, *others = published_steps(asked.run.checkpoints)
    assert 2 <= first <= 15 and others == [16]
    assert ranks.log().count("event=save_requested") == 1


def _wait_for(path: Path) -> None:
    end = time.monotonic() + LIMIT_SECONDS
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)


def _slow_writers(seconds: float, after: Path) -> None:
    """So many seconds late, counted from the moment when `after` is there."""
    real = writer.write_rank_digests

    def slowly(directory: Path, rank: int, names: list[str]) -> None:
        _wait_for(after)
        time.sleep(seconds)
        real(directory, rank, names)

    writer.write_rank_digests = slowly


def _writes_until(path: Path) -> None:
    """The first save lasts until half a second after `path` is there. Training waits for the first
    request at its second step, and is slow while it saves, lest it ends before."""
    _slow_writers(0.5, after=path)
    held_at(2, lambda loop: loop.job.run.save_request.exists(), rank=0)()
    from hpctrain.train.loop import Loop

    real = Loop.one_step

    def one_step(self: Any) -> Any:
        if self.saver.busy:
            time.sleep(0.5)
        return real(self)

    Loop.one_step = one_step  # type: ignore[method-assign]


@pytest.mark.variant("test_a_save_on_request")
def test_a_request_during_a_save_is_kept_until_after_it(trial: Callable[..., Trial]) -> None:
    """It asks for the state of now, which the save under way does not have."""
    asked = trial(async_save=True, train_steps=25, lr_decay_steps=25)
    twice = asked.run.directory / "twice"
    ranks = asked.start(prepare=lambda: _writes_until(twice))
    asked.wait_for_step(1, ranks)
    asked.run.save_request.touch()
    _wait_for_log(ranks, "event=save_requested")
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
    from hpctrain.train.saving.saver import Saver

    real_wait, real_write = Saver._agree_or_rest, writer.write_rank_digests
    real_publish = saver.publish

    def wait(self: Any) -> Any:
        pending = self._pending
        step, stage = pending.position.step, "published" if pending.publishing else "written"
        waited = place / f"{partial_name(step, 0)}-{stage}"
        if os.environ["RANK"] == "0" and not waited.exists():
            time.sleep(0.4)
            waited.touch()
        return real_wait(self)

    def write(directory: Path, rank: int, names: list[str]) -> None:
        _wait_for(place / f"{directory.name}-written")
        real_write(directory, rank, names)

    def publish(root: Path, manifest: Any, fence: Any) -> Path:
        _wait_for(place / f"{partial_name(manifest.step, manifest.epoch)}-published")
        return real_publish(root, manifest, fence)

    Saver._agree_or_rest = wait  # type: ignore[method-assign]
    writer.write_rank_digests, saver.publish = write, publish


@pytest.mark.variant("test_a_save_on_request")
def test_each_save_is_written_down(trial: Callable[..., Trial]) -> None:
    made = trial(save_interval_steps=2, async_save=True, **DP2)
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
def test_a_synchronous_save_stalls_until_it_counts(trial: Callable[..., Trial]) -> None:
    made = trial(save_interval_steps=3, **DP2)
    ranks = made.start(prepare=lambda: _waited_for(made.run.directory))
    assert ranks.wait(LIMIT_SECONDS) == [0, 0], ranks.log()
    saves = read_saves(made.run)
    assert [save.step for save in saves] == [3, 6]
    assert all(save.stall_seconds > 0.7 for save in saves), "for its writers and for publishing"
    events = [line.split()[0] for line in ranks.log().splitlines()]
    three = ["event=step"] * 3 + ["event=checkpoint"]
    assert events == ["event=start", *three, *three], "no step before the save counts"


@pytest.mark.variant("test_a_save_on_request")
def test_plans_are_used_again_and_the_files_are_right(trial: Callable[..., Trial]) -> None:
    """From the third save on megatron-core plans nothing; resuming from a late one is exact."""
    whole = trial(save_interval_steps=1, async_save=True, dropout=0.1, **PP2)
    assert set(whole.train(prepare=_count_plans)) == {0}
    plans = (whole.run.directory / "plans").read_text().split()
    assert plans == ["1", "2"], "planned for the first two of six saves"
    for step in (3, 5):
        resumed = trial(dropout=0.1, **PP2)
        resumed.adopt(whole, step)
        assert set(resumed.train(resume=step)) == {0}
        assert resumed.exact == {s: whole.exact[s] for s in range(step + 1, 7)}


def _count_plans() -> None:
    """Rank 0 notes each time when plans of all ranks are gathered."""
    from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner

    from hpctrain.train.loop import Loop

    real, state = MCoreSavePlanner.create_global_plan, {"loop": None}
    save = Loop._save

    def note(self: Any, plans: Any) -> Any:
        loop: Any = state["loop"]
        with (loop.job.run.directory / "plans").open("a") as stream:
            stream.write(f"{loop.position.step}\n")
        return real(self, plans)

    def remember(self: Loop, *, wait: bool) -> None:
        state["loop"] = self  # type: ignore[assignment]
        save(self, wait=wait)

    MCoreSavePlanner.create_global_plan = note
    Loop._save = remember  # type: ignore[method-assign]


def _patient_retirement() -> None:
    """Deleting lasts until the next checkpoint counts, which nothing but the training makes."""
    real = Retention.retire

    def patiently(self: Retention, *arguments: Any) -> list[int]:
        root = self._root
        newest, end = published_steps(root)[-1], time.monotonic() + LIMIT_SECONDS / 2
        while newest < 6 and published_steps(root)[-1] == newest:
            if time.monotonic() > end:
                (root.parent / "stopped-by-deleting").touch()
                break
            time.sleep(0.01)
        return real(self, *arguments)

    Retention.retire = patiently  # type: ignore[method-assign]


@pytest.mark.variant("test_checkpoint_files_are_as_the_manifest_says")
def test_deleting_old_checkpoints_stops_nobody(trial: Callable[..., Trial]) -> None:
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


def test_the_interval_follows_the_costs(trial: Callable[..., Trial]) -> None:
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


def test_without_a_failure_rate_or_auto_the_interval_stays(trial: Callable[..., Trial]) -> None:
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
    from hpctrain.train.loop import Loop

    real_step, real_published, now = Loop.one_step, SaveInterval.published, 0.0

    def one_step(self: Loop) -> Any:
        nonlocal now
        now += 0.05
        return real_step(self)

    def published(self: SaveInterval, save: SaveRecord) -> None:
        costs = dict(stall_seconds=0.01, publish_seconds=0.01)
        real_published(self, save.model_copy(update=costs))

    Loop.one_step = one_step  # type: ignore[method-assign]
    SaveInterval.published = published  # type: ignore[method-assign]
    setattr(save_interval, "time", SimpleNamespace(monotonic=lambda: now))  # noqa: B010


@pytest.mark.variant("test_checkpoint_files_are_as_the_manifest_says")
def test_the_launch_s_failure_rate_sets_the_interval(
    trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
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

    real = Saver.begin

    def begin(self: Any, position: Any) -> None:
        copied_bytes = 0
        clone = torch.Tensor.clone

        def counted(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
            nonlocal copied_bytes
            copied_bytes += tensor.numel() * tensor.element_size()
            return clone(tensor, **options)

        torch.Tensor.clone = counted  # type: ignore[method-assign, assignment]
        try:
            real(self, position)
        finally:
            torch.Tensor.clone = clone  # type: ignore[method-assign]
        name = f"copied-{os.environ['RANK']}"
        (self._job.run.directory / name).write_text(str(copied_bytes))

    Saver.begin = begin  # type: ignore[method-assign]


@pytest.mark.variant("test_a_save_on_request")
def test_training_waits_for_no_copies_on_a_cpu(trial: Callable[..., Trial]) -> None:
    """Its state is snapshotted by forking; what has to be copied, the writers copy."""
    made = trial(save_interval_steps=3, async_save=True, **DP2)
    assert made.train(prepare=_count_copied_bytes) == [0, 0]
    (save, *_) = read_saves(made.run)
    for rank in (0, 1):
        copied_bytes = int((made.run.directory / f"copied-{rank}").read_text())
        assert copied_bytes < save.size_bytes / 100
