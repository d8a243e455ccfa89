"""Import megatron-core, and run it on a CPU: replace the CUDA symbols that it requires.

With a GPU no symbol is replaced, and the same trainer code runs on NCCL. Each private function
replaces one group of symbols and names its users. `_rng_trackers` matters most, because nothing
fails without it: all tensor-parallel ranks would draw the same dropout masks. Does not belong
here: faults of megatron-core that also exist on GPUs (see `engines/megatron/fixes.py`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._device
from torch.distributed import ReduceOp
from torch.utils._triton import has_triton_package

from hpctrain.train.device import on_cpu
from hpctrain.train.engines.megatron.core_versions.supported import current
from hpctrain.train.spared_imports import hidden

_CPU = torch.device("cpu")
_FACTORIES = ("tensor", "zeros", "ones", "empty", "empty_like", "full", "arange")
# core/timers.py and core/inference import them for metrics, which the trainer writes by itself.
_UNUSED = ("wandb", "torch.utils.tensorboard")
_installed = False


def import_core() -> None:
    """Install the replacements and import megatron.core, without packages that ranks never use.

    Those take a tenth of a rank's start, with a GPU as well. A checkout of Megatron-LM uses them:
    it calls `install` alone.
    """
    with hidden(*_UNUSED):
        install()
        importlib.import_module("megatron.core")


def import_core_to_read() -> None:
    """Import megatron.core for files of datasets, in a process that computes nothing.

    torch.compile decorates its fusions, and imports torch._inductor for it: half of the import.
    """
    compiled = torch.compile
    torch.compile = _uncompiled
    try:
        with hidden(*_UNUSED):
            install_needed_triton()
            importlib.import_module("megatron.core")
    finally:
        torch.compile = compiled


def install() -> None:
    """Replace the symbols; does nothing with CUDA, or when called again.

    Must run before the first import of megatron.core, which binds some symbols while importing.
    """
    global _installed
    if not on_cpu() or _installed:
        return
    assert "megatron.core" not in sys.modules, "cpu.install() must precede megatron.core"
    _installed = True
    # megatron-core's fusions use torch.compile, which would run a C++ compiler here. As a decorator
    # it also imports torch._dynamo, which takes a sixth of the start-up time of a rank.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    torch.compile = _uncompiled
    # About eighty places use `device=torch.cuda.current_device()`.
    torch.cuda.current_device = lambda: _CPU
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    # Literal `device="cuda"`: optimizer.py:907, clip_grads.py:103, schedules.py:596 and others.
    # `with torch.device(...)` recognizes factories by identity: make it cache the real ones first.
    torch.utils._device._device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    # `.cuda()` in the optimizer's gather (distrib_optimizer.py:1089) and in parallel loading.
    torch.Tensor.cuda = lambda self, *args, **keywords: self
    torch.nn.Module.cuda = lambda self, *args, **keywords: self
    _tensor_type_names()
    _generators()
    # Streams are constructed with several optimizer instances; events by timers.
    torch.cuda.Stream = torch.cuda.Event = _NoStream
    for name in ("stream", "current_stream", "default_stream"):
        setattr(torch.cuda, name, _NoStream)
    install_needed_triton()
    _rng_trackers()
    _shared_storage()
    _uneven_exchanges()
    _uneven_gathers()


def _uncompiled(model: Any = None, **options: Any) -> Any:
    """Return what a disabled torch.compile returns."""
    return model if model is not None else _uncompiled


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **keywords: Any) -> Any:
        device = keywords.get("device")
        if device is not None and torch.device(device).type == "cuda":
            keywords["device"] = _CPU
        # rotary positions under context parallelism (rope_utils.py, get_pos_emb_on_this_cp_rank)
        keywords.pop("pin_memory", None)
        return factory(*args, **keywords)

    return make


def _tensor_type_names() -> None:
    """Prefix types, because optimizers and clip_grads.py:167 expect 'torch.cuda.FloatTensor'."""
    original = torch.Tensor.type

    def type_name(self: Any, *args: Any, **keywords: Any) -> Any:
        result = original(self, *args, **keywords)
        if isinstance(result, str) and result.count(".") == 1:
            return "torch.cuda." + result.partition(".")[2]
        return result

    torch.Tensor.type = type_name


def _generators() -> None:
    """Replace the CUDA generator by the CPU's default generator."""

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    torch.cuda.manual_seed = torch.cuda.manual_seed_all = manual_seed
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda device="cuda": torch.get_rng_state()
        module.set_rng_state = lambda state, device="cuda": torch.set_rng_state(state)


class _NoStream(contextlib.nullcontext[None]):
    """A stream or event of a device that computes synchronously: waiting returns at once."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__()

    def record_event(self, event: Any = None) -> _NoStream:
        """Return a completed event, for which token_dispatcher.py waits."""
        return self

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *args, **keywords: True


def _uneven_exchanges() -> None:
    """Convert split sizes to lists for gloo.

    The expert dispatcher converts only CUDA tensors (token_dispatcher.py,
    maybe_move_tensor_to_cpu).
    """
    exchange = torch.distributed.all_to_all_single

    @functools.wraps(exchange)
    def all_to_all_single(
        output: Any,
        input: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        **keywords: Any,
    ) -> Any:
        sizes = (
            None if parts is None else [int(size) for size in parts]
            for parts in (output_split_sizes, input_split_sizes)
        )
        return exchange(output, input, *sizes, **keywords)

    torch.distributed.all_to_all_single = all_to_all_single


def _uneven_gathers() -> None:
    """Gather and scatter parts of different sizes, which gloo refuses and NCCL does.

    Experts that are split over ranks get different numbers of tokens from each (mappings.py,
    _gather_along_first_dim and _reduce_scatter_along_first_dim).
    """
    gather, scatter = torch.distributed.all_gather, torch.distributed.reduce_scatter

    @functools.wraps(gather)
    def all_gather(parts: Any, own: Any, group: Any = None, async_op: bool = False) -> Any:
        if len({part.shape for part in parts}) == 1:
            return gather(parts, own, group=group, async_op=async_op)
        for index, part in enumerate(parts):
            if index == torch.distributed.get_rank(group):
                part.copy_(own)
            torch.distributed.broadcast(part, group=group, group_src=index)

    @functools.wraps(scatter)
    def reduce_scatter(
        own: Any, parts: Any, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if len({part.shape for part in parts}) == 1:
            return scatter(own, parts, op=op, group=group, async_op=async_op)
        for index, part in enumerate(parts):
            total = part.clone()
            torch.distributed.all_reduce(total, op=op, group=group)
            if index == torch.distributed.get_rank(group):
                own.copy_(total)

    torch.distributed.all_gather = all_gather
    torch.distributed.reduce_scatter = reduce_scatter


def _rng_trackers() -> None:
    """Make megatron-core's RNG tracker use the CPU's generator.

    The tracker sets its state through `torch.cuda._lazy_call`. On a CPU build that call is queued
    and never made (torch/cuda/__init__.py): tensor-parallel ranks would silently share dropout
    masks. `fork()` warns that the CPU state changed, which is intended here.
    """
    import megatron.core.tensor_parallel.random as tracker

    def get_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> Any:
        return torch.get_rng_state()

    def set_state(new_state: Any, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    tracker._get_cuda_rng_state = get_state
    tracker._set_cuda_rng_state = set_state
    logging.getLogger(tracker.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _shared_storage() -> None:
    """Restore recomputed outputs by a copy, as megatron-core 0.16.1 does.

    Newer versions compile a C++ extension for it when the first output is restored.
    """
    import megatron.core.tensor_parallel.random as recomputation

    def copy_storage(output: Any, recomputed: Any) -> None:
        with torch.no_grad():
            output.untyped_storage().resize_(recomputed.untyped_storage().size())
            output.untyped_storage().copy_(recomputed.untyped_storage())

    if hasattr(recomputation, "_get_share_storage"):
        recomputation._get_share_storage = lambda: copy_storage


class _TritonName:
    """Replaces every name of Triton: usable as decorator, call and type, with no effect."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        decorates = not keywords and len(arguments) == 1
        decorates = decorates and isinstance(arguments[0], types.FunctionType)
        return arguments[0] if decorates else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class _TritonModule(types.ModuleType):
    """A module with every name; its kernels cannot run."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _TritonName()


def install_needed_triton() -> None:
    """Install Triton's names if the megatron-core of this process cannot be imported without."""
    if current().imports_triton:
        install_triton()


def install_triton() -> None:
    """Install modules named as Triton's where it is missing.

    moe/ops/paged_stash.py imports them unconditionally from core_v0.18 on. torch must have found
    out before that there is no Triton, or it would try to use this one.
    """
    if importlib.util.find_spec("triton") is not None:
        return
    has_triton_package()  # caches its result
    main, language = _TritonModule("triton"), _TritonModule("triton.language")
    main.__version__ = "3.4.0"  # type: ignore[attr-defined]
    main.__path__ = []
    main.__spec__ = importlib.machinery.ModuleSpec("triton", None)
    sys.modules["triton"] = main
    sys.modules["triton.language"] = language
