"""Starts the command line: what holds before its modules are imported, which takes a while.

Belongs here: nothing that needs an import of ours or of others. Does not belong here: commands, and
reporting their errors (`main`, `failures`).
"""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Entry point of the `hpctrain` program: Ctrl-C ends it quietly from the first moment."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else somebody ignores interruptions on purpose
        signal.signal(signal.SIGINT, lambda _number, _frame: os._exit(130))
    from hpctrain.cli import main as commands

    signal.signal(signal.SIGINT, before)
    commands.main()
