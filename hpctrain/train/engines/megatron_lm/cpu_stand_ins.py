"""Run Megatron-LM on a machine without GPUs: for trials and tests of a checkout, not for training.

The replacements of CUDA and Triton in `hpctrain.train.megatron_on_cpu` also serve Megatron-LM.
Belongs here: what only such a machine needs. Does not belong here: corrections of megatron-core
(see `hpctrain.train.engines.megatron.fixes`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import typing
from multiprocessing import spawn
from typing import Any

import torch
from torch.utils.data import DataLoader

# Compute capability that arguments.py reads from a GPU; from 10 on it checks fewer variables.
_HOPPER = 9


def install() -> None:
    """Install all replacements; the checkout must be on the path and not be imported yet."""
    if not hasattr(typing, "override"):  # the main line is written for Python 3.12
        vars(typing)["override"] = lambda method: method
    _hide_program_from_spawned_processes()
    _give_loaders_their_own_generator()
    from hpctrain.train import megatron_on_cpu
    from hpctrain.train.engines.megatron import fixes

    megatron_on_cpu.install_triton()  # also for checkouts between the releases
    megatron_on_cpu.install()
    fixes.install()
    _create_adam_state_before_loading()
    if importlib.util.find_spec("megatron.training") is not None:
        _start_without_cuda()


def _create_adam_state_before_loading() -> None:
    """Give PyTorch's Adam its state before the state dict is built to load into.

    Without TransformerEngine and Apex the state does not exist before the first step, and the
    state dict asserts it (distrib_optimizer.py, state_dict).
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from hpctrain.train.engines.megatron.fixes import prime_adam

    original = DistributedOptimizer.sharded_state_dict

    def sharded_state_dict(self: Any, *arguments: Any, **keywords: Any) -> Any:
        prime_adam(self)
        return original(self, *arguments, **keywords)

    DistributedOptimizer.sharded_state_dict = sharded_state_dict


def _hide_program_from_spawned_processes() -> None:
    """Keep the process that megatron-core's saver spawns from importing the program again.

    None of these replacements would be installed there, and it needs nothing of the program.
    """
    original = spawn.get_preparation_data

    def without_program(name: str) -> dict[str, Any]:
        data = original(name)
        return {key: value for key, value in data.items() if not key.startswith("init_main")}

    spawn.get_preparation_data = without_program


def _give_loaders_their_own_generator() -> None:
    """Draw the seeds of data loaders from a generator of their own.

    A loader draws a seed from the CPU's generator each time it is iterated from the start, so once
    more in a resumed run. Here dropout draws from the same generator; on a GPU it does not.
    """
    original = DataLoader.__init__

    def init(self: Any, *arguments: Any, **keywords: Any) -> None:
        keywords.setdefault("generator", torch.Generator().manual_seed(0))
        original(self, *arguments, **keywords)

    DataLoader.__init__ = init


def _start_without_cuda() -> None:
    """Patch initialize.py, which asserts CUDA and makes groups and seeds for ranks with a GPU."""
    from megatron.training import arguments, initialize

    parameters = inspect.signature(initialize.initialize_megatron).parameters.values()
    initialize.initialize_megatron.__defaults__ = tuple(
        True if parameter.name == "allow_no_cuda" else parameter.default for parameter in parameters
    )
    initialize._warmup_jit_function = lambda *arguments, **keywords: None
    torch.cuda.device_count = lambda: 1
    arguments.get_device_arch_version = lambda: _HOPPER
    with contextlib.suppress(ImportError):
        from megatron.legacy import fused_kernels  # core_v0.16

        fused_kernels.load = lambda args: None
