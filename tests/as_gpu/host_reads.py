"""Count what makes the host wait for the device within one training step.

A census on the CPU: every tensor counts as one of a GPU, so the count is an upper bound. Counted
are operations whose result the host needs (a number, a size that depends on data) and copies to the
host. Process groups are fake, except those of DDP. Belongs here: counting, and a step of each
engine. Does not belong here: the bounds.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from fake_worlds import fake_groups, group_of_one
from fresh_process import place_of_call
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.engines.train_json import parse_train_config
from hpctrain.records.layout import RunLayout
from hpctrain.train.job import Job
from hpctrain.train.rank_environment import Launch
from hpctrain.train.startup import room_of
from hpctrain.train.step_agreement import Control
from hpctrain.train.stop import StopSignals

# Operations after which CUDA is waited for: a scalar, or an output whose size depends on values.
_WAITING = {
    "aten::_local_scalar_dense",
    "aten::is_nonzero",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::repeat_interleave",
    "aten::bincount",
    "aten::equal",
}
_METHODS = ("tolist", "numpy", "cpu")
_ROOTS = ("/hpctrain/train/", "/megatron/core/", "/torch/distributed/fsdp/")
# Tensors that lie on the host also with a GPU: samples before they are copied, and the state of the
# CPU's generator, which megatron-core compares.
_ON_THE_HOST = ("datasets/", "tensor_parallel/random.py fork")


class _Census(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, kinds: Any, args: Any = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        masked = name in ("aten::index", "aten::index_put_", "aten::index_put") and any(
            torch.is_tensor(one) and one.dtype == torch.bool for one in args[1]
        )
        if masked and name != "aten::index":
            masked = args[2].numel() != 1  # one value: torch fills under the mask, without a size
        if name in _WAITING or masked:
            self.note(name)
        return func(*args, **(keywords or {}))

    def note(self, name: str) -> None:
        self.found[f"{name} in {place_of_call(*_ROOTS)}"] += 1


@contextmanager
def census() -> Iterator[Counter[str]]:
    """Count within the block."""
    counting = _Census()

    def noting(name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        def method(self: torch.Tensor, *args: Any, **keywords: Any) -> Any:
            counting.note(name)
            return original(self, *args, **keywords)

        return method

    patches = [mock.patch.object(torch.Tensor, name, noting(name)) for name in _METHODS]
    patches.append(
        mock.patch.object(
            torch.cuda, "synchronize", lambda device=None: counting.note("synchronize")
        )
    )
    for patch in patches:
        patch.start()
    try:
        with counting:
            yield counting.found
    finally:
        for patch in patches:
            patch.stop()


@contextmanager
def engine_of(config: Any) -> Iterator[Any]:
    """Build the engine of a document as rank 0 does, in groups of its own."""
    groups = group_of_one() if config.engine == "ddp" else fake_groups(0, config.world_size)
    with tempfile.TemporaryDirectory() as directory, groups:
        run = RunLayout(Path(directory) / "run")
        run.create()
        launch = Launch(0, config.world_size, 0, "node", 0, "")
        room = room_of(config)
        mesh = room.join(config, launch)
        job = Job(config, launch, run, StopSignals())
        yield room.build(job, mesh, Control(mesh.control)).engine


def reads_of_a_step(document: str) -> dict[str, int]:
    """Build the engine of a document, train two steps, and count in a third."""
    config = parse_train_config(document)
    torch.set_num_threads(1)
    with engine_of(config) as engine:
        for step in range(2):
            engine.update(step * config.global_batch_size, lambda: None)
        with census() as found:
            engine.update(2 * config.global_batch_size, lambda: None)
        return {
            place: count
            for place, count in found.items()
            if not any(f" in {where}" in place for where in _ON_THE_HOST)
        }


def reads_at(document: str, microbatches: list[int]) -> list[dict[str, int]]:
    """Count for several numbers of micro-batches per step."""
    base = json.loads(document)
    size = base["micro_batch_size"] * base["data_parallel_size"]
    return [
        reads_of_a_step(json.dumps({**base, "global_batch_size": number * size}))
        for number in microbatches
    ]


def reads_of_examples() -> list[int]:
    """Count in operations of which the first six wait for a GPU, and the others do not."""
    tensor = torch.arange(4.0)
    mask = tensor > 1
    examples: list[Callable[[], Any]] = [
        lambda: tensor.sum().item(),
        lambda: bool(mask.any()),
        lambda: tensor.tolist(),
        lambda: tensor[mask],
        lambda: mask.nonzero(),
        lambda: tensor.masked_select(mask),
        lambda: tensor.masked_fill(mask, 0.0),
        lambda: torch.where(mask, tensor, 0.0).sum(),
    ]
    counts = []
    for example in examples:
        with census() as found:
            example()
        counts.append(sum(found.values()))
    return counts
