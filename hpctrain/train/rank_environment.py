"""Read the launcher's environment variables: rank, world size, epoch, checkpoint to resume from.

Does not belong here: anything with torch.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.records.manifest import step_of
from hpctrain.spec.engines.registry import DEFAULT_ENGINE, abilities_of


@dataclass(frozen=True)
class Launch:
    """This process within its launch.

    `epoch` is the fencing number of the launch, `resume` the name of a checkpoint directory or
    empty for a fresh start. `mttf_seconds` is the mean time between failures of the whole run,
    infinite if unknown. `pinned_steps` are checkpoints that retention must keep. `version` is that
    of the supervisor's hpctrain, empty without a supervisor. `speed_check`: how many slow nodes the
    supervisor can replace; None: this launch does not check the speed. `node_rank` counts the nodes
    of the launch.
    """

    rank: int
    world_size: int
    local_rank: int
    node: str
    epoch: int
    resume: str
    mttf_seconds: float = math.inf
    pinned_steps: frozenset[int] = frozenset()
    version: str = ""
    speed_check: int | None = 0
    node_rank: int = 0

    @property
    def leads(self) -> bool:
        """True on rank 0, which writes the run's records."""
        return self.rank == 0

    @property
    def resume_step(self) -> int:
        """The step of the checkpoint to resume from; 0 for a fresh start."""
        return step_of(self.resume) or 0


def read_launch(environment: Mapping[str, str]) -> Launch:
    """Read the launcher's variables: RANK and the like first, then srun's SLURM_PROCID.

    Raises InvalidInputError when a variable is missing or not a number.
    """
    mttf = environment.get("HPCTRAIN_MTTF_SECONDS", "")
    try:
        mttf_seconds = float(mttf or "inf")
    except ValueError:
        mttf_seconds = math.nan
    if not mttf_seconds > 0:
        message = f"HPCTRAIN_MTTF_SECONDS is not a positive number: {mttf!r}"
        raise InvalidInputError([Problem(message)])
    return Launch(
        rank=_number(environment, "RANK", "SLURM_PROCID"),
        world_size=_number(environment, "WORLD_SIZE", "SLURM_NTASKS"),
        local_rank=_number(environment, "LOCAL_RANK", "SLURM_LOCALID"),
        node=environment.get("SLURMD_NODENAME") or socket.gethostname(),
        epoch=_number(environment, "HPCTRAIN_EPOCH", default="0"),
        resume=environment.get("HPCTRAIN_RESUME", ""),
        mttf_seconds=mttf_seconds,
        pinned_steps=frozenset(
            _parse("HPCTRAIN_PINNED_STEPS", step)
            for step in environment.get("HPCTRAIN_PINNED_STEPS", "").split()
        ),
        version=environment.get("HPCTRAIN_VERSION", ""),
        speed_check=None
        if environment.get("HPCTRAIN_SPEED_CHECK") == "off"
        else _number(environment, "HPCTRAIN_SPEED_CHECK", default="0"),
        # GROUP_RANK: the node of an agent, which may have no Slurm around it
        node_rank=_number(environment, "SLURM_NODEID", "GROUP_RANK", default="0"),
    )


def quiet_defaults(
    engine: str = DEFAULT_ENGINE,
    environment: Mapping[str, str] = os.environ,
    *,
    host_threads: int = 1,
) -> dict[str, str]:
    """Return variables to set before torch is imported, except those that the user has set.

    `host_threads`: OpenMP threads of the rank, 1 unless its optimizer computes on the host: the GPU
    does the work, and without GPUs the ranks share the cores. GPUs are numbered by their address,
    as `placement` numbers them.
    """
    wanted = {
        "OMP_NUM_THREADS": str(host_threads),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        **abilities_of(engine).environment,
    }
    return {name: value for name, value in wanted.items() if name not in environment}


def host_threads(environment: Mapping[str, str] = os.environ) -> int:
    """Return the CPUs that this rank has for itself: its mask, shared with ranks of one agent.

    A task that Slurm has not bound sees those of its neighbours too: then the number that srun's
    `--cpus-per-task` gives it counts.
    """
    sharing = int(environment.get("LOCAL_WORLD_SIZE") or 1)  # an agent: one task for all ranks
    share = len(os.sched_getaffinity(0)) // sharing
    return max(1, min(share, int(environment.get("SLURM_CPUS_PER_TASK") or share)))


def _number(environment: Mapping[str, str], *names: str, default: str | None = None) -> int:
    for name in names:
        text = environment.get(name)
        if text:
            return _parse(name, text)
    if default is not None:
        return int(default)
    raise InvalidInputError([Problem(f"none of {', '.join(names)} is set: start this with srun")])


def _parse(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidInputError([Problem(f"{name} is not a number: {text!r}")]) from None
