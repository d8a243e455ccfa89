"""Running hpctrain's command line inside the test process."""

from __future__ import annotations

import fcntl
import functools
import io
import json
import os
import pty
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import TextIO

import jsonschema

from hpctrain.cli.main import run
from hpctrain.cli.verbs import VERBS, output_schema


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


@functools.cache
def _validator(verb: str) -> jsonschema.protocols.Validator:
    return jsonschema.Draft202012Validator(json.loads(output_schema(verb)))


def _verb(arguments: tuple[str, ...]) -> str:
    """The command of an argument list: `status`, `serve plan`."""
    words = [one for one in arguments if not one.startswith("-")]
    return next((one for n in (2, 1) if (one := " ".join(words[:n])) in VERBS), "")


def check_json(outcome: Outcome) -> None:
    """Whatever a test asks for with --json has the schema that `hpctrain schema` promises."""
    verb = _verb(outcome.arguments)
    if "--json" not in outcome.arguments or not VERBS.get(verb, VERBS["top"]).output:
        return
    if verb == "schema" and len(outcome.arguments) > 2:
        return
    if not outcome.stdout:  # a broken pipe, or a bug that a test provokes
        return
    found = [*_validator(verb).iter_errors(json.loads(outcome.stdout))]
    assert not found, f"{verb}: {[error.message for error in found]}\n{outcome.transcript()}"


def hpctrain(*arguments: str, stdin: str = "", debug: bool = False) -> Outcome:
    """Run `hpctrain ARGUMENTS` without a terminal."""
    stdout, stderr = io.StringIO(), io.StringIO()
    keyboard = io.TextIOWrapper(io.BytesIO(stdin.encode()))
    with redirect_stdout(stdout), redirect_stderr(stderr), _standard_input(keyboard):
        exit_code = run(list(arguments), debug=debug)
    outcome = Outcome(arguments, exit_code, stdout.getvalue(), stderr.getvalue())
    check_json(outcome)
    return outcome


def on_terminal(columns: int, *arguments: str, typed: str = "") -> str:
    """Run `hpctrain ARGUMENTS` on a pseudo-terminal of so many columns; return all that it shows.

    `typed` is what a person answers. Line ends are those of a file; the codes of colours are kept.
    The last line is the exit code.
    """
    leader, follower = pty.openpty()
    os.write(leader, typed.encode())
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    shown: list[bytes] = []
    reader = threading.Thread(target=_read_all, args=(leader, shown))
    reader.start()
    with (
        open(os.dup(follower)) as keyboard,
        open(follower, "w") as screen,
        redirect_stdout(screen),
        redirect_stderr(screen),
        _standard_input(keyboard),
    ):
        exit_code = run(list(arguments))
        screen.write(f"exit code {exit_code}\n")
    reader.join()
    os.close(leader)
    return b"".join(shown).decode().replace("\r\n", "\n")


def _read_all(descriptor: int, into: list[bytes]) -> None:
    while True:
        try:
            data = os.read(descriptor, 65536)
        except OSError:  # EIO: nobody has the other end any more
            return
        if not data:
            return
        into.append(data)


@contextmanager
def _standard_input(stream: TextIO) -> Iterator[None]:
    before = sys.stdin
    sys.stdin = stream
    try:
        yield
    finally:
        sys.stdin = before
