"""The order of things around a job array: plan, submit, wait, merge; and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from virtual_clock import VirtualClock

from hpctrain.base.errors import HpctrainError, SlurmUnreachableError, UsageError
from hpctrain.base.units import Duration
from hpctrain.data import on_slurm as data_on_slurm
from hpctrain.data.on_slurm import ArrayRequest, prepare_on_slurm, wait_for
from hpctrain.job.render.environment import MUST
from hpctrain.records.datasets import DatasetReport, DatasetRequest, SamplesSidecar, ShardsReport
from hpctrain.slurm.arrays import ArrayOptions
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.records import JobRecord
from hpctrain.slurm.states import JobState
from hpctrain.spec.loader import find_profile, load_profile
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profile.software import ContainerProfile, ModulesProfile, SoftwareProfile

PROFILE = load_profile(find_profile("sandbox", [])).document
REPORT = DatasetReport(
    prefix="out/x",
    status="written",
    dataset=SamplesSidecar(
        format="packed", samples=3, sources_sha256="", request_sha256="", npz_bytes=1, npz_sha256=""
    ),
    skipped=(),
    over_budget_files=0,
)


class Place:
    """The data program and submitit, played; `steps` is what was done, in order."""

    def __init__(self, directory: Path, missing: int = 5) -> None:
        self.slurm, self.missing, self.steps = FakeSlurm(), missing, list[str]()
        self.directory, self.options, self.commands = directory, list[ArrayOptions](), list[Any]()
        self.request = DatasetRequest(output=Path("out/x"), inputs=(Path("in"),), workers=3)
        directory.mkdir()

    def run_program(self, command: list[str], output: Path, timeout_seconds: float) -> bytes:
        (stage,) = (word.partition("=")[2] for word in command if word.startswith("--stage="))
        self.steps.append(stage)
        if stage == "plan":
            plan = ShardsReport(directory=str(self.directory), shards=9, missing=self.missing)
            return plan.model_dump_json().encode()
        return REPORT.model_dump_json().encode()

    def submit_array(self, commands: Any, folder: Path, options: ArrayOptions) -> int:
        self.steps.append("submit")
        self.commands, self.options = list(commands), [*self.options, options]
        ended = JobRecord(71, state=JobState.COMPLETED, array_job_id=70)
        self.slurm.records[71] = ended
        return 70

    def prepare(self, jobs: int = 2, profile: ClusterProfile = PROFILE, **more: Any) -> Any:
        array = ArrayRequest(profile, jobs, **more)
        said: list[str] = []
        report = prepare_on_slurm(self.request, array, self.slurm, said.append)  # type: ignore[arg-type]
        self.said = said
        return report


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, virtual_clock: VirtualClock) -> Place:
    made = Place(tmp_path / "shards")
    monkeypatch.setattr(data_on_slurm, "run_program", made.run_program)
    monkeypatch.setattr(data_on_slurm, "submit_array", made.submit_array)
    return made


def test_plan_array_merge(place: Place) -> None:
    assert place.prepare() == REPORT
    assert place.steps == ["plan", "submit", "merge"]
    assert place.said == ["job array 70: shards 5, elements 2"]
    for number, command in enumerate(place.commands):
        assert command[1:5] == ["-P", "-m", "hpctrain.data.making", "--json"]
        assert command[5:] == [f"--shards={place.directory}", f"--share={number}/2", "--workers=3"]
    (options,) = place.options
    assert (options.partition, options.cpus, options.name) == ("train", 3, "data-x")
    assert options.walltime_minutes == 240
    assert options.variables == ("HOME", "LANG", "PATH", "USER")


def test_data_are_made_where_the_site_wants_them(place: Place) -> None:
    """A partition without GPUs is none of those that runs may use."""
    slurm = PROFILE.slurm.model_copy(update={"data_partition": "cpu", "export": "all"})
    profile = PROFILE.model_copy(update={"slurm": slurm})
    place.prepare(profile=profile)
    place.prepare(profile=profile, partition="train")
    assert [options.partition for options in place.options] == ["cpu", "train"]
    assert place.options[0].variables is None
    with pytest.raises(UsageError, match="no partition other"):
        place.prepare(profile=profile, partition="other")


def test_no_more_elements_than_shards_and_none_without(place: Place) -> None:
    place.missing = 1
    place.prepare(jobs=50)
    assert len(place.commands) == 1
    place.missing, place.steps = 0, []
    place.prepare()
    assert place.steps == ["plan", "merge"]


def test_an_array_that_is_still_there_is_waited_for(place: Place) -> None:
    """Somebody pressed Ctrl-C while it ran, and starts the command again."""
    place.prepare()
    place.slurm.records[71] = JobRecord(71, state=JobState.RUNNING, array_job_id=70)
    asked = 0
    original = place.slurm.jobs

    def jobs(ids: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 4:
            place.slurm.records[71] = replace(place.slurm.records[71], state=JobState.FAILED)
        return original(ids)

    place.slurm.jobs = jobs  # type: ignore[method-assign]
    place.steps = []
    place.prepare()
    assert place.steps == ["plan", "merge"] and asked >= 4
    place.steps = []
    place.prepare()
    assert place.steps == ["plan", "submit", "merge"], "it has ended with shards missing"


def test_silence_is_no_end(place: Place, virtual_clock: VirtualClock) -> None:
    place.slurm.records[1] = JobRecord(1, state=JobState.RUNNING)
    place.slurm.away = True
    with pytest.raises(SlurmUnreachableError):
        wait_for(1, place.slurm)  # type: ignore[arg-type]
    assert 0 < virtual_clock.passed_seconds - data_on_slurm._PATIENCE_SECONDS < 60


def test_shards_that_are_missing_in_the_end_lead_to_the_logs(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(command: list[str], output: Path, timeout_seconds: float) -> bytes:
        if "--stage=merge" in command:
            raise HpctrainError("2 of 9 shards are missing", hint="the same command goes on")
        return place.run_program(command, output, timeout_seconds)

    monkeypatch.setattr(data_on_slurm, "run_program", fails)
    with pytest.raises(HpctrainError, match="2 of 9") as caught:
        place.prepare()
    assert f"goes on; logs of the array are in {place.directory}/slurm" in str(caught.value.hint)


def test_the_profile_says_how_to_ask(place: Place) -> None:
    software = SoftwareProfile(
        python="/opt/py thon",
        modules=ModulesProfile(init="/etc/lmod.sh", purge=True, load=("python/3.11", "a b")),
    )
    slurm = PROFILE.slurm.model_copy(update={"account": "lab", "qos": "low", "constraint": "cpu"})
    profile = PROFILE.model_copy(update={"software": software, "slurm": slurm})
    place.prepare(profile=profile, partition="urgent", walltime=Duration(90))
    (options,) = place.options
    assert options.parameters() == dict(
        job_name="data-x", time=2, cpus_per_task=3, partition="urgent", account="lab", qos="low",
        constraint="cpu",
        setup=[
            *(MUST, "must test -r /etc/lmod.sh"),
            *("# shellcheck source=/dev/null", "source /etc/lmod.sh", "must module purge"),
            *("must module load python/3.11", "must module load 'a b'", "module list"),
        ],
    )  # fmt: skip
    assert place.commands[0][0] == "/opt/py thon"


def test_what_is_refused_before_anything_is_planned(place: Place) -> None:
    container = SoftwareProfile(container=ContainerProfile(launcher="pyxis", image="x"))
    limited = PROFILE.slurm.partitions[0].model_copy(update={"max_walltime": Duration(3600)})
    slurm = PROFILE.slurm.model_copy(update={"partitions": (limited,)})
    for profile, more, words in (
        (PROFILE.model_copy(update={"software": container}), {}, "outside"),
        (PROFILE, {"partition": "none"}, "no partition none: train, urgent"),
        (PROFILE.model_copy(update={"slurm": slurm}), {"walltime": Duration(7200)}, "at most"),
        (PROFILE, {"jobs": 0}, "--jobs must be at least 1"),
    ):
        with pytest.raises(UsageError, match=words):
            place.prepare(profile=profile, **more)
    assert place.steps == []
