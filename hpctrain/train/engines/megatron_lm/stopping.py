"""Stops that Megatron-LM does not notice by itself: during its start, and during an evaluation.

Its signal handler is looked at after each step, evaluation included. Its evaluation looks at the
clock after each batch, on all ranks together (`--exit-duration-in-mins`), so it is given a clock
that runs out when a stop is asked; after that the signal handler saves and leaves. Belongs here:
following these functions. Does not belong here: handing on the stop itself (see `relay`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from hpctrain.train.engines.megatron_lm.on_import import changed_on_import


class MinutesUntilAsked:
    """Stands in for a number of minutes: any time is longer once `asked` returns True.

    Megatron-LM evaluates `train_time > args.exit_duration_in_mins` (training.py).
    """

    def __init__(self, asked: Callable[[], bool]) -> None:
        self._asked = asked

    def __bool__(self) -> bool:
        return True

    def __lt__(self, minutes: float) -> bool:
        return self._asked()


class Stopping:
    """Follows the first training step and every evaluation of the program.

    `asked` tells whether this rank was asked to stop, `begin` is called before the first training
    step. `follows_steps`: the program has the function by which that is known.
    """

    def __init__(self, asked: Callable[[], bool], begin: Callable[[], None]) -> None:
        self.follows_steps = False
        self._asked = asked
        self._begin = begin
        self._begun = False
        self._module: ModuleType | None = None

    def has_received(self) -> bool:
        """Whether Megatron-LM's own handler has the signal (dist_signal_handler.py)."""
        try:
            handler = getattr(self._module, "get_signal_handler", lambda: None)()
        except AssertionError:  # global_vars.py: there is none yet
            return False
        return bool(getattr(handler, "_signal_received", False))

    def following(self) -> AbstractContextManager[None]:
        """Inside the block the program's functions are followed, once it has imported them."""
        return changed_on_import({"megatron.training.training": self._follow})

    def _follow(self, module: ModuleType) -> None:
        self._module = module
        self._follow_steps(module)
        self._follow_evaluation(module)

    def _follow_steps(self, module: ModuleType) -> None:
        train_step: Any = getattr(module, "train_step", None)
        if not inspect.isfunction(train_step):
            return

        @functools.wraps(train_step)
        def step(*given: Any, **keywords: Any) -> Any:
            if not self._begun:
                self._begun = True
                self._begin()
            return train_step(*given, **keywords)

        self.follows_steps = True
        vars(module).update(train_step=step)

    def _follow_evaluation(self, module: ModuleType) -> None:
        evaluate: Any = getattr(module, "evaluate", None)
        get_args: Any = getattr(module, "get_args", None)
        if not (inspect.isfunction(evaluate) and inspect.isfunction(get_args)):
            return

        def asked() -> bool:
            return self._asked() or self.has_received()

        @functools.wraps(evaluate)
        def evaluate_until_asked(*given: Any, **keywords: Any) -> Any:
            args = get_args()
            before, first = getattr(args, "exit_duration_in_mins", None), _position(args)
            args.exit_duration_in_mins = MinutesUntilAsked(asked)
            try:
                found = evaluate(*given, **keywords)
            finally:
                args.exit_duration_in_mins = before
            if _was_left(found) and first is not None:
                _skip_the_rest(args, first, keywords.get("eval_iters"))
            return found

        vars(module).update(evaluate=evaluate_until_asked)


def _position(args: Any) -> int | None:
    position = getattr(args, "consumed_valid_samples", None)
    return position if isinstance(position, int) else None


def _was_left(found: Any) -> bool:
    """training.py, evaluate: `return None, None, True` where the time is up."""
    return isinstance(found, tuple) and len(found) == 3 and found[0] is None and found[2] is True


def _skip_the_rest(args: Any, first: int, eval_iters: object) -> None:
    """Later evaluations read what they would have read had this one been completed.

    Each evaluation goes on in the validation data where the one before ended, and the position is
    saved with the checkpoint.
    """
    batches = eval_iters if isinstance(eval_iters, int) else args.eval_iters
    batch_size = getattr(args, "eval_global_batch_size", None) or args.global_batch_size
    if isinstance(batches, int):
        args.consumed_valid_samples = first + batches * batch_size
