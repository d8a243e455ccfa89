"""The abilities of hpctrain's own trainer on megatron-core.

Belongs here: its abilities. Does not belong here: its document (see `hpctrain.engines.megatron`).
"""

from __future__ import annotations

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

ZERO_WORDS = (
    Word("zero0", ("optimizer.distributed=false",)),
    Word("zero1", ("optimizer.distributed=true",)),
)
MESH_WORDS = (TENSOR_WORD, PIPELINE_WORD, CONTEXT_WORD)
# tensor_parallel/layers.py relies on kernels that start in launch order. FSDP overlaps less with it
# (Megatron-LM's arguments.py refuses that pair).
ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}

ABILITIES = EngineAbilities(
    name="megatron",
    title="megatron-core",
    document="hpctrain.engines.megatron:MegatronConfig",
    fill="hpctrain.engines.megatron:megatron_config",
    assembly="hpctrain.train.engines.megatron.assembly",
    preflight="hpctrain.train.engines.megatron.preflight",
    rules="hpctrain.plan.abilities.trainable_megatron",
    verifier="hpctrain.train.engines.megatron.verify",
    export="hpctrain.convert.run_checkpoint:export_megatron",
    model_classes=MEGATRON_CORE,
    families=("gpt", "llama", "bert"),
    weights="megatron_core",
    pads_vocab=True,
    axes=MODEL_AXES,
    zero_stages=(0, 1),  # without and with the distributed optimizer
    offloads=("none", "cpu"),  # OptimizerConfig.optimizer_cpu_offload
    planned_offloads=("cpu",),
    recomputes=("none", "selective", "full"),
    # It has not been measured on GPUs: it takes the median of measured software, and hides
    # gradients and weights of data parallelism as the runs of `mcore` do.
    calibration="generic",
    overlap_calibration="mcore",
    chooses_overlap=True,
    environment=ENVIRONMENT,
    words=(*ZERO_WORDS, *WORDS_OF_EVERY_ENGINE, *MESH_WORDS),
)
