"""Outlasting faults of storage on the supervisor's side.

Belongs here: waiting for the run directory, and whether the ledger can be written. Does not belong
here: what is decided when it does not come back (`policy`), how ranks wait (`hpctrain.train`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from hpctrain.durable import FULL_ERRNOS
from hpctrain.supervise.context import AttemptContext

# Longer than a remount or a failover takes, as a rule: what ranks have written is worth the wait.
_PATIENCE_SECONDS = 60.0
_RETRY_SECONDS = 1.0
_Result = TypeVar("_Result")


def outlast(context: AttemptContext, work: Callable[[], _Result]) -> _Result:
    """Do `work` again and again while it raises OSError, but not while the job is being ended.

    Raises the last OSError after a minute, and at once when the disk is full.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return work()
        except OSError as error:
            over = time.monotonic() >= deadline or context.signals.final
            if over or error.errno in FULL_ERRNOS:
                raise
        time.sleep(_RETRY_SECONDS)
