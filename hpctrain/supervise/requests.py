"""What people ask for by files in `control/`, and what becomes of a request.

A request stands until it has been followed or taken back, so one that is made while the job waits
in the queue is followed when it starts. Files may be made by hand (`touch control/stop`); what is
in them is untrusted text. Belongs here: reading and removing requests on the supervisor's side.
Does not belong here: making them (`hpctrain.actions`).
"""

from __future__ import annotations

import contextlib
import os
import pwd
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpctrain.durable import replace_text
from hpctrain.store.layout import RunLayout

# What the supervisor itself writes into control/stop when Slurm warns: it is for that launch only.
_OWN = "supervisor: "
_LONGEST_WORDS = 200
Kind = Literal["stop-now", "hold", "stop"]


@dataclass(frozen=True)
class Request:
    """What is asked for, by whom in the words of the file (may be empty), and whose file it is."""

    kind: Kind
    words: str
    owner: str = ""

    @property
    def by(self) -> str:
        if self.words:
            return self.words
        return f"{self.owner or 'somebody'} (the file control/{self.kind})"


def ask_trainer_to_leave(run: RunLayout, reason: str) -> None:
    """Have the trainer save and leave at the next step boundary; not a request of a person."""
    if not run.stop_request.exists():
        replace_text(run.stop_request, f"{_OWN}{reason}\n", mode=0o600)


def requested(run: RunLayout) -> Request | None:
    """The strongest request of a person that stands now.

    Raises OSError when the file system does not tell whether there is one.
    """
    kinds: tuple[tuple[Path, Kind], ...] = (
        (run.stop_now_request, "stop-now"),
        (run.hold_request, "hold"),
        (run.stop_request, "stop"),
    )
    for path, kind in kinds:
        words = _read(path)
        if words is not None and not words.startswith(_OWN):
            return Request(kind, words, _owner(path))
    return None


def clear_stale_requests(run: RunLayout) -> None:
    """Remove what the supervisor asked an earlier launch for."""
    words = _read(run.stop_request)
    if words is not None and words.startswith(_OWN):
        run.stop_request.unlink(missing_ok=True)


def clear_followed_requests(run: RunLayout) -> None:
    """The run has stopped or is held: what asked for it is done."""
    for path in (run.stop_now_request, run.hold_request, run.stop_request, run.save_request):
        # One that cannot be removed, such as a directory, goes on asking; the job must end first.
        with contextlib.suppress(OSError):
            path.unlink()


def _owner(path: Path) -> str:
    """Who made the file, for those that say nothing."""
    try:
        return pwd.getpwuid(os.lstat(path).st_uid).pw_name
    except (OSError, KeyError):
        return ""


def _read(path: Path) -> str | None:
    """The first printable words of a file, None if there is none; never follows a link.

    A file that exists is a request, whatever it is and whoever may read it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError:
        os.lstat(path)  # a file system that is away has no requests in it
        return ""
    try:
        text = os.read(descriptor, 4 * _LONGEST_WORDS).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)
    line = text.strip().splitlines()[0] if text.strip() else ""
    return "".join(c if c.isprintable() else "?" for c in line)[:_LONGEST_WORDS]
