"""What every test starts from: an environment that does not depend on who runs the tests.

A shell on a cluster is full of variables that change what Slurm, the trainer or hpctrain do.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import longest_first
import pytest
from parts import LeavesOut
from reliability_report import ReliabilityReport

if TYPE_CHECKING:
    from another_user import AnotherUser
    from file_system_calls import FileSystemCalls
    from virtual_clock import ShiftedClock, VirtualClock

# Where environments with Ray and vLLM are, which take minutes to make (serving_environment.py).
_WANTED = ("HPCTRAIN_RAY_ENVIRONMENT", "HPCTRAIN_SERVING_ENVIRONMENT")
_FOREIGN = ("HPCTRAIN_", "NCCL_", "SACCT_", "SBATCH_", "SINFO_", "SLURM_", "SQUEUE_", "WANDB_")

# At import: before session fixtures, and before anything that reads the environment is imported.
for _name in [name for name in os.environ if name.startswith(_FOREIGN)]:
    if _name not in _WANTED:
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
        "--write-durations",
        action="store_true",
        help="Write tests/durations.json, by which processes begin with the longest files.",
    )
    parser.addoption(
        "--slurm",
        metavar="RELEASE|DIRECTORY",
        help="Run tests/slurm on another Slurm, as `hpctrain sandbox up --slurm` does.",
    )
    parser.addoption(
        "--nightly",
        action="store_true",
        help="Run what `make test` leaves out, too: tests/parts.py.",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(LeavesOut(), "leaves-out")
    if hasattr(config, "workerinput"):
        # Linux shares processors between sessions (sched(7), autogroup): each step of Slurm is one,
        # beside which the tests of one terminal would starve.
        os.setsid()
        return
    if config.getoption("--write-reliability"):
        config.pluginmanager.register(ReliabilityReport(), "reliability")
    if config.getoption("--write-durations"):
        config.pluginmanager.register(longest_first.DurationsWriter(), "durations")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    plugin = config.pluginmanager.get_plugin("leaves-out")
    assert isinstance(plugin, LeavesOut)
    plugin.leave_out(config, items)
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        longest_first.order(items, worker["workercount"])


def pytest_collection_finish() -> None:
    """Take what was imported and collected out of the garbage collector's sight.

    It never goes away, and scanning it took two fifths of the time of tests that build models.
    What comes is looked through as often as in the command line (`hpctrain.cli.main`).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture
def another_user() -> AnotherUser:
    """Somebody else on this machine; skips where only root could tell."""
    from another_user import another_user_or_none

    user = another_user_or_none()
    return user or pytest.skip("only root can become another user")


@pytest.fixture
def file_system_calls(monkeypatch: pytest.MonkeyPatch) -> FileSystemCalls:
    from file_system_calls import FileSystemCalls

    return FileSystemCalls(monkeypatch)


@pytest.fixture
def virtual_clock() -> Iterator[VirtualClock]:
    """Time that passes only in pauses, and at once (tests/virtual_clock.py)."""
    from virtual_clock import VirtualClock

    from hpctrain.base import clock

    with clock.replaced(by := VirtualClock()):
        yield by


@pytest.fixture
def shifted_clock() -> Iterator[ShiftedClock]:
    """Real time, which a test sets ahead."""
    from virtual_clock import ShiftedClock

    from hpctrain.base import clock

    with clock.replaced(by := ShiftedClock()):
        yield by
