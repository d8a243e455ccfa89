"""One real Slurm for all tests of this directory, and a clean slate between them.

These tests fail, and do not skip, on a machine without Slurm: the message says what to install.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpctrain.sandbox.repair import repair
from hpctrain.sandbox.sandbox import Sandbox
from hpctrain.sandbox.shape import default_shape


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    """4 nodes with 2 GPUs; `train` is preempted by `urgent` with 20 s of grace."""
    # A short name, so that sockets fit into it; pytest's own directories are long.
    parent = Path(tempfile.mkdtemp(prefix="ht-", dir="/tmp"))
    box = None
    try:
        box = Sandbox.create(parent / "s", default_shape(nodes=4, gpus_per_node=2))
        box.up()
        yield box
    finally:
        if box is not None:
            box.down()
        shutil.rmtree(parent, ignore_errors=True)


@pytest.fixture(autouse=True)
def clean_slate(sandbox: Sandbox) -> Iterator[None]:
    """After each test: no jobs, no dead or frozen daemon, every node idle."""
    yield
    repair(sandbox)
