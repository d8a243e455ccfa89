"""What a person asks a run for: a file in `control/`, and a line in the ledger that says who.

    stop       save at the next step boundary, leave the nodes, stop
    stop-now   end the launch at once, without a save, and stop
    hold       save, leave the nodes, wait held in the queue (where Slurm does not requeue: stop)
    save       save at the next step boundary and go on

The empty file is the request; its first line says by whom and why. Whoever may write into
`control/` can make one by hand (`touch control/save`). A request stands until it is followed or
taken back, also over a requeue, a crash or a wait in the queue, and the newest of a person's
requests to leave takes the place of an older one. Belongs here: making requests and taking them
back. Does not belong here: following them (`hpctrain.supervise.requests`, `hpctrain.train`), and
whether a request makes sense now (`control`).
"""

from __future__ import annotations

import contextlib
import os
import pwd
from pathlib import Path
from typing import Literal

from hpctrain.actions.runs import RunFiles
from hpctrain.durable import replace_text
from hpctrain.errors import UsageError
from hpctrain.store.layout import RunLayout
from hpctrain.store.ledger import EventKind

RequestKind = Literal["stop", "stop-now", "hold", "save"]
KINDS: tuple[RequestKind, ...] = ("stop", "stop-now", "hold", "save")
# What the ledger calls it when requests are withdrawn that nobody has followed yet.
TAKE_BACK = "take back"
# The other way to leave would contradict the new one; `stop-now` outranks both.
_REPLACES: dict[RequestKind, tuple[RequestKind, ...]] = {"stop": ("hold",), "hold": ("stop",)}
_LONGEST_REASON = 160


def path_of(layout: RunLayout, kind: RequestKind) -> Path:
    """The file that asks for it."""
    return {
        "stop": layout.stop_request,
        "stop-now": layout.stop_now_request,
        "hold": layout.hold_request,
        "save": layout.save_request,
    }[kind]


def user_name() -> str:
    """Who runs this process. Not from the environment, which anybody can set."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid {os.getuid()}"


def one_line(text: str) -> str:
    """Printable and short: it is shown on terminals and kept for ever."""
    words = " ".join(text.split())
    return "".join(c if c.isprintable() else "?" for c in words)[:_LONGEST_REASON]


def note(run: RunFiles, action: str, reason: str, job_id: int | None = None) -> None:
    """The audit line: who asks for what, and why.

    A member of the team may write into `control/` without owning the ledger: then the request's
    own words and its owner are what the supervisor writes down when it follows.
    """
    fields = {"job_id": job_id, "user": user_name(), "action": action}
    with contextlib.suppress(PermissionError):
        run.ledger.append(EventKind.CONTROL, **fields, reason=one_line(reason) or None)


def ask(run: RunFiles, kind: RequestKind, reason: str = "", job_id: int | None = None) -> None:
    """Ask for `kind`: first the ledger, then the file.

    The file gets the mode that the user's umask allows. Raises PermissionError for whoever may
    not write into `control/`.
    """
    note(run, kind, reason, job_id)
    why = one_line(reason)
    words = f"{user_name()} ({why})" if why else user_name()
    replace_text(path_of(run.layout, kind), f"{words}\n")
    for other in _REPLACES.get(kind, ()):
        path_of(run.layout, other).unlink(missing_ok=True)


def take_back(layout: RunLayout, kinds: tuple[RequestKind, ...] = KINDS) -> tuple[RequestKind, ...]:
    """Remove the files that ask for `kinds`; returns what had been asked for.

    Whoever submits a run again wants it to run: a request of before must not stop it. Raises
    UsageError for one that cannot be removed, such as a directory of that name.
    """
    taken = []
    for kind in kinds:
        path = path_of(layout, kind)
        try:
            path.unlink()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UsageError(f"{path} cannot be removed: {error.strerror}") from error
        taken.append(kind)
    return tuple(taken)
