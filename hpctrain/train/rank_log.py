"""The log of a rank that an agent has started; below srun itself Slurm writes it.

Same name in both cases, so that whoever reads logs needs not know the launcher. Belongs here: the
variable that names the file, and turning output into it. Does not belong here: the name itself
(see `store.layout`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

VARIABLE = "HPCTRAIN_RANK_LOG"


def take_own_log(environment: Mapping[str, str] = os.environ) -> None:
    """Have stdout and stderr of this process go to its own log, if an agent has named one.

    Both through one descriptor that appends, or they would write over each other. Where the file
    cannot be opened, output stays with the agent's.
    """
    path = environment.get(VARIABLE)
    if not path:
        return
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        return
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
