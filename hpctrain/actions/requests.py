"""Make a person's request to a run: the line in its ledger first, then the file in `control/`.

Belongs here: recording who asks for what, and why. Does not belong here: the files (see
`hpctrain.store.requests`), whether a request makes sense now (see `control`).
"""

from __future__ import annotations

import contextlib

from hpctrain.actions.runs import RunFiles
from hpctrain.store.ledger import EventKind
from hpctrain.store.requests import RequestKind, make_request, printable_reason, user_name

# What the ledger calls it when requests are withdrawn that nobody has followed yet.
TAKE_BACK = "take back"


def note(run: RunFiles, action: str, reason: str, job_id: int | None = None) -> None:
    """Record in the ledger who asks for what, and why.

    A member of the team may write into `control/` without owning the ledger. Then the supervisor
    records the request's own text and its owner when it follows the request.
    """
    fields = {"job_id": job_id, "user": user_name(), "action": action}
    with contextlib.suppress(PermissionError):
        run.ledger.append(EventKind.CONTROL, **fields, reason=printable_reason(reason) or None)


def ask(run: RunFiles, kind: RequestKind, reason: str = "", job_id: int | None = None) -> None:
    """Record and make a request. Raises PermissionError for who may not write into `control/`."""
    note(run, kind, reason, job_id)
    make_request(run.layout, kind, reason)
