"""Megatron-LM on a machine without GPUs: for trials and tests of a checkout, not for training.

What `hpctrain.train.megatron_on_cpu` puts in the place of CUDA serves Megatron-LM, too. Some of its
versions also import Triton without asking whether it is there. Belongs here: what only such a
machine needs. Does not belong here: corrections of megatron-core (see
`hpctrain.train.engines.megatron`).
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import inspect
import sys
import types
import typing
from multiprocessing import spawn
from typing import Any

import torch
from torch.utils._triton import has_triton_package
from torch.utils.data import DataLoader

# Compute capability: what arguments.py asks a GPU for; from 10 on it asks less of the environment.
_HOPPER = 9


def install() -> None:
    """Put all stand-ins in force; the checkout must be on the path, and not be imported yet."""
    _newer_typing()
    _kernels()
    _no_second_program()
    _loaders_draw_for_themselves()
    from hpctrain.train import megatron_on_cpu
    from hpctrain.train.engines.megatron import fixes

    megatron_on_cpu.install()
    fixes.install()
    _state_before_loading()
    if importlib.util.find_spec("megatron.training") is not None:
        _start_without_cuda()


def _state_before_loading() -> None:
    """Without TransformerEngine and Apex, PyTorch's Adam has no state before its first step, and a
    state to load into is asked for (distrib_optimizer.py, state_dict)."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from hpctrain.train.engines.megatron.fixes import prime_adam

    original = DistributedOptimizer.sharded_state_dict

    def sharded_state_dict(self: Any, *given: Any, **keywords: Any) -> Any:
        prime_adam(self)
        return original(self, *given, **keywords)

    DistributedOptimizer.sharded_state_dict = sharded_state_dict


def _newer_typing() -> None:
    """The main line is written for Python 3.12: `override` says nothing that matters here."""
    if not hasattr(typing, "override"):
        vars(typing)["override"] = lambda method: method


def _no_second_program() -> None:
    """The process that megatron-core's saver spawns would import the program again, where none of
    this is in force; it needs nothing of it."""
    original = spawn.get_preparation_data

    def without_program(name: str) -> dict[str, Any]:
        data = original(name)
        return {key: value for key, value in data.items() if not key.startswith("init_main")}

    spawn.get_preparation_data = without_program


def _loaders_draw_for_themselves() -> None:
    """A loader draws a seed from the CPU's generator each time it is read from the start, so once
    more in a resumed run; here dropout draws from the same generator, and on a GPU it does not."""
    original = DataLoader.__init__

    def init(self: Any, *given: Any, **keywords: Any) -> None:
        keywords.setdefault("generator", torch.Generator().manual_seed(0))
        original(self, *given, **keywords)

    DataLoader.__init__ = init


class _Anything:
    """Stands for every name of Triton: decorates, is called, and is part of types, for nothing."""

    def __call__(self, *given: Any, **keywords: Any) -> Any:
        decorates = len(given) == 1 and not keywords and isinstance(given[0], types.FunctionType)
        return given[0] if decorates else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class _Kernels(types.ModuleType):
    """A module with every name; its kernels cannot run."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


def _kernels() -> None:
    """Modules named as Triton's (moe/ops/paged_stash.py of core_v0.18 imports them as they are).

    torch must have found before that there is no Triton, or it would try to use this one.
    """
    if importlib.util.find_spec("triton") is not None:
        return
    has_triton_package()  # remembers its answer
    main, language = _Kernels("triton"), _Kernels("triton.language")
    main.__version__ = "3.4.0"  # type: ignore[attr-defined]
    main.__path__ = []
    main.__spec__ = importlib.machinery.ModuleSpec("triton", None)
    sys.modules["triton"] = main
    sys.modules["triton.language"] = language


def _start_without_cuda() -> None:
    """initialize.py asserts CUDA, and makes groups and seeds for as many ranks as have a GPU."""
    from megatron.training import arguments, initialize

    parameters = inspect.signature(initialize.initialize_megatron).parameters.values()
    initialize.initialize_megatron.__defaults__ = tuple(
        True if parameter.name == "allow_no_cuda" else parameter.default for parameter in parameters
    )
    initialize._warmup_jit_function = lambda *given, **keywords: None
    torch.cuda.device_count = lambda: 1
    arguments.get_device_arch_version = lambda: _HOPPER
    with contextlib.suppress(ImportError):
        from megatron.legacy import fused_kernels  # core_v0.16

        fused_kernels.load = lambda args: None
