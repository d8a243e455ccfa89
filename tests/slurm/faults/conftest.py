"""What every rehearsal of a fault gets: somebody who asserts and keeps what was seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from survival import Survival


@pytest.fixture
def survival(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> Iterator[Survival]:
    """Its entries travel with the test's report, also from a worker of xdist."""
    kept = Survival(record_property, request.node.name)
    yield kept
    kept.hand_in()
