"""Signs of life under wrong clocks, slow starts and slow saves; and how cheap looking is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import cast

import pytest
from supervise_stage import Stage

from hpctrain.slurm.records import StepRecord
from hpctrain.slurm.states import JobState
from hpctrain.store.signs import ExitRecord, Phase, Progress, write_record
from hpctrain.supervise import gather, watch
from hpctrain.supervise.process import Launch
from hpctrain.supervise.watch import LaunchWatch


class Clock:
    """What `time` is to the watch; `monotonic` moves by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Srun:
    """An srun that is never waited for."""

    failures = ()

    def poll(self) -> None:
        return None


class Scene:
    """A watch over epoch 3 whose clock and trainer move by hand."""

    def __init__(self, stage: Stage, clock: Clock) -> None:
        self.stage, self.clock = stage, clock
        self.watch = self.resumed_at(0)

    def resumed_at(self, step: int) -> LaunchWatch:
        return LaunchWatch(self.stage.supervisor().context, cast(Launch, Srun()), 3, step)

    def says(self, phase: Phase, step: int, *, epoch: int = 3, clock_seconds: float = 0.0) -> None:
        record = Progress(
            epoch=epoch,
            phase=phase,
            step=step,
            target_step=100,
            time=self.clock.now + clock_seconds,
        )
        write_record(self.stage.layout.progress, record, durable=False)
        assert not self.watch._look()

    def silent(self, seconds: float) -> bool:
        self.clock.now += seconds
        return self.watch._look()


@pytest.fixture
def scene(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Scene:
    clock = Clock()
    monkeypatch.setattr(watch, "time", clock)
    return Scene(stage, clock)


def test_a_launch_that_never_says_anything(scene: Scene) -> None:
    assert not scene.silent(599)
    assert scene.silent(2)
    stall = scene.watch.stall
    assert stall is not None and (stall.phase, stall.limit_seconds) == ("starting", 600)
    assert not scene.watch.started


def test_words_of_an_older_launch_are_no_sign_of_life(scene: Scene) -> None:
    scene.says("training", 50, epoch=2)
    assert not scene.watch.started
    assert scene.silent(601)


@pytest.mark.parametrize("clock_seconds", [-86400.0, 0.0, 86400.0])
def test_the_clock_of_the_trainers_node_does_not_matter(scene: Scene, clock_seconds: float) -> None:
    scene.says("training", 7, clock_seconds=clock_seconds)
    scene.says("training", 8, clock_seconds=clock_seconds)
    for step in range(9, 20):
        assert not scene.silent(59)
        scene.says("training", step, clock_seconds=clock_seconds)
    assert not scene.silent(59)
    assert scene.silent(2)
    assert scene.watch.stall is not None
    assert scene.watch.stall.silent_seconds == 61
    assert scene.watch.stall.phase == "training"


def test_the_first_step_after_a_resume_may_take_long(scene: Scene) -> None:
    scene.watch = scene.resumed_at(500)
    scene.says("loading", 500)
    scene.says("training", 500)
    assert not scene.silent(599)
    scene.says("training", 501)
    assert scene.silent(61)


@pytest.mark.parametrize("phase", ["loading", "saving", "evaluating", "leaving"])
def test_slow_phases_have_the_longer_limit(scene: Scene, phase: Phase) -> None:
    scene.says("training", 1)
    scene.says("training", 2)
    scene.says(phase, 2)
    assert not scene.silent(599)
    assert scene.silent(2)
    assert scene.watch.stall is not None and scene.watch.stall.phase == phase


def test_an_unreadable_sign_is_not_silence(scene: Scene) -> None:
    scene.says("training", 1)
    scene.stage.layout.progress.write_text('{"epoch": 3, "pha')
    assert not scene.silent(30)
    scene.says("training", 2)
    assert not scene.silent(59)


def record(scene: Scene, rank: int, outcome: str) -> None:
    values = {"epoch": 3, "rank": rank, "node": "n0", "outcome": outcome, "step": 1}
    ended = ExitRecord.model_validate({**values, "exit_code": 0, "time": 1.0})
    write_record(scene.stage.layout.exit_record(3, rank), ended)


def test_the_ranks_that_survive_get_time_for_their_last_words(scene: Scene) -> None:
    record(scene, 0, "crash")
    assert not scene.silent(1)
    assert scene.silent(watch._LAST_WORDS_SECONDS)


def test_an_srun_that_does_not_notice_the_end_of_its_ranks_is_ended(scene: Scene) -> None:
    record(scene, 0, "yielded")
    assert not scene.silent(1)
    assert not scene.silent(watch._LEAVING_SECONDS / 2)
    assert scene.silent(watch._LEAVING_SECONDS)


def test_only_numbered_steps_of_this_attempt_are_ended(stage: Stage) -> None:
    slurm = stage.slurm
    slurm.steps = lambda job_id: tuple(  # type: ignore[method-assign]
        StepRecord(name, JobState.RUNNING) for name in ("batch", "extern", "0", "12")
    )
    ours = LaunchWatch(stage.supervisor().context, cast(Launch, Srun()), 3)
    assert ours._steps() == ["0", "12"]
    slurm.change(restart_count=1)
    assert ours._steps() == []
    slurm.change(restart_count=0)
    slurm.away = True
    assert ours._steps() == []


def test_job_facts(stage: Stage) -> None:
    context = stage.supervisor().context
    stage.slurm.change(state=JobState.COMPLETING, reason=None, preempt_time=5.0, restart_count=2)
    facts = gather.job_facts(context, patient=False)
    assert facts is not None
    assert (facts.state, facts.reason) == ("COMPLETING", "None")
    assert (facts.restart_count, facts.preempt_time) == (2, True)


def test_slurm_is_asked_until_it_answers(stage: Stage) -> None:
    stage.slurm.away = True
    asked = 0
    original = stage.slurm.show_job

    def later(job_id: int) -> object:
        nonlocal asked
        asked += 1
        stage.slurm.away = asked < 4
        return original(job_id)

    stage.slurm.show_job = later  # type: ignore[method-assign,assignment]
    context = stage.supervisor().context
    assert gather.job_facts(context, patient=False) is None
    assert asked == 1
    assert gather.job_facts(context, patient=True) is not None
    assert asked == 4


def test_in_the_final_stage_slurm_is_asked_once(stage: Stage) -> None:
    stage.slurm.away = True
    context = stage.supervisor().context
    context.signals._arrived.append("TERM")
    started = time.monotonic()
    assert gather.job_facts(context, patient=True) is None
    assert time.monotonic() - started < 0.2


def test_an_hour_of_looking_costs_little(stage: Stage) -> None:
    """1800 looks and 18000 polls an hour; a run with many launches behind it."""
    for epoch in range(1, 101):
        (stage.layout.epochs / f"{epoch:06d}.json").touch()
    ours = LaunchWatch(stage.supervisor().context, cast(Launch, Srun()), 100)
    write_record(
        stage.layout.progress,
        Progress(epoch=100, phase="training", step=1, target_step=9, time=1.0),
        durable=False,
    )
    before = time.process_time()
    for _ in range(180):
        assert not ours._look()
    hour_seconds = (time.process_time() - before) * 10
    assert hour_seconds < 18, "half a percent of one core"


_LIGHT = """
import sys
import hpctrain.supervise.loop
heavy = {"jinja2", "click", "rich", "ruamel", "torch", "numpy", "megatron"} & set(sys.modules)
# Not ru_maxrss, which a process inherits from the one that forked it.
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(" ".join(sorted(heavy)), int(peak.split()[1]) // 1024)
"""


def test_the_supervisor_is_light() -> None:
    """It runs beside the ranks of the first node for weeks."""
    answer = subprocess.run(
        [sys.executable, "-c", _LIGHT], capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()
    assert len(answer) == 1, f"imports {answer[:-1]}"
    assert int(answer[0]) < 60, "MiB"


def test_records_are_read_in_the_order_of_their_ends(stage: Stage) -> None:
    for rank, ended_at in ((0, 9.0), (1, 3.0)):
        values = {"epoch": 1, "rank": rank, "node": "n0", "outcome": "crash", "step": 1}
        write_record(
            stage.layout.exit_record(1, rank),
            ExitRecord.model_validate({**values, "exit_code": 1, "time": ended_at}),
        )
    context = stage.supervisor().context
    launch = Launch([sys.executable, "-c", ""], os.environ)
    launch.process.wait(20)
    launch.finish_reading()
    evidence = gather.gather(context, launch, LaunchWatch(context, launch, 1))
    assert [exit_.rank for exit_ in evidence.rank_exits] == [1, 0]
    assert evidence.started
    assert evidence.srun_exit_code == 0
