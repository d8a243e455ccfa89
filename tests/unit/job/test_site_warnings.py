"""What is refused or said of a run at its site before it waits in the queue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpctrain.base.errors import InvalidInputError, LimitError
from hpctrain.job.site_warnings import registry_warnings, staging_warnings, unmounted_warnings
from hpctrain.plan.job import TrainingJob
from hpctrain.plan.planner import make_plan
from hpctrain.spec.loader import find_profile, load_profile, load_run_spec
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profile.software import ContainerProfile, Launcher

RUN = Path("/shared/runs/a")
SPEC = """\
name: staged
model: {family: gpt, layers: 4, hidden: 64, heads: 4, seq: 32, vocab: 256}
resources: {gpus: 4}
parallel: {tp: 2, pp: 2}
batch: {global: 8}
budget: {steps: 10}
optimizer: {lr: 1.0e-3}
checkpoint: {every: 10min}
data:
  stage: true
  sources: [{path: SOURCE}]
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.bin"
    path.write_bytes(b"0" * 4000)
    return path


def site(capacity: str | None, place: Path | None = None, rate: str = "1GB/s") -> ClusterProfile:
    changes: dict[str, Any] = {}
    if capacity is not None:
        changes["software"] = {"scratch": "/local/$USER", "scratch_capacity": capacity}
    if place is not None:
        shared = {"name": "home", "path": "/", "kind": "nfs"}
        near = {"name": "work", "path": str(place), "kind": "gpfs"}
        speed = {"read_bandwidth": rate, "write_bandwidth": rate}
        own = {"read_bandwidth": "1TB/s", "write_bandwidth": "1TB/s"}
        changes["filesystems"] = [{**shared, **own}, {**near, **speed}]
    return ClusterProfile.model_validate(
        {
            **load_profile(find_profile("a100x64")).document.model_dump(mode="json", by_alias=True),
            **changes,
        }
    )


def warnings(profile: ClusterProfile, data: Path, **engine: str) -> tuple[str, ...]:
    file = data.parent / "spec.yaml"
    text = SPEC.replace("SOURCE", str(data.with_suffix("")))
    file.write_text(text)
    spec = load_run_spec(file, [f"engine.{name}={value}" for name, value in engine.items()])
    plain = spec.document.model_copy(update={"engine": load_run_spec(file, []).document.engine})
    job = TrainingJob(spec.document, profile, make_plan(plain, profile))
    return staging_warnings(job, spec, [str(data)])


def test_a_disk_with_room_takes_the_data_in_silence(data: Path) -> None:
    assert warnings(site("4kB", data.parent), data) == ()


def test_a_profile_without_a_disk_is_refused_at_the_line_of_the_spec(data: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"spec\.yaml:10:.*no disk on its nodes"):
        warnings(site(None), data)


def test_more_data_than_the_disk_holds_is_refused(data: Path) -> None:
    with pytest.raises(LimitError, match="scratch_capacity"):
        warnings(site("3.9kB"), data)


def test_minutes_of_copying_are_said_and_more_than_the_startup_timeout_refused(data: Path) -> None:
    (said,) = warnings(site("1MB", data.parent, "10B/s"), data)
    assert "copying 3.9 KiB to 1 nodes, about 6.67 min at the read bandwidth of work" in said
    with pytest.raises(LimitError, match=r"longer than `engine\.startup_timeout`"):
        warnings(site("1MB", data.parent, "10B/s"), data, startup_timeout="6min")


def test_an_engine_with_a_reader_of_its_own_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="a program of its own"):
        warnings(site("1MB"), data, name="megatron-lm", checkout=str(tmp_path))


def container(launcher: Launcher, *mounts: str, **fields: object) -> ContainerProfile:
    values = {"launcher": launcher, "image": "/nemo.sqsh", "mounts": mounts, **fields}
    return ContainerProfile.model_validate(values)


@pytest.mark.parametrize(
    "mounts, path, seen",
    [
        ((), "/data/pile.bin", False),
        (("/data:/data",), "/data/pile.bin", True),
        (("/data:/data:ro",), "/data/pile.bin", True),
        (("/data",), "/data/pile.bin", True),
        (("/data:/mnt",), "/data/pile.bin", False),  # it is elsewhere in there
        (("/dat:/dat",), "/data/pile.bin", False),
        ((), "/shared/runs/a/data.bin", True),
    ],
)
def test_pyxis(mounts: tuple[str, ...], path: str, seen: bool) -> None:
    warnings = list(unmounted_warnings(container("pyxis", *mounts), [path, path], RUN))
    assert len(warnings) == (0 if seen else 1)
    assert seen or (path in warnings[0] and "`/data:/data`" in warnings[0])


def test_apptainer_mounts_the_home_directory() -> None:
    inside = str(Path.home() / "data.bin")
    assert list(unmounted_warnings(container("apptainer"), [inside], RUN)) == []
    assert len(list(unmounted_warnings(container("pyxis"), [inside], RUN))) == 1


def test_without_a_container_everything_is_there() -> None:
    assert unmounted_warnings(None, ["/data/pile.bin"], RUN) == ()


def test_without_its_home_apptainer_has_what_is_bound_only() -> None:
    inside = str(Path.home() / "data.bin")
    assert unmounted_warnings(container("apptainer", options=["--no-home"]), [inside], RUN)
    without = container("apptainer", options=["--no-mount=bind-paths,tmp"])
    assert unmounted_warnings(without, ["/tmp/x"], RUN)
    assert not unmounted_warnings(without, [inside], RUN)


def test_apptainer_mounts_tmp_whatever_this_shell_has_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/scratch/me")
    seen = ["/tmp/x", "/var/tmp/x", "/scratch/me/x"]
    (warning,) = unmounted_warnings(container("apptainer"), seen, RUN)
    assert "/scratch/me/x" in warning


def test_what_nothing_mounts_is_refused_where_the_site_says_what_it_mounts() -> None:
    site = container("pyxis", site_mounts=["/scratch"])
    assert unmounted_warnings(site, ["/scratch/pile.bin"], RUN) == ()
    with pytest.raises(InvalidInputError) as caught:
        unmounted_warnings(site, ["/scratch/pile.bin", "/data/pile.bin"], RUN)
    (problem,) = caught.value.problems
    assert "/data/pile.bin" in problem.message
    assert "`/data:/data`" in str(problem.hint)


def test_nothing_is_said_of_mounts_that_the_job_decides() -> None:
    assert unmounted_warnings(container("pyxis", "$SCRATCH:/data"), ["/data/x"], RUN) == ()
    assert unmounted_warnings(container("edf"), ["/data/x"], RUN) == ()


@pytest.mark.parametrize(
    ("fields", "warned"),
    [
        ({"image": "nvcr.io#nvidia/pytorch:25.04-py3"}, True),
        ({"image": "docker://ubuntu"}, True),
        ({"image": "ubuntu", "cache": "/shared/images"}, False),
        ({"image": "ubuntu", "options": ["--container-name=train"]}, False),
        ({"image": "/shared/x.sqsh"}, False),
        ({"image": "$SCRATCH/x.sqsh"}, False),
    ],
)
def test_an_image_that_all_nodes_fetch_is_named(fields: dict[str, object], warned: bool) -> None:
    assert bool(registry_warnings(container("pyxis", **fields), 64)) is warned
