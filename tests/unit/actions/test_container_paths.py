"""Inputs that a container does not mount are named before the job waits in the queue."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from hpctrain.actions.container_paths import unmounted_warnings
from hpctrain.spec.profile.software import ContainerProfile

RUN = Path("/shared/runs/a")


def container(launcher: Literal["pyxis", "apptainer"], *mounts: str) -> ContainerProfile:
    return ContainerProfile(launcher=launcher, image="nemo.sqsh", mounts=mounts)


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
    assert list(unmounted_warnings(None, ["/data/pile.bin"], RUN)) == []
