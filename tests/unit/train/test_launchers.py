"""How ranks are started: by srun, below an agent, without Slurm, and below a profiler."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from waiting import wait_until

from hpctrain.base.errors import CheckpointError, InvalidInputError
from hpctrain.records.epochs import current_epoch
from hpctrain.records.exit_records import read_agent_records
from hpctrain.records.layout import RunLayout
from hpctrain.records.old_launches import lines_of_rank
from hpctrain.records.requests import is_requested
from hpctrain.records.run_records import RankEnd, TrainerExit
from hpctrain.train.launchers.agent_environment import (
    Place,
    read_agent_environment,
    read_unsupervised_environment,
)
from hpctrain.train.launchers.agent_ranks import (
    FORWARDED_SIGNALS,
    SignalForwarder,
    catches,
)
from hpctrain.train.launchers.agreed_launch import (
    AgreedLaunch,
    choose_launch,
    open_run_directory,
)
from hpctrain.train.launchers.rank_processes import Rank, open_log
from hpctrain.train.rank_environment import Launch, host_threads, quiet_defaults, read_launch
from hpctrain.train.stop import STOP_SIGNALS

# -- Reading the launcher's environment, and remembering stop signals ----------------------------


SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "1",
    "SLURMD_NODENAME": "n002",
}


def test_srun_says_who_we_are() -> None:
    environment = {**SLURM, "HPCTRAIN_EPOCH": "3", "HPCTRAIN_RESUME": "iter_0000012"}
    assert read_launch(environment) == Launch(5, 16, 1, "n002", 3, "iter_0000012")


def test_another_launcher_wins_over_srun() -> None:
    launch = read_launch({**SLURM, "RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"})
    assert (launch.rank, launch.world_size, launch.local_rank) == (2, 4, 0)
    assert (launch.epoch, launch.resume) == (0, "")
    assert not launch.leads


def test_what_is_missing_or_wrong_is_named() -> None:
    with pytest.raises(InvalidInputError, match="none of RANK, SLURM_PROCID is set"):
        read_launch({})
    with pytest.raises(InvalidInputError, match="HPCTRAIN_EPOCH is not a number: 'two'"):
        read_launch({**SLURM, "HPCTRAIN_EPOCH": "two"})


def test_whether_the_speed_is_checked() -> None:
    given = {"2": 2, "0": 0, "off": None}
    for text, expected in given.items():
        assert read_launch({**SLURM, "HPCTRAIN_SPEED_CHECK": text}).speed_check == expected
    assert read_launch(SLURM).speed_check == 0, "without a supervisor nobody replaces nodes"
    with pytest.raises(InvalidInputError, match="HPCTRAIN_SPEED_CHECK is not a number: 'on'"):
        read_launch({**SLURM, "HPCTRAIN_SPEED_CHECK": "on"})


def test_what_the_supervisor_tells() -> None:
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    told = {"HPCTRAIN_MTTF_SECONDS": "28440.5", "HPCTRAIN_PINNED_STEPS": "400 1200"}
    assert read_launch(place).mttf_seconds == float("inf")
    assert read_launch(place).pinned_steps == frozenset()
    launch = read_launch(place | told)
    assert (launch.mttf_seconds, launch.pinned_steps) == (28440.5, {400, 1200})
    for name, text in (
        ("HPCTRAIN_MTTF_SECONDS", "0"),
        ("HPCTRAIN_MTTF_SECONDS", "nan"),
        ("HPCTRAIN_MTTF_SECONDS", "often"),
        ("HPCTRAIN_PINNED_STEPS", "4,8"),
    ):
        with pytest.raises(InvalidInputError, match=name):
            read_launch(place | {name: text})


def test_the_user_may_choose_the_number_of_threads() -> None:
    assert quiet_defaults("ddp", {})["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in quiet_defaults("ddp", {"OMP_NUM_THREADS": "8"})
    assert quiet_defaults("ddp", {}, host_threads=16)["OMP_NUM_THREADS"] == "16"


def test_an_optimizer_on_the_host_has_the_cpus_of_its_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    assert host_threads({}) == 16
    assert host_threads({"LOCAL_WORLD_SIZE": "8"}) == 2
    assert host_threads({"LOCAL_WORLD_SIZE": "32"}) == 1
    # a task that Slurm has not bound sees the CPUs of all
    assert host_threads({"SLURM_CPUS_PER_TASK": "4"}) == 4
    assert host_threads({"SLURM_CPUS_PER_TASK": "16", "LOCAL_WORLD_SIZE": "8"}) == 2


def test_kernels_start_in_launch_order_where_megatron_needs_it() -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    assert quiet_defaults("megatron", {})[name] == "1"
    assert name not in quiet_defaults("fsdp", {})


def test_signals_are_remembered_and_do_not_kill() -> None:
    program = (
        "import os, signal\n"
        "from hpctrain.train.stop import StopSignals\n"
        "stop = StopSignals()\n"
        "stop.install()\n"
        "assert not stop.requested\n"
        "os.kill(os.getpid(), signal.SIGCONT)\n"
        "assert not stop.requested\n"
        "for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR2):\n"
        "    os.kill(os.getpid(), number)\n"
        "print(stop.requested, stop.name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "True SIGUSR1\n"


def test_the_stop_file(tmp_path: Path) -> None:
    run = RunLayout(tmp_path / "r1")
    run.create()
    assert not is_requested(run, "stop")
    run.stop_request.touch()
    assert is_requested(run, "stop") and not is_requested(run, "save")
    assert not is_requested(RunLayout(Path(os.devnull)), "stop")


# -- What an agent is told, and what it says when something of it is missing ---------------------


WORDS = ["--nnodes=2", "--nproc-per-node=8", "train-n000002.json"]
STEP = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "2"}
TOLD = {
    "SLURM_PROCID": "1",
    "SLURMD_NODENAME": "n7",
    "HPCTRAIN_EPOCH": "5",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "20001",
}


def test_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    agent = read_agent_environment(WORDS, TOLD)
    assert agent.place == Place(1, 2, 8, 8, 16, "10.0.0.1", 20001)
    assert (agent.node, agent.epoch, agent.train_config) == ("n7", 5, "train-n000002.json")
    assert not agent.logs_by_node
    assert read_agent_environment(["--logs=node", *WORDS], TOLD).logs_by_node


@pytest.mark.parametrize("name", TOLD)
def test_what_is_missing_is_named(name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{name} is not set: start this with srun"):
        read_agent_environment(WORDS, {key: value for key, value in TOLD.items() if key != name})


def test_what_is_no_number_is_named() -> None:
    with pytest.raises(InvalidInputError, match="MASTER_PORT is not a number: '-1'"):
        read_agent_environment(WORDS, {**TOLD, "MASTER_PORT": "-1"})


def test_started_by_hand_it_says_what_is_missing() -> None:
    bare = {name: text for name, text in os.environ.items() if name not in TOLD}
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain.train.agent", *WORDS],
        env=bare,
        capture_output=True,
        text=True,
    )
    assert done.returncode == TrainerExit.CONFIG_ERROR
    assert "is not set: start this with srun, below hpctrain's supervisor" in done.stderr
    assert "Traceback" not in done.stderr


# ------------------------------------------------------------------------------------------------
# A node without Slurm and supervisor: what it is told, and which launch its first node chooses.


UNSUPERVISED = [
    "--nnodes=2",
    "--nproc-per-node=8",
    "--run-directory=/runs/a",
    "/etc/hpctrain/train.json",
]
# As Kubeflow's trainer sets them.
KUBEFLOW = {
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "a-node-0-0.a",
    "PET_MASTER_PORT": "29400",
}


def test_options_come_before_variables() -> None:
    agent = read_unsupervised_environment(UNSUPERVISED, KUBEFLOW)
    assert agent.place == Place(1, 2, 8, 8, 16, "a-node-0-0.a", 29400)
    assert str(agent.settings) == "/etc/hpctrain/train.json"
    assert agent.train_config == "/runs/a/train.json"
    only = read_unsupervised_environment(["/runs/a/train.json"], KUBEFLOW)
    assert only.place == Place(1, 4, 2, 2, 8, "a-node-0-0.a", 29400)
    assert only.run.directory == Path("/runs/a")


def test_open_mpi_numbers_nodes_too() -> None:
    told = {"OMPI_COMM_WORLD_RANK": "1", "PET_MASTER_ADDR": "h1"}
    place = read_unsupervised_environment(UNSUPERVISED, told).place
    assert (place.node_rank, place.port) == (1, 29500)


def test_a_single_node_knows_its_place() -> None:
    words = ["--nnodes=1", "--nproc-per-node=1", "t.json"]
    place = read_unsupervised_environment(words, {}).place
    assert (place.node_rank, place.address) == (0, "127.0.0.1")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PET_NODE_RANK", "", "neither --node-rank nor PET_NODE_RANK is set"),
        ("PET_NODE_RANK", "2", "node rank 2 of 2 nodes"),
        ("PET_NODE_RANK", "one", "not a number: 'one'"),
        ("PET_MASTER_ADDR", "", "neither --master-addr"),
    ],
)
def test_what_is_missing(name: str, value: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        read_unsupervised_environment(UNSUPERVISED, {**KUBEFLOW, name: value})


def test_without_its_place_a_node_ends_as_wrongly_configured(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain.train.unsupervised", str(tmp_path / "train.json")],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == TrainerExit.CONFIG_ERROR
    assert "neither --nnodes nor PET_NNODES is set" in done.stderr


def test_the_node_of_a_rank_is_known_without_slurm() -> None:
    """Exit records are kept by node: two nodes may not write into one file."""
    ranks = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "GROUP_RANK": "1"}
    assert read_launch(ranks).node_rank == 1
    assert read_launch({**ranks, "SLURM_NODEID": "3"}).node_rank == 3


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    file = tmp_path / "settings" / "train.json"
    file.parent.mkdir()
    file.write_text('{"engine": "ddp"}')
    return file


def test_launches_are_numbered_in_a_directory_that_is_made(tmp_path: Path, settings: Path) -> None:
    run = RunLayout(tmp_path / "volume" / "run")
    open_run_directory(run, settings)
    assert run.train_config.read_text() == settings.read_text()
    first = choose_launch(run, "node-a")
    partial = run.checkpoints / "iter_0000002.partial-e000001"
    partial.mkdir()
    open_run_directory(run, settings)
    second = choose_launch(run, "node-b")
    assert (first.epoch, second.epoch, current_epoch(run.epochs)) == (1, 2, 2)
    assert first.variables["HPCTRAIN_EPOCH"] == "1" and first.resume == second.resume == ""
    assert not partial.exists(), "what the older launch was saving is fenced off"


def test_a_directory_without_its_parts_is_completed(tmp_path: Path, settings: Path) -> None:
    """A volume may have been made with the directory in it."""
    run = RunLayout(tmp_path / "run")
    run.directory.mkdir()
    open_run_directory(run, settings)
    assert all(directory.is_dir() for directory in run.fixed_directories)


def test_the_directory_of_another_run_is_refused(tmp_path: Path, settings: Path) -> None:
    run = RunLayout(tmp_path / "run")
    open_run_directory(run, settings)
    settings.write_text('{"engine": "fsdp"}')
    with pytest.raises(InvalidInputError, match="another run has begun there"):
        open_run_directory(run, settings)
    run.train_config.unlink()
    run.ledger.write_text("")
    with pytest.raises(InvalidInputError, match="its supervisor starts its launches"):
        open_run_directory(run, settings)


def test_lost_checkpoints_are_no_fresh_start(tmp_path: Path, settings: Path) -> None:
    run = RunLayout(tmp_path / "run")
    open_run_directory(run, settings)
    (run.checkpoints / "iter_0000004").mkdir()
    with pytest.raises(CheckpointError, match="a start from step 0 would lose work"):
        choose_launch(run, "node-a")


def test_the_first_node_tells_the_others_by_json() -> None:
    told = AgreedLaunch(epoch=3, resume="iter_0000004")
    assert AgreedLaunch.model_validate_json(told.model_dump_json()) == told


# -- What an agent does with signals: they reach the ranks that listen, and never end anybody ----


# Deaf until the file `listen` exists; from then on every signal leaves its name in a file.
RANK = """
import os, pathlib, signal, time
def heard(number, frame):
    pathlib.Path("heard-" + signal.Signals(number).name).touch()
pathlib.Path("started").touch()
while not os.path.exists("listen"):
    time.sleep(0.01)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
    signal.signal(number, heard)
while not os.path.exists("leave"):
    time.sleep(0.01)
"""


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", RANK], cwd=tmp_path)
    wait_until((tmp_path / "started").exists)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def forwarder() -> Iterator[SignalForwarder]:
    before = {number: signal.getsignal(number) for number in FORWARDED_SIGNALS}
    found = SignalForwarder()
    found.install()
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGQUIT"])
def test_a_signal_waits_for_the_rank_to_listen(
    name: str, forwarder: SignalForwarder, rank: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    os.kill(os.getpid(), signal.Signals[name])  # this process is the agent, and lives on
    forwarder.forward([])
    for _ in range(3):
        forwarder.forward([rank.pid])
    assert rank.poll() is None, "a rank that is still starting would have died"
    (tmp_path / "listen").touch()
    wait_until(lambda: catches(rank.pid, signal.SIGQUIT))
    forwarder.forward([rank.pid])
    wait_until((tmp_path / f"heard-{name}").exists)
    (tmp_path / f"heard-{name}").unlink()
    forwarder.forward([rank.pid])
    (tmp_path / "leave").touch()
    assert rank.wait(300) == 0
    assert list(tmp_path.glob("heard-*")) == [], "once for each signal"
    os.kill(os.getpid(), signal.Signals[name])
    forwarder.forward([rank.pid])  # nobody is left


def test_what_stops_a_rank_and_what_asks_for_stacks_is_passed_on() -> None:
    assert set(FORWARDED_SIGNALS) == {*STOP_SIGNALS, signal.SIGQUIT}


PRINTS = """
import os, subprocess, sys
print('one', flush=True)
subprocess.run(['sh', '-c', 'echo two >&2'])
print('x' * 200_000)
print('last', end='', flush=True)
os.kill(os.getpid(), 9)
"""


def start_rank(program: str, number: int, log: int, label: bytes) -> Rank:
    return Rank(number, (sys.executable, "-c", program), os.getcwd(), os.environ, log, label)


def ended(rank: Rank) -> int | None:
    wait_until(lambda: rank.poll() is not None)
    rank.finish_reading(60)
    return rank.poll()


def test_a_rank_below_an_agent_writes_its_own_log(tmp_path: Path) -> None:
    run = RunLayout(tmp_path)
    log = tmp_path / "logs/4711.0/step2-rank0003.log"
    log.parent.mkdir(parents=True)
    log.write_text("zero\n")
    descriptor, label = open_log(run, 3, by_node=False, environment=STEP)
    assert label == b""
    assert ended(start_rank(PRINTS, 3, descriptor, label)) == -signal.SIGKILL
    os.close(descriptor)
    assert log.read_text().split() == ["zero", "one", "two", "x" * 200_000, "last"]
    again = {**STEP, "SLURM_RESTART_COUNT": "3"}
    for by_node, place in ((False, again), (False, {}), (True, STEP)):
        assert open_log(run, 3, by_node=by_node, environment=place) == (1, b"3: "), (
            "the agent's own"
        )
    (tmp_path / "logs/4711.3").mkdir()
    descriptor, _ = open_log(run, 3, by_node=False, environment=again)
    os.close(descriptor)
    assert (tmp_path / "logs/4711.3/step2-rank0003.log").exists()


def test_an_agent_puts_the_rank_before_each_line(tmp_path: Path) -> None:
    """As srun does for its own tasks; also of a rank that is killed within a line."""
    log = tmp_path / "step0-node0000.log"
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    ranks = [start_rank(PRINTS, rank, descriptor, b"%d: " % rank) for rank in (8, 11)]
    assert [ended(rank) for rank in ranks] == [-signal.SIGKILL] * 2
    os.close(descriptor)
    for rank in (8, 11):
        lines = list(lines_of_rank(log, rank))
        assert [lines[0], lines[1], lines[-1]] == [b"one", b"two", b"last"]
        assert b"".join(lines[2:-1]) == b"x" * 200_000


# Starts a rank that would live for minutes, and is killed.
AGENT = """
import os, sys, time
from hpctrain.train.launchers.rank_processes import Rank
program = "print('settled', flush=True); import time; time.sleep(300)"
rank = Rank(0, (sys.executable, "-c", program), os.getcwd(), os.environ, 2, b"")
print(rank.pid, flush=True)
time.sleep(300)
"""


def test_a_rank_does_not_outlive_its_agent(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as stream:
        agent = subprocess.Popen(
            [sys.executable, "-c", AGENT], stdout=subprocess.PIPE, stderr=stream, text=True
        )
    assert agent.stdout is not None
    rank = int(agent.stdout.readline())
    wait_until(lambda: "settled" in log.read_text())
    agent.kill()
    agent.wait()
    wait_until(lambda: not is_alive(rank))


# In place of `hpctrain.train`: a rank whose end is told by the file of its number.
RANK_MODULE = """
import os, pathlib, signal, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1], flush=True)
signal.signal(signal.SIGTERM, lambda *_: pathlib.Path("told-" + os.environ["RANK"]).touch())
pathlib.Path("ready-" + os.environ["RANK"]).touch()
order = pathlib.Path("end-" + os.environ["RANK"])
while not (order.exists() or pathlib.Path("told-" + os.environ["RANK"]).exists()):
    time.sleep(0.01)
code = int(order.read_text()) if order.exists() else 75
os.kill(os.getpid(), -code) if code < 0 else os._exit(code)
"""


@pytest.mark.parametrize(
    ("ends", "code", "recorded"),
    [
        ({2: 0, 3: 0}, TrainerExit.DONE, ()),
        ({2: 75}, TrainerExit.YIELDED, ()),
        ({3: -9}, 128 + signal.SIGKILL, (RankEnd(rank=3, code=-9),)),
        ({2: 41}, 41, (RankEnd(rank=2, code=41),)),
        ({}, 128 + signal.SIGINT, ()),  # a person at a terminal
    ],
)
def test_the_first_rank_that_fails_ends_the_others(
    ends: dict[int, int],
    code: int,
    recorded: tuple[RankEnd, ...],
    tmp_path: Path,
) -> None:
    run = RunLayout(tmp_path / "r1")
    run.create()
    run.train_config.touch()
    place = tmp_path / "place"
    (place / "hpctrain").mkdir(parents=True)
    (place / "hpctrain" / "__init__.py").touch()
    (place / "hpctrain" / "train.py").write_text(RANK_MODULE)
    log = run.rank_log(4711, 0, 2, 2)
    log.parent.mkdir(parents=True)
    words = ["--nnodes=2", "--nproc-per-node=2", str(run.train_config)]
    program = (
        "import os, signal, sys\n"
        # whoever runs the tests may ignore Ctrl-C, and children inherit that
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from hpctrain.train.launchers.agent_ranks import SignalForwarder\n"
        "from hpctrain.train.agent import main\n"
        "os.chdir(sys.argv[1])\n"
        "os.environ['PYTHONPATH'] = sys.argv[1]\n"
        "forwarder = SignalForwarder()\n"
        "forwarder.install()\n"
        "os._exit(main(sys.argv[2:], forwarder))\n"
    )
    agent = subprocess.Popen(
        [sys.executable, "-c", program, str(place), *words], env={**os.environ, **STEP, **TOLD}
    )
    wait_until(lambda: all((place / f"ready-{rank}").exists() for rank in (2, 3)))
    for rank, wanted in ends.items():
        (place / f"end-{rank}").write_text(str(wanted))
    if not ends:
        agent.send_signal(signal.SIGINT)
    assert agent.wait(300) == code
    records = read_agent_records(run, 5)
    assert tuple(end for record in records for end in record.ended) == recorded
    assert log.read_text() == f"rank 2 of 4 {run.train_config}\n"
    told = {int(one.name.removeprefix("told-")) for one in place.glob("told-*")}
    assert told == {2, 3} - ends.keys(), "who is left is asked to end"


def is_alive(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


# -- Signals go past a profiler that would keep them to itself, to the rank below it -------------


# As nsys does it starts the program as a child. A signal that reaches it ends it.
PROFILER = """
import subprocess, sys
sys.exit(subprocess.run(sys.argv[1:]).returncode)
"""
PROFILED_RANK = """
import os, pathlib, signal, time
from hpctrain.train.launchers.nsight import report_pid_to_task
from hpctrain.train.stop import StopSignals
while not os.path.exists("begin"):
    time.sleep(0.01)
stop = StopSignals()
stop.install()
def stacks(number, frame):
    pathlib.Path("stacks").touch()
signal.signal(signal.SIGQUIT, stacks)
assert report_pid_to_task(os.environ)
written = pathlib.Path(f"rank-{os.getpid()}")
written.write_text(str(os.getpid()))
written.rename("rank")  # whole, or not there
while not stop.requested:
    time.sleep(0.01)
pathlib.Path("heard").write_text(stop.name)
os._exit(75)
"""
TASK = """
import os, sys
from hpctrain.train.launchers.nsight import record
from hpctrain.train.stop import StopSignals
stop = StopSignals()
stop.install()
profiler, rank, arrived = sys.argv[1:]
stop.name = arrived or stop.name
command = [sys.executable, profiler, sys.executable, rank]
open("task", "w").close()
os._exit(record(command, os.environ, stop))
"""


@pytest.fixture
def task(tmp_path: Path) -> Callable[..., subprocess.Popen[bytes]]:
    for name, text in (("profiler.py", PROFILER), ("rank.py", PROFILED_RANK), ("task.py", TASK)):
        (tmp_path / name).write_text(text)

    def start(arrived: str = "") -> subprocess.Popen[bytes]:
        words = [sys.executable, "task.py", "profiler.py", "rank.py", arrived]
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        return subprocess.Popen(words, cwd=tmp_path, env=environment, start_new_session=True)

    return start


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2"])
@pytest.mark.parametrize("whole_group", [False, True])
def test_a_stop_signal_reaches_the_rank(
    task: Callable[..., subprocess.Popen[bytes]], tmp_path: Path, name: str, whole_group: bool
) -> None:
    started = task()
    (tmp_path / "begin").touch()
    wait_until((tmp_path / "rank").exists)
    os.kill(started.pid, signal.SIGQUIT)
    wait_until((tmp_path / "stacks").exists)
    send = os.killpg if whole_group else os.kill
    send(started.pid, signal.Signals[name])
    assert started.wait(300) == 75
    assert (tmp_path / "heard").read_text() == name
    assert not list(tmp_path.glob("hpctrain-nsight-*"))


def test_what_comes_before_the_rank_listens_is_kept_for_it(
    task: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    early, handed = task(), task("SIGUSR1")
    wait_until(lambda: len(list(tmp_path.glob("hpctrain-nsight-*"))) == 2)
    os.kill(early.pid, signal.SIGTERM)
    (tmp_path / "begin").touch()
    assert [early.wait(300), handed.wait(300)] == [75, 75]


def test_a_rank_that_is_killed_is_told_by_the_code(
    task: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    started = task()
    (tmp_path / "begin").touch()
    wait_until((tmp_path / "rank").exists)
    rank = int((tmp_path / "rank").read_text())
    profiler = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(profiler, signal.SIGKILL)
    os.kill(rank, signal.SIGKILL)
    assert started.wait(300) == 128 + signal.SIGKILL


def test_nothing_is_recorded_without_its_task(
    task: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    started = task()
    (tmp_path / "begin").touch()
    wait_until((tmp_path / "rank").exists)
    rank = int((tmp_path / "rank").read_text())
    profiler = Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1]
    started.kill()
    started.wait()
    wait_until(lambda: not Path(f"/proc/{profiler}").exists())
    os.kill(rank, signal.SIGKILL)
