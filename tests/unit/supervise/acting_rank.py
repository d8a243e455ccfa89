"""Stands in for one rank: opens its stack file as the trainer does, then stays somewhere for ever.

`acting_rank.py RUN EPOCH RANK NODE PLACE`. A file `torch/distributed/distributed_c10d.py` is where
real ranks wait, so a function of a file with this name is where this one waits.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from hpctrain.records.layout import RunLayout
from hpctrain.train.stacks import StackDump, dump_header

RUN, EPOCH, RANK, NODE, PLACE = sys.argv[1:6]
layout = RunLayout(Path(RUN))
# Said from the place itself and by a call without a frame: whoever reads it finds the rank there.
READY = b"ready\n"
STAY = f"os.write(1, {READY!r}); time.sleep(600)"


def told_by(name: str, code: str) -> dict[str, object]:
    """Functions that the interpreter takes to be in the file `name`."""
    found: dict[str, object] = {"os": os, "time": time}
    exec(compile(code, name, "exec"), found)
    return found


waiting = told_by(
    "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py",
    "".join(f"def {name}():\n    {STAY}\n\n" for name in ("all_reduce", "recv")),
)


def load_batch() -> None:
    os.write(1, READY)
    time.sleep(600)


def one_step() -> None:
    place = {"load_batch": load_batch, **waiting}[PLACE]
    place()  # type: ignore[operator]


signal.signal(signal.SIGQUIT, signal.SIG_IGN)
path = layout.stack_dump(int(EPOCH), int(RANK))
layout.make_directory(path.parent)
dump = StackDump(path, dump_header(int(RANK), NODE, int(EPOCH)))
for _ in range(2):  # as data loaders and writers of checkpoints do
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
one_step()
