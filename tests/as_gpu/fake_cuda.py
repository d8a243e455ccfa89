"""A GPU that has no memory and computes nothing: tensors of torch's FakeTensorMode on `cuda:0`.

Fake tensors have a device, a shape and a type, and no numbers. Every operation of a step passes
torch's own dispatcher, so where a tensor is placed follows from the code under test. What a CPU
build of torch lacks is replaced by `fake_cuda_guard` and by `install`, in a process of its own;
each replacement has its reason beside it. Belongs here: the device, and what is seen on it. Does
not belong here: what is run on it (see `fake_cuda_steps`).
"""

from __future__ import annotations

import fake_cuda_guard

fake_cuda_guard.load()  # before torch

import os  # noqa: E402
import sys  # noqa: E402
from collections import Counter  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from dataclasses import dataclass, field  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from fresh_process import place_of_call  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402

DEVICE = torch.device("cuda", 0)
_ROOTS = ("/hpctrain/train/", "/megatron/core/", "/torch/distributed/", "/torch/optim/")


class _Nothing:
    """A stream or an event: without kernels there is nothing to order."""

    device, cuda_stream = DEVICE, 0

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    def record(self, *arguments: Any) -> None:
        pass

    wait_stream = wait_event = wait = record_event = record

    def elapsed_time(self, end: Any) -> float:
        return 1.0


def install() -> None:
    """Give this process the fake GPU; must run before anything of hpctrain asks for one."""
    assert "megatron.core" not in sys.modules, "megatron-core decides by devices when imported"
    assert str(torch._C._get_accelerator()) == "cuda", "no guard: see fake_cuda_guard.load"
    # fusions would be compiled, and a fake device runs no kernel
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    cuda = torch.cuda
    state = torch.Generator().get_state()
    replaced: dict[str, Any] = dict(
        # there is one GPU, with bf16, and nothing to initialise
        is_available=lambda: True,
        is_initialized=lambda: True,
        _lazy_init=lambda: None,
        device_count=lambda: 1,
        get_device_capability=lambda device=None: (9, 0),
        is_bf16_supported=lambda *arguments: True,
        current_device=lambda: DEVICE.index,
        set_device=lambda device: None,
        # no queue of kernels: streams, events and waits order nothing
        synchronize=lambda device=None: None,
        is_current_stream_capturing=lambda: False,
        Stream=_Nothing,
        Event=_Nothing,
        stream=_Nothing,
        current_stream=_Nothing,
        default_stream=_Nothing,
        # figures of an allocator that is not there: nothing is asserted about them
        max_memory_allocated=lambda device=None: 0,
        max_memory_reserved=lambda device=None: 0,
        memory_allocated=lambda device=None: 0,
        # fake tensors draw nothing; states of generators lie on the host, also with a GPU
        manual_seed=lambda seed: None,
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda device="cuda": state.clone(),
        set_rng_state=lambda new, device="cuda": None,
    )
    for name, value in replaced.items():
        setattr(cuda, name, value)
    for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all"):
        setattr(cuda.random, name, replaced[name])
    # megatron-core reads and sets a generator by the number of the current device
    cuda.default_generators = (torch.Generator(),)
    # compares what ranks have received, and a fake tensor has received nothing
    torch.nn.parallel.distributed._verify_param_shape_across_processes = lambda *arguments: None
    # statistics of DDP, timed with events of the CUDA library
    torch.distributed.Logger.set_runtime_stats_and_log = lambda self: None
    torch.nn.Module._apply = _apply  # type: ignore[method-assign]


def _apply(self: Any, function: Any, recurse: bool = True) -> Any:
    """Move a module: torch's own method swaps tensors in place, which fake ones do not allow.

    Keeps what matters of it: attributes of parameters, and parameters that two modules share.
    """
    moved: dict[int, Any] = {}
    for module in self.modules() if recurse else [self]:
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in moved:
                with torch.no_grad():
                    new = torch.nn.Parameter(
                        function(parameter.detach()), requires_grad=parameter.requires_grad
                    )
                new.__dict__.update(
                    {k: v for k, v in parameter.__dict__.items() if not hasattr(new, k)}
                )
                moved[id(parameter)] = (new, parameter)  # holds the old one: ids stay unique
            module._parameters[name] = moved[id(parameter)][0]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = function(buffer)
    return self


@dataclass
class Seen:
    """What happened between the host and the device, each with its operation and place.

    `reads`: the host waits for a number. `copies`: tensors that change the device. `mixed`:
    operations on the device that were given a tensor of the host. `on_the_host`: operations that
    made a tensor on the host. Tensors without an axis do not count as of the host: torch passes
    them to kernels by value.
    """

    reads: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    mixed: Counter[str] = field(default_factory=Counter)
    on_the_host: Counter[str] = field(default_factory=Counter)


# Operations that move a tensor to another device, and those that write it into another tensor.
_MOVES = {"aten::_to_copy", "aten::to", "prims::device_put"}
_WRITES = {"aten::copy_", "aten::_foreach_copy_"}
# Operations that return a number to the host.
_SCALARS = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"}


class _Fake(FakeTensorMode):
    """torch's mode, as it behaves on a build without CUDA although `is_available` is replaced."""

    avoid_device_init = True  # type: ignore[assignment]


class _Indices(TorchFunctionMode):
    """Reads what torch's C++ code reads with an accelerator only.

    A device that is named by a number alone, as by `torch.cuda.current_device()`. And lists of
    numbers, which are copied from memory that a fake tensor has not.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self, func: Any, kinds: Any, args: Any = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        keywords = keywords or {}
        if isinstance(keywords.get("device"), int):
            keywords["device"] = torch.device("cuda", keywords["device"])
        if func is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
            args = (args[0], torch.device("cuda", args[1]), *args[2:])
        if func is torch.Tensor.cuda:
            return args[0].to(DEVICE)
        if func is torch.Tensor.tolist and args[0].device.type == "cuda":
            self._note("tolist")
            return torch.ones(args[0].shape, dtype=args[0].dtype).tolist()
        if func is torch.tensor and not isinstance(args[0], torch.Tensor):
            args = (tree_map(self._number, args[0]), *args[1:])
        return func(*args, **keywords)

    def _number(self, one: Any) -> Any:
        """Read an element of a list of which a tensor is made."""
        if isinstance(one, torch.Tensor) and one.device.type == "cuda":
            self._note("torch.tensor of numbers on the GPU")
            return _one(one.dtype)
        return one


class FakeGpu(TorchDispatchMode):
    """Gives operations with a tensor or a result on the GPU to FakeTensorMode.

    All others run on real tensors of the CPU: samples, generators' states and the agreements of
    ranks have their numbers. A number that is read from the GPU is 1, and so are all elements of a
    tensor that is copied to the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = Seen()
        self._fake = _Fake(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self, func: Any, kinds: Any, args: Any = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        keywords = keywords or {}
        name = func._schema.name
        given = tree_leaves((args, keywords))
        tensors = [one for one in given if isinstance(one, torch.Tensor)]
        on_gpu = any(one.device.type == "cuda" for one in tensors)
        wanted = next((one for one in given if isinstance(one, torch.device)), None)
        if not on_gpu and (wanted is None or wanted.type != "cuda"):
            result = func(*args, **keywords)
            if any(map(_has_axes, tree_leaves(result))):
                self._note(self.seen.on_the_host, name)
            return result
        if name.startswith("c10d::"):
            return _collective(func, args, keywords)
        if on_gpu and name in _SCALARS:
            self._note(self.seen.reads, name)
            return True if name != "aten::_local_scalar_dense" else _one(args[0].dtype)
        devices = {one.device.type for one in tensors if _has_axes(one) or one.is_cuda}
        if wanted is not None:
            devices.add(wanted.type)
        if len(devices) > 1:
            is_copy = name in _MOVES or name in _WRITES
            found = self.seen.copies if is_copy else self.seen.mixed
            self._note(found, f"{name} to {wanted or args[0].device}" if is_copy else name)
        with self._fake:
            result = func(*args, **keywords)
        return tree_map(_real_on_the_host, result)

    def _note(self, found: Counter[str], name: str) -> None:
        found[f"{name} in {place_of_call(*_ROOTS)}"] += 1


def _has_axes(one: Any) -> bool:
    return isinstance(one, torch.Tensor) and one.dim() > 0


def _collective(func: Any, args: Any, keywords: Any) -> Any:
    """Run a collective on empty tensors of the host: FakeTensorMode knows few of them.

    What it writes has no numbers on the device. The result names the tensors of the device.
    """
    fakes: dict[int, Any] = {}

    def stand_in(one: Any) -> Any:
        if not isinstance(one, FakeTensor):
            return one
        real = torch.zeros(one.shape, dtype=one.dtype)
        fakes[id(real)] = (one, real)
        return real

    result = func(*tree_map(stand_in, args), **tree_map(stand_in, keywords))
    return tree_map(lambda one: fakes[id(one)][0] if id(one) in fakes else one, result)


def _one(dtype: torch.dtype) -> Any:
    return torch.ones((), dtype=dtype).item()


def _real_on_the_host(tensor: Any) -> Any:
    if isinstance(tensor, FakeTensor) and tensor.device.type == "cpu":
        return torch.ones(tensor.shape, dtype=tensor.dtype)
    return tensor


@contextmanager
def fake_gpu() -> Iterator[FakeGpu]:
    """Place tensors on the fake GPU within the block."""
    before = torch._C._only_lift_cpu_tensors()
    # `torch.tensor(..., device="cuda")`: make it on the CPU, then move it through the dispatcher
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with FakeGpu() as mode, _Indices(lambda name: mode._note(mode.seen.reads, name)):
            yield mode
    finally:
        torch._C._set_only_lift_cpu_tensors(before)
