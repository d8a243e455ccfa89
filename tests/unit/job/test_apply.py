"""`plan --apply`: the layout is in the file, and everything else is as it was."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest
from command_line import hpctrain

from hpctrain.job.plan import changed_text

ROOT = Path(__file__).resolve().parents[3]
GPT175B = ROOT / "examples/gpt175b.yaml"


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    copy = tmp_path / "gpt175b.yaml"
    copy.write_text(GPT175B.read_text())
    return copy


def changes(before: str, after: str) -> list[str]:
    lines = difflib.ndiff(before.splitlines(), after.splitlines())
    return [line for line in lines if line[0] in "+-"]


def test_the_layout_is_written_and_comments_stay(spec: Path) -> None:
    done = hpctrain("plan", "-p", "a100x64", str(spec), "--apply")
    assert done.exit_code == 0, done.transcript()
    found = changes(GPT175B.read_text(), spec.read_text())
    assert "+   tp: 4                   # one node: tensor parallelism needs NVLink" in found
    assert any(line.startswith("+   vpp: 12 ") for line in found)
    assert all(line[2:].lstrip().split(":")[0] in WRITTEN for line in found), found
    assert "`parallel.vpp 12`" in done.stderr and "`resources.gpus" not in done.stderr
    layout = next(line for line in done.stdout.splitlines() if line.startswith("Layout"))
    again = hpctrain("plan", "-p", "a100x64", str(spec))
    assert layout in again.stdout.splitlines()
    assert "--apply" not in again.stdout.split("480 GPUs")[0], "nothing better is left"


WRITTEN = {"tp", "pp", "vpp", "order"}


@pytest.mark.variant("test_the_layout_is_written_and_comments_stay")
def test_another_time_nothing_is_written(spec: Path) -> None:
    hpctrain("plan", "-p", "a100x64", str(spec), "--apply")
    written, mode = spec.read_bytes(), spec.stat().st_mode
    done = hpctrain("plan", "-p", "a100x64", str(spec), "--apply")
    assert "has this layout already" in done.stderr
    assert (spec.read_bytes(), spec.stat().st_mode) == (written, mode)


def test_a_number_of_gpus_is_written_and_what_set_gives_is_kept(spec: Path) -> None:
    done = hpctrain(
        *("plan", "-p", "a100x64", str(spec), "--gpus", "448", "--set", "batch.micro=1", "--apply")
    )
    text = spec.read_text()
    assert done.exit_code == 0 and "  gpus: 448\n" in text and "  micro: 1\n" in text
    assert "vpp" not in text and "`no parallel.vpp`" in done.stderr
    assert hpctrain("plan", "-p", "a100x64", str(spec)).exit_code == 0


@pytest.mark.parametrize(
    "given",
    [
        ("model.layers=24", "resources.gpus=64"),  # the file's 96 layers do not fit
        ("model.layers=48",),  # they fit, with other memory than was shown
    ],
)
def test_a_layout_that_only_set_makes_possible_is_not_written(
    spec: Path, given: tuple[str, ...]
) -> None:
    before = spec.read_bytes()
    settings = [word for one in given for word in ("--set", one)]
    done = hpctrain("plan", "-p", "a100x64", str(spec), *settings, "--apply")
    assert done.exit_code == 2, done.transcript()
    assert "`--set model.layers` is not in the file: write it there first" in done.stderr
    assert spec.read_bytes() == before


@pytest.mark.variant("test_the_layout_is_written_and_comments_stay")
def test_settings_that_change_no_plan_do_not_matter(spec: Path) -> None:
    done = hpctrain("plan", "-p", "a100x64", str(spec), "--set", "name=other", "--apply")
    assert done.exit_code == 0 and "wrote `parallel.tp" in done.stderr, done.transcript()


def test_a_budget_that_nothing_meets_writes_nothing(spec: Path) -> None:
    before = spec.read_bytes()
    done = hpctrain("plan", "-p", "a100x64", str(spec), "--budget", "1usd", "--apply")
    assert done.exit_code == 4 and spec.read_bytes() == before


def test_standard_input_cannot_be_written() -> None:
    done = hpctrain("plan", "-p", "a100x64", "-", "--apply", stdin=GPT175B.read_text())
    assert done.exit_code == 2 and "--apply writes into a file" in done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "parallel: auto  # the search\nbatch: {global: 8}\nresources:\n    gpus: 8\n",
        "batch:\n    global: 8\n    list:\n    - 1\n    - 2\nresources: {gpus: 8} # all\n",
        "# first\n\nbatch: {global: 8, micro: 1}   # flow\nresources:\n  gpus: 8\n\n# last\n",
    ],
)
def test_lines_that_are_not_meant_stay(text: str) -> None:
    fields = {"parallel": {"tp": 2, "pp": 1}, "batch": {"micro": 4}, "resources": {"gpus": 16}}
    found = changes(text, changed_text(text, fields))
    names = ("parallel", "tp", "pp", "batch", "micro", "resources", "gpus")
    assert all(line[2:].lstrip().split(":")[0] in names for line in found), found
    assert all(comment in changed_text(text, fields) for comment in COMMENTS if comment in text)


COMMENTS = ("# the search", "# all", "# first", "# flow", "# last")
