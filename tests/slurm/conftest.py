"""One real Slurm for all tests of this directory, and a clean slate between them.

These tests fail, and do not skip, on a machine without Slurm: the message says what to install.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from another_user import public_directory
from newer_slurm import CACHE, NEWER, fetched
from other_cluster import OtherCluster, other_shape
from rehearsal import (
    STEPS,
    Stage,
    choose_slurm,
    clean,
    four_nodes,
    own_sandbox,
    wait_till_remembered,
)
from variants import varied

from hpctrain.records.find import RunFiles, find_run
from hpctrain.records.run_records import read_metrics
from hpctrain.runs.state import RunState
from hpctrain.sandbox.debian import fetch_slurm
from hpctrain.sandbox.faults import kill_controller, restart_controller
from hpctrain.sandbox.sandbox import Sandbox


def pytest_configure(config: pytest.Config) -> None:
    given: str | None = config.getoption("--slurm")
    choose_slurm(None if given is None else fetch_slurm(given, CACHE))


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    with own_sandbox(four_nodes()) as box:
        yield box


@pytest.fixture(autouse=True)
def clean_slate(sandbox: Sandbox) -> Iterator[None]:
    """After each test: no jobs, no dead or frozen daemon, every node idle.

    slurmctld 22.05.8 loses count of GPUs when it starts a job again while one of its nodes is dead
    ("bad node_offset" in its log): no other job gets these GPUs until it is started anew.
    """
    log = sandbox.paths.log("slurmctld")
    before = miscounts(log)
    yield
    clean(sandbox)
    if miscounts(log) != before:
        wait_till_remembered(sandbox)
        kill_controller(sandbox)
        restart_controller(sandbox)
        clean(sandbox)


def miscounts(log: Path) -> int:
    return log.read_text(errors="replace").count("bad node_offset")


@pytest.fixture(scope="session")
def real_stage(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return Stage(sandbox, tmp_path_factory.mktemp("stage"))


@pytest.fixture(scope="session")
def stand_in_stage(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return Stage(sandbox, tmp_path_factory.mktemp("stand-in-stage"), stand_in=True)


@pytest.fixture(scope="module")
def strict_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """On a Slurm whose signals reach tasks only, so that ranks hear what agents hand on."""
    shape = four_nodes()
    # who saves leaves at once: a long grace costs nothing
    partitions = tuple(replace(one, grace_seconds=120) for one in shape.partitions)
    shape = replace(shape, partitions=partitions, process_tracking="pgid")
    with own_sandbox(shape) as box:
        yield Stage(box, tmp_path_factory.mktemp("strict"))


def uses_stand_in(request: pytest.FixtureRequest) -> bool:
    """Whether the test's ranks compute nothing: the closest mark `stand_in` says so.

    It is for tests of supervisor, Slurm and commands, for which ranks that start in a tenth of the
    time are as good. `make nightly` (`--nightly`) runs them with the real trainer as well.
    """
    mark = request.node.get_closest_marker("stand_in")
    return mark is not None and mark.args != (False,) and not request.config.getoption("--nightly")


@pytest.fixture
def stage(request: pytest.FixtureRequest) -> Stage:
    """A place to start rehearsals at."""
    name = "stand_in_stage" if uses_stand_in(request) else "real_stage"
    found: Stage = request.getfixturevalue(name)
    return found


@pytest.fixture(scope="session")
def _second_sandbox() -> Iterator[Sandbox]:
    with own_sandbox(other_shape()) as box:
        yield box


@pytest.fixture
def other_cluster(_second_sandbox: Sandbox) -> Iterator[OtherCluster]:
    """Another Slurm beside `sandbox`, whose clients see the same runs."""
    yield OtherCluster(_second_sandbox)
    clean(_second_sandbox)


@pytest.fixture(scope="session")
def newer_slurm(pytestconfig: pytest.Config) -> Path:
    """The directory of a Slurm of 24.05 or newer: that of `--slurm`, if it is one."""
    given: str | None = pytestconfig.getoption("--slurm")
    return fetched(NEWER[0] if given in (None, "22.05") else given)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """What asks for a Slurm with accounting runs on each newer one, or on that of `--slurm`.

    Whole runs with faults run on the newest one alone, on the others as variants.
    """
    if "_sandbox_with_accounting" in metafunc.fixturenames:
        given: str | None = metafunc.config.getoption("--slurm")
        names = NEWER if given is None else (given,)
        always = names if "accounting_stage" not in metafunc.fixturenames else names[-1:]
        metafunc.parametrize(
            "_sandbox_with_accounting", varied(names, *always), indirect=True, scope="session"
        )


@pytest.fixture(scope="session")
def _sandbox_with_accounting(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    shape = replace(four_nodes(), accounting="slurmdbd")
    with own_sandbox(shape, fetched(request.param)) as box:
        yield box


@pytest.fixture
def accounting(_sandbox_with_accounting: Sandbox) -> Iterator[Sandbox]:
    """A sandbox with accounting, of each newer Slurm than this distribution's."""
    yield _sandbox_with_accounting
    clean(_sandbox_with_accounting)


@pytest.fixture
def accounting_stage(accounting: Sandbox, tmp_path: Path) -> Stage:
    """As `stage`, on a sandbox with accounting."""
    return Stage(accounting, tmp_path)


@pytest.fixture
def public_stage(request: pytest.FixtureRequest, sandbox: Sandbox) -> Iterator[Stage]:
    """A stage whose directory other users of this machine may enter."""
    with public_directory() as place:
        yield Stage(sandbox, place, uses_stand_in(request))
    sandbox.directory.chmod(0o700)  # `AnotherUser.client_of` opens it


@pytest.fixture
def reference(request: pytest.FixtureRequest) -> RunFiles:
    """The run that nothing happens to; all others must have its losses."""
    name = "stand_in_reference" if uses_stand_in(request) else "real_reference"
    found: RunFiles = request.getfixturevalue(name)
    return found


@pytest.fixture(scope="session")
def real_reference(real_stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    return _trained_once(real_stage, tmp_path_factory)


@pytest.fixture(scope="session")
def stand_in_reference(stand_in_stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    return _trained_once(stand_in_stage, tmp_path_factory)


def _trained_once(stage: Stage, places: pytest.TempPathFactory) -> RunFiles:
    """One for all processes of pytest-xdist: who comes first trains it, the others wait for it."""
    own = places.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    note = shared / f"reference-{'stand-in' if stage.stand_in else 'real'}"
    with note.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not note.exists():
            note.write_text(str(_trained(stage).layout.directory))
    directory = Path(note.read_text())
    return find_run(directory.parent, directory.name)


def _trained(stage: Stage) -> RunFiles:
    rehearsal = stage.start("name=reference")
    row = rehearsal.wait_till_over()
    assert row.state is RunState.DONE, rehearsal.logs()
    assert [metrics.step for metrics in read_metrics(rehearsal.run.layout)] == [
        *range(1, STEPS + 1)
    ]
    return rehearsal.run
