"""What a first start is judged by: the report of its job, or Slurm's record and a log."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import hpctrain

from hpctrain.job.prepare import prepare
from hpctrain.job.submit import first_start_note
from hpctrain.records.first_starts import FirstStart, read_first_starts, record_first_start
from hpctrain.site.doctor import SiteFinding
from hpctrain.site.first_start import StartRequest, start_job
from hpctrain.site.start_findings import (
    BatchReport,
    Interpreter,
    StartExpectation,
    StartOutcome,
    TaskReport,
    judge_request,
    judge_start,
)
from hpctrain.site.start_survey import elf_machine, numbers
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.records import JobRecord
from hpctrain.slurm.states import JobState
from hpctrain.spec.loader import load_named_profile
from hpctrain.spec.profile import ClusterProfile

NAMED = load_named_profile("a100x64").document
WORKS = {"returncode": 0, "text": "ok", "seconds": 1.0, "came": True}
BROKEN = {"returncode": 1, "text": "first\nModuleNotFoundError: nothing", "seconds": 1.0}
ENDED = JobRecord(7, state=JobState.FAILED, node_list="n1", exit_code=78, start_time=100.0)
PROCESS: dict[str, Any] = {
    "host": "n1",
    "machine": "x86_64",
    "clock": 105.0,
    "python": "/sw/bin/python3",
    "version": [3, 12, 1],
    "elf": "x86_64",
    "cpus": 4,
    "node_cpus": 96,
    "threads_per_core": 1,
    "gpu_devices": 8,
    "run_directory": "/lustre/runs/.start",
    "digests": {"NCCL_DEBUG": "1234"},
}
BATCH: dict[str, Any] = {
    **PROCESS,
    "shell": {"BASH": "5.2", "LOGIN": "", "MODULE": "function"},
    "names": {"WORK": True},
    "supervisor": {**WORKS, "text": "/lustre/runs/.start/software/hpctrain.zip/hpctrain"},
    "step": WORKS,
    "warned": WORKS,
    "complete": True,
}
DISK = {"path": "/lustre", "place": "/lustre", "there": True, "mount": "/lustre", "kind": "lustre"}
TASK: dict[str, Any] = {
    **PROCESS,
    "interfaces": {
        "lo": {"up": True, "addressed": True},
        "ib0": {"up": True, "addressed": True},
        "ib1": {"up": False, "addressed": False},
    },
    "interface_variables": {},
    "filesystems": [{**DISK, "free_bytes": 10**13, "free_inodes": 10**9, "write_seconds": 0.01}],
    "memlock": -1,
    "nofile": 65536,
    "shared_memory_bytes": 2**35,
    "memory_limit_bytes": None,
    "torch": {
        **WORKS,
        "text": json.dumps({"version": "2.9", "cuda": "12.8", "hip": None, "gpus": 0}),
    },
    "packages": {**WORKS, "text": json.dumps({"megatron.core": "0.16", "transformers": None})},
}
EXPECTED = StartExpectation(4, True, ("filesystems[0].path",), {"WORK": "software.python"})


def outcome(
    batch: dict[str, Any] | None = None, task: dict[str, Any] | None = None, **more: Any
) -> StartOutcome:
    """A job that has started twice and reported, with changes."""
    return StartOutcome(
        job_id=7,
        submit_time=90.0,
        seen_time=110.0,
        machine="x86_64",
        directory="/lustre/runs/.start",
        **{
            "interpreter": Interpreter("/sw/bin/python3", "x86_64"),
            "expected": EXPECTED,
            "record": ENDED,
            "batch": None if batch is None else BatchReport.model_validate({**BATCH, **batch}),
            "task": None if task is None else TaskReport.model_validate({**TASK, **task}),
            "restarts": 1,
            **more,
        },
    )


def with_interface(interface: str | None) -> ClusterProfile:
    network = NAMED.network.model_copy(update={"interface": interface})
    return NAMED.model_copy(update={"network": network, "environment": ()})


def failing(found: tuple[SiteFinding, ...]) -> dict[str, SiteFinding]:
    return {one.topic: one for one in found if one.state == "fails"}


def test_a_start_that_works() -> None:
    found = judge_start(with_interface("ib0"), outcome({}, {}))
    assert {one.state for one in found} == {"works"}, [one for one in found if one.state != "works"]
    said = " ".join(one.sentence for one in found)
    assert "Restarts=1" in said and "megatron.core 0.16" in said and "no limit of memory" in said


@pytest.mark.parametrize(
    ("batch", "task", "topic", "field"),
    [
        ({"version": [3, 9, 2]}, {}, "interpreter", "software.python"),
        ({"supervisor": BROKEN}, {}, "supervisor", "software.python"),
        ({"names": {"WORK": False}}, {}, "variables", "software.python"),
        ({"warned": {**WORKS, "came": False}}, {}, "warning", None),
        ({"step": BROKEN}, None, "step", None),
        ({}, {"torch": BROKEN}, "torch", "software.python"),
        ({}, {"filesystems": [{**DISK, "there": False}]}, "file system", "filesystems[0].path"),
        ({}, {"filesystems": [{**DISK, "error": "stale"}]}, "file system", "filesystems[0].path"),
        ({}, {"shared_memory_bytes": 2**20}, "shared memory", None),
    ],
)
def test_what_fails_names_its_field(
    batch: dict[str, Any], task: dict[str, Any] | None, topic: str, field: str | None
) -> None:
    found = failing(judge_start(with_interface("ib0"), outcome(batch, task)))
    assert [*found] == [topic] and found[topic].field == field
    if batch.get("supervisor"):
        assert "ModuleNotFoundError: nothing" in found[topic].sentence


def test_torch_for_other_gpus() -> None:
    text = json.dumps({"version": "2.9", "cuda": None, "hip": "6.2", "gpus": 0})
    found = failing(
        judge_start(with_interface(None), outcome({}, {"torch": {**WORKS, "text": text}}))
    )
    assert "built for ROCm" in found["GPUs"].sentence


@pytest.mark.parametrize(
    ("interface", "variables", "change"),
    [
        ("eth0", {}, "name one of lo, ib0"),
        ("ib1", {}, "name one of lo, ib0"),  # it is down
        ("ib", {}, None),  # NCCL takes a beginning
        ("ib", {"GLOO_SOCKET_IFNAME": "ib"}, "name `ib0`"),
        ("ib0", {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0"}, None),
        (None, {"NCCL_SOCKET_IFNAME": "^lo"}, None),
    ],
)
def test_interfaces(interface: str | None, variables: dict[str, str], change: str | None) -> None:
    task = {"interface_variables": variables}
    found = failing(judge_start(with_interface(interface), outcome({}, task)))
    assert {one.change for one in found.values()} == ({change} if change else set())


def test_threads_for_cores() -> None:
    nodes = NAMED.nodes.model_copy(update={"cpus": 96})
    options = NAMED.slurm.options.model_copy(update={"srun": {"hint": "nomultithread"}})
    slurm = NAMED.slurm.model_copy(update={"options": options})
    profile = with_interface("ib0").model_copy(update={"nodes": nodes, "slurm": slurm})
    found = failing(judge_start(profile, outcome({}, {"threads_per_core": 2})))
    assert found["CPUs"].field == "nodes.cpus" and "`cpus: 48`" in (found["CPUs"].change or "")


@pytest.mark.parametrize(
    ("requeue", "record", "state", "words"),
    [
        ({"returncode": 1, "text": "disabled"}, ENDED, "fails", "refused: disabled"),
        (None, ENDED, "fails", "has not started again"),
        (None, replace(ENDED, state=JobState.PENDING), "unknown", "back in the queue"),
    ],
)
def test_a_requeue_that_is_not_seen(
    requeue: dict[str, Any] | None, record: JobRecord, state: str, words: str
) -> None:
    found = judge_start(
        with_interface("ib0"), outcome({"requeue": requeue}, {}, restarts=None, record=record)
    )
    (one,) = [one for one in found if one.topic == "requeue"]
    assert one.state == state and words in one.sentence


@pytest.mark.parametrize(("clock", "words"), [(80.0, "10 s behind"), (130.0, "20 s ahead of")])
def test_clocks(clock: float, words: str) -> None:
    found = judge_start(with_interface("ib0"), outcome({"clock": clock}, {}))
    assert words in next(one.sentence for one in found if one.topic == "clock")


FOREIGN = Interpreter("/sw/bin/python3", "aarch64")


@pytest.mark.parametrize(
    ("code", "log", "more", "field", "words"),
    [
        (
            78,
            "hpctrain: software.setup: /s.sh:3: `foo` failed on n1\n",
            {},
            "software.setup",
            "/s.sh:3",
        ),
        (1, "line 9: WORK: unbound variable\n", {}, "software.python", "exit code 1"),
        (127, "exec: /sw/bin/python3: not found\n", {}, "software.python", "is not on n1"),
        (
            126,
            "/sw/bin/python3: Exec format error\n",
            {"interpreter": FOREIGN},
            "software.python",
            "built for aarch64",
        ),
        (
            1,
            "/sw/bin/python3: cannot execute binary file\n",
            {"interpreter": FOREIGN},
            "software.python",
            "and this machine is x86_64",
        ),
        (1, "", {}, None, "does not see /lustre/runs/.start"),
    ],
)
def test_a_job_that_never_reported(
    code: int, log: str, more: dict[str, Any], field: str | None, words: str
) -> None:
    job = outcome(record=replace(ENDED, exit_code=code), log=log, restarts=None, **more)
    (found,) = judge_start(NAMED, job)
    assert found.state == "fails" and found.field == field and words in found.sentence


def test_a_job_that_waits_or_runs_is_not_confirmed() -> None:
    waiting = replace(ENDED, state=JobState.PENDING, reason="Priority", exit_code=None)
    job = outcome(record=waiting, gave_up=True)
    (found,) = judge_start(NAMED, job)
    assert found.state == "unknown" and "jobs of higher priority come first" in found.sentence
    assert not job.is_confirmed
    running = replace(waiting, state=JobState.RUNNING)
    (found,) = judge_start(NAMED, outcome(record=running, log="copying\n", gave_up=True))
    assert "has not reported; its log ends: copying" in found.sentence


def test_a_request_that_is_refused() -> None:
    assert judge_request(NAMED, "--nodes=2", None, None).state == "works"
    found = judge_request(NAMED, "--nodes=2", "sbatch: not available", "cpus-per-task=192")
    assert found.field == "nodes.cpus" and "without `--cpus-per-task=192`" in found.sentence


@pytest.mark.parametrize("name", ["a100x64", "h100x16", "gb200nvl72", "sandbox"])
def test_the_job_asks_for_one_node_and_is_else_that_of_a_run(name: str) -> None:
    start = start_job(load_named_profile(name), StartRequest(account="me"), "/sw/python")
    script = start.script
    assert "#SBATCH --nodes=1\n" in script and "--account=me" in script
    assert "--exclusive" not in script and "gres=gpu" not in script
    assert "exec /sw/python start_survey.py batch -- \\\n  srun" in script
    assert script.rstrip().endswith("start_survey.py task")
    assert any(one.startswith("nodes=") for one in start.request)
    gpus = start_job(load_named_profile(name), StartRequest(gpus=1), "/sw/python").script
    assert "gpu" in "".join(line for line in gpus.splitlines() if line.startswith("#SBATCH"))


def test_masks_of_a_whole_node_are_not_those_of_a_small_job() -> None:
    script = start_job(load_named_profile("lumi-g"), StartRequest(account="me")).script
    assert "cpu-bind" not in script and "--mpi=none" in script


def test_programs_and_lists_of_the_kernel(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\n# not for any processor at all\n")
    assert elf_machine(str(script)) is None and elf_machine("/nowhere") is None
    assert elf_machine("/proc/self/exe") is not None
    assert numbers("0,24") == [0, 24] and numbers("0-2") == [0, 1, 2]


_SPEC = """
name: small
model: gpt2
batch: {global: 8, micro: 1}
budget: {steps: 4}
precision: bf16
optimizer: {lr: 1e-3}
parallel: auto
recompute: none
checkpoint: {every_steps: 4}
resources: {gpus: 8, walltime: 00:30:00}
"""


def test_submit_says_it_on_stderr_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm()
    monkeypatch.setattr("hpctrain.slurm.client.SlurmClient", lambda: slurm)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.yaml").write_text(_SPEC)
    words = ("submit", "-p", "a100x1", "spec.yaml", "-y", "--json")
    first, second = hpctrain(*words), hpctrain(*words)
    assert first.exit_code == second.exit_code == 0, first.stderr
    hint = "has not been proved: hpctrain doctor --start -p a100x1\n"
    assert hint in first.stderr and hint not in second.stderr
    assert json.loads(first.stdout)["submitted"]["job_id"] == 1


def test_a_missing_proof_is_told_once(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    runs = tmp_path / "runs"
    prepared = prepare(root / "examples/llama7b.yaml", "a100x1", runs=runs)
    note = first_start_note(prepared, runs)
    assert note == "The first start of profile a100x1 has not been proved"
    assert first_start_note(prepared, runs) is None
    (told,) = read_first_starts(runs)
    assert told.event == "told" and told.profile_digest == prepared.profile.digest
    assert (runs / ".first-starts.jsonl").stat().st_mode & 0o007 == 0
    with (runs / ".first-starts.jsonl").open("a") as file:
        file.write('{"event": "pro')  # a crash in the middle of a line
    assert read_first_starts(runs) == (told,)
    proved = FirstStart(
        event="proved",
        profile="other",
        profile_digest=prepared.profile.digest,
        partition=prepared.job.partition.name,
        event_time=1.0,
    )
    record_first_start(tmp_path / "others", proved)
    assert first_start_note(prepared, tmp_path / "others") is None
    trained = tmp_path / "third" / "old-run"
    trained.mkdir(parents=True)
    (trained / "ledger.jsonl").write_text("")
    (trained / "metrics.jsonl").write_text("{}\n")
    (trained / "job.sbatch").write_text(prepared.script)
    assert first_start_note(prepared, tmp_path / "third") is None
    emulated = prepare(root / "examples/gpt-tiny.yaml", "sandbox", runs=runs)
    assert first_start_note(emulated, tmp_path / "fourth") is None
