"""What the options of megatron-core need of libraries and GPUs.

Versions are those that megatron-core 0.16.1 compares with, capabilities those of TransformerEngine
(pytorch/quantization.py at commit d0067d0d). Belongs here: that table. Does not belong here: what
ranks have (see `hpctrain.train.software_agreement`), options that exclude each other (see
`hpctrain.train.engines.megatron.preflight`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hpctrain.engines.needed_software import SoftwareNeed

if TYPE_CHECKING:
    from hpctrain.engines.megatron import MegatronConfig

# fp8_utils.py, get_fp8_recipe; _compute_fp8_support, _compute_fp8_block_scaling_support and
# _compute_mxfp8_support
_BY_RECIPE: dict[str, dict[str, Any]] = {
    "delayed": dict(version=(1, 0), capability=(8, 9)),
    "tensorwise": dict(version=(2, 2), capability=(8, 9)),
    "blockwise": dict(version=(2, 3), capability=(9, 0), cuda=(12, 9)),
    "mxfp8": dict(version=(2, 1), capability=(10, 0), capability_below=(12, 0)),
}


def software_needs(config: MegatronConfig) -> Iterator[SoftwareNeed]:
    """Yield what each option that is set needs."""
    yield from _format_needs(config)
    engine = dict[str, Any](library="transformer_engine")
    if config.tp_comm_overlap:
        # Before 1.9 userbuffers are started by MPI (megatron/training/initialize.py).
        setting = "`tp_comm_overlap`"
        yield SoftwareNeed(setting=setting, version=(1, 9), instead="leave it false", **engine)
    if config.defer_embedding_wgrad_compute:
        # model_parallel_config.py: only with gradient_accumulation_fusion, which is Apex's
        yield SoftwareNeed(
            setting="`defer_embedding_wgrad_compute`",
            library="apex_wgrad",
            instead="leave it false",
        )
    if config.cpu_offloading_num_layers:
        yield SoftwareNeed(
            setting="`activation_offload_layers`", instead="set it to 0", **engine
        )  # transformer_block.py, get_cpu_offload_context
    if config.cuda_graph_impl == "transformer_engine":
        yield SoftwareNeed(
            setting="`cuda_graph_impl: transformer_engine`", instead="set it to none", **engine
        )
    if config.cuda_graph_impl == "local":
        # streams and captures are CUDA's own; any GPU has them
        yield SoftwareNeed(
            setting="`cuda_graph_impl: local`", capability=(7, 0), instead="set it to none"
        )
    discarded = {"layernorm", "moe_act", "mla_up_proj"} & set(config.recompute_modules)
    if config.recompute_granularity == "selective" and discarded:
        # tensor_parallel/random.py, CheckpointWithoutOutput
        names = ", ".join(sorted(discarded))
        yield SoftwareNeed(
            setting=f"`recompute_modules: [{names}]`", instead="recompute other modules", **engine
        )
    yield from _expert_needs(config)


def _format_needs(config: MegatronConfig) -> Iterator[SoftwareNeed]:
    """Yield what matrix products in 8 and 4 bits need."""
    instead = "set `precision: bf16`"
    if config.fp4 is not None:
        yield SoftwareNeed(
            setting="`precision: fp4`",
            library="transformer_engine",
            version=(2, 7),
            capability=(10, 0),
            instead=instead,
        )
    if config.fp8 is not None:
        if config.fp8_recipe in ("mxfp8", "blockwise"):
            instead = "set `fp8_recipe: tensorwise` or `precision: bf16`"
        yield SoftwareNeed(
            setting=f"`precision: fp8` with `fp8_recipe: {config.fp8_recipe}`",
            library="transformer_engine",
            instead=instead,
            **_BY_RECIPE[config.fp8_recipe],
        )


def _expert_needs(config: MegatronConfig) -> Iterator[SoftwareNeed]:
    """Yield what the dispatch of tokens to experts needs."""
    if config.moe_permute_fusion:
        # transformer_config.py: "Please install TE >= 2.1.0"
        yield SoftwareNeed(
            setting="`moe_permute_fusion`",
            library="transformer_engine",
            version=(2, 1),
            instead="leave it false",
        )
    if config.moe_token_dispatcher_type == "flex":
        # Generations: Megatron-Bridge, training/flex_dispatcher_backend.py
        backend = config.moe_flex_dispatcher_backend
        yield SoftwareNeed(
            setting=f"`moe_flex_dispatcher_backend: {backend}`",
            library="deep_ep" if backend == "deepep" else "hybrid_ep",
            capability=(8, 0),
            capability_below=(11, 0),
            instead="set `moe_token_dispatcher_type: alltoall`",
        )
