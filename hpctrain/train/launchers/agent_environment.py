"""Read an agent's arguments and environment: its node in the launch, and the logs of its ranks.

Does not belong here: torch (see `torchelastic_agent`), signals (see `signal_forwarding`).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.records.layout import RunLayout


@dataclass(frozen=True)
class AgentEnvironment:
    """This node within its launch; `node_rank` counts nodes in Slurm's order.

    `logs_by_node`: ranks have no logs of their own (see `labelled_output`).
    """

    run: RunLayout
    train_config: str
    nodes: int
    ranks_per_node: int
    node_rank: int
    node: str
    epoch: int
    address: str
    port: int
    job_id: int
    restart_count: int
    step_id: int
    logs_by_node: bool = False

    def log_of(self, rank: int) -> Path:
        return self.run.rank_log(self.job_id, self.restart_count, self.step_id, rank)


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
        nodes=options.nnodes,
        ranks_per_node=options.nproc_per_node,
        node_rank=_number(environment, "SLURM_PROCID"),
        node=_text(environment, "SLURMD_NODENAME"),
        epoch=_number(environment, "HPCTRAIN_EPOCH"),
        address=_text(environment, "MASTER_ADDR"),
        port=_number(environment, "MASTER_PORT"),
        job_id=_number(environment, "SLURM_JOB_ID"),
        # not set in the first attempt of a job
        restart_count=int(environment.get("SLURM_RESTART_COUNT") or 0),
        step_id=_number(environment, "SLURM_STEP_ID"),
        logs_by_node=options.logs == "node",
    )


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
