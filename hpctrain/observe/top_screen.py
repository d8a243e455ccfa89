"""The Textual application of `top`: keys, questions, and threads that look and act.

Everything that reads files or asks Slurm runs in a thread, so that the screen answers keys while a
file system or Slurm hangs; a thread that hangs does not keep the program from ending. Belongs here:
what a key does, and what is shown when. Does not belong here: the lines themselves (`top_text`),
looking and acting (`hpctrain.runs`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.strip import Strip
from textual.widget import Widget

from hpctrain.base import clock
from hpctrain.base.errors import HpctrainError
from hpctrain.observe.live_view import (
    ChosenRun,
    LiveRow,
    LiveRuns,
    LiveView,
    RunDetails,
    shown_rows,
)
from hpctrain.observe.top_text import (
    TextPage,
    TopState,
    errors_page,
    help_page,
    history_page,
    log_page,
    screen_lines,
    why_page,
)
from hpctrain.records.find import RunFiles, find_run
from hpctrain.records.requests import user_name
from hpctrain.runs import control
from hpctrain.runs.state import RunState
from hpctrain.slurm.client import SlurmClient

_TICK_SECONDS = 1.0
_SECONDS_TO_LEAVE = 3.0
_STDERR = 2
_T = TypeVar("_T")


@dataclass(frozen=True)
class TopOptions:
    """What `top` looks at and how: `wanted_seconds` between looks; what the terminal can show."""

    runs: Path
    names: tuple[str, ...]
    wanted_seconds: float
    over: bool
    dots: bool
    colours: bool


class Lines(Widget):
    """A widget that consists of ready lines of text, so that no markup is read anywhere."""

    DEFAULT_CSS = "Lines { width: 100%; height: 100%; color: ansi_default; \
        background: ansi_default; }"
    can_focus = True

    def __init__(self, lay_out: Callable[[Size], Sequence[Text]]) -> None:
        super().__init__()
        self._lay_out = lay_out
        self._lines: Sequence[Text] = ()

    def redraw(self) -> None:
        """Lay the lines out again."""
        self._lines = self._lay_out(self.size)
        self.refresh()

    def on_resize(self) -> None:
        self.redraw()

    def render_line(self, y: int) -> Strip:
        if y >= len(self._lines):
            return Strip.blank(self.size.width)
        segments = list(self._lines[y].render(self.app.console))
        return Strip(segments).adjust_cell_length(self.size.width)


class TopApp(App[None]):
    """The live view; `slurm` and `options` are what a command has prepared."""

    CSS = "Screen { background: ansi_default; color: ansi_default; }"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "quit", priority=True, show=False),
        Binding("ctrl+z", "suspend_process", priority=True, show=False),
    ]

    def __init__(self, slurm: SlurmClient, options: TopOptions) -> None:
        super().__init__(ansi_color=True)
        self.options, self._slurm = options, slurm
        self._runs = LiveRuns(options.runs, slurm, options.names)
        self._chosen_run = ChosenRun()
        self._view: LiveView | None = None
        self._details: RunDetails | None = None
        self._chosen: str | None = None
        self._message = self._problem = self._words = ""
        self._over, self._only_mine = options.over or bool(options.names), False
        self._question: _Question | None = None
        self._page: TextPage | None = None
        self._reading_page = False
        self._looking = False
        self._look_at = self._asked_at = 0.0
        self._dashboard = Lines(self._lay_out)
        self._keys: dict[str, Callable[[], None]] = {
            **dict.fromkeys(("up", "k"), partial(self._move, -1)),
            **dict.fromkeys(("down", "j"), partial(self._move, 1)),
            "pageup": partial(self._move, -10),
            "pagedown": partial(self._move, 10),
            "home": partial(self._move, -(10**9)),
            "end": partial(self._move, 10**9),
            **dict.fromkeys(
                ("enter", "w"),
                partial(self._show, "why", lambda run: partial(why_page, run, slurm)),
            ),
            "l": partial(self._show, "log of", log_page, follows=True),
            "d": partial(self._show, "history of", lambda run: partial(history_page, run)),
            "e": partial(self._show, "errors of", lambda run: partial(errors_page, run)),
            "s": self._ask_to_save,
            "S": partial(self._ask_for_reason, "stop", control.stop),
            "h": partial(self._ask_for_reason, "hold", control.hold),
            "/": self._ask_for_words,
            "escape": self._forget,
            "a": self._switch_users,
            "f": self._switch_over,
            "r": self._look_soon,
            "?": lambda: self._open(TextPage("hpctrain top", help_page)),
            "q": self.exit,
        }

    def compose(self) -> ComposeResult:
        yield self._dashboard

    def on_mount(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            loop.add_signal_handler(number, self._leave)
        self._dashboard.focus()
        self.set_interval(_TICK_SECONDS, self._tick)
        self._tick()

    def _leave(self) -> None:
        """Restore the terminal and end; end all the same where the terminal takes nothing more."""
        at_the_latest = threading.Timer(_SECONDS_TO_LEAVE, os._exit, (1,))
        at_the_latest.daemon = True
        at_the_latest.start()
        self.exit()

    # -- looking -------------------------------------------------------------------------------

    @property
    def every_seconds(self) -> float:
        """The time between two looks: as wanted, and never less than the site allows."""
        least_seconds = self._view.poll_seconds if self._view else 0.0
        return max(self.options.wanted_seconds, least_seconds)

    def _tick(self) -> None:
        if not (self.is_headless or os.isatty(_STDERR)):
            # The window or the connection is gone, and nobody should go on asking Slurm.
            self._leave()
            return
        if not self._looking and clock.monotonic() >= self._look_at:
            self._look(ask_slurm=True)
        if self._page is not None and self._page.follows:
            self._read_page(self._page)
        self._dashboard.redraw()

    def _look(self, *, ask_slurm: bool) -> None:
        self._looking = True
        if ask_slurm:
            self._asked_at = clock.monotonic()
        self._in_thread(
            partial(self._runs.look, ask_slurm=ask_slurm), self._take_view, self._take_problem
        )

    def _look_soon(self) -> None:
        """Look now; ask Slurm only if the site allows it by now."""
        if self._looking:
            return
        least_seconds = self._view.poll_seconds if self._view else 0.0
        self._look(ask_slurm=clock.monotonic() - self._asked_at >= least_seconds)

    def _take_view(self, view: LiveView) -> None:
        self._view, self._problem = view, ""
        self._looked()
        self._choose_again()
        self._read_details()

    def _take_problem(self, problem: str) -> None:
        """The last rows stay, and get older."""
        self._problem = problem
        self._looked()

    def _looked(self) -> None:
        self._looking = False
        self._look_at = self._asked_at + self.every_seconds
        self._dashboard.redraw()

    def _read_details(self) -> None:
        run_id = self._chosen
        if run_id is None:
            return

        def read() -> RunDetails:
            return self._chosen_run.read(find_run(self.options.runs, run_id))

        self._in_thread(read, self._take_details, lambda _: None)

    def _take_details(self, details: RunDetails) -> None:
        if details.run_id == self._chosen:
            self._details = details
            self._dashboard.redraw()

    # -- what is shown -------------------------------------------------------------------------

    def _lay_out(self, size: Size) -> list[Text]:
        if self._page is not None:
            return self._page.lines(size.width, size.height)
        return screen_lines(self._state(), size.width, size.height)

    def _state(self) -> TopState:
        details = self._details
        message = self._message if self._question is None else self._question.line
        return TopState(
            directory=str(self.options.runs),
            now=clock.now(),
            every_seconds=self.every_seconds,
            view=self._view,
            shown=self._shown(),
            chosen=self._chosen,
            details=details if details is not None and details.run_id == self._chosen else None,
            message=message,
            problem="" if message else self._problem,
            filters=", ".join(self._hidden_because()),
            dots=self.options.dots,
            colours=self.options.colours,
        )

    def _shown(self) -> tuple[LiveRow, ...]:
        rows = self._view.rows if self._view else ()
        user = user_name() if self._only_mine else None
        return shown_rows(rows, over=self._over, user=user, words=self._words)

    def _hidden_because(self) -> Iterator[str]:
        """Say why some runs are not shown."""
        if self._view is None:
            return
        if self._words:
            yield f"only with `{self._words}` (Esc: all)"
        if self._only_mine:
            yield "only your own (a: all)"
        shown = {row.status.run_id for row in self._shown()}
        hidden = [row.status.state for row in self._view.rows if row.status.run_id not in shown]
        if hidden and not self._words and not self._only_mine:
            failed = sum(state is RunState.FAILED for state in hidden)
            words = f", {failed} of them failed" if failed else ""
            yield f"{len(hidden)} finished not shown{words} (f: all)"

    def _choose_again(self) -> None:
        """Keep the chosen run; take its neighbour when it is not shown any more."""
        ids = [row.status.run_id for row in self._shown()]
        if self._chosen not in ids:
            self._chosen = ids[0] if ids else None

    def _move(self, by: int) -> None:
        ids = [row.status.run_id for row in self._shown()]
        if not ids or self._chosen is None:
            return
        place = max(0, min(len(ids) - 1, ids.index(self._chosen) + by))
        if ids[place] != self._chosen:
            self._chosen = ids[place]
            self._read_details()

    def _switch_users(self) -> None:
        self._only_mine = not self._only_mine
        self._choose_again()

    def _switch_over(self) -> None:
        self._over = not self._over
        self._choose_again()

    def _forget(self) -> None:
        self._words = ""
        self._choose_again()

    def _ask_for_words(self) -> None:
        def filter_by(words: str) -> None:
            self._words = words
            self._choose_again()
            self._read_details()

        self._question = _Question("show runs with: ", filter_by, text="")

    # -- keys ----------------------------------------------------------------------------------

    def on_key(self, event: events.Key) -> None:
        event.stop()
        event.prevent_default()
        name = event.character if event.is_printable and event.character else event.key
        if self._question is not None:
            self._answer(self._question, event)
        elif self._page is not None:
            if self._page.closes_by(name):
                self._page = None
        elif name in self._keys:
            self._message = ""
            self._keys[name]()
        self._dashboard.redraw()

    def on_paste(self, event: events.Paste) -> None:
        if self._question is not None and self._question.text is not None:
            words = " ".join(event.text.split())
            self._question = replace(self._question, text=self._question.text + words)
            self._dashboard.redraw()

    def _answer(self, question: _Question, event: events.Key) -> None:
        if event.key == "escape" or (question.text is None and event.character in ("n", "N")):
            self._question, self._message = None, question.no
        elif question.text is None:
            if event.character in ("y", "Y"):
                self._question = None
                question.then("")
        elif event.key == "enter":
            self._question = None
            question.then(question.text)
        elif event.key == "backspace":
            self._question = replace(question, text=question.text[:-1])
        elif event.key == "ctrl+u":
            self._question = replace(question, text="")
        elif event.is_printable and event.character:
            self._question = replace(question, text=question.text + event.character)

    # -- requests ------------------------------------------------------------------------------

    def _ask_to_save(self) -> None:
        if (run_id := self._chosen) is not None:
            self._question = _Question(
                f"make `{run_id}` save now? y/n ",
                lambda _: self._request(run_id, lambda run: control.save(run, self._slurm)),
            )

    def _ask_for_reason(self, verb: str, action: Callable[..., control.ControlResult]) -> None:
        if (run_id := self._chosen) is None:
            return

        def ask_again(reason: str) -> None:
            because = f" ({reason})" if reason else ""
            self._question = _Question(
                f"make `{run_id}` save and {verb}{because}? y/n ",
                lambda _: self._request(
                    run_id, lambda run: action(run, self._slurm, reason=reason)
                ),
            )

        self._question = _Question(f"why {verb} `{run_id}`? (Enter: no reason) ", ask_again, "")

    def _request(self, run_id: str, act: Callable[[RunFiles], control.ControlResult]) -> None:
        """Make a request as the commands do, and show its outcome."""

        def done(answer: control.ControlResult) -> None:
            self._say(answer.message)
            self._look_soon()

        self._message = f"asking `{run_id}` ..."
        self._in_thread(lambda: act(find_run(self.options.runs, run_id)), done, self._say)

    def _say(self, message: str) -> None:
        self._message = message
        self._dashboard.redraw()

    # -- pages ---------------------------------------------------------------------------------

    def _show(
        self,
        what: str,
        reader: Callable[[RunFiles], Callable[[], list[str]]],
        *,
        follows: bool = False,
    ) -> None:
        run_id = self._chosen
        if run_id is None:
            return
        readers: list[Callable[[], list[str]]] = []

        def read() -> list[str]:
            if not readers:
                readers.append(reader(find_run(self.options.runs, run_id)))
            return readers[0]()

        self._open(TextPage(f"{what} {run_id}", read, follows=follows))

    def _open(self, page: TextPage) -> None:
        self._page, self._reading_page = page, False
        self._read_page(page)

    def _read_page(self, page: TextPage) -> None:
        if self._reading_page:
            return
        self._reading_page = True

        def take(lines: list[str]) -> None:
            if page is self._page:  # and has not been closed meanwhile
                self._reading_page = False
                page.text = lines
                self._dashboard.redraw()

        self._in_thread(page.read, take, lambda problem: take([problem]))

    # -- threads -------------------------------------------------------------------------------

    def _in_thread(
        self, work: Callable[[], _T], then: Callable[[_T], None], failed: Callable[[str], None]
    ) -> None:
        """Call `work` in a thread, and `then` with its result, or `failed` with one line, here.

        The thread is a daemon: the program ends also while Slurm or a file system hangs.
        """

        def run() -> None:
            try:
                result = work()
            except Exception as error:
                self.call_later(failed, _one_line(error))
            else:
                self.call_later(then, result)

        threading.Thread(target=run, daemon=True).start()


@dataclass(frozen=True)
class _Question:
    """A question in the last line; `text` is the answer so far, None for yes or no."""

    words: str
    then: Callable[[str], None]
    text: str | None = None
    no: str = "nothing was done"

    @property
    def line(self) -> str:
        return self.words if self.text is None else f"{self.words}{self.text}_"


def _one_line(error: Exception) -> str:
    """Describe an error in one line."""
    if isinstance(error, HpctrainError):
        words = [*str(error).splitlines(), *([error.hint] if error.hint else [])]
        return "; ".join(words)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"unexpected {type(error).__name__}: {error}; this is a bug of hpctrain"
