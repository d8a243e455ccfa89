"""Correct faults of megatron-core that do not concern CPUs, each by one small function.

Three of them would give wrong numbers silently. A version that contains a fix lists it in
`CoreVersion.mended`, and the fix can be deleted once all do; `tests/engines/test_trainer_resume.py`
shows when. Belongs here: corrections of
megatron-core. Does not belong here: replacements of CUDA (see `hpctrain.train.megatron_on_cpu`).
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from hpctrain.train.engines.megatron.core_versions.supported import current

_installed = False


def install() -> None:
    """Apply all corrections once per process, before a model is built.

    Each looks at the object that it corrects, not at what is installed: what megatron-core uses
    follows from what it could import.
    """
    global _installed
    if _installed:
        return
    _installed = True
    for correct in (
        keep_bucket_padding,
        allow_shards_of_padding,
        count_duplicated_weights_once,
        allow_norms_with_sequence_parallel,
        keep_step_while_loading,
        separate_adam_steps,
        define_router_product,
        define_duplicated_linear,
        add_biases_of_experts,
    ):
        if correct.__name__ not in current().mended:
            correct()
    for logger, beginning in current().muted.items():

        def is_other(record: logging.LogRecord, muted: str = beginning) -> bool:
            return not record.getMessage().startswith(muted)

        logging.getLogger(logger).addFilter(is_other)


def keep_bucket_padding() -> None:
    """Save every parameter's optimizer state from its correct offset.

    `sharded_param_state_fully_reshardable` cuts the gathered buffer with offsets that include the
    padding between gradient buckets, after the padding was dropped (distrib_optimizer.py; fixed
    upstream in NVIDIA/Megatron-LM pull request 5077). With more than one bucket, everything
    behind the first padded bucket is saved shifted. Here the padding is kept while gathering.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer.sharded_param_state_fully_reshardable

    def with_padding(self: Any, *args: Any, **keywords: Any) -> Any:
        parts = [(buffer, buffer.numel) for buffer in self.buffers]
        parts += [(b, b.grad_data.numel()) for buffer in self.buffers for b in buffer.buckets]
        unpadded = [part.numel_unpadded for part, _ in parts]
        for part, padded in parts:
            part.numel_unpadded = padded
        try:
            return original(self, *args, **keywords)
        finally:
            for (part, _), count in zip(parts, unpadded, strict=True):
                part.numel_unpadded = count

    DistributedOptimizer.sharded_param_state_fully_reshardable = with_padding


class _PaddingShard(list[dict[str, Any]]):
    """The state of a bucket of which this rank has no parameter: true, as megatron-core asserts.

    `like`: a tensor of no elements for each tensor that a parameter would have.
    """

    def __init__(self, like: dict[str, Any]) -> None:
        super().__init__()
        self._like = like

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, index: Any) -> Any:
        """Return `like` while it is empty: megatron-core looks there for types of padding."""
        return super().__getitem__(index) if len(self) else self._like


def allow_shards_of_padding() -> None:
    """Save and load where a data-parallel rank has nothing but padding of a bucket.

    A bucket is padded to a multiple of 128 x dp / gcd(128, dp) elements. Where that is more than
    one shard, `sharded_param_state_dp_reshardable` ends the last ranks with the assertion "empty
    bucket encountered", and the others wait. What is left before a shared embedding, which has a
    bucket of its own, may be a single norm: 1024 elements over dp 24 are shards of 48 and 128 of
    padding.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer.get_parameter_state_dp_reshardable

    @functools.wraps(original)
    def with_padding_shards(self: Any) -> Any:
        state = original(self)
        places = [
            buckets for one in range(len(self.gbuf_ranges)) for buckets in state[one].values()
        ]
        known = [tensors for buckets in places for bucket in buckets for tensors in bucket]
        names = (
            [name for name, value in known[0].items() if torch.is_tensor(value)] if known else []
        )
        like = {name: torch.empty(0, device=known[0][name].device) for name in names}
        for buckets in places:
            buckets[:] = [bucket or _PaddingShard(like) for bucket in buckets]
        return state

    DistributedOptimizer.get_parameter_state_dp_reshardable = with_padding_shards
    load = DistributedOptimizer.load_parameter_state_from_dp_reshardable

    @functools.wraps(load)
    def without_padding_shards(self: Any, state: Any) -> Any:
        """dist_checkpointing drops empty lists, which would shift the buckets behind them."""
        for number, by_dtype in enumerate(self.gbuf_ranges):
            for dtype, places in by_dtype.items():
                loaded = state[number][dtype]
                known = iter([one for one in loaded if not all(part["padding"] for part in one)])
                state[number][dtype] = [
                    next(known) if place["param_map"] else [] for place in places
                ]
        return load(self, state)

    DistributedOptimizer.load_parameter_state_from_dp_reshardable = without_padding_shards


def count_duplicated_weights_once() -> None:
    """Count the gradients of weights that all tensor-parallel ranks have once in the norm.

    TransformerEngine marks every weight of a linear layer as a part (module/linear.py,
    reset_parameters), also those of the down projections of latent attention. `clip_grads.py` then
    adds their squares once per tensor-parallel rank, and clips by another norm at each layout.
    """
    from megatron.core.extensions import transformer_engine

    if not transformer_engine.HAVE_TE:
        return
    original = transformer_engine.TELinear.__init__

    def marked(self: Any, *args: Any, parallel_mode: str | None, **keywords: Any) -> None:
        original(self, *args, parallel_mode=parallel_mode, **keywords)
        if parallel_mode == "duplicated":
            for parameter in self.parameters():
                parameter.tensor_model_parallel = False

    transformer_engine.TELinear.__init__ = marked


def allow_norms_with_sequence_parallel() -> None:
    """Allow torch's norms under sequence parallelism, which torch_norm.py refuses, and those kinds
    of norms that it has not.

    The fused norms only add the attribute that makes `finalize_model_grads` sum the norm's
    gradients over the tensor-parallel group.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from hpctrain.train.engines.megatron.layers import Norm, has_own_norms

    original = WrappedTorchNorm.__new__

    def new(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **keywords: Any) -> Any:
        enabled, config.sequence_parallel = config.sequence_parallel, False
        record = getattr(config, "record", None)
        try:
            if record is not None and has_own_norms(record):
                norm = Norm(record, hidden_size, eps)
            else:
                norm = original(cls, config, hidden_size, eps, **keywords)
        finally:
            config.sequence_parallel = enabled
        for parameter in norm.parameters():
            parameter.sequence_parallel = enabled
        return norm

    WrappedTorchNorm.__new__ = new


def define_router_product() -> None:
    """Let the router of experts multiply with torch where TransformerEngine is missing.

    moe_utils.py evaluates `te_general_gemm is not None`, a name that only its import binds.
    """
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def define_duplicated_linear() -> None:
    """Let latent attention be built from megatron-core's own layers.

    multi_latent_attention.py asks `isinstance(..., TELinear)`, which is None where it could not be
    imported, and takes classes that it knows: one is of a library that hpctrain does not use.
    """
    from megatron.core.transformer import multi_latent_attention

    from hpctrain.train.engines.megatron.layers import DuplicatedLinear

    multi_latent_attention.Linear = DuplicatedLinear
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.TELinear = _NoLinear


class _NoLinear:
    """A class without instances."""


def add_biases_of_experts() -> None:
    """Let experts on one tensor-parallel rank add their biases.

    mlp.py adds them in place to what an autograd function without anything to do has returned as it
    was: autograd refuses that.
    """
    from megatron.core.tensor_parallel import layers

    original = layers.reduce_from_tensor_model_parallel_region

    def reduce(input_: Any, group: Any = None) -> Any:
        alone = group is not None and group.size() == 1
        return input_ if alone else original(input_, group=group)

    layers.reduce_from_tensor_model_parallel_region = reduce


def keep_step_while_loading() -> None:
    """Give the loaded state its Adam `step`, which the checkpoint keeps in the param groups.

    Without it `_set_main_param_and_optimizer_states` raises KeyError 'step'. What is no tensor, the
    mark of padding, it gives to a precision-aware optimizer as a state (0.19.2 leaves that out).
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
        group, order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group]["params"][order]
        state = self.optimizer.state.get(main_param, {})
        tensors = {name: value for name, value in tensors.items() if torch.is_tensor(value)}
        if "step" in state:  # of torch; the fused ones count steps in the group
            tensors = {**tensors, "step": state["step"]}
        return original(self, model_param, tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = with_step


def separate_adam_steps() -> None:
    """Give every parameter its own `step` tensor after loading.

    `load_state_dict` gives all of them one tensor and torch's Adam adds 1 to it in place, once
    per parameter: the bias correction is wrong after every resume, silently.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer.load_state_dict

    @torch.no_grad()
    def load(self: Any, state_dict: Any) -> Any:
        result = original(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()
        return result

    DistributedOptimizer.load_state_dict = load


def prime_adam(optimizer: Any) -> None:
    """Give torch Adam's never-stepped parameters their zero state, before a sharded state dict.

    `DistributedOptimizer.state_dict` asserts that every state has a `step`, and the other
    optimizers would create a state without one. Does nothing with the fused Adam of
    TransformerEngine or Apex, nor once the optimizer has stepped.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(part, "optimizer", None)
        if not isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
            continue
        for group in inner.param_groups:
            for parameter in group["params"]:
                state = inner.state[parameter]
                if "step" not in state:
                    state["step"] = torch.tensor(0.0)
                    state.setdefault("exp_avg", torch.zeros_like(parameter))
                    state.setdefault("exp_avg_sq", torch.zeros_like(parameter))
