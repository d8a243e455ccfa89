"""What a checkpoint holds: model, optimizer, schedule, random state, and where the run stands.

Belongs here: the sharded state dict and putting a loaded one back. Does not belong here: files,
processes, publishing (see `saver`), which checkpoint to use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    load_common_state_dict,
    load_content_metadata,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)

from hpctrain.engines.megatron import TrainConfig
from hpctrain.errors import InvalidInputError, Problem
from hpctrain.train import rng
from hpctrain.train.control import Control
from hpctrain.train.data import sample_order
from hpctrain.train.faults import BadCheckpointError, is_damage
from hpctrain.train.mcore_fixes import prime_adam
from hpctrain.train.mesh import seed_everything
from hpctrain.train.model import Model
from hpctrain.train.optimizer import Optimizer

_RUN_KEY = "hpctrain"


@dataclass(frozen=True)
class Position:
    """Where the run stands: finished steps and the samples they consumed."""

    step: int
    consumed_samples: int


@dataclass(frozen=True)
class Snapshot:
    """The parts whose state makes a checkpoint."""

    config: TrainConfig
    model: Model
    optimizer: Optimizer

    def sharded(self, position: Position) -> dict[str, Any]:
        """The state dict to save."""
        self._gather_parameters()
        kind = self.config.optimizer_sharding
        state = self._sharded_parts(sharding_metadata(kind), is_loading=False)
        state[rng.KEY] = rng.sharded_rng_state()
        state["schedule"] = self.optimizer.schedule.state_dict()
        state[_RUN_KEY] = {
            "step": position.step,
            "consumed_samples": position.consumed_samples,
            "sample_order": sample_order(self.config),
            "layout": layout_of(self.config),
            "expert_parallel": self.config.expert_model_parallel_size,
        }
        return state

    def estimated_bytes(self, control: Control) -> int:
        """About the size of a checkpoint on disk, from the parameters of all ranks.

        A parameter is kept as it is trained (2 or 4 bytes), as the optimizer's main copy and as
        its two moments (4 bytes each); what several ranks have is counted for one of them.
        """
        bytes_each = (2 if self.config.precision == "bf16" else 4) + 12
        replicas = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        spread = parallel_state.get_expert_data_parallel_world_size()
        here = sum(
            parameter.numel() / (replicas if getattr(parameter, "allreduce", True) else spread)
            for chunk in self.model.bare
            for parameter in chunk.parameters()
        )
        return int(control.total(here) * bytes_each)

    def restore(self, directory: Path) -> tuple[Position, str | None]:
        """Load everything from `directory`; a remark if the random state could not be kept.

        Raises InvalidInputError when the checkpoint belongs to another sample order, or has
        another kind of optimizer state.
        """
        with _damage_named(directory):
            about = load_common_state_dict(str(directory))[_RUN_KEY]
        check_sample_order(self.config, about["sample_order"], directory)
        check_expert_spread(self.config, about.get("expert_parallel", 1), directory)
        same_place = about["layout"][:2] == layout_of(self.config)[:2]
        metadata = sharding_metadata(_sharding_of(directory))
        check_layout(self.config, about["layout"], metadata, directory)
        state = self._sharded_parts(metadata, is_loading=True)
        if same_place:
            state[rng.KEY] = rng.sharded_rng_state()
        with _damage_named(directory):
            loaded = dist_checkpointing.load(state, directory, _load_strategy(directory))
        self._put_back(loaded)
        position = Position(about["step"], about["consumed_samples"])
        if same_place:
            rng.set_rng_state(loaded[rng.KEY])
            return position, None
        seed_everything(self.config.seed + position.step)
        return position, f"random state re-seeded: saved with tp, pp {about['layout'][:2]}"

    def _sharded_parts(self, metadata: dict[str, Any], *, is_loading: bool) -> dict[str, Any]:
        state = {
            f"model{index}": chunk.sharded_state_dict(metadata=metadata)
            for index, chunk in enumerate(self.model.bare)
        }
        prime_adam(self.optimizer.inner)
        state["optimizer"] = self.optimizer.inner.sharded_state_dict(
            dict(state), is_loading=is_loading, metadata=metadata
        )
        return state

    def _put_back(self, loaded: dict[str, Any]) -> None:
        for index, chunk in enumerate(self.model.bare):
            # an uneven split may leave a chunk without layers, of which nothing is stored
            chunk.load_state_dict(loaded.get(f"model{index}", {}), strict=True)
        self.optimizer.inner.load_state_dict(loaded["optimizer"])
        self.optimizer.schedule.load_state_dict(loaded["schedule"])

    def _gather_parameters(self) -> None:
        """With overlap_param_gather the weights of other ranks' shards are one step old until
        the next forward pass: gather them now, or the checkpoint's model would be stale."""
        if self.config.overlap_param_gather:
            for chunk in self.model.wrapped:
                chunk.start_param_sync(force_sync=True)


def layout_of(config: TrainConfig) -> list[int]:
    """[tp, pp, dp]: what decides whose random state is whose."""
    return [
        config.tensor_model_parallel_size,
        config.pipeline_model_parallel_size,
        config.data_parallel_size,
    ]


def sharding_metadata(kind: str) -> dict[str, Any]:
    """How megatron-core cuts the optimizer state; see `TrainConfig.optimizer_sharding`.

    The kind must be named: the default, `fully_sharded_model_space`, fails in 0.16.1 with
    "flattened_range is not supported".
    """
    return {
        "distrib_optim_sharding_type": kind,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }


def _sharding_of(directory: Path) -> str:
    """The kind that a checkpoint was saved with, which is the only one to load it with."""
    return str(load_content_metadata(directory)["distrib_optim_sharding_type"])


def check_layout(
    config: TrainConfig, saved: list[int], metadata: dict[str, Any], directory: Path
) -> None:
    """Raise InvalidInputError where the optimizer state was saved for one layout only.

    Its parts follow the gradient buffers, whose padding and buckets depend on tp, pp and dp
    (distributed/param_and_grad_buffer.py), whatever the format's name says.
    """
    now = layout_of(config)
    kind = metadata["distrib_optim_sharding_type"]
    if kind == "dp_reshardable" and config.use_distributed_optimizer and saved != now:
        message = f"was saved as {kind} with tp, pp, dp {saved}, and is now wanted with {now}"
        hint = "resume with the same layout; save as fully_reshardable to change it"
        raise InvalidInputError([Problem(message, str(directory), hint=hint)])


def check_sample_order(config: TrainConfig, saved: dict[str, Any], directory: Path) -> None:
    """Raise InvalidInputError for each thing that would change the order of the samples."""
    now = sample_order(config)
    problems = [
        Problem(
            f"{name} was {saved.get(name)} and is now {value}: the order of all samples "
            "would change",
            str(directory),
            hint="submit a new run",
        )
        for name, value in now.items()
        if saved.get(name) != value
    ]
    if problems:
        raise InvalidInputError(problems)


def check_expert_spread(config: TrainConfig, saved: int, directory: Path) -> None:
    """Raise InvalidInputError where experts had an optimizer of their own and now have not.

    megatron-core gives them one with expert parallelism only (optimizer/__init__.py), and
    ChainedOptimizer.load_state_dict takes as many states as there are optimizers.
    """
    now = config.expert_model_parallel_size
    if (saved > 1) != (now > 1):
        message = f"expert_model_parallel_size was {saved} and is now {now}"
        hint = "optimizer state cannot move between 1 and more than 1"
        raise InvalidInputError([Problem(message, str(directory), hint=hint)])


@contextlib.contextmanager
def _damage_named(directory: Path) -> Iterator[None]:
    """Raise BadCheckpointError where the files are at fault, whatever else it is as it comes."""
    try:
        yield
    except Exception as error:
        if is_damage(error):
            raise BadCheckpointError(f"cannot resume from {directory.name}: {error}") from error
        raise


def _load_strategy(directory: Path) -> Any:
    strategy = get_default_load_sharded_strategy(str(directory))
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if group.size() == 1:
        return strategy
    return FullyParallelLoadStrategyWrapper(strategy, group)
