"""Which Slurms can be named, where they are kept, and what is said when one cannot be fetched."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from hpctrain.base.errors import SlurmError, SlurmUnreachableError, UsageError
from hpctrain.sandbox import debian
from hpctrain.sandbox.debian import default_cache, fetch_slurm, slurm_directory


def acting(monkeypatch: pytest.MonkeyPatch, place: Path, text: str) -> None:
    """A script in the place of the one that unpacks."""
    script = place / "acting"
    script.write_text(text)
    monkeypatch.setattr(debian, "_SCRIPT", script)


def unpacks(version: str) -> str:
    """It makes a Slurm whose programs all print this version."""
    return f"""\
mkdir -p "$2/bin" "$2/plugins"
for name in slurmctld slurmd slurmstepd scontrol sinfo squeue scancel munged munge; do
    printf '#!/bin/sh\\necho slurm-wlm {version}\\n' >"$2/bin/$name"
    chmod +x "$2/bin/$name"
done
"""


def test_the_script_is_installed_with_what_it_sources() -> None:
    script = debian._SCRIPT
    sourced = re.findall(r'^source ".*/([\w.-]+)"$', script.read_text(), re.MULTILINE)
    pyproject = tomllib.loads(Path(__file__).parents[3].joinpath("pyproject.toml").read_text())
    installed = pyproject["tool"]["setuptools"]["package-data"]["hpctrain"]
    assert sourced
    assert {f"sandbox/{name}" for name in (script.name, *sourced)} <= set(installed)
    done = subprocess.run(["bash", str(script)], cwd="/", capture_output=True, text=True)
    assert done.returncode == 2
    assert "slurm-from-debian SUITE DIRECTORY" in done.stderr


def test_a_release_lies_in_the_cache_and_a_directory_is_itself(tmp_path: Path) -> None:
    assert slurm_directory("24.11", tmp_path) == tmp_path / "24.11"
    assert slurm_directory(str(tmp_path), Path("/cache")) == tmp_path


@pytest.mark.parametrize(
    ("slurm", "message"),
    [("23.11", "no Debian suite has Slurm 23.11"), ("./nowhere", "no directory ./nowhere")],
)
def test_what_is_neither_is_refused_with_the_releases(slurm: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        slurm_directory(slurm, Path("/cache"))
    assert "22.05, 24.11, 26.05" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("variable", "below"), [("/caches", "/caches"), ("", "~/.cache"), ("relative", "~/.cache")]
)
def test_the_cache_is_where_caches_belong(
    variable: str, below: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", variable)
    assert default_cache() == Path(below).expanduser() / "hpctrain" / "slurm"


def test_what_was_fetched_has_the_version_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acting(monkeypatch, tmp_path, unpacks("24.11.5"))
    assert fetch_slurm("24.11", tmp_path / "cache") == tmp_path / "cache" / "24.11"
    acting(monkeypatch, tmp_path, unpacks("26.11.1"))
    with pytest.raises(SlurmError, match=r"forky has Slurm 26\.11 now, and not 26\.05"):
        fetch_slurm("26.05", tmp_path / "cache")


def test_no_network_is_told_from_everything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acting(monkeypatch, tmp_path, "echo == fetching >&2; echo error: nobody there >&2; exit 69")
    with pytest.raises(SlurmUnreachableError, match=r"Slurm 24\.11: nobody there"):
        fetch_slurm("24.11", tmp_path)
    acting(monkeypatch, tmp_path, "echo error: a bad signature >&2; exit 1")
    with pytest.raises(SlurmError, match="a bad signature") as caught:
        fetch_slurm("24.11", tmp_path)
    assert not isinstance(caught.value, SlurmUnreachableError)


def test_a_cache_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SlurmError, match=r"cannot unpack Slurm 24\.11 into"):
        fetch_slurm("24.11", tmp_path / "file")
