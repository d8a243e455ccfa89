"""DeepSpeed's section of the spec, its contradictions, and its abilities.

DeepSpeed accepts some contradictions silently, so they are found here, where each has a position in
the file. Belongs here: the fields of `engine.deepspeed`, these rules, each with its source, and its
abilities. Does not belong here: DeepSpeed's own configuration (see `hpctrain.engines.deepspeed`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from hpctrain.base.units import ByteSize
from hpctrain.spec.document import Contradiction, Document
from hpctrain.spec.engines.abilities import (
    OFFLOAD_WORD,
    PIPELINE_WORD,
    TENSOR_WORD,
    WORDS_OF_EVERY_ENGINE,
    Choices,
    EngineAbilities,
    Home,
    Word,
    zero_word,
)
from hpctrain.spec.job_text import SubmitText

if TYPE_CHECKING:
    from hpctrain.spec.engine import EngineSpec


class DeepSpeedSpec(Document):
    """Where DeepSpeed keeps things, and how it sends them."""

    offload_parameters: Home = Field(
        "none", description="Home of weights while they are not used (ZeRO stage 3)"
    )
    nvme_path: SubmitText | None = Field(
        None,
        min_length=1,
        description="Directory on each node's NVMe; default: the profile's `local` file system; "
        "`$NAME` is put in where you submit",
    )
    adam: Literal["auto", "torch", "deepspeed"] = Field(
        "auto",
        description="DeepSpeed's own is built with a compiler on the nodes; auto: it with offload, "
        "else PyTorch's",
    )
    reduce_bucket: ByteSize = Field(
        ByteSize(200 * 2**20), gt=0, description="Gradients that are summed together"
    )
    gather_bucket: ByteSize = Field(
        ByteSize(200 * 2**20),
        gt=0,
        description="Weights that are gathered together; stage 3: ahead of their use",
    )
    reduce_precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="In which gradients are summed over GPUs; auto: as computed"
    )


def contradictions(engine: EngineSpec, choices: Choices) -> Iterator[Contradiction]:
    """Find settings that DeepSpeed cannot combine, or would silently ignore."""
    own, optimizer, pp = engine.deepspeed, choices.optimizer, choices.parallel.pp
    offload, parameters = optimizer.offload, own.offload_parameters
    # None: the planner chooses, from stage 1 upwards
    stage = optimizer.zero
    if offload == "nvme" and stage not in (None, 3):
        # only stage3.py has a swapper: at stages 1 and 2 DeepSpeed leaves the setting out
        message = f"offload to nvme needs ZeRO stage 3, not {stage}"
        hint = "set `optimizer.zero: 3`, or offload to `cpu`"
        yield Contradiction(("optimizer", "offload"), message, hint)
    if offload == "cpu" and stage == 0:
        # runtime/zero/config.py: "Valid for ZeRO stage 1, 2, 3"; stage 0 has no such optimizer
        message = "offload to cpu needs ZeRO stage 1, 2 or 3, not 0"
        hint = "set `optimizer.zero: 1`, or remove the offload"
        yield Contradiction(("optimizer", "offload"), message, hint)
    if parameters != "none" and stage not in (None, 3):
        # runtime/zero/config.py: "Valid only with stage 3"
        message = f"weights leave the GPU at ZeRO stage 3 only, not at {stage}"
        where = ("engine", "deepspeed", "offload_parameters")
        yield Contradiction(where, message, "set `optimizer.zero: 3`")
    if own.nvme_path is not None and "nvme" not in (parameters, offload):
        hint = "remove it, or set `optimizer.offload: nvme`"
        where = ("engine", "deepspeed", "nvme_path")
        yield Contradiction(where, "nothing is offloaded to nvme", hint)
    if choices.precision == "bf16" and stage == 0:
        # tried on a small GPT: after six steps the loss is off by 0.11, at stages 1 to 3 by 0.004
        message = "with DeepSpeed bf16 drifts at ZeRO stage 0"
        yield Contradiction(("precision",), message, "set `optimizer.zero: 1`, or `fp32`")
    if pp > 1 and (stage or 0) >= 2:
        # runtime/pipe/engine.py asserts it, because a pipeline accumulates over microbatches
        message = f"ZeRO stage {stage} cannot be combined with pp {pp}"
        yield Contradiction(("optimizer", "zero"), message, "use stage 1, or pp 1")
    if choices.parallel.sequence_parallel:
        # module_inject/layers.py: the input of its layers is whole on every rank
        message = "DeepSpeed does not split norms over tp"
        path = ("parallel", "sequence_parallel")
        yield Contradiction(path, message, "remove it, or train with `engine.name: megatron`")


ABILITIES = EngineAbilities(
    name="deepspeed",
    title="DeepSpeed",
    packages=("torch", "transformers", "deepspeed"),
    extra="deepspeed",
    extra_packages=("deepspeed",),
    document="hpctrain.engines.deepspeed:DeepSpeedConfig",
    fill="hpctrain.engines.deepspeed:deepspeed_config",
    assembly="hpctrain.train.engines.deepspeed.assembly",
    preflight="hpctrain.train.engines.deepspeed.preflight",
    rules="hpctrain.plan.abilities.trainable_deepspeed",
    export="hpctrain.convert.run_checkpoint:export_deepspeed",
    settings={"deepspeed": "{}"},
    contradictions=contradictions,
    reads_packed=True,
    axes=("tp", "pp"),  # deepspeed.pipe.PipelineModule, and its `mpu` for tensors
    sequence_parallel=False,
    copies_kv_heads=False,
    # runtime/pipe/engine.py: `pipe_partitioned` and `grad_partitioned` are on
    splits_stage_messages=True,
    zero_stages=(0, 1, 2, 3),
    stage3_with_tensors=False,
    # `offload_optimizer.device` of its configuration: cpu with stages 1-3, nvme with stage 3
    offloads=("none", "cpu", "nvme"),
    checkpoint_files_per_rank=3,  # optimizer, weights of stage 3, random state
    checkpoint_files_of_leader=1,
    calibration="deepspeed",
    # `data_types.grad_accum_dtype` is fp32: runtime/zero/stage_1_and_2.py, grad_accum
    gradient_addition="main",
    # runtime/engine.py, _configure_zero_optimizer: no `overlap_comm` behind a pipeline
    sums_behind_pipeline=True,
    chooses_overlap=True,
    main_copy_of_trained_only=True,
    resumes_other_stage=False,
    words=(
        *(zero_word(stage) for stage in range(4)),
        OFFLOAD_WORD,
        Word("offload-nvme", ("optimizer.offload=nvme",)),
        Word("offload-weights", ("engine.deepspeed.offload_parameters=cpu",)),
        *WORDS_OF_EVERY_ENGINE,
        TENSOR_WORD,
        PIPELINE_WORD,
    ),
    plain=("engine.deepspeed.offload_parameters=none",),
    nvme_directory="engine.deepspeed.nvme_path",
    weight_home="engine.deepspeed.offload_parameters",
    bucket="engine.deepspeed.reduce_bucket",
    bucket_stages=(1, 2),
    sum_precision="engine.deepspeed.reduce_precision",
)
