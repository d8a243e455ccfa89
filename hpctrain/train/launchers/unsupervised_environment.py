"""Read the arguments and variables of a node that is started without Slurm and a supervisor.

Does not belong here: torch (see `unsupervised_agent`), the epoch and the checkpoint of the launch
(see `unsupervised_agent`), variables of Slurm (see `agent_environment`).
"""

from __future__ import annotations

import argparse
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.records.layout import RunLayout
from hpctrain.train.launchers.agent_environment import AgentEnvironment

# torch/distributed/argparse_util.py: torchrun's options have defaults in variables PET_OPTION.
# `mpirun` of Open MPI numbers its processes in OMPI_COMM_WORLD_RANK.
_VARIABLES = {
    "nnodes": ("PET_NNODES",),
    "nproc_per_node": ("PET_NPROC_PER_NODE",),
    "node_rank": ("PET_NODE_RANK", "OMPI_COMM_WORLD_RANK"),
    "master_addr": ("PET_MASTER_ADDR",),
    "master_port": ("PET_MASTER_PORT",),
}
# torchrun's own.
_DEFAULT_PORT = "29500"


@dataclass(frozen=True)
class UnsupervisedNode:
    """One node of a launch: its place, and the file that is to become `train.json` of the run."""

    place: AgentEnvironment
    train_config: Path


def read_unsupervised_environment(
    arguments: list[str], environment: Mapping[str, str]
) -> UnsupervisedNode:
    """Parse the arguments of `hpctrain.train.unsupervised`; variables fill in for options.

    Raises InvalidInputError for what is missing, no number, or impossible together.
    """
    parser = argparse.ArgumentParser(prog="python -m hpctrain.train.unsupervised")
    for name in _VARIABLES:
        parser.add_argument(f"--{name.replace('_', '-')}")
    parser.add_argument("--run-directory", help="default: the directory of train.json")
    parser.add_argument("train_config", help="the trainer's settings, train.json")
    options = parser.parse_args(arguments)
    config = Path(options.train_config).absolute()
    directory = Path(options.run_directory).absolute() if options.run_directory else config.parent
    run = RunLayout(directory)

    def text(name: str, default: str | None = None) -> str:
        given = (getattr(options, name), *(environment.get(one) for one in _VARIABLES[name]))
        found = next((one for one in given if one), default)
        if found is None:
            option = f"--{name.replace('_', '-')}"
            raise InvalidInputError([Problem(f"neither {option} nor {_VARIABLES[name][0]} is set")])
        return found

    def number(name: str, default: str | None = None) -> int:
        found = text(name, default)
        if not found.isdecimal():
            raise InvalidInputError([Problem(f"{name} is not a number: {found!r}")])
        return int(found)

    nodes = number("nnodes")
    node_rank = number("node_rank", "0" if nodes == 1 else None)
    if node_rank >= nodes:
        raise InvalidInputError([Problem(f"node rank {node_rank} of {nodes} nodes")])
    return UnsupervisedNode(
        place=AgentEnvironment(
            run=run,
            train_config=str(run.train_config),
            nodes=nodes,
            ranks_per_node=number("nproc_per_node"),
            node_rank=node_rank,
            node=socket.gethostname(),
            epoch=0,  # until the nodes have agreed on it
            address=text("master_addr", "127.0.0.1" if nodes == 1 else None),
            port=number("master_port", _DEFAULT_PORT),
            # only names of logs of ranks have them, and here the node writes one log
            job_id=0,
            restart_count=0,
            step_id=0,
            logs_by_node=True,
        ),
        train_config=config,
    )
