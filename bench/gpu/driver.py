"""Rung 1: driver, torch and NCCL. Each refusal is a sentence for somebody who is new to GPUs.

Belongs here: what these facts mean, and what to do. Does not belong here: finding the facts (see
`facts`), libraries above torch (see `environment`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from bench.gpu.facts import MachineFacts
from bench.gpu.rung import Found, Site, failed, not_run, passed, run_program
from hpctrain.records.gpu_report import RungCheck
from hpctrain.records.software import SoftwareFacts

FACTS_SECONDS = 300.0  # importing TransformerEngine from a shared file system takes long
_LOGIN_NODE = (
    "A login node usually has none: go to a node with GPUs, for example "
    "`srun --gpus=1 --pty bash`. In a container the driver comes from outside: `apptainer exec "
    "--nv`, or enroot's NVIDIA hook."
)


def read_facts() -> MachineFacts | RungCheck:
    """Collect the facts in a process of its own; a failed check if that process ends badly."""
    ended = run_program(["-m", "bench.gpu.facts"], FACTS_SECONDS)
    lines = ended.output.strip().splitlines()
    if ended.code != 0 or not lines:
        what = "importing the libraries ends the process"
        return failed("facts", f"{what}: {ended.tail}", ended.seconds)
    return MachineFacts.model_validate_json(lines[-1])


def run(site: Site, found: Found) -> Iterator[RungCheck]:
    """Check everything below the libraries."""
    facts = read_facts()
    if isinstance(facts, RungCheck):
        yield facts
        return
    if facts.software is not None:
        found.software.append(facts.software)
    yield from judge(facts)


def judge(facts: MachineFacts) -> Iterator[RungCheck]:
    """Yield one check for each layer, also above a layer that is missing."""
    yield _driver(facts)
    software = facts.software
    if software is None:
        yield failed(
            "torch",
            f"PyTorch cannot be imported: {facts.torch_error}. Install this checkout as "
            "docs/gpu.md shows, and name the Python that it went into: `make gpu PYTHON=python3`.",
        )
        return
    yield passed("torch", f"torch {software.torch}, Python {software.python}")
    yield from _cuda(facts, software)


def _driver(facts: MachineFacts) -> RungCheck:
    name = "driver"
    if not facts.driver_loaded:
        return failed(
            name,
            "This machine has no NVIDIA driver (/proc/driver/nvidia is missing), so no program "
            f"can use a GPU here. {_LOGIN_NODE}",
        )
    if not facts.devices:
        return failed(
            name,
            "The NVIDIA driver is loaded, but this shell may open no GPU (/dev/nvidia0 is missing)."
            " Slurm shows a job only the GPUs that it asked for: add `--gpus=1` to srun or salloc.",
        )
    version = facts.software.driver if facts.software else None
    gpus = f"{facts.devices} GPU{'s' if facts.devices > 1 else ''}"
    return passed(name, f"NVIDIA driver {version or 'of unknown version'}, {gpus}")


def _cuda(facts: MachineFacts, software: SoftwareFacts) -> Iterator[RungCheck]:
    if software.cuda_build is None:
        yield failed(
            "CUDA",
            f"This PyTorch ({software.torch}) was built for CPUs only, so it would never use a "
            "GPU. Replace it: `pip uninstall torch`, then the line that "
            "https://pytorch.org/get-started/locally gives for your CUDA.",
        )
        yield not_run("GPUs", "needs a PyTorch with CUDA")
        yield not_run("NCCL", "needs a PyTorch with CUDA")
        return
    newest = software.driver_cuda
    if newest is not None and _major(newest) < _major(software.cuda_build):
        yield failed(
            "CUDA",
            f"The driver {software.driver or ''} is too old for this PyTorch: it supports CUDA up "
            f"to {newest}, and {software.torch} needs CUDA {software.cuda_build}. Install a "
            f"PyTorch for CUDA {_major(newest)} (https://pytorch.org/get-started/previous-versions)"
            ", train in a container of that CUDA, or have the administrators update the driver.",
        )
    else:
        driver = f", the driver supports up to {newest}" if newest else ""
        yield passed("CUDA", f"CUDA {software.cuda_build}{driver}")
    yield _gpus(facts, software)
    if software.nccl is None:
        yield failed("NCCL", "This PyTorch has no NCCL, so GPUs cannot work together.")
    else:
        yield passed("NCCL", f"NCCL {software.nccl}")


def _gpus(facts: MachineFacts, software: SoftwareFacts) -> RungCheck:
    if not software.gpus:
        reason = software.gpu_error or "no reason given"
        return failed(
            "GPUs",
            f"PyTorch finds no GPU that it can use. CUDA's own reason: {reason}. Compare with "
            f"`nvidia-smi`; CUDA_VISIBLE_DEVICES must not be empty. {_LOGIN_NODE}",
        )
    parts = [name for name in software.gpus if "MIG" in name]
    if parts:
        return failed(
            "GPUs",
            f"This is a part of a GPU ({parts[0]}). Parts cannot train together, and their rates "
            "are not those of the GPU: ask for a whole one.",
        )
    memory = f" with {facts.memory_bytes[0] / 2**30:.1f} GiB" if facts.memory_bytes else ""
    counted = ", ".join(f"{count} x {name}" for name, count in Counter(software.gpus).items())
    return passed("GPUs", f"{counted}{memory}")


def _major(version: str) -> int:
    return int(version.split(".")[0])
