"""Stops that Megatron-LM does not check for by itself: during its start and during an evaluation.

It checks its signal handler after each step, evaluation included. Its evaluation checks a time
limit after each batch, on all ranks together (`--exit-duration-in-mins`). Here that limit expires
when a stop is requested; the signal handler then makes the program save and exit. Belongs here:
patching these functions. Does not belong here: forwarding the request (see `stop_forwarding`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from hpctrain.train.engines.megatron_lm.import_hooks import patch_on_import


class MinutesUntilStop:
    """Replaces a number of minutes: any time is longer once `stop_requested` returns True.

    Megatron-LM evaluates `train_time > args.exit_duration_in_mins` (training.py).
    """

    def __init__(self, stop_requested: Callable[[], bool]) -> None:
        self._stop_requested = stop_requested

    def __bool__(self) -> bool:
        return True

    def __lt__(self, minutes: float) -> bool:
        return self._stop_requested()


class StopHooks:
    """Patches the first training step and every evaluation of the program.

    `stop_requested` returns whether this rank has a request to stop. `begin` is called before the
    first training step. `patches_steps`: the program has the function of a training step.
    """

    def __init__(self, stop_requested: Callable[[], bool], begin: Callable[[], None]) -> None:
        self.patches_steps = False
        self._stop_requested = stop_requested
        self._begin = begin
        self._begun = False
        self._module: ModuleType | None = None

    def signal_received(self) -> bool:
        """Return whether Megatron-LM's own handler has the signal (dist_signal_handler.py)."""
        try:
            handler = getattr(self._module, "get_signal_handler", lambda: None)()
        except AssertionError:  # global_vars.py: there is none yet
            return False
        return bool(getattr(handler, "_signal_received", False))

    def installed(self) -> AbstractContextManager[None]:
        """Patch the program's functions inside the block, once it has imported them."""

        def patch(module: ModuleType) -> None:
            self._module = module
            self._patch_train_step(module)
            self._patch_evaluate(module)

        return patch_on_import({"megatron.training.training": patch})

    def _patch_train_step(self, module: ModuleType) -> None:
        train_step: Any = getattr(module, "train_step", None)
        if not inspect.isfunction(train_step):
            return

        @functools.wraps(train_step)
        def step(*arguments: Any, **keywords: Any) -> Any:
            if not self._begun:
                self._begun = True
                self._begin()
            return train_step(*arguments, **keywords)

        self.patches_steps = True
        vars(module).update(train_step=step)

    def _patch_evaluate(self, module: ModuleType) -> None:
        evaluate: Any = getattr(module, "evaluate", None)
        get_args: Any = getattr(module, "get_args", None)
        if not (inspect.isfunction(evaluate) and inspect.isfunction(get_args)):
            return

        def stops() -> bool:
            return self._stop_requested() or self.signal_received()

        @functools.wraps(evaluate)
        def evaluate_until_stop(*arguments: Any, **keywords: Any) -> Any:
            args = get_args()
            limit = getattr(args, "exit_duration_in_mins", None)
            first = getattr(args, "consumed_valid_samples", None)
            args.exit_duration_in_mins = MinutesUntilStop(stops)
            try:
                result = evaluate(*arguments, **keywords)
            finally:
                args.exit_duration_in_mins = limit
            # training.py, evaluate: `return None, None, True` when the time is up
            triple = isinstance(result, tuple) and len(result) == 3
            if triple and result[0] is None and result[2] is True and isinstance(first, int):
                _skip_remaining_batches(args, first, keywords.get("eval_iters"))
            return result

        vars(module).update(evaluate=evaluate_until_stop)


def _skip_remaining_batches(args: Any, first: int, eval_iters: object) -> None:
    """Set the position in the validation data to the end of an evaluation that was cut short.

    Each evaluation continues in the validation data where the one before ended, and the position
    is saved with the checkpoint. Later evaluations so read the same samples as in a run that was
    never stopped.
    """
    batches = eval_iters if isinstance(eval_iters, int) else args.eval_iters
    batch_size = getattr(args, "eval_global_batch_size", None) or args.global_batch_size
    if isinstance(batches, int):
        args.consumed_valid_samples = first + batches * batch_size
