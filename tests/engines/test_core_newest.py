"""The newest megatron-core: the engine tests with it, and runs that change to it.

`make install` unpacks it beside the environment. Its wheel is for a newer Python, so it is not
installed: processes find it first by PYTHONPATH, as on a site that has its own. Some engine tests
run here, in a pytest of its own, all of them by `make megatron-core-newest`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer_resume import EXPERTS, OWN_PARTS
from trial_runs import DP2, LIMIT_SECONDS, TP2_PP2, MakeTrial, Trial
from variants import varied

from bench import prefork
from hpctrain.convert import megatron_checkpoint
from hpctrain.records.manifest import checkpoint_name, read_manifest
from hpctrain.records.software import read_software
from hpctrain.train import software
from hpctrain.train.engines.megatron.core_versions.supported import SUPPORTED
from hpctrain.train.engines.megatron.model import build_chunks, load_weights, transformer_settings

HERE = Path(__file__).parent
DIRECTORY = Path(sys.prefix, "megatron-lm")
NEWEST, INSTALLED = SUPPORTED[-1].number, software.megatron_core()
ENVIRONMENT = {"PYTHONPATH": str(DIRECTORY)}
pytestmark = [
    pytest.mark.nightly("a megatron-core that `make install` does not choose"),
    pytest.mark.skipif(INSTALLED == NEWEST, reason="this process has the newest megatron-core"),
]
GROUPS = {
    "layouts": (
        "test_core_names.py",
        "test_trainer_layouts.py::test_layout_equals_one_process[tp2 sp pp2]",
        "test_trainer_layouts.py::test_layout_equals_one_process[pp2 vpp2]",
        "test_trainer_layouts.py::test_recompute_changes_no_bit[selective]",
        "test_trainer_resume.py::test_resume_is_exact[bert]",
    ),
    "checkpoints": (
        "test_trainer_resume.py::test_resume_is_exact[experts, dp2 ep2]",
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
        env={**own, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ended.returncode == 0, ended.stdout[-20000:] + ended.stderr
    assert f"megatron-core {NEWEST} from {DIRECTORY}" in ended.stdout
    passed = re.search(r"(\d+) passed", ended.stdout)
    assert passed is not None and int(passed[1]) >= len(GROUPS[group])
    assert "skipped" not in ended.stdout.splitlines()[-1]


# -----------------------------------------------------------------------------------------------
# A run that changes to another version of megatron-core goes on bit for bit, in both directions.
# The ranks of this process import the installed version; those of the newest one are forked by a
# process of their own, which finds the unpacked package first.


def train_with_newest(*words: str) -> str:
    """Train runs in a process that imports the newest megatron-core; returns rank 0's logs."""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", Path(__file__).with_name("train_in_turn.py"), *words],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_SECONDS,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


CASES: dict[str, dict[str, Any]] = {
    "tp2 pp2": dict(TP2_PP2, dropout=0.1),
    "dp2 overlap bf16, own parts": dict(DP2, dropout=0.1, precision="bf16", **OWN_PARTS),
    "ep2": dict(EXPERTS, dropout=0.1),
}


@pytest.mark.parametrize("case", varied(CASES, "dp2 overlap bf16, own parts"))
def test_change_of_version_is_exact(case: str, trial: MakeTrial) -> None:
    settings = dict(CASES[case], save_interval_steps=3)
    old, upgraded, new, downgraded = (trial(**settings) for _ in range(4))
    assert set(old.train()) == {0}
    upgraded.adopt(old, 3)
    log = train_with_newest(
        str(new.run.directory), f"{upgraded.run.directory}:{checkpoint_name(3)}"
    )
    assert new.exact == old.exact
    assert f"saved_by_megatron-core_{INSTALLED},_resumed_with_{NEWEST}" in log, log
    assert upgraded.exact == {step: old.exact[step] for step in (4, 5, 6)}
    assert "deprecated" not in log.lower()

    downgraded.goes_on(new, 3)
    assert downgraded.exact == {step: old.exact[step] for step in (4, 5, 6)}

    saved = [read_manifest(each.run.checkpoints / checkpoint_name(6)) for each in (old, upgraded)]
    assert [manifest and manifest.library_version for manifest in saved] == [INSTALLED, NEWEST]
    (record,) = read_software(upgraded.run)
    assert record.facts.megatron_core == NEWEST and record.facts.remarks == ()
    if case == "tp2 pp2":  # the model of one process
        assert_equal_weights(
            trial(), *(one.run.checkpoints / checkpoint_name(6) for one in (old, new))
        )


def assert_equal_weights(one: Trial, *checkpoints: Path) -> None:
    """What a conversion, or a run that starts from weights, reads from checkpoints of both."""

    def load() -> None:
        settings = transformer_settings(one.config, compiled=False)
        with megatron_checkpoint.one_rank():
            states = []
            for checkpoint in checkpoints:
                (chunk,) = build_chunks(one.config, settings)
                load_weights(str(checkpoint), [chunk])
                states.append(dict(chunk.named_parameters()))
        first, second = states
        assert first.keys() == second.keys() and len(first) > 20
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert any(weight.std() > 0 for weight in first.values())

    ranks = prefork.fork(load, 1, one.run.logs / "load")
    codes = ranks.wait(LIMIT_SECONDS)
    assert codes == [0], ranks.log(0)
