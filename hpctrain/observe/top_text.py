"""Lays out the screen of `top`, and the pages of text inside it, for a terminal of any size.

Every text from a run is made printable here, and no markup is interpreted anywhere. Belongs here:
columns, lines, colours, keys and what they do, scrolling. Does not belong here: threads and events
(`top_screen`), sentences about runs, any number that is not in the documents (`live_view`).
"""

from __future__ import annotations

import re
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.style import Style
from rich.text import Text

from hpctrain.base import clock
from hpctrain.base.units import short_duration
from hpctrain.observe.live_view import LiveRow, LiveView, RunDetails
from hpctrain.page.text import Whole, facts, fitting, is_numeric, paragraph, used_widths
from hpctrain.records.find import RunFiles
from hpctrain.runs.logs import LogTail
from hpctrain.runs.notify import state_words
from hpctrain.runs.run_page import curve_lines
from hpctrain.runs.status_text import COLOURS, sentences
from hpctrain.slurm.client import SlurmClient

# Colours and positions of a cursor in logs (ECMA-48, CSI); other controls become `?`.
_CONTROL_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_PLAIN, _BOLD, _DIM, _CHOSEN = Style(), Style(bold=True), Style(dim=True), Style(reverse=True)
_ALARM = Style(bold=True, reverse=True)

COLUMNS = (
    *("RUN", "STATE", "USER", "JOB", "TRY", "STEP", "LOSS", "S/STEP", "PLAN", "MFU", "TOK/S"),
    *("LEFT", "SAVED", "RISK", "SEEN"),
)
# What a terminal that is too narrow does without, first to last.
_DROPPED = (
    *("TRY", "TOK/S", "JOB", "SAVED", "SEEN", "MFU", "LOSS", "PLAN", "S/STEP", "RISK", "LEFT"),
    *("USER", "STEP"),
)
# In the header, as far as there is room.
_COUNTED = ("RUNNING", "PENDING", "FAILED", "UNKNOWN", "STOPPED", "DONE")
_RIGHT = ("S/STEP", "PLAN", "MFU", "LEFT", "SAVED", "RISK", "SEEN", "STEP")
# A longer name is shortened in the middle where there is no room for it.
_SHORT_NAME = 16
# A look that takes longer than this many intervals is worth a mark.
_LATE_INTERVALS = 2.5
_LEAST_CURVE, _MOST_CURVE = 3, 12
_LEAST_ROWS, _MOST_MESSAGE_LINES = 3, 3
_NARROWEST_TEXT = 20

FOOTER = (
    *(("Enter", "why"), ("l", "logs"), ("d", "history"), ("e", "errors"), ("s", "save")),
    *(("S", "stop"), ("h", "hold"), ("/", "filter"), ("?", "help"), ("q", "quit")),
)
# What a narrow terminal does without, first to last: `?` lists all keys.
_LESS_NEEDED = ("h", "d", "e", "/", "l", "S", "s", "Enter")


@dataclass(frozen=True)
class TopState:
    """What the screen is made of. `now` in seconds since the epoch.

    `shown`: the rows that are not filtered out. `chosen`: the run id of one of them. `message`: the
    outcome of the last action, or a question. `dots`: the terminal has braille and lines.
    """

    directory: str
    now: float
    every_seconds: float
    view: LiveView | None = None
    shown: tuple[LiveRow, ...] = ()
    chosen: str | None = None
    details: RunDetails | None = None
    message: str = ""
    problem: str = ""
    filters: str = ""
    dots: bool = True
    colours: bool = True

    @property
    def row(self) -> LiveRow | None:
        """The chosen row."""
        return next((row for row in self.shown if row.status.run_id == self.chosen), None)


def printable(text: str) -> str:
    """Make one line of foreign text safe for a terminal; indentation stays."""
    text = _CONTROL_SEQUENCE.sub("", text).expandtabs(4).rstrip()
    return "".join(c if c.isprintable() else "?" for c in text)


def screen_lines(state: TopState, width: int, height: int) -> list[Text]:
    """Lay out the whole screen in exactly `height` lines of at most `width` columns."""
    table = _table(state, width)
    bottom = [*_message(state, width), footer(FOOTER, _LESS_NEEDED, width)]
    room = max(0, height - len(bottom) - 3)  # header, names of columns, title of the chosen run
    row = state.row
    facts = [] if row is None else _facts(row, state, width)
    points = state.details.curve if state.details and len(state.details.curve) > 1 else ()
    # Rows first, as long as facts and the smallest curve have room; what is left is the curve's.
    wanted = min(len(facts), 4) + (_LEAST_CURVE + 3 if points else 0)
    rows_shown = min(max(1, len(table) - 1), max(_LEAST_ROWS, room - wanted))
    # The names of columns and so many rows, the chosen one among them.
    ids = [one.status.run_id for one in state.shown]
    place = ids.index(state.chosen) if state.chosen in ids else 0
    first = max(0, min(place - rows_shown // 2, len(table) - 1 - rows_shown))
    lines = [_header(state, width), table[0], *table[1 + first : 1 + first + rows_shown]]
    if row is not None:
        rule = "\N{BOX DRAWINGS LIGHT HORIZONTAL}" if state.dots else "-"
        name = shortened(printable(row.status.run_id), max(8, width - 8))
        title = Text(f"{rule * 2} ")
        title.append(name, _BOLD)
        title.append(f" {rule * max(0, width - 4 - cell_len(name))}")
        lines.append(_cut(title, width))
    below = max(0, room - rows_shown)
    facts_shown, curve_rows = min(len(facts), below), 0
    if points and below - min(len(facts), 3) > _LEAST_CURVE:
        facts_shown = min(len(facts), max(3, below - _LEAST_CURVE - 3))
        curve_rows = min(_MOST_CURVE, below - facts_shown - 1)
    lines += facts[:facts_shown]
    if curve_rows:
        drawn = curve_lines(points, max(20, width - 12), curve_rows, dots=state.dots)
        lines += [_cut(Text(line), width) for line in drawn]
    space = height - len(bottom)
    lines = [*lines[:space], *([Text()] * (space - len(lines)))] if space > 0 else []
    return [*lines, *bottom][-height:]


def footer(keys: Sequence[tuple[str, str]], droppable: Sequence[str], width: int) -> Text:
    """List keys and what they do, as many as fit; the key is bold."""
    shown = list(keys)
    for name in ("", *droppable):
        shown = [one for one in shown if one[0] != name]
        if sum(len(key) + len(word) + 3 for key, word in shown) - 2 <= width:
            break
    line = Text()
    for key, word in shown:
        line.append("  " if line else "")
        line.append(key, _BOLD)
        line.append(f" {word}")
    return _cut(line, width)


def folded(text: str, width: int) -> list[str]:
    """Break a line at the width of the terminal, between words if its characters are narrow."""
    text, width = printable(text), max(1, width)
    if cell_len(text) <= width:
        return [text]
    if not text.isascii() or width < _NARROWEST_TEXT:
        return chop_cells(text, width)
    indent = len(text) - len(text.lstrip()) + 2
    return textwrap.wrap(
        text,
        width,
        subsequent_indent=" " * min(indent, width // 2),
        break_on_hyphens=False,
        drop_whitespace=False,
    )


def shortened(text: str, width: int) -> str:
    """Leave out the middle of a text that is wider: names differ at both ends."""
    if cell_len(text) <= width:
        return text
    if width <= 4:
        return set_cell_size(text, max(0, width))
    head = (width - 1) // 2
    tail = width - 2 - head
    end = text
    while cell_len(end) > tail:
        end = end[1:]
    return set_cell_size(text, head) + ".." + end


# -- above and below ---------------------------------------------------------------------------


def _header(state: TopState, width: int) -> Text:
    clock_time = time.strftime("%H:%M:%S", time.localtime(state.now))
    style, age, place = _PLAIN, "first look ...", state.directory
    counts: list[str] = []
    if (view := state.view) is not None:
        age_seconds = max(0.0, state.now - view.look_time)
        age = f"{_whole_seconds(age_seconds)} old"
        if view.slurm_silent:
            style, age = _ALARM, "SLURM DOES NOT ANSWER"
            if view.slurm_time is not None:
                age = f"SLURM SILENT, states {_whole_seconds(state.now - view.slurm_time)} old"
        elif age_seconds > _LATE_INTERVALS * state.every_seconds:
            style, age = _ALARM, f"OLD DATA: {_whole_seconds(age_seconds)}"
        found = Counter(row.status.state.value for row in view.rows)
        counts = [f"{found[name]} {name.lower()}" for name in _COUNTED if found[name]]
        place = f"{view.cluster} {place}" if view.cluster else place
    line = Text("hpctrain", _BOLD)
    room = width - cell_len(f"{line.plain}{age}{clock_time}") - 4
    while counts and len(", ".join(counts)) + 2 > room:
        counts.pop()
    room -= len(", ".join(counts)) + 2 * bool(counts) + 2
    if room >= 8:
        line.append(f"  {shortened(printable(place), room)}")
    line.append("  " * bool(counts) + ", ".join(counts))
    line.append(" " * max(1, width - cell_len(f"{line.plain}{age}  {clock_time}")))
    line.append(age, style)
    line.append(f"  {clock_time}")
    return _cut(line, width)


def _message(state: TopState, width: int) -> list[Text]:
    """Show a question or the outcome of an action whole, as far as three lines have room for it."""
    if not (state.problem or state.message):
        return [Text(shortened(printable(state.filters), width), _DIM)]
    words = printable(" ".join((state.problem or state.message).split()))
    lines = paragraph(words, hang=2, width=max(10, width))
    style = _ALARM if state.problem else _BOLD
    return [_cut(Text(line, style), width) for line in lines[:_MOST_MESSAGE_LINES]]


# -- the table ---------------------------------------------------------------------------------


def _table(state: TopState, width: int) -> list[Text]:
    """Lay out the names of columns and a line for each row."""
    if not state.shown:
        none = "no runs here" if not state.view or not state.view.rows else "no run is shown"
        return [Text(), Text(f"  {none if state.view else ''}")]
    body = [_cells(row) for row in state.shown]
    columns = list(COLUMNS)
    if len({row.status.owner for row in state.shown}) < 2:
        columns.remove("USER")
    widths = used_widths(columns, body, always=("RUN", "STATE"), measure=cell_len)
    shown, gap, widths["RUN"] = _columns(widths, width)
    right = {name: name in _RIGHT or is_numeric([one[name] for one in body]) for name in shown}
    head = gap.join(_padded(name, widths[name], right[name]) for name in shown)
    lines = [_cut(Text(f"  {head}", _BOLD), width)]
    for row, cells in zip(state.shown, body, strict=True):
        chosen = row.status.run_id == state.chosen
        line = Text(">" if chosen else " ")
        line.append("!" if row.alerts else " ", _BOLD)
        for number, name in enumerate(shown):
            line.append(gap if number else "")
            cell = shortened(cells[name], widths[name]) if name == "RUN" else cells[name]
            coloured = name == "STATE" and state.colours and not chosen
            colour = COLOURS.get(row.status.state.value) if coloured else None
            style = Style(color=colour) if colour else _PLAIN
            line.append(_padded(cell, widths[name], right[name]), style)
        line = _cut(line, width)
        if chosen:
            line.pad_right(max(0, width - cell_len(line.plain)))
            line.stylize(_CHOSEN)
        lines.append(line)
    return lines


def _columns(widths: dict[str, int], width: int) -> tuple[list[str], str, int]:
    """Choose columns, the gap between them, and the width of names."""
    least = min(widths["RUN"], _SHORT_NAME)
    shown = fitting({**widths, "RUN": least}, _DROPPED, width - 2, " ")
    others = 2 + sum(widths[name] for name in shown if name != "RUN")
    for gap in ("  ", " "):
        room = width - others - len(gap) * (len(shown) - 1)
        if room >= least:
            return shown, gap, min(widths["RUN"], room)
    return shown, " ", max(4, min(widths["RUN"], width - others - len(shown)))


def _cells(row: LiveRow) -> dict[str, str]:
    """Format one row; `-` for what is not known."""
    one = row.status
    step = "-"
    if one.step is not None:
        target = "" if one.target_step is None else f"/{_count(one.target_step)}"
        share = f" {one.step / one.target_step:.0%}" if one.target_step else ""
        step = f"{_count(one.step)}{target}{share}"
    plan = "-"
    if one.step_seconds and row.planned_step_seconds:
        ratio = one.step_seconds / row.planned_step_seconds
        plan = f"{ratio - 1:+.0%}" if ratio < 10 else f"x{ratio:.3g}"

    def age(seconds: float | None) -> str:
        return "-" if seconds is None else _whole_seconds(seconds).replace(" ", "")

    over = one.state.over
    return {
        "RUN": printable(one.run_id),
        "STATE": one.state.value,
        "USER": printable(one.owner or "-"),
        "JOB": "-" if one.job_id is None else str(one.job_id),
        "TRY": str(one.attempts),
        "STEP": step,
        "LOSS": "-" if one.loss is None else f"{one.loss:.4g}",
        "S/STEP": "-" if one.step_seconds is None else f"{one.step_seconds:.3g}",
        "PLAN": plan,
        "MFU": "-" if one.mfu is None else f"{one.mfu:.0%}",
        "TOK/S": "-" if one.tokens_per_second is None else _count(round(one.tokens_per_second)),
        "LEFT": age(one.eta_seconds),
        "SAVED": age(None if over else row.saved_seconds_ago),
        "RISK": age(one.at_risk_seconds or None),
        "SEEN": age(None if over else one.updated_seconds_ago),
    }


# -- the chosen run ----------------------------------------------------------------------------


def _facts(row: LiveRow, state: TopState, width: int) -> list[Text]:
    """Say about the chosen run what deserves attention first, then the rest."""
    lines: list[Text] = []
    for alert in row.alerts:
        words = f"{alert.name}: {alert.message}"
        if alert.remedy:
            words += f" [`hpctrain watch --act` would {alert.remedy}]"
        lines += _paragraph("! ", words, width, _BOLD)
    for untold in state.details.untold if state.details else ():
        lines += _paragraph("! ", f"not told: {state_words(untold)}", width, _BOLD)
    one = row.status
    parts = [] if one.job_id is None else [f"job {one.job_id}"]
    parts += [f"attempt {one.attempts}"] if one.attempts else []
    if one.checkpoint_step is not None:
        ago = (
            "" if row.saved_seconds_ago is None else f" {_whole_seconds(row.saved_seconds_ago)} ago"
        )
        parts.append(f"step {one.checkpoint_step:,} saved{ago}")
    if row.planned_step_seconds is not None:
        parts.append(f"{short_duration(row.planned_step_seconds)} a step planned")
    if parts:
        lines += _paragraph("  ", " \N{MIDDLE DOT} ".join(parts), width, _PLAIN)
    for sentence in sentences(one):
        lines += _paragraph("  ", sentence, width, _PLAIN)
    return lines


def _paragraph(first: str, words: str, width: int, style: Style) -> Iterator[Text]:
    for line in paragraph(printable(" ".join(words.split())), first, hang=2, width=max(10, width)):
        yield _cut(Text(line, style), width)


# -- cells -------------------------------------------------------------------------------------


def _cut(line: Text, width: int) -> Text:
    line.truncate(max(0, width), overflow="crop")
    return line


def _padded(cell: str, width: int, right: bool) -> str:
    if right:
        return " " * max(0, width - cell_len(cell)) + cell
    return set_cell_size(cell, max(width, cell_len(cell)))


def _count(number: int) -> str:
    """Format a number in at most six characters: `9,999`, `52.3k`, `1.25M`."""
    if number < 10_000:
        return f"{number:,}"
    for suffix, scale in (("G", 1e9), ("M", 1e6)):
        if number >= scale:
            return f"{number / scale:.3g}{suffix}"
    return f"{number / 1000:.3g}k"


def _whole_seconds(seconds: float) -> str:
    return short_duration(round(seconds)) if seconds >= 1 else "0 s"


# -- Pages of text inside `top`: what `why`, `describe`, `logs` and `logs --errors` print -------


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
    lines = []
    for title, pairs in (
        ("Keys", KEYS),
        ("Columns; a wider terminal has more of them", _COLUMNS),
    ):
        lines += [
            "",
            title,
            *facts(*((f"  {name}", Whole(what)) for name, what in pairs), margin=18),
        ]
    return lines[1:]
