"""Requests to a run: files in `control/` by which people and the supervisor ask it to save or end.

    stop       save at the next step boundary, leave the nodes, stop
    stop-now   end the launch at once, without a save, and stop
    hold       save, leave the nodes, wait held in the queue (where Slurm does not requeue: stop)
    save       save at the next step boundary and continue

The empty file is the request; its first line holds who made it and why. Whoever may write into
`control/` can make one by hand (`touch control/save`), so its text is untrusted. A request stands
until it is followed or taken back, also over a requeue, a crash or a wait in the queue. Belongs
here: the kinds, their files and text; making, reading and removing them. Does not belong here: the
line in the ledger (`hpctrain.runs.control`), whether a request makes sense now
(`hpctrain.runs.control`), following it (`hpctrain.supervise`, `hpctrain.train`).
"""

from __future__ import annotations

import contextlib
import os
import pwd
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from hpctrain.base.durable import replace_text
from hpctrain.base.errors import UsageError
from hpctrain.base.printable_text import printable_line
from hpctrain.records.layout import RunLayout

RequestKind = Literal["stop", "stop-now", "hold", "save"]
KINDS: tuple[RequestKind, ...] = get_args(RequestKind)
# What the ledger calls the withdrawal of pending requests.
TAKE_BACK = "take back"
# The kinds that end a launch, the strongest first; rank 0 follows `save` by itself.
_TO_LEAVE: tuple[RequestKind, ...] = ("stop-now", "hold", "stop")
# `stop` and `hold` contradict each other, so the new one replaces the other; `stop-now` outranks
# both.
_REPLACES: dict[RequestKind, RequestKind] = {"stop": "hold", "hold": "stop"}
# The supervisor's own request in control/stop, when Slurm warns, is for the current launch only.
_OF_SUPERVISOR = "supervisor: "
# A reason, and the whole text of a request: the reason with the name of its user.
_LONGEST_REASON, _LONGEST_TEXT = 160, 200


@dataclass(frozen=True)
class Request:
    """A request of a person: its kind, the text of its file (may be empty), the file's owner."""

    kind: RequestKind
    words: str
    owner: str = ""

    @property
    def by(self) -> str:
        if self.words:
            return self.words
        return f"{self.owner or 'somebody'} (the file control/{self.kind})"

    @property
    def reason(self) -> str:
        """The words without the name of their owner, which `make_request` puts in front."""
        if self.words == self.owner:
            return ""
        inner = self.words.removeprefix(f"{self.owner} (")
        return inner.removesuffix(")") if inner != self.words else self.words


def request_path(run: RunLayout, kind: RequestKind) -> Path:
    """The file whose existence is the request."""
    return {
        "stop": run.stop_request,
        "stop-now": run.stop_now_request,
        "hold": run.hold_request,
        "save": run.save_request,
    }[kind]


def user_name() -> str:
    """The user of this process. Not from the environment, which anybody can set."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid {os.getuid()}"


def printable_reason(text: str) -> str:
    """One printable line: a reason is shown on terminals and kept for ever."""
    return printable_line(text, _LONGEST_REASON)


def make_request(run: RunLayout, kind: RequestKind, reason: str = "") -> None:
    """Write a person's request; the newest request to leave replaces an older one.

    The file gets the mode that the user's umask allows. Raises PermissionError for a user who may
    not write into `control/`.
    """
    why = printable_reason(reason)
    text = f"{user_name()} ({why})" if why else user_name()
    replace_text(request_path(run, kind), f"{text}\n")
    if (other := _REPLACES.get(kind)) is not None:
        request_path(run, other).unlink(missing_ok=True)


def take_back(run: RunLayout, kinds: tuple[RequestKind, ...] = KINDS) -> tuple[RequestKind, ...]:
    """Remove the requests of these kinds; returns those that stood.

    A run that is submitted again is meant to run: an earlier request must not stop it. Raises
    UsageError for one that cannot be removed, such as a directory of that name.
    """
    taken = []
    for kind in kinds:
        path = request_path(run, kind)
        try:
            path.unlink()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UsageError(f"{path} cannot be removed: {error.strerror}") from error
        taken.append(kind)
    return tuple(taken)


def read_request(run: RunLayout) -> Request | None:
    """The strongest request to leave that a person has made and that still stands.

    Raises OSError when the file system cannot answer whether there is one.
    """
    for kind in _TO_LEAVE:
        path = request_path(run, kind)
        text = _read(path)
        if text is not None and not text.startswith(_OF_SUPERVISOR):
            try:
                owner = pwd.getpwuid(os.lstat(path).st_uid).pw_name
            except (OSError, KeyError):
                owner = ""
            return Request(kind, text, owner)
    return None


def ask_trainer_to_leave(run: RunLayout, reason: str) -> None:
    """Have the trainer save and leave at the next step boundary; not a request of a person."""
    if not run.stop_request.exists():
        replace_text(run.stop_request, f"{_OF_SUPERVISOR}{reason}\n", mode=0o600)


def clear_stale_requests(run: RunLayout) -> None:
    """Remove the supervisor's own request to an earlier launch."""
    text = _read(run.stop_request)
    if text is not None and text.startswith(_OF_SUPERVISOR):
        run.stop_request.unlink(missing_ok=True)


def clear_followed_requests(run: RunLayout) -> None:
    """Remove all requests after the run has stopped or is held."""
    for kind in KINDS:
        remove_request(run, kind)


def remove_request(run: RunLayout, kind: RequestKind) -> None:
    """Remove a request if that is possible; one that is a directory, for example, still stands."""
    with contextlib.suppress(OSError):
        request_path(run, kind).unlink()


def is_requested(run: RunLayout, kind: RequestKind) -> bool:
    """Whether such a request stands, whoever has made it; one stat(2), cheap for every step."""
    return os.path.exists(request_path(run, kind))


@dataclass
class SaveRequest:
    """A person's request for a checkpoint, for which rank 0 looks (`looks`); others do nothing."""

    run: RunLayout
    looks: bool

    @property
    def made(self) -> bool:
        return self.looks and is_requested(self.run, "save")

    def done(self) -> bool:
        """Remove the request when a save that covers it has begun; True if there was one.

        A file that cannot be removed would ask for ever: it is not looked for again.
        """
        if not self.made:
            return False
        try:
            request_path(self.run, "save").unlink()
        except FileNotFoundError:
            return False
        except OSError:
            self.looks = False
        return True


def _read(path: Path) -> str | None:
    """The first line of a file, printable and short; None without a file. Never follows a link.

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
        text = os.read(descriptor, 4 * _LONGEST_TEXT).decode(errors="replace").strip()
    except OSError:
        return ""
    finally:
        os.close(descriptor)
    return printable_line(text.splitlines()[0], _LONGEST_TEXT) if text else ""
