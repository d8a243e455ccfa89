"""Inputs that a container does not mount are named before the job waits in the queue."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.actions.site_warnings import registry_warnings, unmounted_warnings
from hpctrain.errors import InvalidInputError
from hpctrain.spec.profile.container import ContainerProfile, Launcher

RUN = Path("/shared/runs/a")


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
