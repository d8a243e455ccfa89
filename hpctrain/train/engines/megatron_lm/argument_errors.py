"""Report arguments that Megatron-LM rejects as invalid input, not as a failure of the run.

Belongs here: errors of its parser and of its checks. Does not belong here: which arguments it is
run with (see `hpctrain.engines.megatron_lm`).
"""

from __future__ import annotations

import argparse
import contextlib
import traceback
from collections.abc import Iterator
from typing import NoReturn

from hpctrain.base.errors import InvalidInputError, Problem

# Where Megatron-LM parses and checks, and turns arguments into configurations.
_CHECKS = ("megatron/training/arguments.py", "megatron/training/argument_utils.py")
_CHECK_ERRORS = (AssertionError, ValueError, TypeError, RuntimeError)


@contextlib.contextmanager
def convert_argument_errors() -> Iterator[None]:
    """Raise InvalidInputError for rejected arguments; other errors pass unchanged."""
    before = argparse.ArgumentParser.error

    def error(parser: argparse.ArgumentParser, message: str) -> NoReturn:
        raise InvalidInputError([_problem(message)])

    argparse.ArgumentParser.error = error  # type: ignore[method-assign,assignment]
    try:
        yield
    except _CHECK_ERRORS as failure:
        frames = traceback.extract_tb(failure.__traceback__)
        if any(frame.filename.endswith(_CHECKS) for frame in frames):
            reason = str(failure).strip() or type(failure).__name__
            raise InvalidInputError([_problem(reason)]) from failure
        raise
    finally:
        argparse.ArgumentParser.error = before  # type: ignore[method-assign]


def _problem(reason: str) -> Problem:
    hint = "`engine.arguments` and the fields of the spec become its arguments"
    return Problem(f"Megatron-LM refuses its arguments: {reason}", hint=hint)
