"""Choose the device of a rank: its GPU with NCCL, or the CPU with gloo where there is no GPU.

Belongs here: that choice, for all engines, the group of all ranks, memory statistics and random
states. Does not belong here: groups of an axis.
"""

from __future__ import annotations

import resource
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.engines.training import TrainConfig
from hpctrain.train.rank_environment import Launch


def on_cpu() -> bool:
    """Return True where there is no usable GPU."""
    return not torch.cuda.is_available()


def backend(*, host_tensors: bool = False) -> str:
    """Return the backend of torch.distributed for tensors on this rank's device.

    `host_tensors`: also for tensors on the host, which NCCL does not support. FSDP needs them for
    collectives on offloaded weights.
    """
    if on_cpu():
        return "gloo"
    return "cpu:gloo,cuda:nccl" if host_tensors else "nccl"


def choose_device(launch: Launch) -> torch.device:
    """Return the GPU of this rank, or the CPU."""
    if on_cpu():
        return torch.device("cpu")
    index = gpu_index(launch.local_rank, torch.cuda.device_count())
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def join_ranks(
    config: TrainConfig, launch: Launch, *, host_tensors: bool = False
) -> tuple[torch.device, timedelta]:
    """Choose the device, and open the group of all ranks; returns the timeout of the start as well.

    A collective call. `host_tensors`: see `backend`.
    """
    device = choose_device(launch)
    timeout = timedelta(seconds=config.startup_timeout_seconds)
    dist.init_process_group(
        backend(host_tensors=host_tensors),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timeout,
    )
    return device, timeout


def gpu_index(local_rank: int, visible: int) -> int:
    """Return the number of a rank's GPU among those that it sees.

    With `--gpus-per-task` each task sees a single GPU, which is then number 0. Whether two ranks
    would share one is checked before (see `software_agreement`).
    """
    return local_rank if local_rank < visible else 0


def gpu_ids() -> tuple[str, ...]:
    """Return the identifier of each GPU that this rank sees: equal ones are the same GPU."""
    if on_cpu():
        return ()
    count = torch.cuda.device_count()
    return tuple(str(torch.cuda.get_device_properties(index).uuid) for index in range(count))


def wait_for_device() -> None:
    """Wait until this rank's GPU has finished all queued work; returns at once on a CPU."""
    if not on_cpu():
        torch.cuda.synchronize()


def peak_memory_bytes() -> int:
    """Return the peak of allocated GPU memory; on a CPU the peak resident set (getrusage(2))."""
    if on_cpu():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # ru_maxrss is in KiB
    return int(torch.cuda.max_memory_allocated())


def reserved_memory_bytes() -> int:
    """Return the peak of GPU memory reserved by PyTorch's allocator; 0 on a CPU."""
    return 0 if on_cpu() else int(torch.cuda.max_memory_reserved())


# -- Read and set torch's random number generators, so that dropout continues after a resume -----


def random_state() -> dict[str, Any]:
    """Return the state of the CPU's generator and, with a GPU, of the current GPU's."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Set the generators that a rank on `device` uses."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
