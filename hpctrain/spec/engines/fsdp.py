"""The abilities of FSDP: `fully_shard` of torch.distributed.

Belongs here: its abilities. Does not belong here: its document (see `hpctrain.engines.native`).
"""

from __future__ import annotations

from hpctrain.spec.engines.abilities import (
    OFFLOAD_WORD,
    WORDS_OF_EVERY_ENGINE,
    EngineAbilities,
    Word,
    zero_word,
)

ABILITIES = EngineAbilities(
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
