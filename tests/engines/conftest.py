"""Fixtures of the tests on real megatron-core: run directories, reference runs on one process."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs the megatron extra", allow_module_level=True)

import trial_runs
from trial_runs import (
    GPT,
    LLAMA,
    MakeTrial,
    Trained,
    Trial,
    make_trial,
    trained,
    two_micro_batches,
)


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module imports megatron-core: the CPU layer must come first.

    Not where pytest-xdist only hands out tests: its processes come here, too.
    """
    if not _hands_out(config):
        import hpctrain.train.engines.megatron.assembly  # noqa: F401


def _hands_out(config: pytest.Config) -> bool:
    return config.getoption("dist", "no") != "no"


def pytest_report_header(config: pytest.Config) -> str:
    """Name the megatron-core of this process, which PYTHONPATH decides."""
    if _hands_out(config):
        return "megatron-core as pytest-xdist's processes find it"
    from hpctrain.train import software

    core = importlib.util.find_spec("megatron.core")
    place = "nowhere" if core is None or core.origin is None else Path(core.origin).parents[2]
    return f"megatron-core {software.megatron_core()} from {place}"


@pytest.fixture
def trial(tmp_path: Path) -> MakeTrial:
    """Make run directories below this test's own directory."""
    made: list[Trial] = []

    def make(base: dict[str, Any] = GPT, **changes: Any) -> Trial:
        changes = two_micro_batches(base, **changes)
        made.append(make_trial(tmp_path / f"run-{len(made)}", base, **changes))
        return made[-1]

    return make


@pytest.fixture(scope="session", autouse=True)
def _shared_by_all_processes(tmp_path_factory: pytest.TempPathFactory) -> None:
    """`trial_runs.trained`: a run for all processes of pytest-xdist."""
    own = tmp_path_factory.getbasetemp()
    shared = own if "PYTEST_XDIST_WORKER" not in os.environ else own.parent
    directory = shared / "shared-runs"
    directory.mkdir(exist_ok=True)
    trial_runs.shared_directory = lambda: directory


@pytest.fixture
def gpt_reference() -> Trained:
    """Six steps on one process with checkpoints after every second one."""
    return trained(GPT)


@pytest.fixture
def llama_reference() -> Trained:
    return trained(LLAMA)
