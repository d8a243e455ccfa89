"""Find the software and the GPUs of this rank, by importing the one and asking CUDA for the other.

A library that is installed may still be unusable: another ABI, a missing symbol, no driver. All
settings, corrections and refusals read these facts, so they cannot disagree about a library.
Belongs here: finding the facts. Does not belong here: what follows from them (see
`software_agreement`).
"""

from __future__ import annotations

import ast
import ctypes
import functools
import importlib
import importlib.util
import platform
import resource
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hpctrain.records.kept_code import own_code
from hpctrain.records.software import Library, SoftwareFacts
from hpctrain.version import __version__

# Kernels that TransformerEngine chooses from, by the module that each needs; cuDNN's are part of
# TransformerEngine itself (its pytorch/attention/dot_product_attention/utils.py).
_ATTENTION_KERNELS = {"flash_attn": "flash-attn", "flash_attn_3": "flash-attn 3"}
# megatron-core imports these names (tensor_parallel/layers.py, _grad_accum_fusion_available)
_WGRAD_EXTENSION = "fused_weight_gradient_mlp_cuda"
_COMPILERS = ("gcc", "cc", "clang")  # as triton searches them (triton/runtime/build.py)


class LibraryProblem(NamedTuple):
    """Why a rank cannot train with a library; `hint` is what to do."""

    message: str
    hint: str | None


class LibraryFindings(NamedTuple):
    """What an engine has found about its library: refusals, and remarks for the log."""

    problems: tuple[LibraryProblem, ...] = ()
    remarks: tuple[str, ...] = ()


def raise_open_files_limit() -> int:
    """Raise the soft limit of open files to the hard one, and return it.

    gloo opens one socket to every other rank; Slurm hands on the soft limit of the login node's
    shell, often 1024 (srun(1), --propagate).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return hard
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        return soft
    return hard


@functools.cache
def transformer_engine() -> Library:
    """Import TransformerEngine as megatron-core does; without CUDA it cannot be imported."""
    return import_library("transformer_engine", "transformer_engine.pytorch", "transformer-engine")


@functools.cache
def apex_wgrad() -> Library:
    """Import Apex's extension that adds the gradient of a weight in the matrix product."""
    return import_library(_WGRAD_EXTENSION, _WGRAD_EXTENSION, "apex")


@functools.cache
def apex() -> Library:
    """Import Apex's optimizers as megatron-core does."""
    return import_library("apex", "apex.optimizers", "apex")


def import_library(package: str, module: str, distribution: str) -> Library:
    """Import `module` of a package and return its version, or the first line of the error."""
    if importlib.util.find_spec(package) is None:
        return Library()
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken extension raises anything
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        return Library(error=text)
    try:
        return Library(version=version(distribution))
    except PackageNotFoundError:
        own = getattr(importlib.import_module(package), "__version__", "unknown version")
        return Library(version=str(own))


@functools.cache
def collect() -> SoftwareFacts:
    """Find everything that this rank has; takes seconds where TransformerEngine is installed."""
    engine = transformer_engine()
    kernels = []
    if engine.imported:
        kernels = ["cuDNN"]
        for module, name in _ATTENTION_KERNELS.items():
            library = import_library(module, module, name.split(" ")[0])
            kernels += [f"{name} {library.version}"] if library.imported else []
    return SoftwareFacts(
        hpctrain=__version__,
        code=own_code(),
        python=platform.python_version(),
        torch=torch.__version__,
        cuda_build=torch.version.cuda,
        driver=_driver(),
        driver_cuda=newest_cuda_of_driver() if torch.version.cuda else None,
        nccl=_nccl(),
        gpus=_gpus(),
        capabilities=_capabilities(),
        gpu_error=_gpu_error(),
        megatron_core=megatron_core(),
        transformer_engine=engine,
        attention=tuple(kernels),
        apex_wgrad=apex_wgrad(),
        flash_attention=import_library("flash_attn", "flash_attn", "flash-attn"),
        deep_ep=import_library("deep_ep", "deep_ep", "deep_ep"),
        hybrid_ep=_hybrid_ep(),
        triton=import_library("triton", "triton", "triton") if torch.version.cuda else Library(),
        compiler=next(filter(None, map(shutil.which, _COMPILERS)), None),
        open_files=raise_open_files_limit(),
    )


@functools.cache
def megatron_core() -> str | None:
    """Return the version of the megatron-core that Python would import; None without one.

    Read from its files: a checkout in PYTHONPATH comes before an installed package, whose metadata
    would name another version. Importing it takes seconds, and its own `__version__` runs git.
    """
    try:
        spec = importlib.util.find_spec("megatron.core")  # executes nothing: `megatron` has no code
    except ModuleNotFoundError:
        return None
    if spec is None or spec.origin is None:
        return None
    return _declared_version(Path(spec.origin).with_name("package_info.py"))


def _declared_version(package_info: Path) -> str | None:
    """Read MAJOR, MINOR, PATCH and PRE_RELEASE of megatron-core's package_info.py."""
    try:
        statements = ast.parse(package_info.read_text(encoding="utf-8")).body
    except (OSError, ValueError, SyntaxError):
        return _version("megatron-core")
    values = {
        statement.targets[0].id: statement.value.value
        for statement in statements
        if isinstance(statement, ast.Assign)
        and isinstance(statement.targets[0], ast.Name)
        and isinstance(statement.value, ast.Constant)
    }
    release = [values.get(name) for name in ("MAJOR", "MINOR", "PATCH")]
    if None in release:
        return _version("megatron-core")
    return ".".join(map(str, release)) + str(values.get("PRE_RELEASE", ""))


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    """Read the version of the kernel's driver (NVIDIA driver README, "The /proc Interface")."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as stream:
            words = stream.readline().split()
    except OSError:
        return None
    numbers = [word for word in words if word[0].isdigit() and "." in word]
    return numbers[0] if numbers else None


def newest_cuda_of_driver(library: Any = None) -> str | None:
    """Return the newest CUDA that the driver supports; None without a driver.

    Asks the driver's own library, because torch has no function for it in all of its releases:
    cuDriverGetVersion, 1000 x major + 10 x minor (CUDA Driver API, Version Management). It needs no
    cuInit, so that processes may still be forked afterwards.
    """
    number = ctypes.c_int()
    try:
        driver = library or ctypes.CDLL("libcuda.so.1")
        if driver.cuDriverGetVersion(ctypes.byref(number)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}" if number.value else None


def _nccl() -> str | None:
    if torch.version.cuda is None:
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _gpus() -> tuple[str, ...]:
    if not torch.cuda.is_available():
        return ()
    return tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _capabilities() -> tuple[str, ...]:
    """Return the compute capability of each visible GPU, as NVIDIA writes it: 9.0."""
    if not torch.cuda.is_available():
        return ()
    found = (torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))
    return tuple(f"{major}.{minor}" for major, minor in found)


def _hybrid_ep() -> Library:
    """Find HybridEP as megatron-core does: one class of newer DeepEP (fused_a2a.py)."""
    library = import_library("deep_ep", "deep_ep", "deep_ep")
    if library.imported and not hasattr(importlib.import_module("deep_ep"), "HybridEPBuffer"):
        return Library(error=f"deep_ep {library.version} has no HybridEPBuffer")
    return library


def _gpu_error() -> str | None:
    """Return CUDA's own reason why no GPU can be used."""
    if torch.version.cuda is None or torch.cuda.is_available():
        return None
    try:
        torch.cuda.init()
    except Exception as error:  # RuntimeError or AssertionError, by torch's version
        return str(error).splitlines()[0]
    return "torch.cuda.is_available() is False"
