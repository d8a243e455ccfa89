"""Draw initial weights: each number depends on the seed, the weight's name and its place only.

A rank draws its own part, wherever the weight is split: the model is the same at every layout,
experts differ on all expert-parallel ranks, and the start takes the time of a part. A counter-based
generator gives the numbers (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"):
SplitMix64's output function (Steele et al. 2014) of the element's index, and from these uniform
numbers those of other distributions. Equal bit for bit on one kind of device. Belongs here: the
numbers, and recording what a module's initialisers would draw. Does not belong here: memory (see
`engines.models.allocation`), which part of a weight a rank has (see the engines).
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.base.errors import InvalidInputError, Problem

# SplitMix64: the odd step between two counters, and the multipliers of its output function.
_STEP = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# A CPU computes what its cache contains; a GPU needs enough elements for all of its cores.
_ELEMENTS_AT_ONCE = {"cpu": 2**15}
_ELEMENTS_AT_ONCE_ON_GPU = 2**22


class Distribution(Protocol):
    """What the elements of a weight are drawn from."""

    def numbers(self, key: int, places: torch.Tensor) -> torch.Tensor:
        """Return float32 numbers for int64 places in the whole weight, in row-major order."""
        ...


@dataclass(frozen=True)
class Constant:
    """One value for all elements."""

    value: float

    def numbers(self, key: int, places: torch.Tensor) -> torch.Tensor:
        return torch.full(places.shape, self.value, dtype=torch.float32, device=places.device)


@dataclass(frozen=True)
class Uniform:
    """Numbers between `low` and `high`."""

    low: float
    high: float

    def numbers(self, key: int, places: torch.Tensor) -> torch.Tensor:
        return uniform(key, places).mul_(self.high - self.low).add_(self.low)


@dataclass(frozen=True)
class Normal:
    """A normal distribution."""

    mean: float
    std: float

    def numbers(self, key: int, places: torch.Tensor) -> torch.Tensor:
        return normal(key, places).mul_(self.std).add_(self.mean)


@dataclass(frozen=True)
class TruncatedNormal:
    """A normal distribution without what lies outside of `low` and `high`.

    The inverse of its distribution function, of uniform numbers (Devroye 1986, "Non-uniform random
    variate generation", section II.2).
    """

    mean: float
    std: float
    low: float
    high: float

    def numbers(self, key: int, places: torch.Tensor) -> torch.Tensor:
        first, last = (
            math.erf((limit - self.mean) / (self.std * math.sqrt(2.0)))
            for limit in (self.low, self.high)
        )
        drawn = uniform(key, places).mul_(last - first).add_(first).erfinv_()
        drawn = drawn.mul_(self.std * math.sqrt(2.0)).add_(self.mean)
        return drawn.clamp_(self.low, self.high)


@torch.no_grad()
def fill(
    part: torch.Tensor,
    key: int,
    distribution: Distribution,
    *,
    global_shape: Sequence[int],
    offsets: Sequence[int],
    device: torch.device | None = None,
) -> None:
    """Fill a part of a weight in place with numbers of a distribution.

    `part` has as many axes as `global_shape`; `offsets` is the place of its first element. Only the
    inner axes' sizes decide: a weight that is padded along its first axis keeps its numbers. The
    numbers are computed on `device`, by default that of `part`.
    """
    flat = part.detach().reshape(-1)
    shares_memory = flat.data_ptr() == part.data_ptr() or not part.numel()
    values = flat if shares_memory and part.is_contiguous() else torch.empty_like(flat)
    device = device or part.device
    at_once = _ELEMENTS_AT_ONCE.get(device.type, _ELEMENTS_AT_ONCE_ON_GPU)
    for first in range(0, flat.numel(), at_once):
        last = min(first + at_once, flat.numel())
        local = torch.arange(first, last, device=device)
        places = global_places(local, part.shape, global_shape, offsets)
        values[first:last] = distribution.numbers(key, places).to(part.dtype)
    if values is not flat:
        part.detach().copy_(values.view(part.shape))


def stream_key(seed: int, name: str) -> int:
    """Return the 64-bit key of one weight's numbers."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def global_places(
    local: torch.Tensor,
    shape: Sequence[int],
    global_shape: Sequence[int],
    offsets: Sequence[int],
) -> torch.Tensor:
    """Return the row-major indices in the whole weight of elements of a part, as int64."""
    sizes, wholes, starts = list(shape), list(global_shape), list(offsets)
    while len(sizes) > 1 and sizes[-1] == wholes[-1]:
        # an axis that is not split and the one outside of it are one: divisions are slow
        inner = sizes.pop()
        for axes in (wholes, starts):
            axes.pop()
        for axes in (sizes, wholes, starts):
            axes[-1] *= inner
    if len(sizes) == 1:
        return local + starts[0]
    places = torch.zeros_like(local)
    stride, inner = 1, 1
    for size, whole, start in zip(sizes[::-1], wholes[::-1], starts[::-1], strict=True):
        places += (local // inner % size + start) * stride
        inner *= size
        stride *= whole
    return places


def normal(key: int, places: torch.Tensor) -> torch.Tensor:
    """Return standard normal numbers (float32) for int64 places: Box-Muller, of one 64-bit number.

    Its upper 23 bits are one of the two uniform numbers, the next 23 the other one.
    """
    bits = random_bits(key, places)
    radius = _fractions(_shifted(bits, 41)).log_().mul_(-2.0).sqrt_()
    angle = _fractions(bits.bitwise_right_shift_(18).bitwise_and_(2**23 - 1)).mul_(2.0 * math.pi)
    return radius.mul_(angle.cos_())


def uniform(key: int, places: torch.Tensor) -> torch.Tensor:
    """Return float32 numbers in (0, 1): the upper 23 bits of SplitMix64, and a half."""
    return _fractions(_shifted(random_bits(key, places), 41))


def random_bits(key: int, places: torch.Tensor) -> torch.Tensor:
    """Return SplitMix64's output (int64 that wraps around) for int64 places."""
    bits = (places * _signed(_STEP)).add_(_signed(key))
    bits.bitwise_xor_(_shifted(bits, 30)).mul_(_signed(_FIRST))
    bits.bitwise_xor_(_shifted(bits, 27)).mul_(_signed(_SECOND))
    return bits.bitwise_xor_(_shifted(bits, 31))


def _fractions(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers of 23 bits, in the middles of 2^23 parts of (0, 1)."""
    return numbers.to(torch.float32).add_(0.5).mul_(2.0**-23)


def _shifted(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right as unsigned numbers: torch's shift of int64 keeps the sign."""
    return (numbers >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    """The int64 with the bits of an unsigned number."""
    number &= 2**64 - 1
    return number - 2**64 if number >= 2**63 else number


# ------------------------------------------------------------------------------------------------
# Record what a module's own initialisers do to its weights, to draw any part of them elsewhere.
# While a module is built, its weights are on the meta device and its buffers on the CPU.
# Operations that write into a weight are noted instead of computed: a distribution, constants, a
# row of zeros. They are repeated for the part of a weight that a rank has.


_ATEN = torch.ops.aten
_UNWRITTEN = (
    _ATEN.empty.memory_format,
    _ATEN.empty_like.default,
    _ATEN.empty_strided.default,
    _ATEN.new_empty.default,
    _ATEN.new_empty_strided.default,
)
# The result is the same tensor in other memory; transformers pads biases, mostly by nothing.
_COPIES = (_ATEN.clone.default, _ATEN.constant_pad_nd.default)
_NOTE = "hpctrain_initial_weight"


@dataclass(frozen=True)
class Table:
    """Given values of all elements, such as angles that a module has computed."""

    values: torch.Tensor

    def numbers(self, key: int, places: torch.Tensor) -> torch.Tensor:
        return self.values.reshape(-1).to(places.device)[places].to(torch.float32)


@dataclass(frozen=True)
class Overwritten:
    """A distribution, and a constant between two places: the row of a padding token."""

    base: Distribution
    first: int
    end: int
    value: float

    def numbers(self, key: int, places: torch.Tensor) -> torch.Tensor:
        drawn = self.base.numbers(key, places)
        return drawn.masked_fill_((places >= self.first) & (places < self.end), self.value)


@dataclass
class InitialWeight:
    """One weight of a module: its whole shape, its name, and what its elements are drawn from.

    `reason`: why there is no distribution.
    """

    shape: torch.Size
    distribution: Distribution | None = None
    reason: str = "no initialiser writes into it"
    name: str = ""
    key: int = 0

    def draw(
        self,
        part: torch.Tensor,
        *,
        offsets: Sequence[int] | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Fill a part of the weight in place; `offsets`: where it begins along each axis.

        None: `part` is the whole. The numbers are computed on `device`, by default that of `part`.
        """
        assert self.distribution is not None, self.name
        offsets = [0] * len(self.shape) if offsets is None else offsets
        fill(
            part,
            self.key,
            self.distribution,
            global_shape=self.shape,
            offsets=offsets,
            device=device,
        )

    def draw_range(self, part: torch.Tensor, first: int) -> None:
        """Fill `part` [elements] with those of the flattened weight from `first` on."""
        assert self.distribution is not None, self.name
        whole = [math.prod(self.shape)]
        fill(part, self.key, self.distribution, global_shape=whole, offsets=[first])


def initial_weight(parameter: nn.Parameter) -> InitialWeight:
    """Return what was recorded for a parameter, or for the meta parameter that it replaces."""
    recorded: InitialWeight = getattr(parameter, _NOTE)
    return recorded


class _Recorded(nn.Parameter):
    """A meta parameter that initialisers do not recognise as one.

    Some functions of torch.nn.init return at once for meta tensors, and would be missed.
    """

    is_meta = False


class Recorder:
    """The weights of the modules that are built while it records; `recording` makes one."""

    def __init__(self) -> None:
        # by storage, which all views share; weak references keep addresses from being used again
        self._weights: dict[int, tuple[InitialWeight, StorageWeakRef]] = {}
        self._on_meta: dict[tuple[int, int, torch.Size], tuple[_Recorded, StorageWeakRef]] = {}
        self._unwritten: dict[int, StorageWeakRef] = {}

    def name_weights(self, module: nn.Module) -> None:
        """Name the weights after their places in `module`; names from an earlier call stay."""
        for name, parameter in module.named_parameters():
            recorded = self._weight_of(parameter)
            recorded.name = recorded.name or name

    def finish(self, module: nn.Module, seed: int) -> None:
        """Attach to each parameter what it is drawn from; see `initial_weight`.

        Raises InvalidInputError if the initial values of one cannot be drawn in parts.
        """
        self.name_weights(module)
        problems = []
        for name, parameter in module.named_parameters():
            recorded = self._weight_of(parameter)
            recorded.key = stream_key(seed, recorded.name)
            setattr(parameter, _NOTE, recorded)
            if recorded.distribution is None:
                message = f"its initial values cannot be drawn part by part: {recorded.reason}"
                problems.append(Problem(message, name))
        if problems:
            raise InvalidInputError(problems)

    def _weight_of(self, parameter: nn.Parameter) -> InitialWeight:
        known = self._weights.get(_storage(parameter))
        if known is not None:
            return known[0]
        recorded = InitialWeight(parameter.shape, reason="it is the result of an operation")
        self._add(parameter, recorded)
        return recorded

    def _add(self, tensor: torch.Tensor, weight: InitialWeight) -> None:
        self._weights[_storage(tensor)] = (weight, StorageWeakRef(tensor.untyped_storage()))

    def on_meta(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter on the meta device; values that it has already are recorded."""
        if parameter.device.type == "meta":
            return parameter
        address = _storage(parameter)
        place = (address, parameter.storage_offset(), parameter.shape)
        if place in self._on_meta:
            return self._on_meta[place][0]
        weight = InitialWeight(parameter.shape)
        if address not in self._unwritten:
            values = parameter.detach()
            first = values.reshape(-1)[:1]
            equal = values.numel() > 0 and bool((values == first).all())
            weight.distribution = Constant(float(first)) if equal else Table(values)
        empty = torch.empty_like(parameter, device="meta")
        recorded = _Recorded(empty, requires_grad=parameter.requires_grad)
        recorded.__dict__.update(parameter.__dict__)
        self._add(recorded, weight)
        if parameter.untyped_storage().nbytes() == parameter.nbytes:
            self._add(parameter, weight)  # whoever has it may still write into it
        self._on_meta[place] = (recorded, StorageWeakRef(parameter.untyped_storage()))
        return recorded

    def note_unwritten(self, made: torch.Tensor) -> None:
        """Record that a tensor's memory has no values yet."""
        self._unwritten[_storage(made)] = StorageWeakRef(made.untyped_storage())

    def note_copy(self, copy: torch.Tensor, source: torch.Tensor) -> None:
        """Record that a tensor has the values of another one, which may be a weight."""
        known = self._weights.get(_storage(source))
        if known is not None and copy.shape == source.shape == known[0].shape:
            self._add(copy, replace(known[0]))

    def note_write(self, target: torch.Tensor, operation: Any, arguments: dict[str, Any]) -> None:
        """Record an operation that writes into `target`, a weight or a view of one."""
        self._unwritten.pop(_storage(target), None)
        known = self._weights.get(_storage(target))
        if known is None:
            return
        weight, written = known[0], _written(operation, arguments)
        if target.is_contiguous() and written is not None:
            first, end = target.storage_offset(), target.storage_offset() + target.numel()
            if target.numel() == math.prod(weight.shape):
                weight.distribution = written
                return
            if isinstance(written, Constant) and weight.distribution is not None:
                weight.distribution = Overwritten(weight.distribution, first, end, written.value)
                return
        weight.distribution = None
        weight.reason = f"its initialiser uses {operation} on a tensor {list(target.shape)}"

    def note_truncated_normal(self, target: torch.Tensor, drawn: TruncatedNormal) -> bool:
        """Record `torch.nn.init.trunc_normal_` of a whole weight; returns False if it is none."""
        known = self._weights.get(_storage(target))
        whole = known is not None and target.numel() == math.prod(known[0].shape)
        if known is not None and whole:
            known[0].distribution = drawn
        return whole

    def release(self) -> None:
        """Let the weights be ordinary meta parameters again."""
        for parameter, _ in self._on_meta.values():
            parameter.__class__ = nn.Parameter


class _Operations(TorchDispatchMode):
    """Reports operations that write into tensors to a recorder, and runs them."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _UNWRITTEN:
            self._recorder.note_unwritten(result)
        elif func in _COPIES:
            self._recorder.note_copy(result, args[0])
        elif func._schema.is_mutable:
            declared = func._schema.arguments
            given = {argument.name: argument.default_value for argument in declared}
            given.update(
                (argument.name, value) for argument, value in zip(declared, args, strict=False)
            )
            given.update(kwargs or {})
            for argument in declared:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    targets = given[argument.name]
                    for target in targets if isinstance(targets, list | tuple) else [targets]:
                        if isinstance(target, torch.Tensor):
                            self._recorder.note_write(target, func, given)
        return result


def _written(operation: Any, given: dict[str, Any]) -> Distribution | None:
    """What an operation writes into its tensor, if it is one that can be repeated in parts."""
    if operation == _ATEN.normal_.default:
        return Normal(given["mean"], given["std"])
    if operation == _ATEN.uniform_.default:
        return Uniform(given["from"], given["to"])
    if operation == _ATEN.zero_.default:
        return Constant(0.0)
    if operation in (_ATEN.fill_.Scalar, _ATEN.fill_.Tensor):
        return Constant(float(given["value"]))
    if operation == _ATEN.copy_.default and given["src"].device.type != "meta":
        return Table(given["src"].detach().expand(given["self"].shape).clone())
    return None


@contextlib.contextmanager
def unwritten_memory() -> Iterator[None]:
    """Leave new memory as it is inside the block; deterministic mode would write all of it."""
    settings = torch.utils.deterministic
    before = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = before


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Put the weights of modules that are built inside the block on meta, and record operations.

    Buffers are made as ever. Memory of a weight exists for a moment, before it is written into.
    """
    recorder = Recorder()
    register, truncated = nn.Module.register_parameter, nn.init._no_grad_trunc_normal_

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None:
            self._parameters[name] = recorder.on_meta(param)

    def trunc_normal_(
        tensor: Any, mean: float, std: float, a: float, b: float, generator: Any = None
    ) -> Any:
        if recorder.note_truncated_normal(tensor, TruncatedNormal(mean, std, a, b)):
            return tensor
        return truncated(tensor, mean, std, a, b, generator=generator)

    nn.Module.register_parameter = register_on_meta
    nn.init._no_grad_trunc_normal_ = trunc_normal_
    try:
        with unwritten_memory(), _Operations(recorder):
            yield recorder
    finally:
        nn.Module.register_parameter = register
        nn.init._no_grad_trunc_normal_ = truncated
        recorder.release()


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
