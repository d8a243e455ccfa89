"""The stand-in keeps the trainer's contract: launches of two nodes with two ranks, no Slurm."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from trainer_contract import assert_done, assert_yielded
from variants import varied
from waiting import wait_until

from bench.free_ports import free_port
from hpctrain.checkpoints.publish import published_steps
from hpctrain.engines.train_json import train_config_of
from hpctrain.job.prepare import prepare
from hpctrain.job.run_directory import write_run_directory
from hpctrain.judge.odd_stacks import main_stack
from hpctrain.records.epochs import claim_epoch
from hpctrain.records.exit_records import read_exit_records
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import checkpoint_name, read_manifest
from hpctrain.records.requests import is_requested, make_request
from hpctrain.records.run_records import RankTimes, read_metrics, read_record
from hpctrain.records.software import read_software
from tests.rig.stand_in import rank as light
from tests.rig.stand_in.interpreter import write_stand_in_interpreter
from tests.rig.stand_in.node import tasks_of_node

ROOT = Path(__file__).resolve().parents[3]
NODES, PER_NODE = 2, 2
STEPS, EVERY = 40, 10
LIMIT_SECONDS = 120.0
SPEC = f"""
name: standin
model: {{layers: 2, hidden: 64, heads: 4, vocab: 256, seq: 64}}
batch: {{global: 8, micro: 2}}
budget: {{steps: {STEPS}}}
precision: fp32
optimizer: {{lr: 1e-3}}
parallel: {{pp: 2}}
recompute: none
checkpoint: {{every_steps: {EVERY}, keep: 20}}
resources: {{gpus: 4, walltime: 00:30:00}}
"""


class Launches:
    """One run, and launches of it: processes with the variables that srun and supervisor set."""

    def __init__(self, place: Path, step_seconds: float) -> None:
        place.mkdir()
        self.python = write_stand_in_interpreter(place / "python", step_seconds)
        (place / "spec.yaml").write_text(SPEC)
        runs = place / "runs"
        prepared = prepare(place / "spec.yaml", "sandbox", runs=runs, python=str(self.python))
        self.words = [word for word in prepared.script.split() if word != "\\"][-4:]
        self.run = write_run_directory(prepared, runs)
        self.ranks: list[subprocess.Popen[str]] = []

    def start(self, resume: int | None = None) -> int:
        """Start all ranks; returns the epoch."""
        epoch = claim_epoch(self.run.epochs, "test")
        shared = {
            "SLURM_NTASKS": str(NODES * PER_NODE),
            "SLURM_STEP_NUM_NODES": str(NODES),
            "SLURM_STEP_TASKS_PER_NODE": f"{PER_NODE}(x{NODES})",
            "HPCTRAIN_EPOCH": str(epoch),
            "HPCTRAIN_RESUME": "" if resume is None else checkpoint_name(resume),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        self.ranks = []
        for number in range(NODES * PER_NODE):
            node, local = divmod(number, PER_NODE)
            own = {"SLURM_PROCID": number, "SLURM_LOCALID": local, "SLURM_NODEID": node}
            environment = {**os.environ, **shared, "SLURMD_NODENAME": f"n{node}"}
            environment |= {name: str(value) for name, value in own.items()}
            self.ranks.append(
                subprocess.Popen(
                    self.words,
                    cwd=self.run.directory,
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        return epoch

    def codes(self) -> list[int]:
        """Wait for all ranks."""
        return [code for code, _ in self.endings()]

    def endings(self) -> list[tuple[int, str]]:
        """Wait for all ranks: how each ended, and what it said."""
        said = [process.communicate(timeout=LIMIT_SECONDS)[1] for process in self.ranks]
        print(*said)
        return [
            (process.returncode, words) for process, words in zip(self.ranks, said, strict=True)
        ]

    def wait_for_step(self, step: int, epoch: int) -> None:
        def reached() -> bool:
            return any(row.epoch == epoch and row.step >= step for row in read_metrics(self.run))

        self.wait(reached)

    def wait(self, reached: Callable[[], bool]) -> None:
        def reached_by_living_ranks() -> bool:
            assert all(process.poll() is None for process in self.ranks), self.endings()
            return reached()

        wait_until(reached_by_living_ranks)

    def end(self) -> None:
        for process in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    """A run that nothing happened to."""
    launches = Launches(tmp_path_factory.mktemp("finished") / "place", 0.001)
    launches.start()
    assert launches.codes() == [0] * 4
    return launches


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Launches]:
    """A run whose launches are long enough to be disturbed."""
    launches = Launches(tmp_path / "place", 0.05)
    yield launches
    launches.end()


def expected_losses(run: RunLayout) -> list[str]:
    config = train_config_of(run.train_config, run.train_config.read_bytes())
    states = [light.initial_state(config.seed, rank) for rank in range(config.world_size)]
    losses = []
    for step in range(1, STEPS + 1):
        states = [light.advance(state, step) for state in states]
        losses.append(light.loss_of(step, sum(states)).hex())
    return losses


def test_done(finished: Launches) -> None:
    run = finished.run
    assert_done(run, STEPS)
    rows = read_metrics(run)
    assert [row.step for row in rows] == [*range(1, STEPS + 1)]
    assert [row.loss_hex for row in rows] == expected_losses(run)
    assert published_steps(run.checkpoints) == [*range(EVERY, STEPS + 1, EVERY)]
    (software,) = read_software(run)
    assert (software.nodes, software.ranks) == (("n0", "n1"), 4)
    times = read_record(run.rank_times, RankTimes)
    assert times is not None and times.nodes == ("n0", "n0", "n1", "n1")
    assert not [path for path in run.stacks.rglob("*") if path.is_file()], "unused dumps are gone"


def test_a_checkpoint_has_the_shard_of_every_rank_and_who_wrote_it(finished: Launches) -> None:
    manifest = read_manifest(finished.run.checkpoints / checkpoint_name(EVERY))
    assert manifest is not None
    writers = dict(zip((file.name for file in manifest.files), manifest.writers, strict=True))
    assert writers == {"common.pt": 0, **{light.shard_name(rank): rank for rank in range(4)}}


def test_a_finished_run_is_not_run_again(finished: Launches) -> None:
    finished.start(resume=STEPS)
    assert finished.codes() == [0] * 4
    assert len(read_metrics(finished.run)) == STEPS


@pytest.mark.parametrize("how", varied(["stop file", "SIGTERM", "SIGUSR2"], "SIGTERM"))
def test_stop_saves_and_the_resume_is_exact(how: str, slow: Launches) -> None:
    """The signal goes to the last rank only, which imports nothing of ours."""
    run = slow.run
    slow.wait_for_step(EVERY, slow.start())
    if how == "stop file":
        make_request(run, "stop")
    else:
        slow.ranks[-1].send_signal(signal.Signals[how])
    assert slow.codes() == [75] * 4
    last = read_metrics(run)[-1].step
    record = assert_yielded(run, last)
    assert record.signalled_ranks == ((3,) if how == "SIGTERM" else ())
    run.stop_request.unlink(missing_ok=True)
    slow.start(resume=last)
    assert slow.codes() == [0] * 4
    assert_done(run, STEPS, epoch=2)
    assert [row.loss_hex for row in read_metrics(run)] == expected_losses(run)


def test_a_save_that_a_person_wants(slow: Launches) -> None:
    epoch = slow.start()
    slow.wait_for_step(1, epoch)
    make_request(slow.run, "save")
    slow.wait(lambda: not is_requested(slow.run, "save"))
    slow.wait(lambda: bool(published_steps(slow.run.checkpoints)))
    slow.ranks[0].send_signal(signal.SIGTERM)
    assert slow.codes() == [75] * 4


def test_a_damaged_shard_is_refused_by_name(slow: Launches) -> None:
    epoch = slow.start()
    slow.wait_for_step(EVERY, epoch)
    slow.wait(lambda: EVERY in published_steps(slow.run.checkpoints))
    slow.ranks[0].send_signal(signal.SIGTERM)
    assert slow.codes() == [75] * 4
    shard = slow.run.checkpoints / checkpoint_name(EVERY) / light.shard_name(3)
    shard.write_text(shard.read_text().replace("3 ", "2 "))
    epoch = slow.start(resume=EVERY)
    assert slow.codes() == [1] * 4
    records = read_exit_records(slow.run, epoch)
    blaming = {record.rank for record in records if record.cause == "bad_checkpoint"}
    assert len(blaming) == 1 and len(records) == 4
    assert any(light.shard_name(3) in (record.message or "") for record in records)


@pytest.mark.parametrize("victim", [3, pytest.param(2, marks=pytest.mark.variant)])
def test_ranks_that_lose_one_leave_a_record_each(victim: int, slow: Launches) -> None:
    """A rank that imports nothing, and the first one of a node, which writes for others."""
    epoch = slow.start()
    slow.wait_for_step(1, epoch)
    slow.ranks[victim].kill()
    codes = slow.codes()
    assert [code for rank, code in enumerate(codes) if rank != victim] == [1] * 3
    ranks = {record.rank for record in read_exit_records(slow.run, epoch)}
    assert ranks >= {0, 1, 2, 3} - {victim}
    assert not slow.run.done.exists()


@pytest.fixture
def slower(tmp_path: Path) -> Iterator[Launches]:
    """A run that is seconds away from its first save when it has done a step."""
    launches = Launches(tmp_path / "place", 0.3)
    yield launches
    launches.end()


def test_a_launch_that_is_not_the_newest_publishes_nothing(slower: Launches) -> None:
    epoch = slower.start()
    slower.wait_for_step(1, epoch)
    claim_epoch(slower.run.epochs, "another")
    assert slower.codes()[0] == 1
    (record,) = (one for one in read_exit_records(slower.run, epoch) if one.rank == 0)
    assert record.cause == "superseded"
    assert published_steps(slower.run.checkpoints) == []


def test_a_stopped_rank_gives_no_stack_and_the_others_wait_for_it(slow: Launches) -> None:
    epoch = slow.start()
    slow.wait_for_step(1, epoch)
    slow.ranks[1].send_signal(signal.SIGSTOP)
    for process in slow.ranks:
        process.send_signal(signal.SIGQUIT)
    dumps = [slow.run.stack_dump(epoch, number) for number in (0, 2, 3)]
    slow.wait(lambda: all("most recent call first" in path.read_text() for path in dumps))
    assert "most recent call first" not in slow.run.stack_dump(epoch, 1).read_text()

    def waits(rank: int) -> bool:
        """Whether a rank is done with its step, as the supervisor sees it in its newest stack."""
        slow.ranks[rank].send_signal(signal.SIGQUIT)
        text = slow.run.stack_dump(epoch, rank).read_text()
        stack = main_stack(text[text.rindex("Current thread") :])
        return stack is not None and stack.waits

    slow.wait(lambda: all(map(waits, (0, 2, 3))))


def test_most_ranks_import_nothing_of_ours() -> None:
    code = (
        "import sys, runpy; runpy.run_path(sys.argv[1]); "
        "print([name for name in sys.modules if name.partition('.')[0] in "
        "('hpctrain', 'pydantic', 'json', 'pathlib', 'dataclasses')])"
    )
    found = subprocess.run(
        [sys.executable, "-S", "-c", code, str(ROOT / "tests/rig/stand_in/rank.py")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "[]"


def test_the_ranks_that_write_import_no_torch() -> None:
    code = (
        "import sys, tests.rig.stand_in.leader; "
        "sys.exit(bool({'torch', 'numpy', 'megatron'} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_script_is_the_golden_one_but_for_the_interpreter(tmp_path: Path) -> None:
    python = write_stand_in_interpreter(tmp_path / "python", 1.0)
    spec = ROOT / "examples" / "gpt175b.yaml"
    prepared = prepare(spec, "a100x64", runs=tmp_path / "runs", python=str(python))
    golden = (ROOT / "tests/golden/scripts/a100x64--gpt175b.sbatch").read_text()
    assert prepared.script.replace(str(python), "/opt/hpctrain/bin/python3") == golden


def test_tasks_of_a_node() -> None:
    environment = {"SLURM_STEP_TASKS_PER_NODE": "8(x2),4", "SLURM_NODEID": "2"}
    assert tasks_of_node(environment) == 4
    assert tasks_of_node(environment | {"SLURM_NODEID": "1"}) == 8
