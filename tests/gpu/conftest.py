"""Tests that need a GPU. Where there is none nothing of this directory is collected.

`GPU_TESTS` comes from the rungs of `make gpu`: `cuda` requires a usable GPU, `emulated`
runs on the CPU what does not need one, so that this code itself is tested. The tests start
processes of their own, because a GPU cannot be used by what was forked from a process that has
used it. A lock keeps tests of several workers apart: one of them fills the GPU.
"""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "engines"))
WANTED = os.environ.get("GPU_TESTS", "")
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


@pytest.fixture(autouse=True)
def gpu_to_oneself() -> Iterator[None]:
    """Wait until no other test of this machine uses the GPU."""
    path = Path(tempfile.gettempdir(), f"hpctrain-gpu-tests-{os.getuid()}.lock")
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def real_gpu() -> None:
    """Skip a test that a CPU cannot take the place of a GPU in."""
    if EMULATED:
        pytest.skip("emulated on CPU: needs a real GPU")
