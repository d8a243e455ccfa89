"""Write lines of the replica program between those of its engine.

Does not belong here: what the engine says (`engine_process`).
"""

from __future__ import annotations

import contextlib
import time


def say(text: str) -> None:
    """Write one line with the time; a log that cannot be written ends nothing."""
    with contextlib.suppress(OSError):
        print(f"hpctrain {time.strftime('%H:%M:%S')} {text}", flush=True)
