"""Handing on a wish to stop: from our signals and the stop file to Megatron-LM's own handler.

Megatron-LM takes over SIGTERM while it starts (dist_signal_handler.py), and looks for it after
each step on all ranks together; other signals and files it does not know. A save that does not end
the launch cannot be had from outside. Belongs here: that translation. Does not belong here: what
follows (Megatron-LM saves and leaves).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable

from hpctrain.store.requests import is_requested, remove_request
from hpctrain.train.job import Job

_POLL_SECONDS = 0.5


class Relay:
    """A thread that sends this process SIGTERM once, when a stop is wished for and understood.

    `on_understood` is called once, when Megatron-LM's own handler is in force.
    """

    def __init__(self, job: Job, on_understood: Callable[[], None] = lambda: None) -> None:
        self._job = job
        self._on_understood = on_understood
        self._ours = signal.getsignal(signal.SIGTERM)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Our own handler is back in force: what comes now is no business of Megatron-LM's."""
        self._over.set()
        self._thread.join()
        signal.signal(signal.SIGTERM, self._ours)

    @property
    def wished(self) -> bool:
        if self._job.stop.requested:
            return True
        return self._job.launch.leads and is_requested(self._job.run, "stop")

    @property
    def _understood(self) -> bool:
        return signal.getsignal(signal.SIGTERM) != self._ours

    def _decline_save(self) -> None:
        """Made by hand, for `hpctrain save` refuses; left there it would be waited for."""
        if self._job.launch.leads and is_requested(self._job.run, "save"):
            remove_request(self._job.run, "save")
            words = "control/save: Megatron-LM saves by steps only; control/stop saves and ends"
            print(words, file=sys.stderr, flush=True)

    def _run(self) -> None:
        told = False
        while not self._over.wait(_POLL_SECONDS):
            self._decline_save()
            if self._understood and not told:
                told = True
                self._on_understood()
            if self.wished and self._understood:
                os.kill(os.getpid(), signal.SIGTERM)
                return
