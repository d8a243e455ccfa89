"""The audit line of a request that somebody made with a file only.

Belongs here: writing it once. Does not belong here: following the request (`launch_watch`).
"""

from __future__ import annotations

from hpctrain.store.ledger import EventKind
from hpctrain.store.requests import Request
from hpctrain.supervise.context import AttemptContext

_RECENT_EVENTS = 50


def audit(context: AttemptContext, request: Request) -> None:
    """Say in the ledger who asks, unless the verb that made the file has said it already."""
    recent = context.ledger.events()[-_RECENT_EVENTS:]
    for event in reversed(recent):
        if event.event is EventKind.CONTROL and event.action == request.kind:
            return
        if event.event is EventKind.LAUNCH_STARTED:
            break
    context.note(
        EventKind.CONTROL,
        action=request.kind,
        user=request.owner or None,
        reason=request.words or None,
    )
