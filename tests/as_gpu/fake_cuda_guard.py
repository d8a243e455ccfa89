"""Compile and load what a CPU build of torch lacks in C++ to place tensors on `cuda:0`.

Belongs here: the compiler and the order of loading. Does not belong here: anything that imports
torch, because torch asks once, while it is imported, whether there is a GPU.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

VARIABLE = "FAKE_CUDA_GUARD"
_SOURCE = Path(__file__).with_suffix(".cpp")
_LIBRARIES = ("libc10.so", "libtorch_cpu.so")


def compiler() -> str | None:
    """Return the C++ compiler of this machine; None without one."""
    return shutil.which("c++")


def _torch() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.submodule_search_locations is not None
    return Path(found.submodule_search_locations[0])


def build(target: Path) -> None:
    """Compile the library; takes seconds. Raises CalledProcessError."""
    program, torch = compiler(), _torch()
    assert program is not None
    command = [program, "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{torch / 'include'}"]
    command += ["-o", str(target), str(_SOURCE), f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
    subprocess.run(command, check=True, timeout=300)


def load() -> None:
    """Load the library that VARIABLE names, if it does; torch must not be imported yet."""
    library = os.environ.get(VARIABLE)
    if library is None:
        return
    assert "torch" not in sys.modules, "torch has found no GPU already"
    for name in _LIBRARIES:
        ctypes.CDLL(str(_torch() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(library)
