"""Arguments that Megatron-LM refuses, told apart from failures of a run.

Belongs here: the refusals of its parser and of its checks. Does not belong here: which arguments
are given (see `hpctrain.engines.megatron_lm`).
"""

from __future__ import annotations

import argparse
import contextlib
import traceback
from collections.abc import Iterator
from typing import NoReturn

from hpctrain.errors import InvalidInputError, Problem

# Where Megatron-LM parses and checks, and turns arguments into configurations.
_CHECKS = ("megatron/training/arguments.py", "megatron/training/argument_utils.py")
_KINDS = (AssertionError, ValueError, TypeError, RuntimeError)


@contextlib.contextmanager
def refusals_named() -> Iterator[None]:
    """Raise InvalidInputError where the arguments are at fault; anything else as it comes."""
    before = argparse.ArgumentParser.error

    def error(parser: argparse.ArgumentParser, message: str) -> NoReturn:
        raise InvalidInputError([_problem(message)])

    argparse.ArgumentParser.error = error  # type: ignore[method-assign,assignment]
    try:
        yield
    except _KINDS as failure:
        if _in_checks(failure):
            words = str(failure).strip() or type(failure).__name__
            raise InvalidInputError([_problem(words)]) from failure
        raise
    finally:
        argparse.ArgumentParser.error = before  # type: ignore[method-assign]


def _problem(words: str) -> Problem:
    hint = "`engine.arguments` and the fields of the spec become its arguments"
    return Problem(f"Megatron-LM refuses its arguments: {words}", hint=hint)


def _in_checks(failure: BaseException) -> bool:
    """True if it was raised by the checks themselves, however deep below."""
    frames = traceback.extract_tb(failure.__traceback__)
    return any(frame.filename.endswith(_CHECKS) for frame in frames)
