"""Tell people about this run from inside its job, in a thread that nothing waits for.

The supervisor writes an event into the ledger and continues; this thread reads the ledger and sends
(`hpctrain.notify.delivery`). A webhook that hangs, or a node without a network, delays neither a
requeue nor a launch. What could not be sent is sent by `hpctrain watch --act`. Belongs here: when
to look, and for how long the end of a job waits. Does not belong here: what is told to whom.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping

from hpctrain.base import clock
from hpctrain.notify.delivery import Sender, deliver, sender_name
from hpctrain.records.ledger import Event, Ledger
from hpctrain.supervise.context import AttemptContext, log_message

# For how long an ending job waits for its last message: longer than one channel takes. The nodes
# are idle meanwhile, so not for long.
CLOSE_SECONDS = 15.0
# ... and where Slurm ends the job and kills what is left of it (slurm.conf(5), KillWait).
_HURRIED_SECONDS = 2.0


class NoticeSender:
    """Sends the notices of one attempt; does nothing where the run tells nobody.

    `environment` is that of the job.
    """

    def __init__(self, context: AttemptContext, environment: Mapping[str, str]) -> None:
        self._context = context
        self._sender = Sender(sender_name(f"job {context.job_id}"), dict(environment), told=set())
        self._ledger = Ledger(context.run_layout.ledger)
        self._read: list[Event] = []
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        if context.config.notify is not None:
            self._thread = threading.Thread(target=self._work, daemon=True, name="notices")
            context.ledger.listener = self._wake.set

    def start(self) -> None:
        if self._thread is not None:
            self._thread.start()

    def close(self) -> None:
        """Make a last pass, and wait for it for a few seconds."""
        if self._thread is None or self._thread.ident is None:
            return
        self._closing.set()
        self._wake.set()
        ends = self._context.signals.final
        self._thread.join(_HURRIED_SECONDS if ends else CLOSE_SECONDS)

    def _work(self) -> None:
        next_time: float | None = None
        while True:
            clock.wait(self._wake, None if next_time is None else max(0.0, next_time - clock.now()))
            self._wake.clear()
            # In this order: a `close` in between is then seen here or wakes the next wait.
            closing = self._closing.is_set()
            next_time = self._pass()
            if closing:
                return

    def _pass(self) -> float | None:
        """Send what is due; return when to look again. A problem is logged and ends nothing."""
        context = self._context
        try:
            delivery = deliver(
                context.run_layout, context.config, self._events(), self._sender, clock.now()
            )
        except Exception as error:  # whatever it is, the run goes on; texts may contain anything
            log_message(f"nobody was told: {type(error).__name__}")
            return None
        for one in delivery.results:
            told = ", ".join(one.kinds)
            outcome = "told" if one.problem is None else f"NOT told: {one.problem}"
            log_message(f"{one.channel}: {told}: {outcome}")
        return delivery.next_time

    def _events(self) -> list[Event]:
        """What is in the file, where `hpctrain watch` reads the same, and what waits to be there.

        Of a run that ends because its disk is full or away the file does not have the end.
        """
        waiting = self._context.ledger.waiting_events()
        with contextlib.suppress(OSError):
            self._read = self._ledger.events() or self._read
        return [*self._read, *(event for event in waiting if event not in self._read)]
