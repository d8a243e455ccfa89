"""What every test starts from: an environment that does not depend on who runs the tests.

A shell on a cluster is full of variables that change what Slurm, the trainer or hpctrain do.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from reliability_report import ReliabilityReport

if TYPE_CHECKING:
    from another_user import AnotherUser

_FOREIGN = ("HPCTRAIN_", "NCCL_", "SACCT_", "SBATCH_", "SINFO_", "SLURM_", "SQUEUE_", "WANDB_")

# At import: before session fixtures, and before anything that reads the environment is imported.
for _name in [name for name in os.environ if name.startswith(_FOREIGN)]:
    del os.environ[_name]
os.environ.update(NO_COLOR="1", COLUMNS="100", TZ="UTC0", OMP_NUM_THREADS="1")
time.tzset()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-golden",
        action="store_true",
        help="Write the files of tests/golden anew instead of comparing with them.",
    )
    parser.addoption(
        "--write-reliability",
        action="store_true",
        help="Write the table of docs/reliability.md from what tests/slurm/faults see.",
    )
    parser.addoption(
        "--slurm",
        type=Path,
        metavar="DIRECTORY",
        help="Run tests/slurm on the Slurm that scripts/slurm-from-debian has unpacked there.",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--write-reliability") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(ReliabilityReport(), "reliability")


@pytest.fixture
def another_user() -> AnotherUser:
    """Somebody else on this machine; skips where only root could tell."""
    from another_user import another_user_or_none

    user = another_user_or_none()
    return user or pytest.skip("only root can become another user")
