"""Translate the options of production runs into megatron-core's names.

Each function returns only what an option changes, so that megatron-core's defaults stay elsewhere.
Sources are files of megatron-core 0.16.1 unless another is named; "Bridge" is NVIDIA-NeMo's
Megatron-Bridge at commit 067f987d. Belongs here: formats of numbers, recomputation, offload,
messages, experts' dispatch, CUDA graphs. Does not belong here: shape and layout (see `model`), what
excludes an option (`hpctrain.spec.engines.megatron`).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.enums import AttnBackend

from hpctrain.engines.megatron import MegatronConfig
from hpctrain.spec.engines.megatron import WGRAD_DEFERRAL_LIMIT
from hpctrain.train.device import on_cpu
from hpctrain.train.engines.megatron.core_versions.supported import current

# The history that delayed scaling takes its largest value from: TransformerEngine's own default
# (common/recipe/__init__.py, DelayedScaling) and Bridge's (training/mixed_precision.py,
# bf16_with_fp8_delayed_scaling_mixed). megatron-core's default is the last step alone.
_AMAX_HISTORY_STEPS = 1024
# Steps before graphs are captured: kernels choose their algorithms first (megatron-core's default).
CUDA_GRAPH_WARMUP_STEPS = 3


def number_format_settings(config: MegatronConfig) -> dict[str, Any]:
    """Return the settings of matrix products in 8 or 4 bits; nothing else changes its type."""
    if config.fp4 is not None:
        # fp4_utils.py, get_fp4_recipe: the only format that TransformerEngine has
        return dict(fp4=config.fp4, fp4_recipe="nvfp4")
    if config.fp8 is None:
        return {}
    settings: dict[str, Any] = dict(
        fp8=config.fp8, fp8_recipe=config.fp8_recipe, fp8_param=config.fp8_param
    )
    if config.fp8_recipe == "delayed":
        settings |= dict(fp8_amax_history_len=_AMAX_HISTORY_STEPS, fp8_amax_compute_algo="max")
    return settings


def gradient_settings(config: MegatronConfig) -> dict[str, Any]:
    """Return how data parallelism sums gradients and gathers weights of 8 bits.

    NCCL itself averages, as in all recipes of Bridge (recipes/common.py): a division before the sum
    would read all gradients once more, and round those in bf16 once more. gloo has no average. A
    mean over all tokens divides behind the sum (distributed_data_parallel.py).
    """
    instances = config.num_distributed_optimizer_instances
    return dict(
        grad_reduce_in_fp32=config.grad_reduce_in_fp32,
        average_in_collective=not counts_tokens(config) and not on_cpu(),
        num_distributed_optimizer_instances=instances,
        **_gathered_weights(config),
    )


def counts_tokens(config: MegatronConfig) -> bool:
    """Return whether the loss is a mean over all tokens of a step.

    How many words of BERT are masked differs from microbatch to microbatch.
    """
    return config.calculate_per_token_loss or config.model.reads_masked_text


_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.uint8}


def optimizer_format_settings(config: MegatronConfig) -> dict[str, Any]:
    """Return the types of the optimizer's state, and what it has to know of 8 bits
    (optimizer_config.py, fp8_recipe)."""
    settings: dict[str, Any] = {}
    if config.use_precision_aware_optimizer:
        narrow = config.precision == "bf16" and not config.grad_reduce_in_fp32
        settings = dict(
            use_precision_aware_optimizer=True,
            exp_avg_dtype=_TYPES[config.exp_avg_dtype],
            exp_avg_sq_dtype=_TYPES[config.exp_avg_sq_dtype],
            main_params_dtype=_TYPES[config.main_params_dtype],
            main_grads_dtype=torch.bfloat16 if narrow else torch.float32,
            # a copy in fp16 has no remainder of bf16 (FusedAdam of TransformerEngine)
            store_param_remainders=config.main_params_dtype == "fp32",
        )
    if config.fp8 is not None:
        settings |= dict(fp8_recipe=config.fp8_recipe, **_gathered_weights(config))
        settings.pop("fp8_param_gather", None)
    return settings


def _gathered_weights(config: MegatronConfig) -> dict[str, Any]:
    """Return how weights of 8 bits are gathered.

    MXFP8 keeps rows and columns of a weight apart. What is gathered is bf16 therefore, and takes
    the place of the gradients (distributed_data_parallel_config.py).
    """
    if not config.fp8_param:
        return {}
    reused = config.fp8_recipe == "mxfp8"
    return dict(fp8_param_gather=True, reuse_grad_buf_for_mxfp8_param_ag=reused)


def recompute_settings(config: MegatronConfig) -> dict[str, Any]:
    """Return what is recomputed: whole layers, or with `selective` named parts of them.

    Korthikanti et al. 2022, arXiv 2205.05198. With a number of layers `block` recomputes the first
    ones of each chunk and keeps the others (transformer_block.py, _checkpointed_forward).
    """
    if config.recompute_granularity == "full":
        layers = config.recompute_num_layers
        return dict(
            recompute_granularity="full",
            recompute_method="uniform" if layers is None else "block",
            recompute_num_layers=1 if layers is None else layers,
        )
    if config.recompute_granularity == "selective":
        return dict(
            recompute_granularity="selective", recompute_modules=list(config.recompute_modules)
        )
    return {}


def offload_settings(config: MegatronConfig) -> dict[str, Any]:
    """Return which layers keep their activations in the host's memory, by TransformerEngine."""
    if not config.cpu_offloading_num_layers:
        return {}
    return dict(
        cpu_offloading=True,
        cpu_offloading_num_layers=config.cpu_offloading_num_layers,
        cpu_offloading_activations=True,
        cpu_offloading_weights=False,  # weights are read in every pass
    )


def message_settings(config: MegatronConfig) -> dict[str, Any]:
    """Return the overlap of tensor parallel messages, and what fills the end of a pipeline."""
    settings: dict[str, Any] = {}
    if config.tp_comm_overlap:
        # NCCL starts userbuffers: hpctrain's ranks are started without MPI
        settings |= dict(tp_comm_overlap=True, tp_comm_bootstrap_backend="nccl")
    if config.defer_embedding_wgrad_compute:
        settings |= dict(
            defer_embedding_wgrad_compute=True, wgrad_deferral_limit=WGRAD_DEFERRAL_LIMIT
        )
    if config.cross_entropy_loss_fusion:
        # `native` is compiled by torch and needs no library
        settings |= dict(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="native")
    return settings


def attention_settings(config: MegatronConfig) -> dict[str, Any]:
    """Return the kernels of attention, and how ranks of one sequence exchange keys and values.

    Heads are exchanged among near ranks before keys and values go around a ring of such groups
    (transformer_config.py, cp_comm_type; Fang and Zhao 2024, arXiv 2405.07719).
    """
    settings: dict[str, Any] = dict(attention_backend=AttnBackend[config.attention_backend])
    if sizes := config.hierarchical_context_parallel_sizes:
        both = dict(hierarchical_context_parallel_sizes=list(sizes), cp_comm_type="a2a+p2p")
        settings |= both
    return settings


def dispatch_settings(config: MegatronConfig) -> dict[str, Any]:
    """Return how tokens reach their experts."""
    settings: dict[str, Any] = dict(moe_token_dispatcher_type=config.moe_token_dispatcher_type)
    if config.moe_token_dispatcher_type == "flex":
        settings |= dict(moe_flex_dispatcher_backend=config.moe_flex_dispatcher_backend)
    if config.moe_permute_fusion:
        settings |= dict(moe_permute_fusion=True)
    if config.moe_shared_expert_overlap:
        settings |= dict(moe_shared_expert_overlap=True)
    return settings


def graph_settings(config: MegatronConfig) -> dict[str, Any]:
    """Return who captures CUDA graphs of the layers.

    Without experts whole layers are captured. Sizes of experts' inputs are read on the host
    (token_dispatcher.py), which no graph can do: with experts attention alone is captured.
    """
    if config.cuda_graph_impl == "none":
        return {}
    return {
        "cuda_graph_impl": config.cuda_graph_impl,
        current().graphed_modules: [] if config.model.moe is None else ["attn"],
        "cuda_graph_warmup_steps": CUDA_GRAPH_WARMUP_STEPS,
        # a graph replays only generators whose state lies on the GPU (cuda_graphs.py,
        # CudaGraphManager)
        "use_te_rng_tracker": needs_te_generators(config),
    }


def needs_te_generators(config: MegatronConfig) -> bool:
    """Return whether TransformerEngine's generators are needed.

    Megatron-LM's arguments.py wants them where its layers are captured, or where it captures.
    """
    kinds = (config.cuda_graph_impl, config.transformer_impl)
    return config.cuda_graph_impl != "none" and "transformer_engine" in kinds


def without_gpu_options(config: MegatronConfig) -> MegatronConfig:
    """Return the same model and layout without what only a GPU or a library of it can do."""
    return config.model_copy(
        update=dict(
            fp8=None,
            fp8_param=False,
            fp4=None,
            cpu_offloading_num_layers=0,
            tp_comm_overlap=False,
            defer_embedding_wgrad_compute=False,
            moe_token_dispatcher_type="alltoall",
            moe_permute_fusion=False,
            cuda_graph_impl="none",
        )
    )
