"""The engine tests, with the newest megatron-core: some of them here, all by
`make megatron-core-newest`.

Each group runs in a pytest of its own, which finds the unpacked package before the installed one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from newest_core import DIRECTORY, NEWEST, environment_of_newest
from variants import varied

from hpctrain.train import software

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.nightly("a megatron-core that `make install` does not choose"),
    pytest.mark.skipif(
        software.megatron_core() == NEWEST, reason="this process has the newest megatron-core"
    ),
]

GROUPS = {
    "layouts": (
        "test_core_names.py",
        "test_trainer_layouts.py::test_layout_equals_one_process[tp2 sp pp2]",
        "test_trainer_layouts.py::test_layout_equals_one_process[pp2 vpp2]",
        "test_trainer_layouts.py::test_recompute_changes_no_bit[selective]",
        "test_trainer_bert.py::test_bert_resumes_bit_by_bit",
    ),
    "checkpoints": (
        "test_trainer_experts.py::test_experts_of_two_ranks_resume_exactly",
        "test_trainer_resume.py::test_resume_is_exact[dp2 overlap, bf16, sync]",
        "test_trainer_resume.py::test_another_dp_goes_on_within_rounding[dense]",
        "test_models_convert.py::test_logits_are_equal_and_the_way_back_is_exact[gpt2, untied]",
    ),
}


@pytest.mark.parametrize("group", varied(GROUPS, "checkpoints"))
def test_same_tests_pass_with_the_newest(group: str, tmp_path: Path) -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:xdist"]
        # A directory of its own: two pytests that end at once remove each other's `pytest-current`.
        + ["--basetemp", str(tmp_path / "of-the-newest")]
        + [str(HERE / test) for test in GROUPS[group]],
        cwd=HERE.parents[1],
        env={**own, **environment_of_newest()},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ended.returncode == 0, ended.stdout[-20000:] + ended.stderr
    assert f"megatron-core {NEWEST} from {DIRECTORY}" in ended.stdout
    passed = re.search(r"(\d+) passed", ended.stdout)
    assert passed is not None and int(passed[1]) >= len(GROUPS[group])
    assert "skipped" not in ended.stdout.splitlines()[-1]
