"""Ranks with this directory on their PYTHONPATH stand still at the step that HELD_RANKS names.

For launches whose program cannot be replaced by `faults/faulty_trainer.py`: ranks below an agent,
submissions by the command line, Megatron-LM's own loop. `HELD_RANKS=1:14,2:34` has launch 1 wait
when step 14 begins, with its saves ended, and launch 2 at step 34. Rank 1 waits until it is asked
to leave, the others for rank 1.
"""

import importlib.util
import os
import signal
import sys
import time
from importlib.abc import MetaPathFinder
from pathlib import Path

_REQUEST = Path("control/stop")


def _held_step():
    pairs = (word.split(":") for word in os.environ.get("HELD_RANKS", "").split(",") if word)
    steps = {launch: int(step) for launch, step in pairs}
    return steps.get(os.environ.get("HPCTRAIN_EPOCH"))


def _is_second():
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID")) == "1"


def hold_loop(module):
    """Of the engines whose loop is ours."""
    real, held = module.Loop.one_step, _held_step()

    def one_step(loop):
        if loop.position.step + 1 == held:
            loop.saver.finish()
            stop = sys.modules["__main__"].stop
            while _is_second() and not (stop.requested or _REQUEST.exists()):
                time.sleep(0.05)
        return real(loop)

    module.Loop.one_step = one_step


def hold_reporter(module):
    """Of Megatron-LM: the last rank stops itself, and Slurm has it go on in order to warn it."""
    real, held = module.LogReporter.handle_line, _held_step()

    def handle_line(reporter, line):
        before = reporter.step
        handled = real(reporter, line)
        if held is not None and before < held <= reporter.step:
            os.kill(os.getpid(), signal.SIGSTOP)
        return handled

    module.LogReporter.handle_line = handle_line


_CHANGES = {
    "hpctrain.train.loop": hold_loop,
    "hpctrain.train.engines.megatron_lm.log_reporter": hold_reporter,
}


class Changer(MetaPathFinder):
    """Changes a module when it has been imported."""

    def __init__(self):
        self.looking = False

    def find_spec(self, name, path, target=None):
        if name not in _CHANGES or self.looking:
            return None
        self.looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.looking = False
        real = spec.loader.exec_module

        def exec_module(module):
            real(module)
            if module.__name__ == name:  # all modules of a zip archive have one loader
                _CHANGES[name](module)

        spec.loader.exec_module = exec_module
        return spec


if sys.orig_argv[1:3] == ["-m", "hpctrain.train"] and _held_step() is not None:
    sys.meta_path.insert(0, Changer())
