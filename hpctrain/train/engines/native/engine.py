"""Make one training step and one evaluation with FSDP or DDP, for the training loop.

The loss is the mean over all labels of the global batch, however it is distributed over ranks and
microbatches. Belongs here: process groups, the optimizer, the order of work within a step. Does not
belong here: how the module is wrapped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from hpctrain.engines.native import NativeConfig
from hpctrain.train.data import Share
from hpctrain.train.device import join_ranks
from hpctrain.train.engine import AxisGroup, Evaluation, Update
from hpctrain.train.engines.models.engine import ModuleEngine
from hpctrain.train.engines.models.tasks import Loss, LossTotals, nominal_labels
from hpctrain.train.numerics import are_finite
from hpctrain.train.rank_environment import Launch
from hpctrain.train.schedule import parameter_groups

# -- Join the process groups of one rank: copies of the model, and the ranks that share a copy ---


@dataclass(frozen=True)
class NativeMesh:
    """The device and groups of this rank.

    `shards`: the DeviceMesh that `fully_shard` takes; None for DDP. `control` is a gloo group of
    all ranks for agreements, apart from the collectives on GPUs.
    """

    device: torch.device
    rank: int
    size: int
    control: Any
    shards: Any

    @property
    def axes(self) -> tuple[AxisGroup, ...]:
        """All ranks sum gradients together, whether or not they share a copy of the model."""
        return (AxisGroup("dp", dist.group.WORLD, tuple(range(self.size))),) * (self.size > 1)

    @property
    def reads(self) -> bool:
        return True

    @property
    def share(self) -> Share:
        """Every rank reads its own samples."""
        return Share(self.rank, self.size, self.device)


def open_mesh(config: NativeConfig, launch: Launch) -> NativeMesh:
    """Join the launch's process groups; all ranks must call this."""
    device, timeout = join_ranks(config, launch, host_tensors=config.cpu_offload)
    seed_dropout(config.seed, launch.rank)
    control = dist.new_group(backend="gloo", timeout=timeout)
    shards = None
    if config.engine == "fsdp":
        # one axis, or two: copies of the model outside, the shards of a copy on adjacent ranks
        copies = config.data_parallel_size // config.shard_size
        axes = {"copy": copies} if copies > 1 else {}
        axes["shard"] = config.shard_size
        shards = init_device_mesh(device.type, (*axes.values(),), mesh_dim_names=(*axes,))
    return NativeMesh(
        device=device, rank=launch.rank, size=launch.world_size, control=control, shards=shards
    )


def seed_dropout(seed: int, rank: int) -> None:
    """Seed each rank differently, because ranks read different samples."""
    torch.manual_seed(seed + rank)


# -- Build torch's AdamW, with the weight decay and the clipping of the other engines ------------


class MuonAndAdamW(torch.optim.Optimizer):
    """Updates matrices by torch's Muon and all other weights by AdamW, with one state.

    `parts` keep no groups and no state of their own: loading replaces those of this one.
    """

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        groups = [
            dict(group, part=number)
            for number, part in enumerate(parts)
            for group in part.param_groups
        ]
        super().__init__(groups, {})
        self._parts = parts

    def step(self, closure: Any = None) -> None:
        for number, part in enumerate(self._parts):
            part.param_groups = [one for one in self.param_groups if one["part"] == number]
            part.state = self.state
            part.step()


def build_optimizer(config: NativeConfig, module: Any) -> torch.optim.Optimizer:
    """Build the optimizer of the trainable parameters; no weight decay on biases and norms.

    Muon's rate is such that updates are as large as AdamW's (Liu et al. 2025, arXiv 2502.16982,
    section 2.2), so that both have one rate and one decay.
    """
    groups = parameter_groups(config, module)
    if config.optimizer == "adamw":
        return _adamw(config, groups)
    ends = {id(one) for one in _end_weights(module)}
    matrices = [p for p in groups[0]["params"] if p.ndim == 2 and id(p) not in ends]
    taken = {id(one) for one in matrices}
    rest = [
        dict(group, params=[one for one in group["params"] if id(one) not in taken])
        for group in groups
    ]
    muon = torch.optim.Muon(
        [dict(groups[0], params=matrices)],
        momentum=config.muon_momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    return MuonAndAdamW(muon, _adamw(config, [group for group in rest if group["params"]]))


def _end_weights(module: Any) -> Iterator[Any]:
    """Yield weights of embeddings and of the output layer, which are no matrices between layers."""
    whole = getattr(module, "module", module)
    for part in whole.modules():
        if isinstance(part, torch.nn.Embedding):
            yield part.weight
    output = whole.get_output_embeddings() if hasattr(whole, "get_output_embeddings") else None
    if output is not None:
        yield output.weight


def _adamw(config: NativeConfig, groups: list[dict[str, Any]]) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        # one pass over memory without copies: other variants need four more bytes per weight
        fused=True,
    )


@torch.no_grad()
def scale_and_clip(optimizer: torch.optim.Optimizer, factor: Any, limit: float) -> Any:
    """Multiply all gradients by `factor`, and clip their norm to `limit` (0: no clipping).

    In one pass over memory and without waiting for the device. Returns the norm of all gradients
    over all ranks, multiplied and not yet clipped.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    factor = factor.to(norm.device)
    norm = norm * factor
    if limit > 0:
        # as torch/nn/utils/clip_grad.py, _clip_grads_with_norm_
        factor = factor * torch.clamp(limit / (norm + 1e-6), max=1.0)
    parts = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients]
    if parts:
        torch._foreach_mul_(parts, factor.to(parts[0].device))
    return norm


@dataclass(kw_only=True)
class NativeEngine(ModuleEngine):
    """Implements `hpctrain.train.engine.Engine`."""

    config: NativeConfig
    mesh: NativeMesh
    module: Any
    optimizer: torch.optim.Optimizer
    loss: Loss

    def update(self, samples: range, before_step: Callable[[], None]) -> Update:
        """Run forward, backward and optimizer.

        Gradients are averaged over ranks with the last microbatch.
        """
        rate = self.set_next_rate(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        nominal = nominal_labels(self.config, samples)
        scale, microbatches = self.mesh.size / nominal, self.config.microbatches_of(len(samples))
        losses = LossTotals(microbatches, self.mesh.device)
        for number, batch in enumerate(self.data.training.microbatches(samples)):
            with self._gradient_sync(number == microbatches - 1):
                with self.clock.computing(), self._autocast():
                    loss_sum, count = self.loss(self.module, batch)
                losses.add(loss_sum, count)
                with self.clock.timing("backward"):
                    (loss_sum * scale).backward()
        before_step()
        totals = losses.wait()
        factor = nominal / totals[1].clamp(min=1)
        norm = scale_and_clip(self.optimizer, factor, self.config.clip_grad)
        self.optimizer.step()
        self.finished_steps += 1
        return Update(totals, norm, rate)

    @contextlib.contextmanager
    def _gradient_sync(self, last: bool) -> Any:
        """Sum gradients over ranks in the backward pass of the last microbatch only."""
        if self.config.engine == "fsdp":
            self.module.set_requires_gradient_sync(last)
            yield
        else:
            with contextlib.nullcontext() if last else self.module.no_sync():
                yield

    def _autocast(self) -> Any:
        """Return the precision of operations: FSDP casts weights itself, DDP uses autocast."""
        half = self.config.engine == "ddp" and self.config.precision == "bf16"
        return torch.autocast(self.mesh.device.type, torch.bfloat16, enabled=half)

    def evaluate(self, batches: Iterable[int]) -> Evaluation | None:
        with self._autocast():
            return self.mean_over(batches, self.module, lambda batch: self.loss(self.module, batch))

    def weights_are_finite(self) -> bool:
        weights = [p.detach() for p in self.module.parameters()]
        return are_finite([p.to_local() if isinstance(p, DTensor) else p for p in weights])
