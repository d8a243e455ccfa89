"""Fixtures of the tests on real megatron-core: run directories, reference runs on one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the megatron extra")

# Before any test module imports megatron-core: the CPU layer must come first.
from trial_runs import GPT, LLAMA, Trial, make_trial

import hpctrain.train.engines.megatron.assembly
from hpctrain.train import software

assert hpctrain.train.engines.megatron.assembly is not None


def pytest_report_header() -> str:
    """Name the megatron-core of this process, which PYTHONPATH decides."""
    import megatron.core

    place = Path(str(megatron.core.__file__)).parents[2]
    return f"megatron-core {software.megatron_core()} from {place}"


@pytest.fixture
def trial(tmp_path: Path) -> Callable[..., Trial]:
    """Make run directories below this test's own directory."""
    made: list[Trial] = []

    def make(base: dict[str, Any] = GPT, **changes: Any) -> Trial:
        made.append(make_trial(tmp_path / f"run-{len(made)}", base, **changes))
        return made[-1]

    return make


def _reference(directory: Path, base: dict[str, Any]) -> Trial:
    """Six steps on one process with a checkpoint after the second."""
    made = make_trial(directory, base, save_interval_steps=2)
    assert made.train() == [0]
    return made


@pytest.fixture(scope="session")
def gpt_reference(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    return _reference(tmp_path_factory.mktemp("reference") / "gpt", GPT)


@pytest.fixture(scope="session")
def llama_reference(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    return _reference(tmp_path_factory.mktemp("reference") / "llama", LLAMA)
