"""One node of a launch with `launcher: torchrun`: a torchelastic agent that starts its ranks.

    python -m hpctrain.train.agent --nnodes=2 --nproc-per-node=8 RUN_DIRECTORY/train.json

srun starts one per node. Options have torchrun's names. What differs from torchrun is what a
supervised run needs: signals are handed on and end nobody, ranks follow the order of Slurm's nodes,
logs are where those of srun's tasks are, and ranks are never restarted, because each start of ranks
is a launch with an epoch and a checkpoint of its own, which only the supervisor gives.
Belongs here: the order of things at start and end. Does not belong here: anything that takes time
to import before signals are caught.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from hpctrain.train.launchers.signal_forwarding import Passing


def main(arguments: list[str], passing: Passing) -> int:
    """Run the ranks of this node to their end. Returns the exit code that speaks for them."""
    from hpctrain.errors import InvalidInputError
    from hpctrain.store.run_records import TrainerExit
    from hpctrain.train.launchers.agent_place import read_place

    try:
        place = read_place(arguments, os.environ)
    except InvalidInputError as error:
        print(error, file=sys.stderr, flush=True)
        return TrainerExit.CONFIG_ERROR
    from hpctrain.train.launchers.elastic import run  # torch comes in here

    return run(place, passing)


def leave(code: int) -> NoReturn:
    """Not by sys.exit: the interpreter gives up its signal handlers first, and a signal that comes
    while it ends (the supervisor's, after the file that said the same) would be our exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    signals = Passing()
    signals.install()
    leave(main(sys.argv[1:], signals))
