"""Tests that need a GPU. Where there is none nothing of this directory is collected.

`GPU_TESTS` comes from the rungs of `make gpu`: `cuda` requires a usable GPU, `emulated`
runs on the CPU what does not need one, so that this code itself is tested. The tests start
processes of their own, because a GPU cannot be used by what was forked from a process that has
used it. Small tests may share the GPU (`pytest -n 8`); one marked `whole_gpu`, because it fills
the GPU or times it, waits until it is alone, and is better left to a call of its own (bench.gpu).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "engines"))
WANTED = os.environ.get("GPU_TESTS", "")
ALONE = "whole_gpu"
EMULATED = WANTED == "emulated"
_IS_COLLECTED = bool(WANTED) or Path("/dev/nvidiactl").exists()
collect_ignore_glob = [] if _IS_COLLECTED else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def usable_gpu() -> None:
    """Fail where torch cannot use a GPU: everything would compare a CPU with itself."""
    import torch

    if EMULATED:
        return
    usable = torch.cuda.is_available()
    assert usable, f"torch {torch.__version__} finds no usable GPU: `make gpu RUNG=1` says why"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{ALONE}: no other test may use the GPU meanwhile")


@pytest.fixture(autouse=True)
def turn_on_the_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Wait for this test's turn: beside other small ones, or alone."""
    path = Path(tempfile.gettempdir(), f"hpctrain-gpu-tests-{os.getuid()}.lock")
    alone = request.node.get_closest_marker(ALONE) is not None
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


@pytest.fixture
def real_gpu() -> None:
    """Skip a test that a CPU cannot take the place of a GPU in."""
    if EMULATED:
        pytest.skip("emulated on CPU: needs a real GPU")


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """Remove what a test has written at its end: checkpoints of all tests would fill a disk."""
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)
