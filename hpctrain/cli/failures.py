"""Reports errors: what is wrong, where, and what to do, with the exit code of each kind.

Belongs here: which exception a person is told how. Does not belong here: raising, finding commands
(`main`).
"""

from __future__ import annotations

import os
import sys
import traceback

import click

from hpctrain.base.errors import HpctrainError, InvalidInputError
from hpctrain.page.output import ErrorDocument, coloured, json_out, terminal_width
from hpctrain.page.text import paragraph

_INTERRUPTED, _BUG, _USAGE, _ENVIRONMENT = 130, 1, 2, 7
# Import name of a package that no engine needs -> the extra of pyproject.toml that has it.
_EXTRAS = {
    "PIL": "data",
    "sklearn": "data",
    "submitit": "data",
    "matplotlib": "plots",
    "prometheus_client": "metrics",
    "textual": "top",
}


def extras() -> dict[str, str]:
    """List packages that hpctrain can do without by import name, with the extra that has each."""
    from hpctrain.spec.engines.registry import ENGINES

    of_engines = {
        name: one.extra for one in ENGINES.values() if one.extra for name in one.extra_packages
    }
    return {**_EXTRAS, **of_engines}


def report(error: BaseException, *, debug: bool, as_json: bool = False) -> int:
    """Tell what happened, on stderr; returns the exit code. `debug` shows the traceback.

    With `as_json` an error of the user's is a document on standard output, too.
    """
    if isinstance(error, click.Abort | KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return _INTERRUPTED
    if as_json and isinstance(error, HpctrainError | click.ClickException):
        json_out("error", ErrorDocument.of(error))
    if isinstance(error, click.ClickException):
        error.show()
        return error.exit_code
    if debug:
        traceback.print_exception(error)
    if isinstance(error, InvalidInputError):
        hints = [problem.hint for problem in error.problems if problem.hint]
        show([str(problem) for problem in error.problems], hints)
        return error.exit_code
    if isinstance(error, HpctrainError):
        show(str(error).splitlines(), [error.hint] if error.hint else [])
        return error.exit_code
    return _unexpected(error)


def _unexpected(error: BaseException) -> int:
    """Tell apart what the machine lacks and what is a bug of hpctrain."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if name and (extra := extras().get(name)):
        hint = f"pip install 'hpctrain[{extra}]'"
        show(
            [f"this needs the Python package {name}, which {sys.executable} does not have"], [hint]
        )
        return _USAGE
    if isinstance(error, MemoryError):
        show(["this machine has not enough memory for that"], ["`ulimit -v` shows a limit"])
        return _ENVIRONMENT
    if isinstance(error, OSError) and error.strerror:
        printing = not silence_stdout() or _was_printing(error)
        file = error.filename or ("standard output" if printing else None)
        where = f"{file}: " if file else ""
        show([f"{where}{error.strerror}"], ["`--debug` shows during what"])
        return _ENVIRONMENT
    message = f"unexpected {type(error).__name__}: {error}"
    show(
        [message], ["this is a bug of hpctrain; run again with `--debug` and report the traceback"]
    )
    return _BUG


def _was_printing(error: BaseException) -> bool:
    """Tell whether printing on stdout has failed: the error itself names no file."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    innermost = frames[-1] if frames else None
    if innermost is None or innermost.f_code is not click.echo.__code__:
        return False
    return not innermost.f_locals["err"]


def show(lines: list[str], hints: list[str]) -> None:
    """Print `error: ...`, one line per problem, then the hints after a blank line."""
    for line in lines:
        _echo("error: ", "red", line)
    if hints:
        click.echo(err=True)
    for hint in dict.fromkeys(hints):
        _echo("hint: ", "cyan", hint)


def _echo(mark: str, colour: str, text: str) -> None:
    """Print a line on stderr; one that a terminal would break is wrapped between words."""
    width = terminal_width()
    if sys.stderr.isatty() and len(mark) + len(text) > width:
        text = "\n".join(paragraph(text, mark, width=width)).removeprefix(mark)
    click.echo(coloured(mark, colour) + text, err=True)


def silence_stdout() -> bool:
    """Print what is still buffered, or drop it where that fails: Python would complain at exit.

    Returns whether it has been printed.
    """
    try:
        sys.stdout.flush()
        return True
    except OSError:
        descriptor = sys.stdout.fileno()
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    return False
