"""Parts of layers that megatron-core's own layer specifications do not have, and where they go.

`arranged` puts them into the specification of a layer, `arrange_ends` before and behind the layers.
They read the record of the model, `record` of the configuration, and know their layer by its
number. Belongs here: these parts, each a few lines over a class of megatron-core. Does not belong
here: fields of TransformerConfig (see `hpctrain.engines.megatron`), building chunks (see `model`).
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from hpctrain.spec.model import ModelSpec

# -- Norms -------------------------------------------------------------------------------------


class Norm(torch.nn.Module):
    """A norm with a weight around zero, without bias, or without both."""

    def __init__(self, record: ModelSpec, size: int, eps: float) -> None:
        super().__init__()
        self.shape, self.eps, self.rms = (size,), eps, record.norm == "rmsnorm"
        self.first = float(record.norm_zero_centered)
        weight = record.norm != "layernorm_no_weights"
        start = torch.full(self.shape, 1.0 - self.first)
        self.weight = torch.nn.Parameter(start) if weight else None
        bias = record.norm == "layernorm"
        self.bias = torch.nn.Parameter(torch.zeros(self.shape)) if bias else None

    def forward(self, x: Any) -> Any:
        weight = self.weight
        if weight is not None and self.first:
            weight = weight.float() + self.first
        x32 = x.float()
        if self.rms:
            return functional.rms_norm(x32, self.shape, weight, self.eps).type_as(x)
        if weight is not None:
            weight = weight.float()
        bias = self.bias.float() if self.bias is not None else None
        return functional.layer_norm(x32, self.shape, weight, bias, self.eps).type_as(x)


def has_own_norms(record: ModelSpec) -> bool:
    """Tell whether megatron-core's norm on torch cannot compute the record's."""
    return record.norm_zero_centered or record.norm in ("layernorm_no_bias", "layernorm_no_weights")


class HeadsNorm(torch.nn.Module):
    """A norm of queries or keys with a weight for each number of each head.

    `each_head`: over a head (StableLM 2, Command R+); `width`: over all heads, those of other
    tensor-parallel ranks too (OLMo 2).
    """

    def __init__(self, heads: int, config: Any) -> None:
        super().__init__()
        record: ModelSpec = config.record
        self.rms, self.eps = record.norm == "rmsnorm", record.norm_epsilon
        self.over_all = record.attends.qk_norm == "width"
        self.parts = config.tensor_model_parallel_size
        self.size = record.head_size
        self.weight = torch.nn.Parameter(torch.ones(heads // self.parts * self.size))
        set_tensor_model_parallel_attributes(self.weight, self.parts > 1, 0, 1)

    def forward(self, x: Any) -> Any:
        """Compute for [tokens, batch, heads, size]."""
        x32 = x.float()
        axes = (-2, -1) if self.over_all else (-1,)
        if not self.rms:
            x32 = x32 - self._mean(x32, axes)
        x32 = x32 * torch.rsqrt(self._mean(x32.square(), axes) + self.eps)
        return (x32 * self.weight.float().view(-1, self.size)).type_as(x)

    def _mean(self, x: Any, axes: tuple[int, ...]) -> Any:
        mean = x.mean(axes, keepdim=True)
        if not self.over_all or self.parts == 1:
            return mean
        # both passes sum over the ranks: the mean is of all of them, and acts on all of them
        summed = reduce_from_tensor_model_parallel_region(mean)
        return copy_to_tensor_model_parallel_region(summed) / self.parts

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> Any:
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )


# -- Attention ---------------------------------------------------------------------------------


class DuplicatedLinear(torch.nn.Module):
    """A down projection of latent attention that each tensor-parallel rank has, as
    TransformerEngine's is with `parallel_mode="duplicated"`.

    The column-parallel layer that megatron-core has for it otherwise takes the gradients of the
    keys that all heads share from the heads of one rank (multi_latent_attention.py).
    """

    def __init__(
        self, inputs: int, outputs: int, *, config: Any, init_method: Any, **named: Any
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel
        shared = named["tp_comm_buffer_name"] == "kv_down_proj" and not config.sequence_parallel
        self.own = config.kv_lora_rank if shared else outputs

    def forward(self, x: Any) -> tuple[Any, None]:
        output = functional.linear(x, self.weight)
        own, shared = output[..., : self.own], output[..., self.own :]
        if shared.size(-1):
            shared = copy_to_tensor_model_parallel_region(shared)
            if shared.requires_grad:
                # its gradient is a slice, of which megatron-core sums a copy (mappings.py, _reduce)
                shared.register_hook(torch.Tensor.contiguous)
            return torch.cat([own, shared], -1), None
        return output, None


class CoreAttention(DotProductAttention):
    """Unfused attention with capped logits or slopes, and values of another size."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(config, layer_number, *args, **keywords)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
        if self.config.softmax_type == "learnable":
            split = config.tensor_model_parallel_size > 1
            set_tensor_model_parallel_attributes(self.softmax_offset, split, 0, 1)
        self.plain_mask = self.scale_mask_softmax.mask_func
        self.scale_mask_softmax.mask_func = self.masked

    def masked(self, scores: Any, mask: Any) -> Any:
        """Mask [batch, heads, tokens, tokens]; called before the softmax, with scaled scores."""
        record: ModelSpec = self.config.record
        cap = record.attends.soft_cap
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        if record.positions == "alibi":
            tokens = torch.arange(scores.size(-1), device=scores.device)
            scores = scores + (self._slopes(scores) * tokens).to(scores.dtype)
        return self.plain_mask(scores, mask)

    def _slopes(self, scores: Any) -> Any:
        """Return a slope for each head of this rank (Press et al. 2021, arXiv 2108.12409)."""
        heads, own = self.config.num_attention_heads, self.num_attention_heads_per_partition
        whole = 2 ** math.floor(math.log2(heads))
        base, extra = 2.0 ** (-8.0 / whole), 2.0 ** (-4.0 / whole)
        slopes = [base**n for n in range(1, whole + 1)]
        slopes += [extra ** (2 * n + 1) for n in range(heads - whole)]
        first = own * self.tp_group.rank()
        return torch.tensor(slopes[first : first + own], device=scores.device)[:, None, None]


class OwnAttention(SelfAttention):
    """Attention with norms over heads, or whose `window` layers have rotary positions of another
    base, which are not scaled (Gemma 3)."""

    def __init__(self, config: Any, submodules: Any, layer_number: int, **keywords: Any) -> None:
        record: ModelSpec = config.record
        base = record.rotates.window_base
        if record.mixer(layer_number - 1) != "window":
            base = None
        if base is not None and hasattr(config, _YARN_SCALE):
            config = copy.copy(config)
            delattr(config, _YARN_SCALE)
        super().__init__(config, submodules, layer_number, **keywords)
        if record.attends.qk_norm in ("width", "each_head"):
            self.q_layernorm = HeadsNorm(record.heads, config)
            self.k_layernorm = HeadsNorm(record.key_value_heads, config)
        self.own_rotary = base and RotaryEmbedding(
            config.kv_channels,
            record.rotates.partial,
            rotary_interleaved=config.rotary_interleaved,
            rotary_base=base,
            use_cpu_initialization=config.use_cpu_initialization,
            cp_group=self.pg_collection.cp,
        )

    def forward(self, *args: Any, rotary_pos_emb: Any = None, **keywords: Any) -> Any:
        if self.own_rotary and rotary_pos_emb is not None:
            ranks = self.pg_collection.cp.size()
            rotary_pos_emb = self.own_rotary(rotary_pos_emb.size(0) * ranks)
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb, **keywords)


# What attention.py multiplies sine and cosine by follows from this attribute of the configuration
# (yarn_rotary_pos_embedding.py, _yarn_get_concentration_factor_from_config).
_YARN_SCALE = "yarn_rotary_scaling_factor"


def scale_rotary(settings: Any, record: ModelSpec) -> None:
    """Let sine and cosine be multiplied by the factor that the record's scaling has."""
    _, factor = frequencies(record)
    if factor != 1 and record.mla is None:
        setattr(settings, _YARN_SCALE, math.exp((factor - 1) / 0.1))


def frequencies(record: ModelSpec) -> tuple[torch.Tensor, float]:
    """Return the rotary frequencies for the record's length, and the factor of sine and cosine.

    transformers, modeling_rope_utils.py; sources are named at `RopeScaling`.
    """
    size, base = int(record.head_size * record.rotates.partial), record.rope_base
    plain = 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size)
    scaling = record.rotates.scaling
    if scaling is None or scaling.kind == "dynamic":  # of longer sequences than the model's alone
        return plain, 1.0
    by = scaling.factor
    original = scaling.original_seq or record.max_seq or record.seq
    if scaling.kind == "linear":
        return plain / by, 1.0
    if scaling.kind == "llama3":
        low, high = scaling.low_freq_factor or 1.0, scaling.high_freq_factor or 4.0
        turns = original * plain / (2 * math.pi)
        share = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - share) * plain / by + share * plain, 1.0
    if scaling.kind == "longrope":
        longer = record.seq > original
        each = scaling.long_factor if longer else scaling.short_factor
        whole = by if by > 1 else (record.max_seq or original) / original
        usual = 1.0 if whole <= 1 else math.sqrt(1 + math.log(whole) / math.log(original))
        # written like transformers' own: the factor before the power
        own = torch.tensor(each, dtype=torch.float32, device="cpu") if each else 1.0
        return plain / own, scaling.attention_factor or usual
    ends = [
        size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (scaling.beta_fast or 32, scaling.beta_slow or 1)
    ]
    if scaling.truncate is not False:
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    first, last = max(ends[0], 0), min(ends[1], size - 1)
    last = last + 0.001 if first == last else last
    places = torch.arange(size // 2, dtype=torch.float32, device="cpu")
    share = 1 - ((places - first) / (last - first)).clamp(0, 1)

    def grown(by_share: float) -> float:
        return 0.1 * by_share * math.log(by) + 1.0 if by > 1 else 1.0

    if scaling.attention_factor is not None:
        factor = scaling.attention_factor
    elif scaling.mscale and scaling.mscale_all_dim:
        factor = grown(scaling.mscale) / grown(scaling.mscale_all_dim)
    else:
        factor = grown(1.0)
    return plain / by * (1 - share) + plain * share, factor


# -- The layer -----------------------------------------------------------------------------------


class Added(torch.nn.Module):
    """What is added to the stream: the output of a branch, behind a norm or times a number.

    In the place of megatron-core's addition of bias, dropout and residual.
    """

    def __init__(self, config: Any, norm: Any) -> None:
        super().__init__()
        self.scale = config.record.residual_scale
        sizes = dict(hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
        self.norm = None if norm is None else norm(config=config, **sizes)

    def forward(self, training: bool, fused: bool) -> Any:
        add = get_bias_dropout_add(training, fused)

        def added(output: Any, residual: Any, dropout: float) -> Any:
            branch, bias = output
            branch = branch if bias is None else branch + bias
            branch = branch if self.norm is None else self.norm(branch)
            branch = branch if self.scale == 1 else branch * self.scale
            return add((branch, None), residual, dropout)

        return added


class ParallelLayer(TransformerLayer):
    """A layer whose MLP has the same input as its attention, behind the same norm or its own."""

    def _forward_attention(self, hidden_states: Any, *args: Any, **keywords: Any) -> Any:
        """Keep the input of the layer until its MLP has read it.

        A layer that is recomputed comes here once more.
        """
        self.entered = hidden_states
        return super()._forward_attention(hidden_states, *args, **keywords)

    def _forward_pre_mlp_layernorm(self, hidden_states: Any) -> Any:
        entered = self.entered
        del self.entered
        if self.config.record.parallel_residual == "one_norm":
            return self.input_layernorm(entered)
        return super()._forward_pre_mlp_layernorm(entered)


def with_bias(linear: Any, bias: bool) -> Any:
    """Return a class of linear layers that have a bias, or none, whatever they are told."""

    def build(self: Any, *args: Any, **keywords: Any) -> None:
        linear.__init__(self, *args, **{**keywords, "bias": bias})

    return type(linear.__name__, (linear,), {"__init__": build})


def arranged(spec: ModuleSpec, settings: Any, engine: bool) -> ModuleSpec:
    """Put the record's parts into megatron-core's specification of a layer.

    `engine`: of TransformerEngine's, whose linear layers contain the norms before them.
    """
    record: ModelSpec = settings.record
    layer, attention = spec.submodules, spec.submodules.self_attention
    inner = attention.submodules
    norm: Any = WrappedTorchNorm
    if engine:
        from megatron.core.extensions.transformer_engine import TENorm

        norm = TENorm if record.norm in ("layernorm", "rmsnorm") else WrappedTorchNorm
    kinds = dict(module=spec.module)
    own_norms = has_own_norms(record) and not (engine and norm is not WrappedTorchNorm)
    if own_norms or record.norm_place == "after" or record.parallel_residual == "one_norm":
        layer, inner = _before(layer, inner, norm, record, engine)
    if record.norm_place != "before" or record.residual_scale != 1:
        behind = None if record.norm_place == "before" else norm
        added = ModuleSpec(module=Added, params=dict(config=settings, norm=behind))
        layer = replace(layer, self_attn_bda=added, mlp_bda=added)
    if record.parallel_residual is not None:
        kinds = dict(module=ParallelLayer)
    if own_norms and record.attends.qk_norm == "head":
        inner = replace(inner, q_layernorm=norm, k_layernorm=norm)
    if record.mla is None and record.bias in ("attention", "mlp"):
        has = record.bias == "attention"
        inner = replace(
            inner,
            linear_qkv=with_bias(inner.linear_qkv, has),
            linear_proj=with_bias(inner.linear_proj, has),
        )
    if not engine and (record.mla is not None or needs_own_core(record)):
        inner = replace(inner, core_attention=CoreAttention)
    if not engine and record.mla is not None:
        down = dict.fromkeys(("linear_q_down_proj", "linear_kv_down_proj"), DuplicatedLinear)
        inner = replace(inner, **down)
    norms_heads = record.attends.qk_norm in ("width", "each_head")
    own = norms_heads or record.rotates.window_base is not None
    module = OwnAttention if own else attention.module
    attention = replace(attention, module=module, submodules=inner)
    return replace(spec, submodules=replace(layer, self_attention=attention), **kinds)


def _before(layer: Any, inner: Any, norm: Any, record: ModelSpec, engine: bool) -> tuple[Any, Any]:
    """Put norms of their own before attention and MLP, or none where they are behind them."""
    first = IdentityOp if record.norm_place == "after" else norm
    second = IdentityOp if record.parallel_residual == "one_norm" else first
    if engine:
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear as Linear

        inner = replace(inner, linear_qkv=Linear)
        if hasattr(layer.mlp.submodules, "linear_fc1"):
            mlp = replace(layer.mlp.submodules, linear_fc1=Linear)
            layer = replace(layer, mlp=replace(layer.mlp, submodules=mlp))
    return replace(layer, input_layernorm=first, pre_mlp_layernorm=second), inner


def needs_own_core(record: ModelSpec) -> bool:
    """Tell whether the product of queries and keys has what megatron-core's has not."""
    attends = record.attends
    given = (attends.soft_cap, attends.sinks, record.positions == "alibi")
    return any(given)


# -- Before and behind the layers ------------------------------------------------------------------


def arrange_ends(chunk: Any, settings: Any) -> None:
    """Put what the record has before and behind its layers into a GPTModel."""
    record: ModelSpec = settings.record
    rotary = getattr(chunk, "rotary_pos_emb", None)
    if rotary is not None and record.rotates.scaling is not None:
        rotary.inv_freq = frequencies(record)[0].to(rotary.inv_freq.device)
    embedding = getattr(chunk, "embedding", None)
    if embedding is not None:
        _arrange_embedding(embedding, settings)
    if getattr(chunk, "output_layer", None) is not None:
        _arrange_output(chunk.output_layer, settings)


def _arrange_embedding(embedding: Any, settings: Any) -> None:
    record: ModelSpec = settings.record
    scale, offset = record.embedding_scale, record.position_offset
    if record.embedding_norm:
        sizes = dict(hidden_size=settings.hidden_size, eps=settings.layernorm_epsilon)
        embedding.norm = WrappedTorchNorm(config=settings, **sizes)
        embedding.register_forward_hook(lambda module, given, x: module.norm(x))
    if scale != 1:
        # rounded as transformers rounds it, to the type of the weights (GemmaModel.forward), and
        # learned positions are added after it (BioGptModel.forward)
        scaled = embedding.word_embeddings if record.positions == "learned" else embedding
        scaled.register_forward_hook(
            lambda module, given, x: x * torch.tensor(scale, dtype=x.dtype, device=x.device)
        )
    if offset and hasattr(embedding, "position_embeddings"):
        embedding.position_embeddings.register_forward_pre_hook(
            lambda module, given: (given[0] + offset,)
        )


def _arrange_output(layer: Any, settings: Any) -> None:
    record: ModelSpec = settings.record
    scale, cap = record.logit_scale, record.logit_soft_cap
    if record.output_bias:
        rows = layer.output_size_per_partition
        layer.bias = torch.nn.Parameter(torch.zeros(rows, dtype=settings.params_dtype))
        split = settings.tensor_model_parallel_size > 1
        set_tensor_model_parallel_attributes(layer.bias, split, 0, 1)
        layer.bias.allreduce = True

    def scaled(module: Any, given: Any, output: Any) -> Any:
        logits, bias = output
        logits = logits if scale == 1 else logits * scale
        return logits if cap is None else cap * torch.tanh(logits / cap), bias

    if scale != 1 or cap is not None:
        layer.register_forward_hook(scaled)
