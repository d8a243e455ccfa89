"""Trainers with this directory on their PYTHONPATH stand still after the step of HELD_TRAINER.

`HELD_TRAINER=1:34` has rank 1 of launch 1 wait when its optimizer has taken step 34, until it hears
a signal that it catches; the others wait for it. Whatever the framework is, its optimizer is one of
PyTorch. A trainer that talks to hpctrain is asked by a socket, after the request to stop is there.
A driver of Ray has no rank and no optimizer: it waits when its actors have played step 34.
"""

import importlib.util
import os
import select
import signal
import sys
import time
from importlib.abc import MetaPathFinder
from pathlib import Path


def hold(after_each_step):
    """Wait in the step of HELD_TRAINER, where `after_each_step` has a function called."""
    output = Path(os.environ["HPCTRAIN_OUTPUT"])  # RUN/output/launch-000001
    launch, held = map(int, os.environ["HELD_TRAINER"].split(":"))
    if int(output.name.rpartition("-")[2]) != launch:
        return
    step = int(os.environ.get("HPCTRAIN_RESUME_STEP") or 0)
    talks, request = "HPCTRAIN_AGENT" in os.environ, output.parents[1] / "control/stop"
    heard, written = os.pipe()
    os.set_blocking(written, False)

    def count(*_):
        nonlocal step
        step += 1
        if step == held:
            signal.set_wakeup_fd(written, warn_on_full_buffer=False)
            while not (select.select([heard], [], [], 0.05)[0] or (talks and request.exists())):
                pass
        elif step > held and talks:
            time.sleep(0.2)  # what is asked for comes by a socket, within a second

    after_each_step(count)


def after_each_get(ray, count):
    get = ray.get

    def counted_get(*words, **named):
        found = get(*words, **named)
        count()
        return found

    ray.get = counted_get


class Changer(MetaPathFinder):
    """Changes a module when it has been imported."""

    def __init__(self, module, change):
        self.module, self.change = module, change

    def find_spec(self, name, path, target=None):
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        real = spec.loader.exec_module

        def exec_module(module):
            real(module)
            self.change(module)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("HELD_TRAINER"):
    if os.environ.get("RANK") == "1":
        sys.meta_path.insert(
            0,
            Changer(
                "torch.optim.optimizer",
                lambda module: hold(module.register_optimizer_step_post_hook),
            ),
        )
    elif "RAY_ADDRESS" in os.environ:
        sys.meta_path.insert(
            0, Changer("ray", lambda ray: hold(lambda count: after_each_get(ray, count)))
        )
