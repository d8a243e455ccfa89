"""What rehearsals of faults get: somebody who asserts and keeps what was seen, and patience."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from slurm_settings import long_kill_wait
from survival import Survival

from hpctrain.sandbox.sandbox import Sandbox


@pytest.fixture
def survival(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> Iterator[Survival]:
    """Its entries travel with the test's report, also from a worker of xdist."""
    kept = Survival(record_property, request.node.name)
    yield kept
    kept.hand_in()


@pytest.fixture
def patient_slurm(sandbox: Sandbox) -> Iterator[None]:
    with long_kill_wait(sandbox):
        yield
