"""Forward stop requests, from our signals and the stop file, to Megatron-LM's signal handler.

Megatron-LM installs a handler for SIGTERM while it starts (dist_signal_handler.py), and checks it
after each step on all ranks together. It ignores other signals and reads no files. It cannot be
made to save without ending the launch. Belongs here: translating requests. Does not belong here:
what follows (Megatron-LM saves and exits).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable

from hpctrain.records.requests import is_requested, remove_request
from hpctrain.train.job import Job

_POLL_SECONDS = 0.5


class StopForwarder:
    """A thread that sends this process SIGTERM once, when a stop is requested and can be handled.

    `on_handler_installed` is called once, when Megatron-LM's own handler has replaced ours.
    """

    def __init__(self, job: Job, on_handler_installed: Callable[[], None] = lambda: None) -> None:
        self._job = job
        self._on_handler_installed = on_handler_installed
        self._our_handler = signal.getsignal(signal.SIGTERM)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="stop forwarder", daemon=True)

    def __enter__(self) -> StopForwarder:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """End the thread and restore our own handler: later signals do not concern Megatron-LM."""
        self._closed.set()
        self._thread.join()
        signal.signal(signal.SIGTERM, self._our_handler)

    @property
    def stop_requested(self) -> bool:
        if self._job.stop.requested:
            return True
        return self._job.launch.leads and is_requested(self._job.run, "stop")

    def _poll(self) -> None:
        reported = False
        while not self._closed.wait(_POLL_SECONDS):
            if self._job.launch.leads and is_requested(self._job.run, "save"):
                # Made by hand, because `hpctrain save` refuses; its author would wait for it.
                remove_request(self._job.run, "save")
                message = (
                    "control/save: Megatron-LM saves by steps only; control/stop saves and ends"
                )
                print(message, file=sys.stderr, flush=True)
            handled = signal.getsignal(signal.SIGTERM) != self._our_handler
            if handled and not reported:
                reported = True
                self._on_handler_installed()
            if self.stop_requested and handled:
                os.kill(os.getpid(), signal.SIGTERM)
                return
