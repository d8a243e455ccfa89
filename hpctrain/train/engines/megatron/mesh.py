"""Join the process groups of one rank, seed it by its place in them, and keep its random state.

Belongs here: torch.distributed and megatron-core's parallel state, device choice, seeding.
Does not belong here: what is computed on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel.random import (
    convert_cuda_rng_state,
    is_graph_safe_cuda_rng_tracker,
)

from hpctrain.engines.megatron import MegatronConfig
from hpctrain.records.speed_checks import AxisName
from hpctrain.train.data import Share
from hpctrain.train.device import join_ranks, on_cpu
from hpctrain.train.engine import AxisGroup
from hpctrain.train.engines.megatron.option_settings import needs_te_generators
from hpctrain.train.rank_environment import Launch

SEED_STRIDE_OF_STAGES = 100  # as Megatron-LM: megatron/training/initialize.py, _set_random_seed


@dataclass(frozen=True)
class MegatronMesh:
    """The device of this rank and its place on each axis.

    `control` is a gloo group of all ranks for agreements, apart from the collectives on GPUs.
    """

    device: torch.device
    control: Any
    data_rank: int
    data_size: int
    tensor_rank: int
    pipeline_rank: int
    first_stage: bool
    last_stage: bool

    @property
    def share(self) -> Share:
        return Share(self.data_rank, self.data_size, self.device)

    @property
    def reads(self) -> bool:
        """True on stages that embed tokens or compute the loss."""
        return self.first_stage or self.last_stage

    @property
    def axes(self) -> tuple[AxisGroup, ...]:
        """Groups of all axes; those of dp include cp, over which gradients are summed, too."""
        groups: tuple[tuple[AxisName, Any], ...] = (
            ("tp", parallel_state.get_tensor_model_parallel_group()),
            ("cp", parallel_state.get_context_parallel_group()),
            ("ep", parallel_state.get_expert_model_parallel_group()),
            ("dp", self.reduce_group),
            ("pp", parallel_state.get_pipeline_model_parallel_group()),
        )
        found = ((axis, group, dist.get_process_group_ranks(group)) for axis, group in groups)
        return tuple(
            AxisGroup(axis, group, tuple(ranks)) for axis, group, ranks in found if len(ranks) > 1
        )

    @property
    def reduce_group(self) -> Any:
        """Data-parallel ranks, times context-parallel ones."""
        return parallel_state.get_data_parallel_group(with_context_parallel=True)


def open_mesh(config: MegatronConfig, launch: Launch) -> MegatronMesh:
    """Join the launch's process groups; all ranks must call this."""
    device, timeout = join_ranks(config, launch)
    parallel_state.initialize_model_parallel(
        **parallel_sizes(config),
        distributed_timeout_minutes=max(1, round(config.startup_timeout_seconds / 60)),
        create_gloo_process_groups=False,  # nothing here uses them, and there are many
    )
    seed_everything(config)
    return MegatronMesh(
        device=device,
        control=dist.new_group(backend="gloo", timeout=timeout),
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        first_stage=parallel_state.is_pipeline_first_stage(),
        last_stage=parallel_state.is_pipeline_last_stage(),
    )


def parallel_sizes(config: MegatronConfig) -> dict[str, Any]:
    """Return the axes of the mesh and their order, as `initialize_model_parallel` takes them."""
    sizes, instances = (
        config.hierarchical_context_parallel_sizes,
        config.num_distributed_optimizer_instances,
    )
    return dict(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_ranks,
        order=config.parallel_order,
        num_distributed_optimizer_instances=instances,
        hierarchical_context_parallel_sizes=None if sizes is None else list(sizes),
    )


def seed_everything(config: MegatronConfig, added: int = 0) -> None:
    """Seed as Megatron-LM does: another seed per pipeline stage, trackers per tensor rank.

    `added` to the run's seed gives other numbers. CUDA graphs replay only generators whose state
    lies on the GPU.
    """
    stage = parallel_state.get_pipeline_model_parallel_rank()
    seed = config.seed + added + SEED_STRIDE_OF_STAGES * stage
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(
        seed,
        te_rng_tracker=needs_te_generators(config),
        use_cudagraphable_rng=config.cuda_graph_impl != "none",
    )


# ------------------------------------------------------------------------------------------------
# Read and set the random number generators, so that dropout continues exactly after a resume.
# Only dropout draws random numbers while training: torch's default generators and megatron-core's
# trackers hold all of their state. Python's and NumPy's generators are not used. Data-parallel
# replicas share their state, as in Megatron-LM.


RNG_KEY = "rng_state"


def set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None and not on_cpu():
        torch.cuda.set_rng_state(state["cuda"])
    tracker = tensor_parallel.get_cuda_rng_tracker()
    graphs = is_graph_safe_cuda_rng_tracker(tracker)
    tracker.set_states(_converted(state["trackers"], to_graphable=graphs))


def _converted(states: dict[str, Any], *, to_graphable: bool) -> dict[str, Any]:
    """Convert states of generators: tensors to store, generators where CUDA graphs need them.

    As Megatron-LM's checkpointing.py does; a run may start or stop using CUDA graphs at a resume.
    """
    return {
        name: convert_cuda_rng_state(state, to_graphable=to_graphable)
        for name, state in states.items()
    }


def sharded_rng_state() -> ShardedObject:
    """Return one object per (pipeline, tensor) rank, as in Megatron-LM's checkpoints."""
    state = {
        "cpu": torch.get_rng_state(),
        "cuda": None if on_cpu() else torch.cuda.get_rng_state(),
        "trackers": _converted(
            tensor_parallel.get_cuda_rng_tracker().get_states(), to_graphable=False
        ),
    }
    return ShardedObject(
        RNG_KEY,
        state,
        (
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_world_size(),
        ),
        (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
        ),
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )
