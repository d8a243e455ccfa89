"""Entry point of one rank: `python -m hpctrain.train RUN_DIRECTORY/train.json`.

Light and guarded on purpose: processes spawned by multiprocessing import this file again. Signal
handlers are installed before torch, whose import takes seconds in which a SIGTERM would kill.
"""

from __future__ import annotations

import gc
import sys

if __name__ == "__main__":
    from hpctrain.train.stop import StopSignals, leave

    stop = StopSignals()
    stop.install()
    # Importing torch creates a million permanent objects; `Loop.run` enables collection again.
    gc.disable()

    from hpctrain.train.entry import main

    leave(main(sys.argv[1:], stop))
