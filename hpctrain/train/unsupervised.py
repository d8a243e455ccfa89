"""Start the ranks of one node where there is neither Slurm nor a supervisor.

    python -m hpctrain.train.unsupervised --nnodes=2 --nproc-per-node=8 --node-rank=0 \
        --master-addr=host1 --run-directory=/runs/gpt train.json

Pods of Kubernetes and bare hosts run this program, one per node (`hpctrain export`). Options have
torchrun's names, and each may come from torchrun's variable instead (`PET_NNODES` and the like,
which Kubeflow's trainer sets). It differs from torchrun in what a supervisor does otherwise: node 0
numbers the launch and selects the newest verified checkpoint, and all ranks resume from that one;
a signal reaches the ranks, which save, however long that takes; the exit code is that of the rank
that failed first. Ranks are never restarted: whoever has started this program starts it again. Does
not belong here: slow imports before signal handlers are installed.
"""

from __future__ import annotations

import os
import sys

from hpctrain.train.launchers.agent_ranks import SignalForwarder
from hpctrain.train.stop import leave


def main(arguments: list[str], forwarder: SignalForwarder) -> int:
    """Run the ranks of this node to their end. Returns their common exit code."""
    from hpctrain.base.errors import CheckpointError, InvalidInputError
    from hpctrain.records.run_records import TrainerExit
    from hpctrain.train.launchers.agent_environment import read_unsupervised_environment
    from hpctrain.train.launchers.agreed_launch import run_agreed

    try:
        return run_agreed(read_unsupervised_environment(arguments, os.environ), forwarder)
    except (InvalidInputError, CheckpointError) as error:
        # another start would find the same; whoever starts this program must see that
        print(error, file=sys.stderr, flush=True)
        return TrainerExit.CONFIG_ERROR
    except OSError as error:  # the run directory may be back for the next start
        print(error, file=sys.stderr, flush=True)
        return TrainerExit.CRASH


if __name__ == "__main__":
    signals = SignalForwarder()
    signals.install()
    leave(main(sys.argv[1:], signals))
