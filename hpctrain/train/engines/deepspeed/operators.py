"""Build DeepSpeed's compiled operators once per node, before any rank needs them.

torch builds an extension below a file `lock` that a killed build leaves behind, and then waits for
it forever (torch/utils/cpp_extension.py and file_baton.py). Its default place is the home
directory, which nodes with other CPUs share although the code is compiled for this one
(-march=native). Belongs here: place, order and refusal of a build. Does not belong here: whether
its tools exist (see `preflight`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.engines.deepspeed import DeepSpeedConfig

_DIRECTORY_VARIABLE = "TORCH_EXTENSIONS_DIR"


def build_operators(config: DeepSpeedConfig) -> None:
    """Load what the run's offload needs, one rank of a node after the other; the first builds.

    Raises InvalidInputError if an operator cannot be built.
    """
    builders = _needed_builders(config)
    if not builders:
        return
    root = extensions_directory()
    os.environ[_DIRECTORY_VARIABLE] = str(root)
    with exclusive_build(root):
        for title, builder in builders.items():
            try:
                builder.load(verbose=False)
            except Exception as error:
                message = f"{title} cannot be built here: {type(error).__name__}: {error}"
                hint = "load a CUDA toolkit and a C++ compiler"
                if builder.NAME == "cpu_adam":
                    hint += ", or set `engine.deepspeed.adam: torch`"
                raise InvalidInputError(
                    [Problem(message, hint=hint, node_dependent=True)]
                ) from None


def _needed_builders(config: DeepSpeedConfig) -> dict[str, Any]:
    """Name DeepSpeed's builders of the operators that this configuration loads."""
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder

    builders = {}
    if not config.torch_adam:
        builders["DeepSpeed's Adam for offloaded state"] = CPUAdamBuilder()
    if config.nvme_path is not None:
        builders["DeepSpeed's access to NVMe"] = AsyncIOBuilder()
    return builders


def extensions_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the user's TORCH_EXTENSIONS_DIR, else a private directory on this node.

    Someone else's directory of that name in /tmp is not used: code is loaded from there.
    """
    given = environment.get(_DIRECTORY_VARIABLE)
    if given:
        return Path(given)
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    own = Path(tempfile.gettempdir(), f"hpctrain-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        own.mkdir(mode=0o700)
    status = own.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or own.is_symlink():
        own = Path(tempfile.mkdtemp(prefix="hpctrain-"))
    return own / f"torch-{torch.__version__}-{python}"


@contextlib.contextmanager
def exclusive_build(root: Path) -> Iterator[None]:
    """Let no other rank of this user build below `root`, and remove what a killed build has left.

    The kernel releases this lock with the process that holds it, so it cannot be left behind.
    """
    root.mkdir(parents=True, exist_ok=True)
    with open(root / ".hpctrain-build", "a", encoding="ascii") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for stale in root.glob("*/lock"):
            stale.unlink(missing_ok=True)
        yield
