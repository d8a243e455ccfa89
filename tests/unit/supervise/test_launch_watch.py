"""Signs of life under wrong clocks, slow starts and slow saves; and how cheap looking is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from launch_evidence import config
from supervise_stage import Stage
from trainer_documents import train_json
from virtual_clock import VirtualClock

from hpctrain.records.exit_records import write_exit_record
from hpctrain.records.ledger import EventKind
from hpctrain.records.run_records import (
    ExitRecord,
    Phase,
    Progress,
    RankTimes,
    StepMetrics,
    append_metrics,
    write_record,
)
from hpctrain.records.speed_checks import SlowPart, SpeedCheck, write_speed_check
from hpctrain.records.supervise_config import LaunchShape
from hpctrain.slurm.client import Backoff
from hpctrain.slurm.messages import TaskFailure
from hpctrain.slurm.records import JobRecord, StepRecord
from hpctrain.slurm.states import JobState
from hpctrain.supervise.evidence import gather, launch_watch, slurm_facts
from hpctrain.supervise.evidence.launch_watch import LaunchWatch
from hpctrain.supervise.evidence.run_dir_snapshot import (
    BackgroundReader,
    RunDirReader,
    RunDirSnapshot,
)
from hpctrain.supervise.evidence.slurm_facts import OwnSteps
from hpctrain.supervise.srun_process import SrunProcess

NEXT_SECONDS = Backoff.next_seconds


class Srun:
    """An srun that is never waited for."""

    failures = ()
    waits_for_step = False

    def poll(self) -> None:
        return None


class Scene:
    """A watch over epoch 3 that looks every two seconds of a clock that moves by hand."""

    def __init__(self, stage: Stage, clock: VirtualClock) -> None:
        self.stage, self.clock = stage, clock
        self.srun = Srun()
        self.watch = self.resumed_at(0)

    def resumed_at(self, step: int, **more: Any) -> LaunchWatch:
        context = self.stage.supervisor().context
        return LaunchWatch(context, cast(SrunProcess, self.srun), 3, step, **more)

    def looks(self) -> bool:
        """True when the step has to be ended."""
        watch = self.watch
        find_saves = watch._silence.is_late(self.clock.monotonic())
        return watch._must_end(watch._reader.read(find_saves, True), self.clock.monotonic())

    def says(self, phase: Phase, step: int, *, epoch: int = 3, clock_seconds: float = 0.0) -> None:
        record = Progress(
            epoch=epoch,
            phase=phase,
            step=step,
            target_step=100,
            time=self.clock.monotonic() + clock_seconds,
        )
        write_record(self.stage.layout.progress, record, durable=False)
        assert not self.looks()

    def silent(self, seconds: float) -> bool:
        ended = False
        while seconds > 0:
            self.clock.advance(min(seconds, 2.0))
            seconds -= 2.0
            ended = self.looks()
        return ended

    def shows_a_rank(self) -> None:
        path = self.stage.layout.stack_dump(3, 0)
        path.parent.mkdir(parents=True)
        path.write_text("rank=0 node=n0 pid=1 epoch=3\n")


@pytest.fixture
def scene(stage: Stage, monkeypatch: pytest.MonkeyPatch, virtual_clock: VirtualClock) -> Scene:
    virtual_clock.advance(1000.0)
    monkeypatch.setattr(launch_watch, "_READ_SECONDS", 2.0)
    return Scene(stage, virtual_clock)


def stalled(scene: Scene) -> tuple[str, float]:
    stall = scene.watch.stall
    assert stall is not None
    return stall.phase, stall.limit_seconds


SILENCES = {
    row[0]: row[1:] for row in yaml.safe_load(Path(__file__).with_name("silences.yaml").read_text())
}


@pytest.mark.parametrize("name", SILENCES)
def test_a_silence(scene: Scene, name: str) -> None:
    settings, steps, (phase, limit_seconds) = SILENCES[name]
    resumed = settings.get("resumed", 0)
    changes = {key: value for key, value in settings.items() if key != "resumed"}
    scene.stage.configure(config().model_copy(update=changes))
    scene.watch = scene.resumed_at(resumed)
    saving = scene.stage.layout.checkpoints / "iter_0000001.partial-e000003"
    for word, value in (step.split(maxsplit=1) if " " in step else (step, "") for step in steps):
        if word == "quiet":
            assert not scene.silent(float(value))
        elif word == "ends":
            assert scene.silent(float(value))
        elif word == "old":
            scene.says("training", 50, epoch=2)
            assert not scene.watch.started
        elif word == "save":
            saving.with_name(f"iter_0000001.partial-e{int(value):06d}").mkdir()
        elif word == "saved":
            saving.rename(saving.with_name("iter_0000001"))
        elif word == "srun":
            scene.srun.waits_for_step = True
        elif word == "rank":
            scene.shows_a_rank()
        elif word == "unreadable":
            scene.stage.layout.progress.write_text('{"epoch": 3, "pha')
        elif word == "away":
            scene.clock.advance(float(value))
            assert not scene.looks()
        else:
            scene.says(cast(Phase, word), int(value))
    assert stalled(scene) == (phase, limit_seconds)
    assert scene.watch.started is (phase not in ("starting", "launching"))
    assert scene.watch.storage_stalled_seconds == 0


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
    assert stalled(scene) == ("training", 60)


def test_a_launch_learns_and_the_next_one_knows(scene: Scene) -> None:
    scene.stage.configure(config().model_copy(update={"stall_seconds": 3600.0}))
    state = launch_watch.CrossLaunchState.of(scene.stage.supervisor().context)
    scene.watch = scene.resumed_at(0, state=state)
    for step in range(9):
        scene.says("training", step)
        assert not scene.silent(24)
    assert scene.silent(100)
    assert stalled(scene) == ("training", 120)
    scene.watch = scene.resumed_at(8, state=state)
    for step in range(9, 16):
        scene.says("training", step)
        assert not scene.silent(10)
    assert not scene.silent(105), "the longer steps of the launch before are not forgotten"
    assert scene.silent(10)


def test_steps_of_earlier_attempts_are_learned_but_not_their_first_ones(stage: Stage) -> None:
    stage.configure(config().model_copy(update={"stall_seconds": 3600.0}))
    for epoch in (1, 2):
        for step, seconds in enumerate((900.0, *[30.0] * 5)):
            row = {"step": step, "epoch": epoch, "time": 1.0, "loss": 1.0, "loss_hex": "0x1"}
            row |= {"grad_norm": None, "learning_rate": 1.0, "step_seconds": seconds}
            row |= {"tokens_per_second": 1.0, "mfu": None, "memory_bytes": 1}
            append_metrics(stage.layout, StepMetrics.model_validate(row | {"consumed_samples": 1}))
    state = launch_watch.CrossLaunchState.of(stage.supervisor().context)
    assert state.limits.limit("training") == 150


def test_times_without_an_answer_add_up(scene: Scene) -> None:
    scene.says("training", 1)
    for seconds, in_all in ((6, 0), (20, 20), (100, 120), (30, 150)):
        scene.clock.advance(seconds)
        scene.watch._count_failed_read(scene.clock.monotonic(), None)
        assert not scene.looks()
        assert scene.watch.storage_stalled_seconds == in_all
    assert not scene.silent(48), "the time between two looks counts, the rest of the 150 s not"
    assert scene.silent(2)


def record(scene: Scene, rank: int, outcome: str) -> None:
    values = {"epoch": 3, "rank": rank, "node": "n0", "outcome": outcome, "step": 1}
    ended = ExitRecord.model_validate({**values, "exit_code": 0, "time": 1.0})
    write_exit_record(scene.stage.layout, 0, ended)


def test_the_ranks_that_survive_get_time_for_their_last_words(scene: Scene) -> None:
    record(scene, 0, "crash")
    assert not scene.silent(1)
    assert scene.silent(launch_watch._LAST_WORDS_SECONDS)


def test_who_waits_for_a_failed_rank_does_not_hang(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_watch, "_LAST_WORDS_SECONDS", 8.0)
    scene.says("training", 1)
    assert not scene.silent(59)
    scene.srun.failures = (TaskFailure("n1", "1", signal=signal.SIGKILL),)  # type: ignore[assignment]
    assert not scene.silent(7)
    assert scene.silent(4)
    assert scene.watch.stall is None


def test_an_srun_that_does_not_notice_the_end_of_its_ranks_is_ended(scene: Scene) -> None:
    record(scene, 0, "yielded")
    assert not scene.silent(1)
    assert not scene.silent(launch_watch._LEAVING_SECONDS / 2)
    assert scene.silent(launch_watch._LEAVING_SECONDS)


def test_a_newer_launch(scene: Scene) -> None:
    assert not scene.looks()
    (scene.stage.layout.epochs / "000004.json").touch()
    assert scene.looks()
    assert scene.watch.superseded


def test_a_silence_that_a_newer_launch_explains_is_no_hang(scene: Scene) -> None:
    scene.says("training", 1)
    assert scene.silent(62)
    assert scene.watch.stall is not None
    (scene.stage.layout.epochs / "000004.json").touch()
    assert scene.looks()
    assert (scene.watch.stall, scene.watch.superseded) == (None, True)


@pytest.mark.parametrize("kind", ["hold", "stop"])
def test_a_request_is_passed_on_once(scene: Scene, kind: str) -> None:
    (scene.stage.layout.control / kind).write_text("by ann\n")
    scene.stage.slurm.steps = lambda job_id: (  # type: ignore[method-assign]
        StepRecord("0", JobState.RUNNING),
    )
    assert not scene.silent(6)
    assert scene.stage.slurm.signals == [], "a rank that is still starting would die of it"
    assert scene.stage.layout.stop_request.exists()
    for step in (1, 2):
        scene.says("training", step)
    assert scene.stage.slurm.signals == [(5, "0", "USR2")]
    assert (scene.stage.layout.control / kind).exists()


def test_stop_now_ends_the_step_at_once(scene: Scene) -> None:
    scene.says("training", 1)
    scene.stage.layout.stop_now_request.touch()
    assert scene.looks()
    assert (scene.watch.stall, scene.watch.superseded) == (None, False)


def rank_times(scene: Scene, last_step: int, slow_seconds: float) -> None:
    times = RankTimes(
        epoch=3,
        first_step=last_step - 19,
        last_step=last_step,
        time=1.0,
        compute_seconds=(1.0, 1.0, 1.0, slow_seconds),
        nodes=("n0", "n0", "n1", "n1"),
    )
    write_record(scene.stage.layout.rank_times, times, durable=False)
    assert not scene.looks()


def test_a_slow_rank_is_in_the_ledger_once(scene: Scene) -> None:
    for window in range(1, 6):
        rank_times(scene, 20 * window, 1.5)
        assert not scene.looks()
    events = scene.stage.events(EventKind.SLOW_RANK)
    assert [(e.rank, e.node, e.factor, e.last_step) for e in events] == [(3, "n1", 1.5, 60)]
    assert events[0].reason == "computes 1.50 times as long as its peers"
    assert [slow.rank for slow in scene.watch.slow_ranks] == [3]
    rank_times(scene, 120, 1.0)
    assert scene.watch.slow_ranks == ()


def speed_check(epoch: int) -> SpeedCheck:
    return SpeedCheck(
        epoch=epoch,
        time=1.0,
        seconds=4.0,
        nodes=("n0", "n1"),
        accelerator="cpu",
        precision="fp32",
        product_mnk=(256, 256, 256),
        product_flops_per_second=(2e9, 1e9),
        far_cpus=("CPUs of NUMA node 1, its GPU is on node 0", ""),
        slow=(SlowPart(part="gpu", message="rank 1 on n1: slow", nodes=("n1",), certain=True),),
    )


def test_a_check_of_this_launch_is_in_the_ledger_once(scene: Scene) -> None:
    write_speed_check(scene.stage.layout, speed_check(2))
    assert not scene.looks()
    assert scene.watch.speed_check is None, "that of an earlier launch"
    write_speed_check(scene.stage.layout, speed_check(3))
    for _ in range(3):
        assert not scene.looks()
    (event,) = scene.stage.events(EventKind.SPEED_CHECKED)
    assert (event.action, event.nodes, event.epoch) == ("report", "n1", 3)
    far = "rank 0 on node n0 runs on CPUs of NUMA node 1, its GPU is on node 0"
    assert event.evidence == ("rank 1 on n1: slow", far)
    assert scene.watch.speed_check == speed_check(3)


def test_a_new_launch_counts_slow_windows_anew(scene: Scene) -> None:
    state = launch_watch.CrossLaunchState.of(scene.stage.supervisor().context)
    for windows, reported in (((20, 40), 0), ((60, 80), 0), ((100, 120, 140), 1)):
        scene.watch = scene.resumed_at(0, state=state)
        for last_step in windows:
            rank_times(scene, last_step, 1.5)
        assert len(scene.stage.events(EventKind.SLOW_RANK)) == reported


def test_stages_differ_by_what_they_do(scene: Scene) -> None:
    scene.watch = scene.resumed_at(0, stage_of=lambda rank: rank // 3)
    for window in range(1, 6):
        rank_times(scene, 20 * window, 1.5)
    assert scene.stage.events(EventKind.SLOW_RANK) == []


def test_the_stages_of_the_size_that_runs(scene: Scene) -> None:
    for stages, name in ((1, "train.json"), (2, "train-n000001.json")):
        sizes = {"tensor_model_parallel_size": 1, "data_parallel_size": 3}
        text = train_json(**sizes, pipeline_model_parallel_size=stages)
        (scene.stage.layout.directory / name).write_text(text)
    shapes = (
        LaunchShape(nodes=2, tasks=8, train_config="train.json"),
        LaunchShape(nodes=1, tasks=4, train_config="train-n000001.json"),
    )
    scene.stage.configure(config().model_copy(update={"shapes": shapes}))
    for tasks, rank_3 in ((8, 0), (4, 1), (0, 0)):
        assert scene.resumed_at(0, tasks=tasks)._stage_of(3) == rank_3


def test_only_numbered_steps_of_this_attempt_are_ended(stage: Stage) -> None:
    slurm = stage.slurm
    slurm.steps = lambda job_id: tuple(  # type: ignore[method-assign]
        StepRecord(name, JobState.RUNNING) for name in ("batch", "extern", "0", "12")
    )
    ours = OwnSteps(stage.supervisor().context)
    assert ours.ids() == ["0", "12"]
    slurm.change(restart_count=1)
    assert ours.ids() == []
    slurm.change(restart_count=0)
    slurm.away = True
    assert ours.ids() == []


def test_job_facts(stage: Stage) -> None:
    context = stage.supervisor().context
    stage.slurm.change(state=JobState.COMPLETING, reason=None, preempt_time=5.0, restart_count=2)
    facts = gather.job_facts(context, patient=False)
    assert facts is not None
    assert (facts.state, facts.reason) == ("COMPLETING", "None")
    assert (facts.restart_count, facts.preempt_time) == (2, True)


def test_slurm_is_asked_until_it_answers(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.slurm.away = True
    asked = 0
    original = stage.slurm.show_job

    def later(job_id: int) -> object:
        nonlocal asked
        asked += 1
        stage.slurm.away = asked < 4
        return original(job_id)

    stage.slurm.show_job = later  # type: ignore[method-assign,assignment]
    monkeypatch.setattr(slurm_facts, "_PATIENCE_SECONDS", 600.0)
    context = stage.supervisor().context
    assert gather.job_facts(context, patient=False) is None
    assert asked == 1
    assert gather.job_facts(context, patient=True) is not None
    assert asked == 4


def test_in_the_final_stage_slurm_is_asked_once(stage: Stage) -> None:
    stage.slurm.away = True
    context = stage.supervisor().context
    context.signals._arrived.append("TERM")
    asked: list[int] = []
    original = stage.slurm.show_job

    def show_job(job_id: int) -> object:
        asked.append(job_id)
        return original(job_id)

    stage.slurm.show_job = show_job  # type: ignore[method-assign,assignment]
    assert gather.job_facts(context, patient=True) is None
    assert len(asked) == 1


def test_an_hour_of_watching_costs_little(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks and polls as in earnest, only without the waits; a run with many launches behind it."""
    for epoch in range(1, 101):
        (stage.layout.epochs / f"{epoch:06d}.json").touch()
    for rank in range(64):
        path = stage.layout.stack_dump(100, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    context = stage.supervisor().context
    ours = LaunchWatch(context, cast(SrunProcess, Srun()), 100)
    background = BackgroundReader(ours._reader.read)
    monkeypatch.setattr(launch_watch, "_READ_SECONDS", 0.0)
    looks, polls = 200, 2000
    before = time.process_time()
    for number in range(looks):
        values = {"epoch": 100, "phase": "training", "target_step": 9, "time": 1.0}
        sign = Progress.model_validate({**values, "step": number})
        write_record(stage.layout.progress, sign, durable=False)
        while not background.busy:
            assert not ours._poll_snapshot(background)
        while background.busy:
            time.sleep(0.0005)
            assert not ours._poll_snapshot(background)
    looking_seconds = time.process_time() - before
    monkeypatch.setattr(launch_watch, "_READ_SECONDS", 2.0)
    ours._next_read = time.monotonic() + 60
    before = time.process_time()
    for _ in range(polls):
        ours._handle_signals()
        assert not ours._time_is_up()
        assert not ours._poll_snapshot(background)
    hour_seconds = looking_seconds * 1800 / looks + (time.process_time() - before) * 18000 / polls
    background.close()
    assert hour_seconds < 72, "2 % of one core; a tenth of it as a rule"


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


@pytest.mark.parametrize(
    ("kill_wait", "waited"), [(30.0, 22.0), (10.0, 5.0), (3.0, 1.0), (1.0, 0.5)]
)
def test_of_the_final_seconds_some_are_kept_for_the_verdict(
    scene: Scene, kill_wait: float, waited: float
) -> None:
    scene.stage.configure(config().model_copy(update={"kill_wait_seconds": kill_wait}))
    scene.watch = scene.resumed_at(0)
    scene.watch._final_at = scene.clock.monotonic()
    scene.clock.advance(waited - 0.1)
    assert not scene.watch._time_is_up()
    scene.clock.advance(0.2)
    assert scene.watch._time_is_up()


def test_whom_we_have_killed_has_not_failed(stage: Stage) -> None:
    """A rank that has said why it fails may take longer to leave than it is waited for."""
    context = stage.supervisor().context
    words = ("n0: task 0: Killed", "n1: task 1: Exited with exit code 1")
    program = (
        f"import sys; sys.stderr.write({''.join(f'srun: error: {w}{chr(10)}' for w in words)!r})"
    )
    launch = SrunProcess([sys.executable, "-c", program], os.environ)
    launch.process.wait(20)
    launch.finish_reading()
    seen = LaunchWatch(context, launch, 1)
    failures = gather.gather(context, launch, seen).task_failures
    assert [failure.tasks for failure in failures] == ["0", "1"]
    seen.killed_at = 0.0
    failures = gather.gather(context, launch, seen).task_failures
    assert [failure.tasks for failure in failures] == ["1"]


def test_a_record_that_is_added_to_the_file_of_a_node_is_seen(stage: Stage) -> None:
    """Ranks of a node share a file: one leaves well, the next one fails a moment later."""
    reader = RunDirReader(stage.layout, 1)
    seen = []
    for rank, outcome in ((0, "yielded"), (1, "crash")):
        values = {"epoch": 1, "rank": rank, "node": "n0", "outcome": outcome, "step": 1}
        record = ExitRecord.model_validate({**values, "exit_code": 1, "time": 1.0})
        write_exit_record(stage.layout, 0, record)
        snapshot = reader.read(find_saves=False, rank_times=False)
        seen.append((snapshot.left, snapshot.failed))
    assert seen == [(True, False), (True, True)]


def test_records_are_read_in_the_order_of_their_ends(stage: Stage) -> None:
    for rank, ended_at in ((0, 9.0), (1, 3.0)):
        values = {"epoch": 1, "rank": rank, "node": "n0", "outcome": "crash", "step": 1}
        write_exit_record(
            stage.layout,
            rank,
            ExitRecord.model_validate({**values, "exit_code": 1, "time": ended_at}),
        )
    context = stage.supervisor().context
    launch = SrunProcess([sys.executable, "-c", ""], os.environ)
    launch.process.wait(20)
    launch.finish_reading()
    watch = LaunchWatch(context, launch, 1, 20, tasks=2, nodes=("n0", "n1"))
    evidence = gather.gather(context, launch, watch)
    told = (evidence.world_size, evidence.nodes, evidence.resume_step)
    assert told == (2, ("n0", "n1"), 20), "what the watch knows is in the evidence"
    assert [exit_.rank for exit_ in evidence.rank_exits] == [1, 0]
    assert evidence.started
    assert evidence.srun_exit_code == 0


class PausedReader:
    """A reader that has its result when its process goes on, after a minute."""

    def __init__(self, clock: VirtualClock, snapshot: RunDirSnapshot) -> None:
        self.clock, self.snapshot = clock, snapshot

    def request(self, *, find_saves: bool, rank_times: bool) -> None:
        """The snapshot is there at once."""

    @property
    def busy(self) -> bool:
        self.clock.advance(60)
        return True

    def result(self, wait_seconds: float = 0.0) -> RunDirSnapshot:
        return self.snapshot


def test_a_hang_is_confirmed_also_after_a_pause_of_the_supervisor(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.says("training", 7)
    watch = scene.watch
    assert scene.silent(700) and watch.stall is not None
    # nobody dumps stacks here, and the pause falls behind the request
    monkeypatch.setattr(watch, "_inquiry", SimpleNamespace(open=lambda: None))
    reader = PausedReader(scene.clock, watch._reader.read(True, False))
    monkeypatch.setattr(watch, "_must_end", lambda snapshot, now: snapshot is reader.snapshot)
    assert watch._confirm_stall(cast(BackgroundReader, reader), watch.stall)


# -- a step that refuses to die ------------------------------------------------------------------


class Bucket:
    """Slurm's limit for one user: slurm.conf(5), rl_bucket_size 30 and rl_refill_rate 2."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock, self.left, self.least, self.calls = clock, 30.0, 30.0, 0
        self.since = clock.monotonic()

    def take(self) -> None:
        self.left = min(30.0, self.left + 2.0 * (self.clock.monotonic() - self.since)) - 1.0
        self.since, self.calls = self.clock.monotonic(), self.calls + 1
        self.least = min(self.least, self.left)


def test_a_step_that_refuses_to_die_leaves_calls_for_the_requeue(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KillWait and 10 s more, and the shortest pauses that chance can give."""
    clock, slurm = scene.clock, scene.stage.slurm
    bucket = Bucket(clock)
    watch = scene.resumed_at(0)
    seconds = watch.context.config.kill_wait_seconds + 10
    monkeypatch.setattr(launch_watch, "_POLL_SECONDS", 0.2)
    monkeypatch.setattr(Backoff, "next_seconds", NEXT_SECONDS)
    monkeypatch.setattr(launch_watch, "Backoff", partial(Backoff, draw=lambda: 1.0))
    jobs = slurm.jobs

    def steps(job_id: int) -> tuple[StepRecord, ...]:
        bucket.take()
        return (StepRecord("0", JobState.RUNNING),)

    def asked(ids: Collection[int]) -> dict[int, JobRecord]:
        bucket.take()
        return jobs(ids)

    monkeypatch.setattr(slurm, "jobs", asked)
    monkeypatch.setattr(slurm, "steps", steps)
    monkeypatch.setattr(slurm, "kill_step", lambda *_: bucket.take())
    scene.srun.kill = scene.srun.finish_reading = lambda *_: None  # type: ignore[attr-defined]
    began = clock.monotonic()
    watch._end_step()
    assert watch.step_remains and clock.monotonic() - began >= seconds
    assert bucket.calls >= 3 * 3, "it is killed again and again"
    assert bucket.least > 0, f"{bucket.calls} calls in {seconds:.0f} s"
