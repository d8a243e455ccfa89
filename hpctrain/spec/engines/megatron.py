"""megatron-core's section of the spec, and the abilities of hpctrain's own trainer on it.

Belongs here: the fields of `engine.megatron`, and the abilities. Does not belong here: the document
of the trainer (see `hpctrain.engines.megatron`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from hpctrain.spec.document import Document
from hpctrain.spec.engines.abilities import (
    CONTEXT_WORD,
    MEGATRON_CORE,
    MODEL_AXES,
    PIPELINE_WORD,
    TENSOR_WORD,
    WORDS_OF_EVERY_ENGINE,
    EngineAbilities,
    Word,
)
from hpctrain.spec.engines.megatron_contradictions import contradictions, wrong_settings

if TYPE_CHECKING:
    from hpctrain.spec.engine import EngineSpec

ZERO_WORDS = (
    Word("zero0", ("optimizer.distributed=false",)),
    Word("zero1", ("optimizer.distributed=true",)),
)
MESH_WORDS = (TENSOR_WORD, PIPELINE_WORD, CONTEXT_WORD)
# tensor_parallel/layers.py relies on kernels that start in launch order. FSDP overlaps less with it
# (Megatron-LM's arguments.py refuses that pair).
ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}

# How numbers are scaled into 8 bits (megatron-core: transformer_config.py, fp8_recipe).
Fp8Recipe = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]
# Microbatches whose gradient of the output layer waits for the end of the pipeline (as in
# Megatron-Bridge, recipes/gpt/h100/gpt3_175b.py; megatron-core's default keeps all of them).
WGRAD_DEFERRAL_LIMIT = 50


class MegatronSpec(Document):
    """What production runs choose beyond the layout; names as in megatron-core's configuration."""

    fp8_recipe: Fp8Recipe | Literal["auto"] = Field(
        "auto",
        description="Scaling into 8 bits with `precision: fp8`; auto: tensorwise (current scaling) "
        "on Hopper, mxfp8 on Blackwell",
    )
    fp8_param_gather: bool = Field(
        False, description="Keep and gather weights in 8 bits with `precision: fp8`"
    )
    grad_reduce_in_fp32: bool = Field(
        True, description="Sum gradients in fp32; false: in bf16, half the bytes"
    )
    tp_comm_overlap: bool = Field(
        False, description="Hide tensor parallel messages by userbuffers of TransformerEngine"
    )
    cross_entropy_loss_fusion: bool = Field(
        False, description="Loss in fused kernels: fewer passes over the logits"
    )
    defer_embedding_wgrad_compute: bool = Field(
        False, description="Compute the output layer's weight gradient in the pipeline's last gap"
    )
    moe_token_dispatcher_type: Literal["alltoall", "flex"] = Field(
        "alltoall", description="How tokens reach experts; flex: by the backend below"
    )
    moe_flex_dispatcher_backend: Literal["deepep", "hybridep"] = Field(
        "deepep", description="Library of the flex dispatcher"
    )
    moe_permute_fusion: bool = Field(
        False, description="Sort tokens by expert in kernels of TransformerEngine"
    )
    moe_shared_expert_overlap: bool = Field(
        False, description="Compute the shared expert while tokens travel"
    )
    cuda_graph_impl: Literal["none", "local", "transformer_engine"] = Field(
        "none", description="Who captures CUDA graphs of the layers"
    )


def with_fp8_recipe(engine: EngineSpec, recipe: Fp8Recipe) -> EngineSpec:
    """Copy `engine` with this scaling in place of `auto`."""
    own = engine.megatron.model_copy(update={"fp8_recipe": recipe})
    return engine.model_copy(update={"megatron": own})


ABILITIES = EngineAbilities(
    name="megatron",
    title="megatron-core",
    packages=("torch", "megatron.core"),
    extra="megatron",
    document="hpctrain.engines.megatron:MegatronConfig",
    fill="hpctrain.engines.megatron:megatron_config",
    assembly="hpctrain.train.engines.megatron.assembly",
    preflight="hpctrain.train.engines.megatron.preflight",
    library_check="hpctrain.train.engines.megatron.core_versions.check:library_findings",
    rules="hpctrain.plan.abilities.trainable_megatron",
    verifier="hpctrain.train.engines.megatron.verify",
    export="hpctrain.convert.run_checkpoint:export_megatron",
    trained_precisions=("bf16", "fp32", "fp8", "fp4"),  # 8 and 4 bits by TransformerEngine
    model_classes=MEGATRON_CORE,
    families=("gpt", "llama", "bert"),
    weights="megatron_core",
    pads_vocab=True,
    axes=MODEL_AXES,
    zero_stages=(0, 1),  # without and with the distributed optimizer
    offloads=("none", "cpu"),  # OptimizerConfig.optimizer_cpu_offload
    planned_offloads=("cpu",),
    recomputes=("none", "selective", "full"),
    checkpoint_files_of_leader=3,  # common.pt, metadata.json, .metadata
    calibration="megatron-core",
    gradient_addition="product",
    chooses_overlap=True,
    environment=ENVIRONMENT,
    settings={"megatron": "{}"},
    wrong_settings=wrong_settings,
    contradictions=contradictions,
    splits_experts=True,
    precisions=("fp32", "fp16", "bf16", "fp8", "fp4"),
    recomputes_some=True,
    offloads_activations=True,
    words=(*ZERO_WORDS, *WORDS_OF_EVERY_ENGINE, *MESH_WORDS),
)
