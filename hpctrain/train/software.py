"""Find the software and the GPUs of this rank, by importing the one and asking CUDA for the other.

A library that is installed may still be unusable: another ABI, a missing symbol, no driver. All
settings, corrections and refusals read these facts, so they cannot disagree about a library.
Belongs here: finding the facts, and naming them for the run's lock. Does not belong here: what
follows from them (see `software_agreement`), comparing (`hpctrain.records.software`).
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import functools
import hashlib
import importlib
import importlib.util
import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hpctrain.records.kept_code import own_code
from hpctrain.records.software import Library, SoftwareFacts, SoftwareLock
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
    engine, on_gpu = transformer_engine(), torch.cuda.is_available()
    gpus = range(torch.cuda.device_count()) if on_gpu else ()
    capabilities = (torch.cuda.get_device_capability(i) for i in gpus)
    kernels = []
    if engine.imported:
        kernels = ["cuDNN"]
        for module, name in _ATTENTION_KERNELS.items():
            library = import_library(module, module, name.split(" ")[0])
            kernels += [f"{name} {library.version}"] if library.imported else []
    hybrid_ep = deep_ep = import_library("deep_ep", "deep_ep", "deep_ep")
    # as megatron-core looks for it: one class of newer DeepEP (fused_a2a.py)
    if deep_ep.imported and not hasattr(importlib.import_module("deep_ep"), "HybridEPBuffer"):
        hybrid_ep = Library(error=f"deep_ep {deep_ep.version} has no HybridEPBuffer")
    return SoftwareFacts(
        hpctrain=__version__,
        code=own_code(),
        python=platform.python_version(),
        torch=torch.__version__,
        cuda_build=torch.version.cuda,
        driver=_driver(),
        driver_cuda=newest_cuda_of_driver() if torch.version.cuda else None,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None,
        gpus=tuple(map(torch.cuda.get_device_name, gpus)),
        # as NVIDIA writes them: 9.0
        capabilities=tuple(f"{major}.{minor}" for major, minor in capabilities),
        gpu_error=_gpu_error(),
        megatron_core=megatron_core(),
        transformer_engine=engine,
        attention=tuple(kernels),
        apex_wgrad=apex_wgrad(),
        flash_attention=import_library("flash_attn", "flash_attn", "flash-attn"),
        deep_ep=deep_ep,
        hybrid_ep=hybrid_ep,
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
    values: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, SyntaxError):
        text = Path(spec.origin).with_name("package_info.py").read_text(encoding="utf-8")
        values = {
            statement.targets[0].id: statement.value.value
            for statement in ast.parse(text).body
            if isinstance(statement, ast.Assign)
            and isinstance(statement.targets[0], ast.Name)
            and isinstance(statement.value, ast.Constant)
        }
    release = [values.get(name) for name in ("MAJOR", "MINOR", "PATCH")]
    if None in release:
        try:
            return version("megatron-core")
        except PackageNotFoundError:
            return None
    return ".".join(map(str, release)) + str(values.get("PRE_RELEASE", ""))


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


def _gpu_error() -> str | None:
    """Return CUDA's own reason why no GPU can be used."""
    if torch.version.cuda is None or torch.cuda.is_available():
        return None
    try:
        torch.cuda.init()
    except Exception as error:  # RuntimeError or AssertionError, by torch's version
        return str(error).splitlines()[0]
    return "torch.cuda.is_available() is False"


# -- Everything that a launch trains with, by name, for the comparison with the run's lock -------
# Rank 0 finds it for all: ranks that differ in what numbers or messages depend on are refused
# before (`software_agreement`).


# Set by the supervisor, which sees the image from outside.
IMAGE_VARIABLE = "HPCTRAIN_IMAGE"
# NAME-VERSION.dist-info (PyPA, "Recording installed projects"); eggs have more words.
_INSTALLED = re.compile(r"(?P<name>[^-]+)-(?P<version>[^-]+)(-.*)?\.(dist|egg)-info")
_DIGITS = 12
# Directories of a checkout whose code does not train.
_ASIDE = frozenset({".git", "tests", "docs", "examples", "__pycache__"})


def found_software(
    facts: SoftwareFacts,
    epoch: int,
    checkout: str | None,
    environment: Mapping[str, str] = os.environ,
) -> SoftwareLock:
    """Collect what this launch has, with `checkout` as the engine's."""
    own = facts.hpctrain
    if own is not None and facts.code is not None:
        own = f"{own} ({facts.code})"
    libraries = {
        "TransformerEngine": facts.transformer_engine,
        "Apex": facts.apex_wgrad,
        "flash-attn": facts.flash_attention,
        "DeepEP": facts.deep_ep,
        "triton": facts.triton,
    }
    parts = {
        "hpctrain": own,
        "Python": facts.python,
        "torch": facts.torch,
        "CUDA of torch": facts.cuda_build,
        "NCCL": facts.nccl,
        "driver": facts.driver,
        "megatron-core": facts.megatron_core,
        **{name: library.version for name, library in libraries.items()},
        "attention": ", ".join(facts.attention) or None,
        "GPU": ", ".join(dict.fromkeys(facts.gpus)) or None,
        "image": environment.get(IMAGE_VARIABLE) or None,
        "checkout": checkout_state(Path(checkout)) if checkout is not None else None,
    }
    return SoftwareLock(
        epoch=epoch,
        parts={name: text for name, text in parts.items() if text is not None},
        packages=installed_packages(),
    )


def installed_packages() -> dict[str, str]:
    """List all installed distributions and their versions, by the names of their directories.

    Reads one directory for each entry of `sys.path` and opens no file. hpctrain itself is left out:
    the run has its own.
    """
    found: dict[str, str] = {}
    for entry in sys.path:
        try:
            names = os.listdir(entry or ".")
        except OSError:
            continue
        for name in names:
            installed = _INSTALLED.fullmatch(name)
            if installed is not None:
                normal = re.sub(r"[-_.]+", "-", installed["name"]).lower()
                found.setdefault(normal, installed["version"])
    found.pop("hpctrain", None)
    return dict(sorted(found.items()))


def checkout_state(checkout: Path) -> str:
    """Identify the code of a checkout: its commit, if any, and a digest of its Python files.

    A file that cannot be read counts by its name: the engine will say so when it imports it.
    """
    digest = hashlib.sha256()
    for directory, below, files in os.walk(checkout):
        below[:] = sorted(name for name in below if name not in _ASIDE)
        for name in sorted(files):
            if name.endswith(".py"):
                path = Path(directory, name)
                digest.update(f"{path.relative_to(checkout)}\n".encode())
                with contextlib.suppress(OSError):
                    digest.update(path.read_bytes())
    commit = _commit(checkout)
    code = digest.hexdigest()[:_DIGITS]
    return f"{commit[:_DIGITS]} (files {code})" if commit else f"files {code}"


def _commit(checkout: Path) -> str | None:
    """Read the commit that is checked out, without git (gitrepository-layout(5)).

    None where the directory is no plain checkout.
    """
    git = checkout / ".git"
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        branch = git / name
        if branch.is_file():
            return branch.read_text().strip()
        packed = (git / "packed-refs").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    return next((line.split()[0] for line in packed if line.endswith(f" {name}")), None)
