"""Stop a rank during start-up, when there is nothing to save yet.

A start takes minutes (imports, process groups, datasets, weights) and waits for other ranks, so a
stop cannot wait for the first agreement of all ranks. A thread ends the process instead. Does not
belong here: stopping between steps (see `loop`), the exit record (see `entry`). Imports nothing
heavy: it runs before torch is imported.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable

from hpctrain.train.stop import StopSignals

# Slurm signals one node after the other, and a rank that ends breaks the connections of the others.
# After this time all of them should have been signalled.
SETTLE_SECONDS = 5.0
_POLL_SECONDS = 0.2


class StartupStop:
    """Calls `leave` in a thread some seconds after a request to stop, until `end` is called.

    `stop` has caught signals until now. `asked` checks for other requests, several times a second.
    `leave` ends the process, or returns if a step has been trained. Code that holds Python's global
    lock for long blocks the thread; the supervisor then ends the step (see
    `hpctrain.supervise.evidence.launch_watch`).
    """

    def __init__(
        self, stop: StopSignals, asked: Callable[[], bool], leave: Callable[[], None]
    ) -> None:
        self._stop = stop
        self._asked = asked
        self._leave = leave
        self._over = threading.Event()
        self._arrivals, self._arriving = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="startup-stop", daemon=True)

    def begin(self) -> None:
        """Start the thread; call this in the main thread only.

        Python runs signal handlers in its main thread, which may wait for other ranks in C++; the
        pipe receives the number of a signal at once (signal.set_wakeup_fd).
        """
        signal.set_wakeup_fd(self._arriving, warn_on_full_buffer=False)
        self._thread.start()

    def end(self) -> None:
        """End the thread, because from now on all ranks agree on stops.

        Does not return if this rank is ending already. The thread has ended when this returns,
        because a launch forks later.
        """
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
        self._over.set()
        os.write(self._arriving, b"\0")
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        asked_at: float | None = None
        while not self._over.is_set():
            # wait a moment for signals, and remember those that request a stop
            if select.select([self._arrivals], [], [], _POLL_SECONDS)[0]:
                for number in os.read(self._arrivals, 64):
                    self._stop.remember(number)
            if asked_at is None:
                asked = self._stop.requested or self._asked()
                asked_at = time.monotonic() if asked else None
            elif time.monotonic() - asked_at >= SETTLE_SECONDS:
                break
        if not self._over.is_set():
            self._leave()
