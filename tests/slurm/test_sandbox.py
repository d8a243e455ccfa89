"""The sandbox against the Slurm that is installed here: what it promises, and what faults do."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
from newer_slurm import NEWER, fetched
from rehearsal import PATIENCE_SECONDS, create_sandbox, wait_till_remembered
from variants import varied

from hpctrain.base.errors import SlurmError, UsageError
from hpctrain.sandbox import faults
from hpctrain.sandbox.daemons import processes_of_nodes
from hpctrain.sandbox.faults import raise_job_ids
from hpctrain.sandbox.processes import (
    ProcessId,
    all_processes,
    await_condition,
    find_process,
    is_alive,
    open_files,
    read_environment,
)
from hpctrain.sandbox.repair import repair, return_nodes
from hpctrain.sandbox.sandbox import Sandbox
from hpctrain.sandbox.shape import PartitionShape, SandboxShape, SwitchShape, default_shape
from hpctrain.slurm.parse import is_unreachable


def client_environment(sandbox: Sandbox) -> dict[str, str]:
    foreign = ("SLURM", "SBATCH", "SRUN")
    own = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return own | sandbox.environment()


def run(sandbox: Sandbox, *argv: str) -> str:
    done = subprocess.run(
        argv,
        env=client_environment(sandbox),
        cwd=sandbox.directory,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def submit(sandbox: Sandbox, *options: str, wrap: str) -> str:
    return run(sandbox, "sbatch", "--parsable", *options, f"--wrap={wrap}").strip()


def job(sandbox: Sandbox, job_id: str) -> dict[str, str]:
    """As Slurm tells it, asked again while slurmctld is held up for longer than scontrol waits."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            answer = sandbox.command("scontrol", "--oneliner", "show", "job", job_id)
            break
        except SlurmError as error:
            if not is_unreachable(str(error)) or time.monotonic() > deadline:
                raise
    return dict(word.split("=", 1) for word in answer.split() if "=" in word)


def await_true(condition: Callable[[], bool], timeout_seconds: float = PATIENCE_SECONDS) -> None:
    assert await_condition(condition, timeout_seconds), "it did not happen in time"


def await_state(sandbox: Sandbox, job_id: str, state: str) -> None:
    await_true(lambda: job(sandbox, job_id)["JobState"] == state)


def await_ranks(sandbox: Sandbox, job_id: str, count: int) -> None:
    def ranks() -> set[int | None]:
        return {process.rank for process in faults.job_processes(sandbox, job_id)} - {None}

    await_true(lambda: len(ranks()) == count)


def processes_of(directory: Path) -> list[int]:
    conf = str(directory / "slurm.conf")
    everything = all_processes()
    return [p.pid for p in everything if read_environment(p.pid).get("SLURM_CONF") == conf]


def read_name(pid: int) -> str:
    process = find_process(pid)
    return process.name if process else ""


def holds_a_log_of(directory: Path, pid: int) -> bool:
    """Whatever its environment says: that of a slurmstepd is blank since 24.11."""
    return any(name.startswith(f"{directory}/") for name in open_files(pid))


@pytest.fixture
def directory() -> Iterator[Path]:
    parent = Path(tempfile.mkdtemp(prefix="ht-", dir="/tmp"))
    yield parent / "s"
    if (parent / "s" / "sandbox.json").exists():
        Sandbox.open(parent / "s").down()
    shutil.rmtree(parent)


def test_srun_on_two_nodes_sees_the_gpus(sandbox: Sandbox) -> None:
    show = "echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"
    answer = run(sandbox, "srun", "-N2", "--gres=gpu:2", "bash", "-c", show)
    assert sorted(answer.splitlines()) == ["n0 0,1", "n1 0,1"]


def test_up_again_changes_nothing(sandbox: Sandbox) -> None:
    await_true(lambda: set(sandbox.node_states().values()) == {"idle"})
    before = sandbox.status()
    sandbox.up()
    await_true(lambda: sandbox.status() == before)
    assert before.health == "up"
    assert [node.state for node in before.nodes] == ["idle"] * 4


def test_only_the_loopback_device_is_listened_on(sandbox: Sandbox) -> None:
    ports = sandbox.state.ports
    wanted = {f"{port:04X}" for port in range(ports.controller, ports.first_node + ports.nodes)}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    # proc(5): field 1 is the local address in hexadecimal, field 3 the state; 0A is LISTEN.
    listening = [row[1].split(":") for row in rows if row[3] == "0A"]
    ours = [(address, port) for address, port in listening if port in wanted]
    assert {port for _, port in ours} == wanted
    assert {address for address, _ in ours} == {"0100007F"}


def test_nobody_else_can_enter_the_directory(sandbox: Sandbox) -> None:
    assert sandbox.directory.stat().st_mode & 0o777 == 0o700


def test_a_rebooted_node_needs_a_resume(sandbox: Sandbox) -> None:
    job_id = submit(sandbox, "-N2", "--requeue", wrap="srun sleep 3600")
    await_ranks(sandbox, job_id, 2)
    faults.crash_node(sandbox, "n1")
    faults.restart_node(sandbox, "n1", rebooted=True)
    await_true(lambda: faults.has_rebooted(sandbox, "n1"))
    assert job(sandbox, job_id)["Restarts"] == "1"
    run(sandbox, "scancel", job_id)  # it would begin again, and on this node
    return_nodes(sandbox, ("n1",))
    await_true(lambda: sandbox.node_states()["n1"] == "idle")


def test_a_killed_controller_comes_back_and_keeps_the_job(sandbox: Sandbox) -> None:
    job_id = submit(sandbox, wrap="sleep 3600")
    await_state(sandbox, job_id, "RUNNING")
    wait_till_remembered(sandbox)
    faults.kill_controller(sandbox)
    await_true(lambda: sandbox.health() == "partial")
    faults.restart_controller(sandbox)
    assert job(sandbox, job_id)["JobState"] == "RUNNING"
    assert job(sandbox, job_id)["Restarts"] == "0"


def test_ranks_outlive_their_slurmstepd_and_are_still_found(sandbox: Sandbox) -> None:
    job_id = submit(sandbox, "-N2", "--no-requeue", wrap="srun sleep 3600")
    await_ranks(sandbox, job_id, 2)
    (rank,) = [p for p in faults.job_processes(sandbox, job_id, "n1") if p.rank == 1]
    faults.kill_stepd(sandbox, "n1")
    assert rank.command_line[-1] == "3600"
    assert is_alive(rank.identity)
    assert rank in faults.job_processes(sandbox, job_id, "n1")
    faults.crash_node(sandbox, "n1")
    await_true(lambda: not is_alive(rank.identity))


def test_a_frozen_node_stands_still_until_it_is_thawed(directory: Path) -> None:
    # Slurm does not give the node up if we are held up before it is thawed.
    shape = replace(default_shape(nodes=1), slurmd_timeout_seconds=600)
    sandbox = create_sandbox(directory, shape)
    sandbox.up(PATIENCE_SECONDS)
    ticks = sandbox.directory / "ticks"
    job_id = submit(sandbox, wrap=f"while sleep 0.1; do echo >> {ticks}; done")
    await_true(ticks.exists)
    faults.freeze_node(sandbox, "n0")
    await_true(lambda: {one.state for one in processes_of_nodes(sandbox.paths, ("n0",))} == {"T"})
    frozen_at = ticks.stat().st_size
    time.sleep(0.5)
    assert ticks.stat().st_size == frozen_at
    assert [daemon.name for daemon in sandbox.status().daemons if daemon.frozen] == ["slurmd-n0"]
    faults.thaw_node(sandbox, "n0")
    await_true(lambda: ticks.stat().st_size > frozen_at)
    assert job(sandbox, job_id)["JobState"] == "RUNNING"


def test_repair_revives_what_was_killed(sandbox: Sandbox) -> None:
    submit(sandbox, "-N4", wrap="srun sleep 3600")
    wait_till_remembered(sandbox)
    faults.kill_slurmd(sandbox, "n2")
    faults.kill_controller(sandbox)
    repair(sandbox, PATIENCE_SECONDS)
    assert sandbox.health() == "up"
    await_true(lambda: set(sandbox.node_states().values()) == {"idle"})
    assert run(sandbox, "squeue", "--noheader") == ""


def test_faults_name_what_they_cannot_do(sandbox: Sandbox) -> None:
    with pytest.raises(UsageError, match="no node n9"):
        faults.crash_node(sandbox, "n9")
    with pytest.raises(UsageError, match="is running"):
        faults.restart_node(sandbox, "n0", rebooted=True)
    with pytest.raises(UsageError, match="is running"):
        faults.restart_controller(sandbox)


@pytest.mark.variant("test_preemptions_of_all_kinds_cost_no_budget")
def test_an_urgent_job_requeues_a_training_job(directory: Path) -> None:
    shape = default_shape(nodes=2, grace_seconds=40, user_signal_on_preempt=True)
    box = create_sandbox(directory, shape)
    box.up(PATIENCE_SECONDS)
    notices = directory / "notices"
    # Without srun: a step gets SIGTERM when the grace begins, and one that dies of it ends the job.
    patient = f"trap 'echo notice >> {notices}' USR1; while :; do sleep 0.1; done"
    whole = ("-N2", "--exclusive")
    training = submit(box, *whole, "--requeue", "--signal=B:USR1@1", wrap=patient)
    await_state(box, training, "RUNNING")
    submit(box, *whole, "--partition=urgent", wrap="sleep 1")
    await_true(lambda: job(box, training).get("PreemptTime", "None") != "None")
    await_true(notices.exists)
    assert job(box, training)["Restarts"] == "0"
    await_true(lambda: job(box, training)["Restarts"] == "1")


@pytest.mark.variant("test_a_crashed_node_is_lost_before_and_after_slurm_notices")
def test_a_crashed_node_sends_the_job_back_into_the_queue(directory: Path) -> None:
    # Half the usual time-out, because noticing takes twice the time-out.
    box = create_sandbox(directory, replace(default_shape(nodes=2), slurmd_timeout_seconds=5))
    box.up(PATIENCE_SECONDS)
    job_id = submit(box, "-N2", "--requeue", wrap="srun sleep 3600")
    await_ranks(box, job_id, 2)
    doomed = faults.job_processes(box, job_id, "n1")
    faults.crash_node(box, "n1")
    assert doomed
    await_true(lambda: not any(is_alive(process.identity) for process in doomed))
    assert box.health() == "partial"
    with pytest.raises(SlurmError, match="partly alive"):
        box.up()
    await_true(lambda: box.node_states().get("n1", "").startswith("down"))
    await_true(lambda: job(box, job_id)["Restarts"] == "1")


@pytest.fixture(params=varied(["installed", *NEWER], "installed"))
def either_slurm(request: pytest.FixtureRequest) -> Path | None:
    """The Slurm of this machine (None), then each newer one."""
    return None if request.param == "installed" else fetched(request.param)


def test_down_leaves_neither_process_nor_directory(
    directory: Path, either_slurm: Path | None
) -> None:
    box = create_sandbox(directory, default_shape(nodes=2), either_slurm)
    box.up(PATIENCE_SECONDS)
    # One that leaves its session and ignores the polite signals, and ranks without environment.
    stubborn = (
        "trap '' TERM; setsid bash -c 'trap \"\" TERM; sleep 3600' & "
        "srun bash -c 'env -i sleep 3600 & sleep 3600'"
    )
    job_id = submit(box, "-N2", wrap=stubborn)
    await_ranks(box, job_id, 2)

    def doomed_processes() -> list[ProcessId]:
        return [one.identity for one in processes_of_nodes(box.paths, box.shape.node_names)]

    def without_environment() -> list[str]:
        names = [read_name(one.pid) for one in doomed_processes() if not read_environment(one.pid)]
        return [name for name in names if not name.startswith("slurmstepd")]

    await_true(lambda: without_environment() == ["sleep"] * 2)
    doomed = doomed_processes()
    box.down()
    await_true(lambda: not any(map(is_alive, doomed)))
    await_true(lambda: processes_of(directory) == [])
    await_true(lambda: not any(holds_a_log_of(directory, one.pid) for one in all_processes()))
    assert not directory.exists()


def test_daemons_are_known_after_a_change_of_the_configuration(
    directory: Path, either_slurm: Path | None
) -> None:
    """Since 23.11 `scontrol reconfigure` replaces them by new processes."""
    # else Slurm may give the crashed node and its job up before we have looked
    shape = replace(default_shape(nodes=2), slurmd_timeout_seconds=600)
    box = create_sandbox(directory, shape, either_slurm)
    box.up(PATIENCE_SECONDS)
    job_id = submit(box, "-N2", wrap="srun sleep 3600")
    await_ranks(box, job_id, 2)
    raise_job_ids(box, 4711)
    assert box.health() == "up"
    assert submit(box, wrap="true") == "4711"
    faults.crash_node(box, "n1")
    await_true(lambda: {p.node for p in faults.job_processes(box, job_id)} == {"n0"})
    assert [daemon.name for daemon in box.status().daemons if not daemon.alive] == ["slurmd-n1"]


@pytest.mark.nightly("newer releases of Slurm, which are fetched")
def test_clients_of_a_newer_sandbox_are_newer_too(directory: Path) -> None:
    newer_slurm = fetched(NEWER[0])
    box = Sandbox.create(directory, default_shape(nodes=1), newer_slurm)
    box.up(PATIENCE_SECONDS)
    assert box.state.version >= (24, 5)
    assert run(box, "sh", "-c", "command -v squeue").strip() == f"{newer_slurm}/bin/squeue"
    assert run(box, "srun", "squeue", "--version") == run(box, "sinfo", "--version")
    assert Sandbox.open(directory).programs.version == box.state.version


@pytest.mark.variant("test_up_again_changes_nothing")
def test_a_kept_sandbox_comes_up_again_elsewhere(directory: Path) -> None:
    box = create_sandbox(directory, default_shape(nodes=2))
    box.up(PATIENCE_SECONDS)
    first_id = submit(box, wrap="true")
    wait_till_remembered(box)  # slurmctld has 5 s for its end
    box.down(keep=True)
    await_true(lambda: (box.health(), processes_of(directory)) == ("down", []))
    again = Sandbox.open(directory)
    again.up(PATIENCE_SECONDS)
    assert int(submit(again, wrap="true")) > int(first_id)


def test_a_directory_with_a_blank(directory: Path) -> None:
    box = create_sandbox(directory / "my cluster", default_shape(nodes=1, gpus_per_node=1))
    box.up(PATIENCE_SECONDS)
    try:
        assert run(box, "srun", "-N1", "--gpus-per-node=1", "echo", "there").strip() == "there"
    finally:
        box.down()


def test_a_directory_that_slurm_cannot_name(directory: Path) -> None:
    box = create_sandbox(directory / "50%", default_shape(nodes=1))
    with pytest.raises(UsageError, match="no way to write '%'"):
        box.up(PATIENCE_SECONDS)
    assert processes_of(directory) == []


def test_a_directory_too_deep_for_sockets(directory: Path) -> None:
    deep = directory / ("d" * 60) / ("e" * 60)
    box = create_sandbox(deep, default_shape(nodes=1))
    box.up(PATIENCE_SECONDS)
    sockets = box.paths.sockets
    try:
        assert sockets.parent == Path("/tmp")
        assert sockets.stat().st_mode & 0o777 == 0o700
        assert run(box, "srun", "-N1", "hostname")
    finally:
        box.down()
        shutil.rmtree(directory)
    assert not sockets.exists()


@pytest.mark.variant("test_repair_revives_what_was_killed")
def test_a_daemon_that_cannot_start_is_reported_and_nothing_stays(directory: Path) -> None:
    shape = default_shape(nodes=2)
    broken = PartitionShape("broken", nodes="no-such-node")
    box = create_sandbox(
        directory,
        SandboxShape(2, 1, "a100", 4, 4000, (*shape.partitions, broken)),
    )
    started_at = time.monotonic()
    with pytest.raises(SlurmError, match="no-such-node"):
        box.up(timeout_seconds=300)
    assert time.monotonic() - started_at < 300, "a daemon that is dead is not waited for"
    assert box.health() == "down"
    assert processes_of(directory) == []


def test_64_nodes_below_a_tree_of_switches(directory: Path) -> None:
    leaves = tuple(
        SwitchShape(f"leaf{leaf}", nodes=tuple(f"n{leaf * 16 + node}" for node in range(16)))
        for leaf in range(4)
    )
    spine = SwitchShape("spine", switches=tuple(leaf.name for leaf in leaves))
    shape = SandboxShape(
        nodes=64,
        gpus_per_node=8,
        gpu_type="h100",
        cpus_per_node=96,
        memory_mib=1_000_000,
        partitions=default_shape().partitions,
        switches=(*leaves, spine),
        accounting="filetxt",
        slurmd_timeout_seconds=600,
    )
    box = create_sandbox(directory, shape)
    box.up(PATIENCE_SECONDS)
    topology = run(box, "scontrol", "show", "topology")
    assert re.search(r"SwitchName=leaf3 Level=0 .*63\]?$", topology, re.MULTILINE)
    assert re.search(r"SwitchName=spine Level=1 .*Nodes=n\[0-63\]", topology)
    place = run(box, "srun", "-N16", "-wn20", "--gres=gpu:8", "printenv", "SLURM_TOPOLOGY_ADDR")
    assert len(place.split()) == 16
    assert {address.rsplit(".", 1)[0] for address in place.split()} == {"spine.leaf1"}
    await_true(lambda: "JobState=COMPLETED" in box.paths.jobcomp.read_text())


@pytest.mark.skipif(os.geteuid() != 0, reason="all other tests run as an ordinary user already")
def test_an_ordinary_user_needs_no_root(directory: Path) -> None:
    # Not nobody, whose name Slurm 26.05 refuses for SlurmUser.
    ordinary = pwd.getpwnam("games")
    os.chown(directory.parent, ordinary.pw_uid, ordinary.pw_gid)
    # A fork, not a new interpreter: that one may lie where only root can read it.
    process = get_context("fork").Process(target=live_as, args=(ordinary, directory))
    process.start()
    process.join(timeout=2 * PATIENCE_SECONDS)
    assert process.exitcode == 0
    assert processes_of(directory) == []
    assert not directory.exists()


def live_as(user: pwd.struct_passwd, directory: Path) -> None:
    """In a process of its own: become `user` for good, and use a sandbox from up to down."""
    os.setgroups([])
    os.setgid(user.pw_gid)
    os.setuid(user.pw_uid)
    os.chdir(directory.parent)
    box = create_sandbox(directory, default_shape(nodes=2))
    box.up(PATIENCE_SECONDS)
    assert run(box, "srun", "-N2", "id", "-un").split() == [user.pw_name] * 2
    faults.crash_node(box, "n1")
    assert box.health() == "partial"
    box.down()
