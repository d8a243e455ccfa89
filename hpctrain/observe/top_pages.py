"""Pages of text inside `top`: what `why`, `describe`, `logs` and `logs --errors` print.

Belongs here: from a run to lines, scrolling through them, which keys `top` has. Does not belong
here: threads and events (`top_screen`), the sentences themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rich.text import Text

from hpctrain.base import clock
from hpctrain.observe.top_text import folded, footer, printable, shortened
from hpctrain.records.find import RunFiles
from hpctrain.runs.logs import LogTail
from hpctrain.slurm.client import SlurmClient

# Key -> what it does, in the order of the page of help.
KEYS = (
    ("up, down, j, k", "choose a run; PgUp, PgDn, Home and End go further"),
    ("Enter, w", "why: its state, what happened and what happens next (asks Slurm)"),
    ("l", "the newest log of its job, followed as it grows"),
    ("d", "its history: attempts, launches, why each ended"),
    ("e", "the first errors of its ranks"),
    ("s", "make it save a checkpoint and continue; asks first"),
    ("S", "make it save, release its nodes and stop; asks for a reason, and again"),
    ("h", "make it save and wait in the queue until `hpctrain resume`; asks as S does"),
    ("/", "show only runs with these words in name, state, user or reason; Esc ends it"),
    ("a", "everybody's runs, or only your own"),
    ("f", "all finished runs, or only the newest"),
    ("r", "look now; Slurm is asked no more often than the site allows"),
    ("?", "this page"),
    ("q, Ctrl-C", "quit"),
)
_COLUMNS = (
    ("> !", "the chosen run; a run that something is wrong with: the reason is below"),
    ("STEP", "last step, target, share"),
    ("S/STEP", "seconds of a step, the median of the last 20"),
    ("PLAN", "how much longer (+) or shorter (-) a step takes than planned"),
    ("LEFT", "the time of the steps that are left, without waiting in the queue"),
    ("SAVED", "age of the newest checkpoint"),
    ("RISK", "training that a failure now would lose"),
    ("SEEN", "age of the trainer's last sign of life"),
)
_PAGE_KEYS = (
    *(("q", "back"), ("up, down", "line"), ("PgUp, PgDn", "page"), ("Home, End", "first, last")),
)


class TextPage:
    """A text to scroll through; one that `follows` is read again and again and shows its end."""

    def __init__(self, title: str, read: Callable[[], list[str]], *, follows: bool = False) -> None:
        self.title, self.read, self.follows = title, read, follows
        self.text = ["reading ..."]
        self._first, self._room, self._last = 0, 1, 0
        self._at_end = follows

    def lines(self, width: int, height: int) -> list[Text]:
        """Lay out the title, as much of the text as fits, and the keys."""
        lines = [part for line in self.text for part in folded(line, width)]
        self._room = max(1, height - 2)
        self._last = max(0, len(lines) - self._room)
        self._first = self._last if self._at_end else min(self._first, self._last)
        shown = lines[self._first : self._first + self._room]
        place = f"lines {self._first + 1}-{self._first + len(shown)} of {len(lines)}"
        if self.follows:
            place += ", followed" if self._at_end else ", not followed (End: follow)"
        name = shortened(printable(self.title), max(8, width - len(place) - 2))
        title = Text(folded(f"{name}  {place}", width)[0], "bold")
        body = [title, *(Text(line) for line in shown)]
        body += [Text()] * (height - 1 - len(body))
        return [*body, footer(_PAGE_KEYS, ("Home, End", "PgUp, PgDn"), width)][: max(0, height)]

    def closes_by(self, key: str) -> bool:
        """Scroll, or tell that this key closes the page."""
        if key in ("q", "escape"):
            return True
        moves = {
            **dict.fromkeys(("up", "k"), -1),
            **dict.fromkeys(("down", "j", "enter"), 1),
            **dict.fromkeys(("pageup", "b"), -self._room),
            **dict.fromkeys(("pagedown", " ", "space"), self._room),
            **dict.fromkeys(("home", "g"), -self._last),
            **dict.fromkeys(("end", "G"), self._last),
        }
        if key in moves:
            self._first = max(0, min(self._first + moves[key], self._last))
            self._at_end = self.follows and self._first == self._last
        return False


def why_page(run: RunFiles, slurm: SlurmClient) -> list[str]:
    """Explain the state of a run; asks Slurm."""
    from hpctrain.runs.why import why, why_lines

    now = clock.now()
    return list(why_lines(why(run, slurm, now), now))


def history_page(run: RunFiles) -> list[str]:
    from hpctrain.runs.describe import describe, story_lines

    return story_lines(describe(run))


def errors_page(run: RunFiles) -> list[str]:
    from hpctrain.runs.log_errors import error_lines, launch_errors

    return list(error_lines(launch_errors(run)))


def log_page(run: RunFiles) -> Callable[[], list[str]]:
    """Return what reads the newest log again and again."""
    tail = LogTail(run)

    def read() -> list[str]:
        return list(tail.read()) or ["no log yet"]

    return read


def help_page() -> list[str]:
    """List keys and columns."""
    lines = ["Keys"]
    lines += _pairs(KEYS)
    lines += ["", "Columns; a wider terminal has more of them"]
    return [*lines, *_pairs(_COLUMNS)]


def _pairs(pairs: Iterable[tuple[str, str]]) -> list[str]:
    return [f"  {name:<14}  {what}" for name, what in pairs]
