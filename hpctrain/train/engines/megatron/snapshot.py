"""Save and restore model, optimizer, schedule, random state and position of a run.

Belongs here: the sharded state dict, this rank's shards, and restoring a loaded state. Does not
belong here: writing files, processes, publishing (see `hpctrain.train.saving`), which checkpoint to
use.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
    load_content_metadata,
)
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.engines.megatron import MegatronConfig
from hpctrain.train import software
from hpctrain.train.data import sample_order
from hpctrain.train.engine import Form, Position, Writing
from hpctrain.train.engines.megatron.core_versions.supported import check_versions, current
from hpctrain.train.engines.megatron.engine import MegatronOptimizer
from hpctrain.train.engines.megatron.fixes import prime_adam
from hpctrain.train.engines.megatron.mesh import (
    RNG_KEY,
    seed_everything,
    set_rng_state,
    sharded_rng_state,
)
from hpctrain.train.engines.megatron.model import ModelChunks, uses_transformer_engine
from hpctrain.train.saving import writer
from hpctrain.train.saving.digest_check import check_sample_order, damage_named
from hpctrain.train.saving.host_buffers import HostBuffers
from hpctrain.train.saving.shard_files import ShardFile, WriteShards, copied
from hpctrain.train.step_agreement import Control

# -- Write one rank's shards as megatron-core plans them, without its writer process -------------
# megatron-core's own writer has three faults that matter here (0.16.1, filesystem_async.py): it
# starts a Manager process per rank that outlives a killed rank and keeps its stdout open, it waits
# for ever for a writer that has died, and its persistent variant reads live parameters on a CPU.


class WriteResults:
    """Replaces megatron-core's Manager queue; holds the result of this rank's writer."""

    def __init__(self) -> None:
        self._result: Any = None

    def install(self) -> None:
        """Plan one file per rank, of the tensors as they are, whose results come from here.

        megatron-core clones each tensor on a CPU that is part of a larger storage, as all of its
        optimizer's are, while training waits (0.16.1: filesystem_async.py, `_clone_if_needed`).
        Our writers copy such a tensor when they write it (`hpctrain.train.saving.shard_files`).
        0.19.2 also dequantizes weights in 8 bits there, which no run has (see `option_problems`).
        """

        def prepare_write_data(
            planned: filesystem_async.FileSystemWriterAsync, plan: SavePlan, planner: SavePlanner
        ) -> None:
            raw: list[tuple[WriteItem, Any]] = []
            tensors: list[tuple[WriteItem, Any]] = []
            for item in plan.items:
                kind = raw if item.type == WriteItemType.BYTE_IO else tensors
                kind.append((item, planner.resolve_data(item)))
            name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
            path = Path(planned.checkpoint_dir) / name
            planned.write_buckets = [(str(path), name, (raw, tensors))] if plan.items else []
            planned.results_queue = self if plan.items else None

        filesystem_async.FileSystemWriterAsync.prepare_write_data = prepare_write_data

    def put(self, result: Any) -> None:
        self._result = result

    def get_nowait(self) -> Any:
        """Return the result; raises queue.Empty without one, as megatron-core expects."""
        if self._result is None:
            raise queue.Empty
        return self._result


def writing_from_request(
    request: AsyncRequest, results: WriteResults, buffers: HostBuffers | None
) -> Writing:
    """Return this rank's part of what `dist_checkpointing.save` has planned.

    With `buffers` all tensors are copied into them before this returns.
    """

    def finish(result: Any) -> None:
        results.put(result)
        with _postponed_metadata_errors():
            for finalize in request.finalize_fns:
                finalize()

    if request.async_fn is None:
        return Writing(None, finish)
    # filesystem_async.py, get_save_function_and_args: the second argument of `async_fn`; buckets
    # are (path, name, (pairs of item and bytes, pairs of item and tensor))
    planned = request.async_fn_args[1]
    files = tuple(ShardFile(Path(path), name, (*raw, *data)) for path, name, (raw, data) in planned)
    return Writing(WriteShards(copied(files, buffers)), finish)


@contextlib.contextmanager
def _postponed_metadata_errors() -> Iterator[None]:
    """Raise rank 0's error in writing metadata only after all ranks have finished.

    megatron-core synchronizes all ranks behind each of the two files (0.16.1: state_dict_saver.py,
    the broadcast at the end of `save_state_dict_async_finalize`; serialization.py, the barrier
    behind `save_config`). After an error between them rank 0 would exit, and the others would wait
    for ever.
    """
    errors: list[Exception] = []
    patched: tuple[tuple[Any, str], ...] = (
        (filesystem_async.FileSystemWriterAsync, "finish"),
        (serialization, "save_config"),
    )

    def postponing(function: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            try:
                function(*arguments)
            except Exception as error:
                errors.append(error)

        return run

    originals = [getattr(owner, name) for owner, name in patched]
    for (owner, name), function in zip(patched, originals, strict=True):
        setattr(owner, name, postponing(function))
    try:
        yield
    finally:
        for (owner, name), function in zip(patched, originals, strict=True):
            setattr(owner, name, function)
    if errors:
        raise errors[0]


_RUN_KEY = "hpctrain"
_UNKNOWN = -1  # in checkpoints of the first versions


class MegatronSnapshot:
    """The parts whose state makes a checkpoint; implements `hpctrain.train.engine.Snapshot`."""

    form = Form(
        leader_files=(*current().common_files, ".metadata", "metadata.json"),
        shards="*.distcp",
        library_version=software.megatron_core(),
    )

    def __init__(
        self,
        config: MegatronConfig,
        model: ModelChunks,
        optimizer: MegatronOptimizer,
        control: Control,
    ) -> None:
        self.config = config
        self.model = model
        self.optimizer = optimizer
        self._control = control
        # The structure of the state never changes within a launch. Which rank writes what (the
        # fully parallel wrapper), the plans of all ranks and the metadata are made once.
        self._base: Any = get_default_save_sharded_strategy("torch_dist")
        self._base.thread_count = 1
        self._base.use_cached_ckpt_structure = True
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._strategy: Any = self._base
        if group.size() > 1:
            self._strategy = FullyParallelSaveStrategyWrapper(self._base, group, True)
        self._planned = self._reuses_plans = False
        self.buffers = HostBuffers() if writer.needs_copies() else None
        self._results = WriteResults()
        self._results.install()

    def plan(self, position: Position, directory: Path) -> Writing:
        """Plan the save with megatron-core; validated once, because the structure never changes."""
        metadata = sharding_metadata(self.config.optimizer_sharding)
        request = dist_checkpointing.save(
            self.sharded(position),
            directory,
            self._strategy,
            validate_access_integrity=not self._planned,
            async_sharded_save=True,
            **current().save_options,
            # a process group cannot be stored
            content_metadata={k: v for k, v in metadata.items() if k != "dp_cp_group"},
        )
        self._planned = True
        if not self._reuses_plans:
            # megatron-core decides that on each rank by itself (strategies/torch.py, async_save:
            # validated_cache_reuse). If the ranks' decisions differed, one would plan alone and
            # the save would hang.
            self._reuses_plans = self._control.all_agree(self._base.validated_cache_reuse)
            self._base.validated_cache_reuse = self._reuses_plans
        return writing_from_request(request, self._results, self.buffers)

    def sharded(self, position: Position) -> dict[str, Any]:
        """Return the state dict to save."""
        if self.config.overlap_param_gather:
            # Until the next forward pass the weights in other ranks' shards are one step old.
            for chunk in self.model.wrapped:
                chunk.start_param_sync(force_sync=True)
        kind = self.config.optimizer_sharding
        state = self._sharded_parts(sharding_metadata(kind), is_loading=False)
        state[RNG_KEY] = sharded_rng_state()
        state["schedule"] = self.optimizer.schedule.state_dict()
        state[_RUN_KEY] = {
            "step": position.step,
            "consumed_samples": position.consumed_samples,
            "sample_order": sample_order(self.config),
            "layout": layout_of(self.config),
            "bucket_size": self._bucket_size,
            "expert_parallel": self.config.expert_model_parallel_size,
            "state_types": state_types(self.config),
            "transformer_engine": uses_transformer_engine(self.config),
        }
        return state

    def estimated_bytes(self, control: Control) -> int:
        """Estimate the size of a checkpoint on disk from the parameters of all ranks.

        A parameter is saved as it is trained (2 or 4 bytes), as the optimizer's main copy and as
        its two moments (4 bytes each). What several ranks have is counted once.
        """
        bytes_each = (2 if self.config.precision == "bf16" else 4) + 12
        replicas = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        expert_replicas = parallel_state.get_expert_data_parallel_world_size()
        here = sum(
            parameter.numel()
            / (replicas if getattr(parameter, "allreduce", True) else expert_replicas)
            for chunk in self.model.bare
            for parameter in chunk.parameters()
        )
        return int(control.total(here) * bytes_each)

    def restore(self, directory: Path) -> tuple[Position, str | None]:
        """Load everything from `directory`.

        Returns a remark if the random state was re-seeded, or another version of megatron-core has
        saved the checkpoint. Raises InvalidInputError if it belongs to another sample order, has
        another kind of layers or optimizer state, or comes from a version that is not known to
        resume here. Raises LoadFailedError if its files are damaged.
        """
        remarks = check_versions(directory)
        with damage_named(directory):
            common = current().read_common_state(directory)
            about = common[_RUN_KEY]
        check_sample_order(sample_order(self.config), about["sample_order"], directory)
        check_expert_spread(self.config, about.get("expert_parallel", 1), directory)
        check_state_types(self.config, about.get("state_types"), directory)
        check_layers(self.config, about.get("transformer_engine"), directory)
        same_place = about["layout"][:2] == layout_of(self.config)[:2]
        # only the kind that it was saved with can be loaded
        content = load_content_metadata(preloaded_state_dict=common)
        kind = str(content["distrib_optim_sharding_type"])
        metadata = sharding_metadata(kind)
        same_buckets = about.get("bucket_size", _UNKNOWN) == self._bucket_size
        check_layout(self.config, about["layout"], metadata, directory, same_buckets=same_buckets)
        state = self._sharded_parts(metadata, is_loading=True)
        if same_place:
            state[RNG_KEY] = sharded_rng_state()
        with damage_named(directory):
            strategy = get_default_load_sharded_strategy(str(directory))
            if metadata["dp_cp_group"].size() > 1:
                strategy = FullyParallelLoadStrategyWrapper(strategy, metadata["dp_cp_group"])
            options = current().load_options(directory)
            loaded = dist_checkpointing.load(state, directory, strategy, **options)
        self._load_parts(loaded)
        position = Position(about["step"], about["consumed_samples"])
        if same_place:
            set_rng_state(loaded[RNG_KEY])
        else:
            seed_everything(self.config, added=position.step)
            remarks += (f"random state re-seeded: saved with tp, pp {about['layout'][:2]}",)
        return position, "; ".join(remarks) or None

    @property
    def _bucket_size(self) -> int | None:
        """Elements of a bucket of gradients, as megatron-core has chosen; None: one bucket."""
        elements: int | None = self.model.wrapped[0].ddp_config.bucket_size
        return elements

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

    def _load_parts(self, loaded: dict[str, Any]) -> None:
        for index, chunk in enumerate(self.model.bare):
            # an uneven split may leave a chunk without layers, of which nothing is stored
            chunk.load_state_dict(loaded.get(f"model{index}", {}), strict=True)
        self.optimizer.inner.load_state_dict(loaded["optimizer"])
        self.optimizer.schedule.load_state_dict(loaded["schedule"])


def layout_of(config: MegatronConfig) -> list[int]:
    """Return [tp, pp, dp], which determines the rank that a random state belongs to."""
    return [
        config.tensor_model_parallel_size,
        config.pipeline_model_parallel_size,
        config.data_parallel_size,
    ]


def sharding_metadata(kind: str) -> dict[str, Any]:
    """Return how megatron-core shards the optimizer state; see `MegatronConfig.optimizer_sharding`.

    The kind must be named: the default, `fully_sharded_model_space`, fails in 0.16.1 with
    "flattened_range is not supported".
    """
    return {
        "distrib_optim_sharding_type": kind,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }


def check_layout(
    config: MegatronConfig,
    saved: list[int],
    metadata: dict[str, Any],
    directory: Path,
    *,
    same_buckets: bool,
) -> None:
    """Raise InvalidInputError if the optimizer state was saved for another layout only.

    The state of `dp_reshardable` is stored by buckets of gradients without the padding that depends
    on dp (distrib_optimizer.py, sharded_param_state_dp_reshardable). Which parameters are in a
    bucket depends on tp, pp and the size of buckets, which by default grows with dp
    (distributed_data_parallel.py).
    """
    now = layout_of(config)
    if metadata["distrib_optim_sharding_type"] != "dp_reshardable":
        return
    if not config.use_distributed_optimizer or saved == now:
        return
    if saved[:2] == now[:2] and same_buckets:
        return
    what = "tp, pp, dp" if saved[:2] != now[:2] else "other buckets of gradients and tp, pp, dp"
    message = f"was saved with {what} {saved}, and is now resumed with {now}"
    hint = "resume with the same tp and pp; `resources.min_nodes` keeps the buckets for other dp"
    raise InvalidInputError([Problem(message, str(directory), hint=hint)])


def check_expert_spread(config: MegatronConfig, saved: int, directory: Path) -> None:
    """Raise InvalidInputError if experts had an optimizer of their own and now have none, or the
    reverse.

    megatron-core gives them one with expert parallelism only (optimizer/__init__.py), and
    ChainedOptimizer.load_state_dict takes as many states as there are optimizers.
    """
    now = config.expert_model_parallel_size
    if (saved > 1) != (now > 1):
        message = f"expert_model_parallel_size was {saved} and is now {now}"
        hint = "optimizer state cannot move between 1 and more than 1"
        raise InvalidInputError([Problem(message, str(directory), hint=hint)])


def state_types(config: MegatronConfig) -> list[str] | None:
    """Return the types of a precision-aware optimizer's state; None for any other."""
    types: list[str] = [config.exp_avg_dtype, config.exp_avg_sq_dtype, config.main_params_dtype]
    return types if config.use_precision_aware_optimizer else None


def check_state_types(config: MegatronConfig, saved: list[str] | None, directory: Path) -> None:
    """Raise InvalidInputError if the optimizer's state has other types than it was saved with.

    A precision-aware one may store the lower 16 bits of a weight (optimizer_config.py,
    store_param_remainders), which are no number to any other.
    """
    now = state_types(config)
    if saved == now:
        return
    before, after = (" ".join(one) if one else "no such optimizer" for one in (saved, now))
    message = f"was saved with types {before}, and is now resumed with {after}"
    hint = "leave `use_precision_aware_optimizer`, `exp_avg_dtype`, `exp_avg_sq_dtype` and "
    hint += "`main_params_dtype` as they were"
    raise InvalidInputError([Problem(message, str(directory), hint=hint)])


def check_layers(config: MegatronConfig, saved: bool | None, directory: Path) -> None:
    """Raise InvalidInputError if the layers of this run cannot load what others have saved.

    `saved`: whether TransformerEngine's layers have; None in checkpoints that do not name them.
    They and their fused Adam load `_extra_state` and settings that megatron-core's own layers and
    torch's Adam do not save. Without TransformerEngine, the norms before experts have other names
    (gpt_layer_specs.py, sharded_state_dict_keys_map).
    """
    now = uses_transformer_engine(config)
    if saved is None or saved == now or (saved and config.model.moe is None):
        return
    ours, others = "megatron-core's own layers", "TransformerEngine"
    before, after = (others, ours) if saved else (ours, others)
    value = "transformer_engine" if saved else "local"
    message = f"was saved with {before}, and is now resumed with {after}"
    hint = (
        f"resume with `engine.implementation: {value}`; a new run can begin with these weights "
        "(`hpctrain convert`, `model.pretrained`)"
    )
    raise InvalidInputError([Problem(message, str(directory), hint=hint)])
