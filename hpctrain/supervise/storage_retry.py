"""Retry work on the run directory while its storage fails.

Does not belong here: what is decided when it does not come back (`policy`), how ranks wait
(`hpctrain.train`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hpctrain.base import clock
from hpctrain.base.durable import FULL_ERRNOS
from hpctrain.supervise.context import AttemptContext

# Longer than a remount or a failover usually takes.
_PATIENCE_SECONDS = 60.0
_RETRY_SECONDS = 1.0
_Result = TypeVar("_Result")


def retry_while_storage_fails(context: AttemptContext, work: Callable[[], _Result]) -> _Result:
    """Repeat `work` while it raises OSError.

    Raises the last OSError after a minute, or at once if the job is being ended or the disk is
    full.
    """
    deadline = clock.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return work()
        except OSError as error:
            over = clock.monotonic() >= deadline or context.signals.final
            if over or error.errno in FULL_ERRNOS:
                raise
        clock.sleep(_RETRY_SECONDS)
