"""`hpctrain report`: where the page goes, and who may read it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpctrain.base.errors import NoSuchRunError
from hpctrain.cli.main import cli
from tests.fabricated_runs import LAUNCHED, STARTED, SUBMITTED, fabricate


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    directory = tmp_path / "runs"
    directory.mkdir()
    fabricate(directory, "gpt-a", entries=(*SUBMITTED, STARTED, LAUNCHED), steps=5)
    fabricate(directory, "gpt-b", entries=(*SUBMITTED, STARTED, LAUNCHED), steps=7)
    return directory


def run(*words: str, runs: Path) -> str:
    result = CliRunner().invoke(cli, ["report", *words, "--runs", str(runs), "--offline"],
                                catch_exceptions=False)  # fmt: skip
    assert result.exit_code == 0, result.output
    return result.output


def test_the_page_is_a_private_file_with_the_name_of_the_run(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o2770)  # what is made here belongs to a group, and mostly may be read by it
    monkeypatch.chdir(tmp_path)
    old = os.umask(0)
    try:
        assert run("gpt-a", runs=runs) == "gpt-a.html\n"
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "gpt-a.html").stat().st_mode) == 0o600


def test_several_runs_go_into_one_file(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "both.html"
    assert run("gpt-a", "gpt-b", "-o", str(page), runs=runs) == f"{page}\n"
    assert "2 runs side by side" in page.read_text()


def test_a_run_that_is_named_twice_is_one_run(runs: Path) -> None:
    assert "side by side" not in run("gpt-a", "gpt-a", "-o", "-", runs=runs)


def test_a_dash_is_stdout(runs: Path) -> None:
    output = run("gpt-b", "-o", "-", runs=runs)
    assert output.startswith("<!doctype html>") and output.rstrip().endswith("</html>")


def test_slurm_is_not_asked_offline(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("Slurm was asked")

    monkeypatch.setattr("hpctrain.slurm.client.run_command", refuse)
    assert "Slurm was not asked" in run("gpt-a", "-o", "-", runs=runs)


def test_a_run_that_is_not_there(runs: Path) -> None:
    with pytest.raises(NoSuchRunError, match="no run `gpt-c`"):
        run("gpt-c", runs=runs)
