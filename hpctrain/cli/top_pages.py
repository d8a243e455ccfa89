"""Pages of text inside `top`: what `why`, `describe`, `logs` and `logs --errors` print.

Belongs here: from a run to lines, and which keys `top` has. Does not belong here: scrolling
(`top_screen`), the sentences themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from hpctrain.actions.log_tail import LogTail
from hpctrain.actions.runs import RunFiles
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


def why_page(run: RunFiles, slurm: SlurmClient) -> list[str]:
    """Explain the state of a run; asks Slurm."""
    from hpctrain.actions.why import why
    from hpctrain.cli.why_text import why_lines

    now = time.time()
    return list(why_lines(why(run, slurm, now), now))


def history_page(run: RunFiles) -> list[str]:
    from hpctrain.actions.describe import describe
    from hpctrain.cli.story_text import story_lines

    return story_lines(describe(run))


def errors_page(run: RunFiles) -> list[str]:
    from hpctrain.actions.log_errors import launch_errors
    from hpctrain.cli.logs_text import error_lines

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
