"""Running hpctrain's command line inside the test process."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass

from hpctrain.cli.main import run


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    arguments: tuple[str, ...]
    exit_code: int
    stdout: str
    stderr: str

    def transcript(self) -> str:
        """As it is kept in tests/golden."""
        return (
            f"$ hpctrain {' '.join(self.arguments)}\n{self.stdout}"
            f"--- stderr\n{self.stderr}--- exit code {self.exit_code}\n"
        )


def hpctrain(*arguments: str, stdin: str = "", debug: bool = False) -> Outcome:
    """Run `hpctrain ARGUMENTS` without a terminal."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with redirect_stdout(stdout), redirect_stderr(stderr), _stdin(stdin):
        exit_code = run(list(arguments), debug=debug)
    return Outcome(arguments, exit_code, stdout.getvalue(), stderr.getvalue())


@contextmanager
def _stdin(text: str) -> Iterator[None]:
    before = sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(text.encode()))
    try:
        yield
    finally:
        sys.stdin = before
