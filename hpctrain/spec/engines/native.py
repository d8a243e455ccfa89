"""The two engines of torch.distributed, DistributedDataParallel and FSDP (`fully_shard`).

Belongs here: the fields of `engine.ddp`, abilities. Does not belong here: their document (see
`hpctrain.engines.native`).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpctrain.base.units import ByteSize
from hpctrain.spec.document import Document
from hpctrain.spec.engines.abilities import (
    OFFLOAD_WORD,
    WORDS_OF_EVERY_ENGINE,
    EngineAbilities,
    Word,
    zero_word,
)

# Rank of PowerSGD's approximation: that of PyTorch's own example of the hook.
POWERSGD_RANK = 4


class DdpSpec(Document):
    """How DistributedDataParallel sums gradients."""

    bucket: ByteSize = Field(
        ByteSize(25 * 2**20), gt=0, description="Gradients that are summed together"
    )
    hook: Literal["none", "bf16", "fp16", "powersgd", "hierarchical"] = Field(
        "none",
        description="Fewer bytes over a slow link: sums in half precision, of low rank (PowerSGD), "
        "or in full within nodes and in bf16 between them (hierarchical)",
    )
    sync_batchnorm: bool = Field(True, description="Batch statistics over all GPUs (ResNet)")


DDP = EngineAbilities(
    name="ddp",
    title="DDP",
    packages=("torch", "transformers"),
    extra="huggingface",
    extra_packages=("transformers", "peft", "safetensors"),
    document="hpctrain.engines.native:NativeConfig",
    fill="hpctrain.engines.native:native_config",
    assembly="hpctrain.train.engines.native.assembly",
    rules="hpctrain.plan.abilities.trainable_hugging_face",
    export="hpctrain.convert.run_checkpoint:export_distributed",
    settings={"ddp": "{}"},
    optimizers=("adamw", "muon"),  # torch.optim.Muon
    reads_packed=True,
    documents=("joined", "separate"),
    calibration="fsdp",
    autocast=True,
    one_copy_checkpoints=True,
    words=(
        *WORDS_OF_EVERY_ENGINE[:2],
        Word("powersgd", ("engine.ddp.hook=powersgd",)),
        Word("hierarchical", ("engine.ddp.hook=hierarchical",)),
        Word("bf16-sums", ("engine.ddp.hook=bf16",)),
        Word("fp16-sums", ("engine.ddp.hook=fp16",)),
        *WORDS_OF_EVERY_ENGINE[2:],
    ),
    bucket="engine.ddp.bucket",
    bucket_stages=(0,),
    gradient_hook="engine.ddp.hook",
    sharding_alternative="fsdp",
)

FSDP = EngineAbilities(
    name="fsdp",
    title="FSDP",
    packages=("torch", "transformers"),
    extra="huggingface",
    document="hpctrain.engines.native:NativeConfig",
    fill="hpctrain.engines.native:native_config",
    assembly="hpctrain.train.engines.native.assembly",
    rules="hpctrain.plan.abilities.trainable_hugging_face",
    export="hpctrain.convert.run_checkpoint:export_distributed",
    reads_packed=True,
    documents=("joined", "separate"),
    axes=("tp", "cp"),  # 2-D meshes of torch.distributed: FSDP2 with DTensor, context parallel
    planned_axes=("tp", "cp"),
    zero_stages=(2, 3),  # reshard_after_forward off and on (torch.distributed.fsdp.fully_shard)
    shards_over_part=True,
    offloads=("none", "cpu"),  # CPUOffloadPolicy
    calibration="fsdp",
    gradient_addition="block",
    one_copy_checkpoints=True,
    words=(
        zero_word(2),
        zero_word(3),
        Word("shard#", ("optimizer.shard_gpus=#",)),
        OFFLOAD_WORD,
        *WORDS_OF_EVERY_ENGINE,
    ),
)
