"""Where a rank computes: its GPU with NCCL, or the CPU with gloo where there is no GPU.

Belongs here: that choice, for all engines, and how much memory a rank has used. Does not belong
here: process groups.
"""

from __future__ import annotations

import resource

import torch

from hpctrain.train.rank_environment import Launch


def on_cpu() -> bool:
    """True where there is no usable GPU."""
    return not torch.cuda.is_available()


def backend(*, host_tensors: bool = False) -> str:
    """The backend of torch.distributed for tensors on this rank's device.

    `host_tensors`: for those on the host, too. NCCL knows none, and weights that FSDP keeps there
    are handed out and measured by collectives on them.
    """
    if on_cpu():
        return "gloo"
    return "cpu:gloo,cuda:nccl" if host_tensors else "nccl"


def choose_device(launch: Launch) -> torch.device:
    """The GPU of this rank, or the CPU.

    With `--gpus-per-task` Slurm shows each task one GPU only, which is then number 0.
    """
    if on_cpu():
        return torch.device("cpu")
    index = launch.local_rank if torch.cuda.device_count() > launch.local_rank else 0
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def wait_for_device() -> None:
    """Return when this rank's GPU has done everything that was started on it; at once on a CPU."""
    if not on_cpu():
        torch.cuda.synchronize()


def peak_memory_bytes() -> int:
    """Peak of allocated GPU memory; on a CPU the peak resident set (getrusage(2), in KiB)."""
    if on_cpu():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(torch.cuda.max_memory_allocated())


def reserved_memory_bytes() -> int:
    """Peak of what PyTorch has taken from the GPU, used or not; 0 on a CPU."""
    return 0 if on_cpu() else int(torch.cuda.max_memory_reserved())
