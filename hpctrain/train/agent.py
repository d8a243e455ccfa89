"""Start the ranks of one node below an agent (`launcher: torchrun`).

    python -m hpctrain.train.agent --nnodes=2 --nproc-per-node=8 RUN_DIRECTORY/train.json

srun starts one agent per node. Options and the variables of ranks have torchrun's names. It differs
from torchrun where a supervised run requires it: signals are forwarded and end no rank, ranks
follow the order of Slurm's nodes (torchrun's dynamic rendezvous numbers nodes by host name, which
breaks the order of axes over nodes and links), and logs are where those of srun's tasks are. Ranks
are never restarted, because each start of ranks is a launch with its own epoch and checkpoint,
which only the supervisor assigns. Does not belong here: slow imports before signal handlers are
installed.
"""

from __future__ import annotations

import os
import sys

from hpctrain.train.launchers.agent_ranks import SignalForwarder
from hpctrain.train.stop import leave


def main(arguments: list[str], forwarder: SignalForwarder) -> int:
    """Run the ranks of this node to their end. Returns their common exit code."""
    from hpctrain.base.errors import InvalidInputError
    from hpctrain.records.run_records import TrainerExit
    from hpctrain.train.launchers.agent_environment import read_agent_environment
    from hpctrain.train.launchers.rank_processes import run_ranks

    try:
        agent = read_agent_environment(arguments, os.environ)
    except InvalidInputError as error:
        print(error, file=sys.stderr, flush=True)
        return TrainerExit.CONFIG_ERROR
    return run_ranks(agent, forwarder)


if __name__ == "__main__":
    signals = SignalForwarder()
    signals.install()
    leave(main(sys.argv[1:], signals))
