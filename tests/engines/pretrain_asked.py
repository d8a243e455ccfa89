"""`pretrain_package` whose second rank is asked to stop in the middle of the evaluation of step 4,
if ASKED is set, and which notes the batches of evaluations in the file of its rank."""

import os
import runpy
import signal
import time
from pathlib import Path

from megatron.training import training

before = training.get_forward_backward_func
batches = 0


def get_forward_backward_func(*given, **keywords):
    run = before(*given, **keywords)

    def noted(*arguments, **settings):
        global batches
        if settings["forward_only"]:
            batches += 1
            with Path(os.environ["COMPUTED"], os.environ["RANK"]).open("a") as stream:
                stream.write(f"{batches} ")
            if batches == 3 and os.environ["RANK"] == "1" and os.environ.get("ASKED"):
                os.kill(os.getpid(), signal.SIGTERM)
        return run(*arguments, **settings)

    return noted


def slow(*given, **keywords):
    """Building the datasets takes long."""
    Path(os.environ["COMPUTED"], f"slow-{os.environ['RANK']}").touch()
    time.sleep(600)


if os.environ.get("SLOW_START"):
    training.build_train_valid_test_data_iterators = slow
training.get_forward_backward_func = get_forward_backward_func

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("pretrain_package.py")), run_name="__main__")
