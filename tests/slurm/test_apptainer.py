"""Ranks in a real Apptainer, as the rendered script starts it: stopped, resumed, refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from debian_apptainer import MARKER, ROOT, Images, build_images, fetched_apptainer, in_container
from rehearsal import PlannedFault, Rehearsal, Stage
from slurm_settings import grace
from variants import varied

from hpctrain.records.find import RunFiles
from hpctrain.records.kept_code import is_current
from hpctrain.records.ledger import EventKind
from hpctrain.records.software import read_software
from hpctrain.runs.state import RunState
from hpctrain.sandbox.processes import read_environment
from hpctrain.version import __version__

pytestmark = pytest.mark.nightly("a real Apptainer, which is fetched")

# What a shell would make something else of.
ODD = 'it\'s $$(id) `id` "x" \\ $$HOME'
ODD_INSIDE = ODD.replace("$$", "$")


@pytest.fixture(scope="module")
def programs() -> Path:
    return fetched_apptainer()


@pytest.fixture(autouse=True)
def in_path(programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Building an image would leave a cache in the home directory."""
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("APPTAINER_CONFIGDIR", str(tmp_path / "apptainer"))


@pytest.fixture
def images(in_path: None, tmp_path: Path) -> Images:
    return build_images(tmp_path)


def environments_inside(rehearsal: Rehearsal) -> dict[int, dict[str, str]]:
    """The variables of the ranks whose root directory is the image's."""
    return {
        process.rank: dict(read_environment(process.pid))
        for process in rehearsal.processes()
        if process.rank is not None and Path("/proc", str(process.pid), "root", MARKER).exists()
    }


@pytest.mark.parametrize("kind", varied(["directory", "sif"], "directory"))
def test_a_run_that_is_preempted_in_its_container_is_the_same_run(
    kind: str, stage: Stage, reference: RunFiles, images: Images, programs: Path
) -> None:
    """The directory with a clean environment, the file with that of the job."""
    image, options = (images.directory, ["--cleanenv"]) if kind == "directory" else (images.sif, [])
    rehearsal = stage.start(
        f"name=in-a-{kind}",
        f"environment.variables.ODD={json.dumps(ODD)}",
        "environment.variables.LD_LIBRARY_PATH=/plugin",
        planned=(PlannedFault(epoch=1, rank=1, step=13, do="await_warning"),),
        software=in_container(programs, image, stage.directory, options),
    )
    rehearsal.wait_for_step(12)
    inside = environments_inside(rehearsal)
    assert sorted(inside) == [0, 1], rehearsal.logs()
    nodes = rehearsal.nodes()
    for rank, variables in inside.items():
        assert variables["APPTAINER_CONTAINER"] == str(image)
        assert variables["SLURM_PROCID"] == str(rank)
        assert variables["SLURMD_NODENAME"] == nodes[rank]
        assert variables["ODD"] == ODD_INSIDE
        assert variables["OMP_NUM_THREADS"] == "1", "the profile's, not the image's"
        assert variables["OF_THE_IMAGE"] == "yes"
        assert variables["LD_LIBRARY_PATH"].split(":")[0] == "/plugin"
        # sbatch(1), OUTPUT ENVIRONMENT VARIABLES: the job has it, and nobody has named it
        assert ("ENVIRONMENT" in variables) == (kind == "sif")
    with grace(stage.sandbox, seconds=600):
        rehearsal.urgent_job()
        rehearsal.wait(lambda: bool(rehearsal.causes), "preempted")
    rehearsal.assert_done_exactly(reference)
    assert rehearsal.causes == ["preempted", "done"], rehearsal.logs()
    resumed = rehearsal.events(EventKind.LAUNCH_STARTED)[1].resume_step
    assert resumed == 13, "the ranks saved and left within the grace"


def assert_refused(rehearsal: Rehearsal, *words: str) -> None:
    """Over after one launch, for what every node has in common, which is named."""
    row = rehearsal.wait_till_over()
    assert (row.state, rehearsal.causes) == (RunState.FAILED, ["config_error"]), rehearsal.logs()
    (ended,) = rehearsal.events(EventKind.LAUNCH_ENDED)
    assert all(word in str(ended.reason) for word in words), ended


def test_a_mount_that_no_node_has_stops_the_run_and_is_named(
    stage: Stage, images: Images, programs: Path
) -> None:
    mounts = ["/nowhere/at/all"]
    software = in_container(programs, images.directory, stage.directory, mounts=mounts)
    rehearsal = stage.start("name=unbound", software=software)
    assert_refused(rehearsal, "mount source /nowhere/at/all doesn't exist")


@pytest.mark.variant("test_a_mount_that_no_node_has_stops_the_run_and_is_named")
def test_another_hpctrain_in_the_image_is_not_the_one_that_runs(
    stage: Stage, images: Images, programs: Path, tmp_path: Path
) -> None:
    """A run keeps its code, and its ranks import that."""
    other = tmp_path / "version.py"
    other.write_text('__version__ = "0.0.1"\n')
    mounts = [f"{other}:{ROOT / 'hpctrain/version.py'}"]
    software = in_container(programs, images.directory, stage.directory, mounts=mounts)
    rehearsal = stage.start("name=other-version", software=software)
    row = rehearsal.wait_till_over()
    assert row.state is RunState.DONE, rehearsal.logs()
    (software,) = read_software(rehearsal.run.layout)
    assert software.facts.hpctrain == __version__
    assert is_current(rehearsal.run.layout, software.facts.code) and software.facts.code
