"""The table of supported versions of megatron-core, and which row applies to an installed one.

Belongs here: the table, comparing versions, and which pairs of versions resume exactly. Does not
belong here: what differs (one module per version), what is checked at the start (see `check`).
"""

from __future__ import annotations

import functools
import re

from hpctrain.train import software
from hpctrain.train.engines.megatron.core_versions.core_0_16 import CORE_0_16
from hpctrain.train.engines.megatron.core_versions.core_0_19 import CORE_0_19
from hpctrain.train.engines.megatron.core_versions.record import CoreVersion

# From the oldest to the newest. The engine tests run with each of them.
SUPPORTED: tuple[CoreVersion, ...] = (CORE_0_16, CORE_0_19)
# The version of checkpoints whose manifest does not name one: the only one that was supported.
UNNAMED_VERSION = CORE_0_16.number


def release_numbers(version: str) -> tuple[int, ...]:
    """Return the release of a version as numbers, without suffixes: (0, 16, 1) for 0.16.1rc0+x."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def is_tested(version: str) -> bool:
    """Return whether the engine tests run with exactly this version."""
    return any(version == known.number for known in SUPPORTED)


def row_of(version: str) -> CoreVersion:
    """Return the newest row that is not newer than `version`; the oldest one for older versions."""
    release = release_numbers(version)
    rows = [known for known in SUPPORTED if release_numbers(known.number) <= release]
    return rows[-1] if rows else SUPPORTED[0]


@functools.cache
def current() -> CoreVersion:
    """Return the row of the megatron-core that this process imports."""
    return row_of(software.megatron_core() or SUPPORTED[0].number)


def resumes_exactly(saved: str, now: str) -> bool:
    """Return whether a checkpoint of version `saved` is known to resume exactly with `now`.

    Every version resumes its own checkpoints. All pairs of tested versions do
    (tests/engines/test_core_newest.py compares losses bit for bit); nothing is known of others.
    """
    return saved == now or (is_tested(saved) and is_tested(now))


def tested_numbers() -> str:
    """Return the tested versions for messages: `0.16.1 or 0.19.2`."""
    return " or ".join(known.number for known in SUPPORTED)
