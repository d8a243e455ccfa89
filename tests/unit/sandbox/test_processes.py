"""Processes of a sandbox: reading /proc, and its monitors."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fetched_prometheus import fetched_prometheus

from hpctrain.base.errors import SlurmUnreachableError, UsageError
from hpctrain.cli.main import cli
from hpctrain.observe.monitoring import RULES
from hpctrain.sandbox import debian
from hpctrain.sandbox.daemons import find_job_processes
from hpctrain.sandbox.debian import fetch_prometheus, is_complete
from hpctrain.sandbox.monitoring import (
    MONITORS,
    MonitorFiles,
    Monitoring,
    alertmanager_yaml,
    monitor_addresses,
    monitor_argv,
    prometheus_yaml,
)
from hpctrain.sandbox.paths import Ports, SandboxPaths
from hpctrain.sandbox.processes import (
    ProcessId,
    all_processes,
    await_condition,
    descendants,
    end,
    find_process,
    is_alive,
    kill,
    parse_stat,
    read_command_line,
    read_environment,
)
from hpctrain.sandbox.shape import default_shape
from hpctrain.sandbox.state import SandboxState, read_state, write_state

SLEEP = [sys.executable, "-c", "import time; print(flush=True); time.sleep(900)"]
DEAF = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(900)",
]


@pytest.fixture
def child(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    environment = {"SLURM_CONF": "/box/slurm.conf", "EMPTY": ""}
    process = subprocess.Popen(request.param, env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def identity(process: subprocess.Popen[bytes]) -> ProcessId:
    found = find_process(process.pid)
    assert found is not None
    return found.identity


def test_a_name_may_hold_parentheses_and_spaces() -> None:
    tail = " ".join(str(number) for number in range(5, 22))
    process = parse_stat(f"42 (a (b) c) S 7 {tail} 987654 0 0")
    assert (process.pid, process.name, process.state, process.parent_pid) == (42, "a (b) c", "S", 7)
    own = find_process(os.getpid())
    assert own is not None
    assert own.parent_pid == os.getppid()


@pytest.mark.parametrize("child", [SLEEP], indirect=True)
def test_a_zombie_is_dead(child: subprocess.Popen[bytes]) -> None:
    process = identity(child)
    assert is_alive(process)
    child.kill()
    # Not waited for, so that it stays as a zombie: kill -0 still succeeds.
    assert await_condition(lambda: not is_alive(process), timeout_seconds=300)
    os.kill(child.pid, 0)


@pytest.mark.parametrize("child", [SLEEP], indirect=True)
def test_a_pid_with_another_start_is_another_process(child: subprocess.Popen[bytes]) -> None:
    impostor = ProcessId(child.pid, identity(child).start_ticks - 1)
    assert not is_alive(impostor)
    kill([impostor])
    assert is_alive(identity(child))


@pytest.mark.parametrize("child", [SLEEP], indirect=True)
def test_end_reaches_a_stopped_process(child: subprocess.Popen[bytes]) -> None:
    process = identity(child)
    os.kill(child.pid, signal.SIGSTOP)
    end([process], grace_seconds=300)
    assert child.wait(timeout=300) == -signal.SIGTERM


@pytest.mark.parametrize("child", [DEAF], indirect=True)
def test_end_insists_when_sigterm_is_ignored(child: subprocess.Popen[bytes]) -> None:
    end([identity(child)], grace_seconds=0.2)
    assert child.wait(timeout=300) == -signal.SIGKILL


@pytest.mark.parametrize("child", [SLEEP], indirect=True)
def test_environment_and_command_line(child: subprocess.Popen[bytes]) -> None:
    environment = read_environment(child.pid)
    assert environment["SLURM_CONF"] == "/box/slurm.conf"
    assert environment["EMPTY"] == ""
    assert read_command_line(child.pid) == tuple(SLEEP)
    child.kill()
    child.wait()
    assert read_environment(child.pid) == {}
    assert read_command_line(child.pid) == ()


def test_descendants_are_found_at_every_depth() -> None:
    stat = "{pid} (x) S {parent}" + " 0" * 17 + " 5 0"
    parents = {2: 1, 3: 2, 4: 3, 5: 1}
    family = [parse_stat(stat.format(pid=pid, parent=parent)) for pid, parent in parents.items()]
    assert {process.pid for process in descendants([2], family)} == {3, 4}


@pytest.mark.parametrize("child", [SLEEP], indirect=True)
def test_all_processes_leaves_ourselves_out(child: subprocess.Popen[bytes]) -> None:
    pids = {process.pid for process in all_processes()}
    assert child.pid in pids
    assert os.getpid() not in pids


# -- Which processes of a job are ranks, by the environments that three releases of Slurm give --


@pytest.fixture
def started(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SandboxPaths]:
    """A process with the variables of `request.param`, in a job on node n0 of a sandbox."""
    paths = SandboxPaths(tmp_path, tmp_path)
    job = {"SLURM_CONF": str(paths.slurm_conf), "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n0"}
    process = subprocess.Popen(SLEEP, env=job | request.param, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield paths
    process.kill()
    process.communicate()


@pytest.mark.parametrize(
    ("started", "step_id", "rank"),
    [
        ({"SLURM_PROCID": "0"}, None, None),  # the batch step of 22.05 and 24.11
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "-5"}, None, None),  # that of 26.05
        ({"SLURM_PROCID": "3", "SLURM_STEP_ID": "2"}, "2", 3),
        ({"SLURM_PROCID": "1", "SLURM_STEP_ID": "2", "RANK": "9"}, "2", 9),  # below an agent
    ],
    indirect=["started"],
)
def test_the_batch_step_is_no_rank(
    started: SandboxPaths, step_id: str | None, rank: int | None
) -> None:
    (found,) = find_job_processes(started, ("n0", "n1"))
    assert (found.job_id, found.node, found.step_id, found.rank) == ("7", "n0", step_id, rank)
    assert find_job_processes(started, ("n1",)) == ()


# -- The monitors of a sandbox: their configuration, and who may reach them --------------------


PORTS = Ports(20000, 4)
HOOK = "http://127.0.0.1:9099/alerts"


@pytest.fixture
def files(tmp_path: Path) -> MonitorFiles:
    """Below a directory whose name YAML would read as something else."""
    place = tmp_path / 'a: "b" #c'
    found = MonitorFiles(SandboxPaths(place, place / "sockets"))
    for directory in (place, *found.all_directories()):
        directory.mkdir(parents=True)
    found.rules.write_text(RULES.read_text())
    return found


@pytest.mark.nightly("a real Prometheus, which is fetched")
def test_the_real_programs_accept_their_configuration(files: MonitorFiles, tmp_path: Path) -> None:
    programs = fetched_prometheus()
    for hook in (None, HOOK):
        monitoring = Monitoring(programs.directory, tmp_path / "runs: #1", hook)
        files.prometheus_yaml.write_text(prometheus_yaml(files, PORTS, monitoring))
        files.alertmanager_yaml.write_text(alertmanager_yaml(monitoring))
        amtool = str(Path(programs.promtool).with_name("amtool"))
        for words in (
            [programs.promtool, "check", "config", str(files.prometheus_yaml)],
            [amtool, "check-config", str(files.alertmanager_yaml)],
        ):
            done = subprocess.run(words, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stdout + done.stderr
            assert "SUCCESS" in done.stdout


def test_nobody_is_told_without_a_webhook() -> None:
    (silent,) = json.loads(alertmanager_yaml(Monitoring(Path("/p"), Path("/r"))))["receivers"]
    assert set(silent) == {"name"}
    (told,) = json.loads(alertmanager_yaml(Monitoring(Path("/p"), Path("/r"), HOOK)))["receivers"]
    assert told["webhook_configs"] == [{"url": HOOK, "send_resolved": True}]


def test_monitors_listen_on_the_loopback_device_with_ports_of_their_own(
    files: MonitorFiles,
) -> None:
    seen = set()
    for name in MONITORS:
        argv = monitor_argv(name, files, PORTS, Monitoring(Path("/p"), Path("/r")))
        words = [word for word in argv if re.match(r"--(web\.)?listen(-address)?=", word)]
        assert [word.partition("=")[2].rpartition(":")[0] for word in words] == ["127.0.0.1"], argv
        seen.add(words[0].rpartition(":")[2])
    assert len(seen) == len(MONITORS)
    assert seen.isdisjoint(map(str, range(PORTS.controller, PORTS.accounting + 1)))
    assert {address.rpartition(":")[2] for address in monitor_addresses(PORTS).values()} == seen


def test_jobs_are_found_by_the_files_that_name_their_endpoints(files: MonitorFiles) -> None:
    document = json.loads(prometheus_yaml(files, PORTS, Monitoring(Path("/p"), Path("/runs"))))
    (found,) = (one for one in document["scrape_configs"] if "file_sd_configs" in one)
    assert found["file_sd_configs"][0]["files"] == ["/runs/.file_sd/*.json"]
    assert found["job_name"] != "hpctrain", "an endpoint that has gone is no dead exporter"


def test_a_sandbox_of_an_older_hpctrain_has_no_monitors(tmp_path: Path) -> None:
    paths = SandboxPaths(tmp_path, tmp_path / "sockets")
    state = SandboxState(default_shape(), paths.sockets, PORTS, (22, 5))
    write_state(paths, state)
    document = json.loads((tmp_path / "sandbox.json").read_text())
    del document["monitoring"]
    (tmp_path / "sandbox.json").write_text(json.dumps(document))
    assert read_state(tmp_path) == state and state.monitoring is None


def up(*words: str) -> None:
    cli.main(["sandbox", "up", *words], standalone_mode=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--webhook", HOOK], "--webhook is for the alerts of --prometheus"),
        (["--prometheus", "--webhook", "https://hooks.example.org/S3CRET"], "this machine"),
        (["--prometheus", "--webhook", "http://127.0.0.1.example.org/x"], "this machine"),
        (["--prometheus", "--webhook", "http://127.0.0.1@example.org/x"], "this machine"),
        (["--prometheus", "--webhook", "file:///etc/passwd"], "this machine"),
    ],
)
def test_alerts_of_a_sandbox_stay_on_this_machine(
    words: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        up("--directory", str(tmp_path / "box"), *words)
    assert "S3CRET" not in str(caught.value), "an address is a secret"
    assert not (tmp_path / "box").exists()


def test_without_a_network_nothing_is_left_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real script and apt, which asks a proxy that nobody has started."""
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with pytest.raises(SlurmUnreachableError, match="cannot fetch Prometheus") as caught:
        fetch_prometheus(tmp_path)
    assert "network" in (caught.value.hint or "")
    assert not is_complete(tmp_path)


def test_the_script_is_beside_what_it_sources() -> None:
    script = debian._PROMETHEUS_SCRIPT
    (sourced,) = re.findall(r'^source ".*/([\w.-]+)"$', script.read_text(), re.MULTILINE)
    assert script.with_name(sourced).is_file()
    done = subprocess.run(["bash", str(script)], cwd="/", capture_output=True, text=True)
    assert done.returncode == 2
    assert "prometheus-from-debian SUITE DIRECTORY" in done.stderr
