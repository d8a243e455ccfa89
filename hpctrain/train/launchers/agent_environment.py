"""Read an agent's arguments and environment: its node in the launch.

Does not belong here: processes (see `rank_processes`), signals (see `agent_ranks`).
"""

from __future__ import annotations

import argparse
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.records.layout import RunLayout


@dataclass(frozen=True)
class Place:
    """This agent among those of its launch. `first_rank`: the number of its first rank."""

    node_rank: int
    nodes: int
    first_rank: int
    ranks_here: int
    world_size: int
    address: str
    port: int


@dataclass(frozen=True)
class AgentEnvironment:
    """This node within its launch; its nodes are counted in Slurm's order.

    `logs_by_node`: ranks have no logs of their own. `settings`: without a supervisor, the file that
    is to become `train.json` of the run.
    """

    run: RunLayout
    train_config: str
    place: Place
    node: str
    epoch: int
    logs_by_node: bool = False
    settings: Path | None = None


def read_agent_environment(
    arguments: list[str], environment: Mapping[str, str]
) -> AgentEnvironment:
    """Parse the arguments of `hpctrain.train.agent` and the variables of Slurm and the supervisor.

    Raises InvalidInputError when a variable is missing or not a number.
    """
    parser = argparse.ArgumentParser(prog="python -m hpctrain.train.agent")
    parser.add_argument("--nnodes", type=int, required=True, help="nodes of this launch")
    parser.add_argument("--nproc-per-node", type=int, required=True, help="ranks on each node")
    parser.add_argument(
        "--logs", choices=("rank", "node"), default="rank", help="a log per rank, or per node"
    )
    parser.add_argument("train_config", help="the trainer's settings, RUN_DIRECTORY/train.json")
    options = parser.parse_args(arguments)
    return AgentEnvironment(
        run=RunLayout(Path(options.train_config).absolute().parent),
        train_config=options.train_config,
        place=_place(
            _number(environment, "SLURM_PROCID"),
            options.nnodes,
            options.nproc_per_node,
            _text(environment, "MASTER_ADDR"),
            _number(environment, "MASTER_PORT"),
        ),
        node=_text(environment, "SLURMD_NODENAME"),
        epoch=_number(environment, "HPCTRAIN_EPOCH"),
        logs_by_node=options.logs == "node",
    )


def _place(node_rank: int, nodes: int, ranks: int, address: str, port: int) -> Place:
    return Place(node_rank, nodes, node_rank * ranks, ranks, nodes * ranks, address, port)


def _text(environment: Mapping[str, str], name: str) -> str:
    text = environment.get(name)
    if not text:
        message = f"{name} is not set: start this with srun, below hpctrain's supervisor"
        raise InvalidInputError([Problem(message)])
    return text


def _number(environment: Mapping[str, str], name: str) -> int:
    text = _text(environment, name)
    if not text.isdecimal():
        raise InvalidInputError([Problem(f"{name} is not a number: {text!r}")])
    return int(text)


# -- Read the arguments and variables of a node that is started without Slurm and a supervisor ---


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


def read_unsupervised_environment(
    arguments: list[str], environment: Mapping[str, str]
) -> AgentEnvironment:
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
    return AgentEnvironment(
        run=run,
        train_config=str(run.train_config),
        place=_place(
            node_rank,
            nodes,
            number("nproc_per_node"),
            text("master_addr", "127.0.0.1" if nodes == 1 else None),
            number("master_port", _DEFAULT_PORT),
        ),
        node=socket.gethostname(),
        epoch=0,  # until the nodes have agreed on it
        logs_by_node=True,
        settings=config,
    )
