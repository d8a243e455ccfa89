"""A plugin of pytest that ends a run when its time is up: `-p time_limit --until UNIX_SECONDS`.

The test that runs then is skipped and no other one begins; that is no failure, unless no test at
all has ended by then. Until then the files run in the order of the command line, also in processes
of pytest-xdist (`--no-loadscope-reorder`).
"""

from __future__ import annotations

import signal
from collections.abc import Generator
from time import time as now  # tests put other clocks into the module

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--until", type=float, metavar="UNIX_SECONDS", required=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = {file: place for place, file in enumerate(config.args)}
    items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(order)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    return True if now() >= item.config.getoption("until") else None  # "has been run"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    signal.signal(signal.SIGALRM, _skip)
    left = item.config.getoption("until") - now()
    signal.setitimer(signal.ITIMER_REAL, max(left, 0.001))
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


pytest_runtest_setup = pytest_runtest_call


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if now() < session.config.getoption("until") or reporter is None:  # None: a process of xdist
        return
    if reporter.stats.keys() & {"passed", "failed", "error"}:
        reporter.write_line("\ntime is up: what had not begun by now was left out")
    else:
        reporter.write_line("\ntime is up: no test has ended by now, so nothing is shown")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _skip(signum: int, frame: object) -> None:
    raise pytest.skip.Exception("time is up")
